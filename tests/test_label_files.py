"""Files of labels: names, columns, labels and ids that are accepted, and messages about the others."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence

import polars as pl
import pytest

from amalgam import Experiment
from amalgam.tests.workspaces import Workspace

AMALGAM = ("student.method=amalgam", "targets.mode=hard")


def write(workspace: Workspace, rows: Sequence[Sequence[str]], name: str = "labels.csv") -> None:
    with (workspace.folder / name).open("w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *rows])


# ---- before any stage


FAULTS: dict[str, tuple[str, int, str]] = {
    "absent": ("nope.csv", 3, "./nope.csv does not exist"),
    "folder": ("texts", 3, "./texts is no file of labels"),
    "other columns": ("amalgam.csv", 3, "no column text in amalgam.csv"),
    "other label": ("labels.csv", 3, "no teacher has the label bankng; did you mean banking?"),
    "another method": ("labels.csv targets.mode=scores", 2, "targets.mode: scores does not use labels"),
    "no file": ("--out more.csv targets.mode=scores", 2, "targets.mode: scores does not use labels"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_label_refuses_a_file_before_any_stage_runs(fresh: Workspace, fault: str) -> None:
    arguments, code, message = FAULTS[fault]
    write(fresh, [(fresh.texts()[0][0], "bankng")])
    (fresh.folder / "amalgam.csv").write_text("body,sort\na,b\n")
    refused = fresh.attempt("label", *arguments.split())
    assert (refused.code, message in refused.err) == (code, True), refused.err
    assert not list(fresh.artifacts.rglob("*.parquet"))


def test_label_takes_the_labels_of_the_corpus(workspace: Workspace) -> None:
    effect = workspace("label", "corpus", *AMALGAM)
    assert "120 labels" in effect.out
    assert "labels=corpus" in effect.out
    experiment = Experiment.load(workspace.config, AMALGAM, quiet=True)
    assert experiment.compare_labels("corpus").labels == 120


# ---- ids


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "polars", "pandas"])
def test_whole_numbers_are_ids_in_the_texts_and_in_the_labels(fresh: Workspace, kind: str) -> None:
    numbered = pl.DataFrame(fresh.texts(), schema=["text", "label"], orient="row").with_row_index("number")
    numbered = numbered.cast({"number": pl.Int64})
    numbered.write_parquet(fresh.folder / "texts/train.parquet")
    fresh.edit("train: texts/train.csv", "train: texts/train.parquet\n  id: number")
    fresh.edit("  test: texts/test.csv\n", "")
    labels = numbered.select("number", "label").head(6)
    if kind in {"parquet", "jsonl"}:
        write_file = labels.write_parquet if kind == "parquet" else labels.write_ndjson
        write_file(fresh.folder / f"labels.{kind}")
        fresh("plan", f"labels=labels.{kind}")
        assert "6 labels" in fresh("label", f"labels.{kind}", *AMALGAM).out
        labels.with_columns(number=500).write_parquet(fresh.folder / "other.parquet")
        assert "row 1: no training text has the id 500" in fresh.attempt("plan", "labels=other.parquet").err
        return
    experiment = Experiment.load(fresh.config, AMALGAM, quiet=True)
    assert experiment.compare_labels(labels if kind == "polars" else labels.to_pandas()).labels == 6


# ---- labels


def test_blanks_around_a_label_do_not_count(workspace: Workspace) -> None:
    (first, label), (second, other) = workspace.texts()[:2]
    write(workspace, [(first, label), (second, other)])
    workspace("build-targets", "labels=labels.csv")
    write(workspace, [(first, f"{label}  "), (second, f" {other}"), (first, label)])
    assert "build-targets" not in workspace.stale("labels=labels.csv")


def test_a_label_in_other_case_gets_a_rename_as_fix(workspace: Workspace) -> None:
    rows = [(text, label.upper()) for text, label in workspace.texts()[:30]]
    write(workspace, rows)
    refused = workspace.attempt("plan", "labels=labels.csv")
    fix = refused.err.splitlines()[-1]
    assert fix.startswith('fix: set corpus.rename: {"')
    assert fix.endswith("}, or correct these rows")
    rename = re.sub(r"^fix: set corpus.rename: (.*), or correct these rows", r"corpus.rename=\1", fix)
    assert "30 labels" in workspace("label", "labels.csv", rename, *AMALGAM).out
    write(workspace, [*rows, ("no such text", rows[0][1].lower())])
    refused = workspace.attempt("plan", "labels=labels.csv")
    assert "; correct or remove the other rows; `amalgam label" in refused.err
