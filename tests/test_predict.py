"""`amalgam predict` on the tiny experiment's student: it says what the model says, wherever texts are from."""

from __future__ import annotations

import csv
import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from amalgam.data.keys import text_key
from amalgam.stages.app.student import input as asked_texts
from amalgam.stages.common.models.output_folder import MARK
from amalgam.tests.workshop import KNOWS, TEST, Said, Shop, write_texts

TEXTS = ["the chef fried the onion", "the court heard the banker", "a nurse"]


@pytest.fixture(scope="module")
def desk(built: Shop, tmp_path_factory: pytest.TempPathFactory) -> Shop:
    """The experiment without its workspace: a student needs none."""
    return built.copy(tmp_path_factory.mktemp("predict") / "shop")


@pytest.fixture(scope="module")
def right(desk: Shop) -> dict[str, dict[str, float]]:
    """What transformers itself says of every text of the test part and of TEXTS."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = desk.folder / "students/student"
    model, tokenizer = (kind.from_pretrained(folder) for kind in (AutoModelForSequenceClassification, AutoTokenizer))
    found = {}
    with torch.no_grad():
        for text in [*TEXTS, *(text for text, _ in desk.texts("test"))]:
            shares = (
                model(**tokenizer(text, truncation=True, max_length=32, return_tensors="pt"))
                .logits.softmax(-1)[0]
                .tolist()
            )
            found[text] = {model.config.id2label[place]: share for place, share in enumerate(shares)}
    return found


def rows_of(said: Said) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(said.out)))


def best(shares: dict[str, float]) -> str:
    return max(shares, key=lambda label: shares[label])


def test_typed_texts_get_the_models_own_probabilities(desk: Shop, right: dict[str, dict[str, float]]) -> None:
    found = desk("predict", *TEXTS, "--top", "99", "--json").json
    assert [entry["text"] for entry in found] == TEXTS
    for entry in found:
        said = {label["label"]: label["probability"] for label in entry["labels"]}
        assert said == pytest.approx(right[entry["text"]], abs=1e-5)
        assert list(said.values()) == sorted(said.values(), reverse=True)


def test_explain_sums_what_each_teachers_labels_hold(desk: Shop, right: dict[str, dict[str, float]]) -> None:
    [entry] = desk("predict", TEXTS[0], "--explain", "--json").json
    for teacher, labels in KNOWS.items():
        assert entry["mass"][teacher] == pytest.approx(sum(right[TEXTS[0]][label] for label in labels), abs=1e-5)
    shown = desk("predict", TEXTS[0], "--explain").out
    assert f"labels of first   {entry['mass']['first']:.3f}" in shown


def test_a_label_that_two_teachers_share_counts_for_each(desk: Shop, tmp_path: Path) -> None:
    shutil.copytree(desk.folder / "students/student", tmp_path / "student")
    mark = json.loads((tmp_path / "student" / MARK).read_text())
    mark["teachers"] = {"one": ["banking", "law"], "other": ["law"]}
    (tmp_path / "student" / MARK).write_text(json.dumps(mark))
    [entry] = desk(
        "predict", TEXTS[1], "--explain", "--json", "--top", "99", "--student", str(tmp_path / "student")
    ).json
    shares = {label["label"]: label["probability"] for label in entry["labels"]}
    assert entry["mass"]["other"] == pytest.approx(shares["law"])
    assert entry["mass"]["one"] == pytest.approx(shares["law"] + shares["banking"])


@pytest.mark.parametrize("out", ["labels.parquet", "labels.csv"])
def test_a_file_keeps_its_order_and_every_row(
    desk: Shop, right: dict[str, dict[str, float]], monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    import polars as pl

    monkeypatch.setattr(asked_texts, "BLOCK_ROWS", 7)
    desk("predict", "--input", "texts/test.csv", "--id", "label", "--out", out, "--top", "2", "--explain", "--force")
    found = pl.read_parquet(desk.folder / out) if out.endswith("parquet") else pl.read_csv(desk.folder / out)
    rows = desk.texts("test")
    texts = [text for text, _ in rows]
    assert found.columns[:7] == ["row", "key", "id", "label", "probability", "label_2", "probability_2"]
    assert found.columns[7:] == ["mass_first", "mass_second"]
    keys = [text_key((text,)) for text in texts]
    assert found["key"].to_list() == (keys if out.endswith("parquet") else [key.hex() for key in keys])
    assert found["row"].to_list() == list(range(2, TEST + 2))
    assert found["id"].to_list() == [label for _, label in rows]
    assert found["label"].to_list() == [best(right[text]) for text in texts]
    assert found["probability"].to_list() == pytest.approx([max(right[text].values()) for text in texts], abs=1e-5)


def test_the_column_is_the_experiments_unless_another_is_named(shop: Shop) -> None:
    path = shop.folder / "texts/test.csv"
    path.write_text(path.read_text().replace("text,", "headline,", 1))
    shop.edit("corpus:", "corpus:\n  text: headline")
    assert len(rows_of(shop("predict", "--input", "texts/test.csv"))) == TEST
    refused = shop.tries("predict", "--input", "texts/test.csv", "--text", "headlin")
    assert (refused.code, "fix: --text headline" in refused.err) == (3, True)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "txt"])
def test_every_kind_of_file_says_the_same(desk: Shop, tmp_path: Path, kind: str) -> None:
    rows = desk.texts("test")[:9]
    if kind == "txt":
        (tmp_path / "some.txt").write_text("\n\n".join(text for text, _ in rows) + "\n")
    else:
        write_texts(tmp_path / f"some.{kind}", rows)
    write_texts(tmp_path / "some.csv", rows)
    said, plain = (rows_of(desk("predict", "--input", str(tmp_path / name))) for name in (f"some.{kind}", "some.csv"))
    assert [row["key"] for row in said] == [row["key"] for row in plain]
    assert [row["label"] for row in said] == [row["label"] for row in plain]


def test_a_pipe_is_read_a_text_a_line(desk: Shop, monkeypatch: pytest.MonkeyPatch, right: dict[str, Any]) -> None:
    pipe = io.TextIOWrapper(io.BytesIO("\n".join(TEXTS).encode()), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", pipe)
    rows = rows_of(desk("predict", "--input", "-"))
    assert [row["label"] for row in rows] == [best(right[text]) for text in TEXTS]


def break_nothing(desk: Shop) -> None:
    """The command alone is wrong."""


def blank(desk: Shop) -> None:
    (desk.folder / "bad.csv").write_text('text\nfine\n" "\nalso fine\n')


def latin(desk: Shop) -> None:
    (desk.folder / "bad.txt").write_bytes(b"fine\ncaf\xe9\n")


def empty(desk: Shop) -> None:
    (desk.folder / "empty.csv").write_text("text\n")


def taken(desk: Shop) -> None:
    (desk.folder / "taken.csv").write_text("mine")


def unmarked(desk: Shop) -> None:
    shutil.copytree(desk.folder / "students/student", desk.folder / "bare", dirs_exist_ok=True)
    (desk.folder / "bare" / MARK).unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("prepare", "arguments", "code", "piece"),
    [
        (break_nothing, [], 2, "--input texts.csv"),
        (break_nothing, ["a text", "--input", "texts/test.csv"], 2, "not both"),
        (break_nothing, ["  "], 2, "empty"),
        (break_nothing, ["a text", "--out", "x.csv"], 2, "--json > FILE"),
        (break_nothing, ["--input", "texts/test.csv", "--json"], 2, "--out FILE.parquet"),
        (break_nothing, ["--input", "no.csv"], 3, "no.csv"),
        (break_nothing, ["--input", "amalgam.yaml"], 3, ".csv"),
        (break_nothing, ["--input", "texts/test.csv", "--text", "Text"], 3, "fix: --text text"),
        (break_nothing, ["--input", "texts/test.csv", "--out", "x.xlsx"], 2, ".parquet or .csv"),
        (break_nothing, ["--input", "texts/test.csv", "--out", "no/x.csv"], 2, "mkdir -p no"),
        (break_nothing, ["a text", "--student", "nowhere"], 2, "nowhere"),
        (break_nothing, ["a text", "--student", "texts"], 2, "config.json"),
        (break_nothing, ["a text", "-c", "other.yaml"], 2, "there is no other.yaml"),
        (blank, ["--input", "bad.csv"], 3, "bad.csv row 3, field text: empty"),
        (latin, ["--input", "bad.txt"], 3, "bad.txt line 2: not UTF-8"),
        (empty, ["--input", "empty.csv"], 3, "no rows in empty.csv"),
        (taken, ["--input", "texts/test.csv", "--out", "taken.csv"], 2, "--force"),
        (unmarked, ["a text", "--explain", "--student", "bare"], 2, "bare"),
    ],
)
def test_what_cannot_be_answered_is_refused_with_the_fix(
    desk: Shop, prepare: Callable[[Shop], None], arguments: list[str], code: int, piece: str
) -> None:
    prepare(desk)
    found = desk.tries("predict", *arguments)
    assert (found.code, piece in found.err, found.out) == (code, True, ""), found.err


def test_bad_rows_can_be_left_out_and_are_counted(desk: Shop) -> None:
    blank(desk)
    said = desk("predict", "--input", "bad.csv", "--skip-bad-rows")
    assert [row["row"] for row in rows_of(said)] == ["2", "4"]
    assert "rows left out: 1 empty" in said.err


def test_a_failure_leaves_the_old_file_and_nothing_beside_it(desk: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    taken(desk)
    pipe = io.TextIOWrapper(io.BytesIO(b"fine\ncaf\xe9\n"), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", pipe)
    assert desk.tries("predict", "--input", "-", "--out", "taken.csv", "--force").code == 3
    assert (desk.folder / "taken.csv").read_text() == "mine"
    assert not list(desk.folder.glob(".tmp-*"))


def test_a_student_of_an_older_amalgam_learns_what_its_teachers_know_without_training(shop: Shop) -> None:
    path = shop.folder / "students/student" / MARK
    mark = json.loads(path.read_text())
    path.write_text(json.dumps({"fingerprint": mark["fingerprint"]}))
    weights = (shop.folder / "students/student/model.safetensors").stat().st_ino
    shop("train-student")
    assert json.loads(path.read_text()) == mark
    assert (shop.folder / "students/student/model.safetensors").stat().st_ino == weights
