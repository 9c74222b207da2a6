"""The benchmark of verdicts: what counts as right, and the texts of each case."""

from __future__ import annotations

import argparse
from pathlib import Path

import polars as pl
import pytest

from amalgam.benchmarks import verdicts
from amalgam.benchmarks.verdicts import CASES, FEW, outcome


@pytest.mark.parametrize(
    ("verdict", "right", "on_many", "expected"),
    [
        ("ship", None, "ship", "right"),
        ("cannot say", None, "cannot say", "right"),
        ("cannot say", None, "do not ship", "undecided"),
        ("ship", None, "do not ship", "wrong"),
        ("do not ship", None, "cannot say", "wrong"),
        ("cannot say", "cannot say", "ship", "right"),
        ("ship", "cannot say", "ship", "wrong"),
        ("do not ship", "cannot say", "do not ship", "right"),
        ("do not ship", "cannot say", "ship", "wrong"),
    ],
)
def test_a_verdict_is_right_undecided_or_wrong(verdict: str, right: str | None, on_many: str, expected: str) -> None:
    assert outcome(verdict, right, on_many) == expected


def made(folder: Path, texts: int) -> Path:
    for name in ("trec6", "ag_news"):
        (folder / name).mkdir(parents=True)
        for part in ("train", "test"):
            rows = [(f"{name} {part} {place}", "abcd"[place % 4]) for place in range(texts)]
            pl.DataFrame(rows, schema=["text", "label"], orient="row").write_parquet(folder / name / f"{part}.parquet")
    return folder


def test_texts_of_a_case_are_disjoint_and_wrong_labels_are_shuffled(tmp_path: Path) -> None:
    options = argparse.Namespace(data=made(tmp_path / "data", 400), texts=100, test=60, many=200)
    verdicts.write_texts("trec6", tmp_path, options)
    files = {path.stem: pl.read_parquet(path) for path in tmp_path.glob("*.parquet")}
    parts = [set(files[part]["text"]) for part in ("teachers", "train", "test", "many")]
    assert len(set().union(*parts)) == sum(map(len, parts)) == 100 + 100 + 60 + 200
    assert len(files["few"]) == FEW
    assert set(files["first"]["label"]) == {"a", "b"}
    assert files["wrong"]["text"].equals(files["teachers"]["text"])
    assert (files["wrong"]["label"] != files["teachers"]["label"]).sum() > 0
    assert files["train"].columns == ["text"]
    assert not set(files["other"]["text"]) & set(files["train"]["text"])
    names = {name for case in CASES.values() for name in (case.train, case.test, case.teachers) if name}
    assert names <= set(files)


def test_too_few_texts_are_refused(tmp_path: Path) -> None:
    options = argparse.Namespace(data=made(tmp_path / "data", 100), texts=100, test=100, many=200)
    with pytest.raises(SystemExit, match=r"no text is left for \w+.parquet"):
        verdicts.write_texts("trec6", tmp_path, options)
