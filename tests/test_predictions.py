"""A teacher may be a file of predictions, which any program wrote: no model of it runs."""

from __future__ import annotations

import gzip
import json
import lzma
import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import pytest

from amalgam import Experiment
from amalgam.data.arrays import softmax
from amalgam.data.keys import text_key
from amalgam.pipeline.config.schema import Corpus
from amalgam.pipeline.errors import ModelError
from amalgam.stages.common.models.predictions import labels_in, read_predictions
from amalgam.tests.workspaces import TEACHER_LABELS, TEST, TRAIN

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from amalgam.tests.workspaces import Workspace

SECOND = TEACHER_LABELS["second"]


def probabilities(text: str, label: str) -> list[float]:
    """Returns 0.91 for the gold label; for a text without one of these labels, a guess that depends on its length."""
    favoured, highest = (SECOND.index(label), 0.91) if label in SECOND else (len(text) % 4, 0.4)
    return [highest if place == favoured else (1 - highest) / 3 for place in range(4)]


def frame_of(rows: Sequence[tuple[str, str]]) -> pl.DataFrame:
    columns = zip(*(probabilities(*row) for row in rows), strict=True)
    return pl.DataFrame({"text": [text for text, _ in rows], **dict(zip(SECOND, columns, strict=True))})


def write(frame: pl.DataFrame, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    writers: dict[str, Any] = {".csv": frame.write_csv, ".jsonl": frame.write_ndjson, ".parquet": frame.write_parquet}
    writers[path.suffix](path)


def predicted(workspace: Workspace, *overrides: str) -> dict[bytes, Any]:
    """Returns the probabilities of the second teacher by the keys of the texts."""
    logits = Experiment.load(workspace.config, overrides=overrides).logits("second").collect()
    return dict(zip(logits["key"].to_list(), softmax(logits["logits"].to_numpy().astype(float)), strict=True))


def named(workspace: Workspace, suffix: str = ".csv") -> Path:
    """Names a file of predictions as the second teacher, and the default method."""
    workspace.edit("targets:\n  mode: soft\nstudent:\n", "student:\n  method: amalgam\n")
    workspace.edit("  passes: 4\n", "")
    workspace.edit("./models/second", f"./predictions/second{suffix}")
    return workspace.config.parent / f"predictions/second{suffix}"


@pytest.fixture
def workspace(fresh: Workspace) -> Workspace:
    """Returns an experiment with a model and a file of predictions."""
    write(frame_of([*fresh.texts(), *fresh.texts("test")]), named(fresh))
    return fresh


@pytest.fixture
def file(workspace: Workspace) -> Path:
    """Returns the experiment's file of predictions."""
    return workspace.folder / "predictions/second.csv"


def test_its_rows_are_the_teachers_predictions(workspace: Workspace) -> None:
    workspace("report")
    rows = predicted(workspace)
    for text, label in [*workspace.texts(), *workspace.texts("test")]:
        assert rows[text_key((text,))] == pytest.approx(probabilities(text, label), abs=1e-4)
    own = [label for _, label in workspace.texts("test") if label in SECOND]
    [system] = [row for row in workspace.numbers()["evaluation"]["systems"].items() if row[0] == "teacher:second"]
    assert system[1]["accuracy"] == pytest.approx(len(own) / len(workspace.texts("test")))


def test_a_text_goes_to_the_teacher_that_is_certain_of_it_and_of_similar_texts(workspace: Workspace) -> None:
    workspace("build-targets")
    gold = {text_key((text,)): label for text, label in workspace.texts()}
    chosen = Experiment.load(workspace.config).targets.collect()
    own = [gold[key] in SECOND for key in chosen["key"].to_list()]
    by_second = [teacher == "second" for teacher in chosen["teacher"].to_list()]
    assert np.mean(np.array(by_second)[own]) > 0.8


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_kinds_of_files_and_names_of_texts(fresh: Workspace, suffix: str) -> None:
    texts = [*fresh.texts(), *fresh.texts("test")]
    frame = frame_of(texts)
    if suffix == ".jsonl":
        key = pl.Series("key", [text_key((text,)).hex() for text, _ in texts])
        frame = frame.drop("text").with_columns(key)
    if suffix == ".parquet":  # with columns of other kinds, and the labels in another order
        key = pl.Series("key", [text_key((text,)) for text, _ in texts], pl.Binary)
        frame = frame.select(key, *reversed(SECOND), note=pl.lit("by rules"), tokens=pl.lit([1, 2]), good=pl.lit(True))
    write(frame, named(fresh, suffix))
    fresh("cache-teachers")
    text, label = fresh.texts()[0]
    order = SECOND if suffix != ".parquet" else [*reversed(SECOND)]
    wanted = probabilities(text, label)[SECOND.index(order[0])]
    assert predicted(fresh)[text_key((text,))][0] == pytest.approx(wanted, abs=1e-4)


def test_texts_are_named_by_their_ids(workspace: Workspace) -> None:
    folder, predicted = workspace.config.parent, list[pl.DataFrame]()
    for part in ("train", "test"):
        rows = workspace.texts(part)
        number = pl.Series("number", [f"{part} {place}" for place in range(len(rows))])
        pl.DataFrame(rows, ["text", "label"], orient="row").with_columns(number).write_csv(folder / f"texts/{part}.csv")
        predicted.append(frame_of(rows).drop("text").with_columns(number))
    write(pl.concat(predicted), folder / "predictions/second.csv")
    workspace.edit("  label: label\n", "  label: label\n  id: number\n")
    workspace("cache-teachers")
    write(pl.concat(predicted)[1:], folder / "predictions/second.csv")
    assert "no prediction for 1 of corpus.train" in workspace.attempt("cache-teachers").err


def test_a_new_text_needs_a_row_and_costs_itself(workspace: Workspace, file: Path) -> None:
    workspace("build-targets")
    assert workspace.plan()["build-targets"]["state"] == "current"
    new = "a new text about the judge", "law"
    workspace.write([*workspace.texts(), new])
    refused = workspace.attempt("build-targets")
    every = len(workspace.texts()) + len(workspace.texts("test"))
    assert f"second.csv has no prediction for 1 of corpus.train ({every} texts in all)" in refused.err
    assert "the first: a new text about the judge" in refused.err
    assert "every text of corpus.train and corpus.test needs a row" in refused.err
    assert "which `catch_all` names" in refused.err
    write(pl.concat([pl.read_csv(file), frame_of([new])]), file)
    with workspace.counting() as work:
        workspace("build-targets")
    assert work[0].logits == 1 + every  # the model predicts one text; all rows of the file are read


FAULTS = {
    "the sum": ("law", 0.2, "the probabilities have the sum"),
    "negative": ("law", -0.1, "law is no probability: -0.1"),
    "not a number": ("law", math.nan, "law is no probability: NaN"),
    "absent": ("law", None, "law has no value"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_rows_are_named(workspace: Workspace, file: Path, fault: str) -> None:
    column, value, words = FAULTS[fault]
    frame = pl.read_csv(file)
    wrong = pl.when(pl.int_range(pl.len()) == 2).then(value).otherwise(pl.col(column)).alias(column)
    if fault == "the sum":
        wrong = pl.when(pl.int_range(pl.len()) == 2).then(pl.col(column) + 0.5).otherwise(pl.col(column)).alias(column)
    write(frame.with_columns(wrong), file)
    assert f"row 4: {words}" in workspace.refusal(2, "cache-teachers")


def test_a_line_of_jsonl_without_a_label_is_named(fresh: Workspace) -> None:
    file = named(fresh, ".jsonl")
    rows = frame_of([*fresh.texts(), *fresh.texts("test")]).to_dicts()
    del rows[2]["law"]
    file.parent.mkdir()
    file.write_text("\n\n".join(map(json.dumps, rows)), "utf-8")
    assert "line 5: law has no value" in fresh.attempt("cache-teachers").err


def test_a_file_that_cannot_be_used_is_refused_by_plan(workspace: Workspace, file: Path) -> None:
    good = file.read_text("utf-8")
    for content, words in {
        "text,note\na text,91%\n": "has no predictions: its columns are text, note; note is no number: 91%",
        "text,label\na text,law\n": "fix: leave it out, or list its labels, also those without a row: `labels: [...]`",
        "": "cannot be read",
        good.replace("text,", "words,", 1): "fix: add the column text with the texts\n",
        good.replace("text,", "Text,", 1): "fix: rename the column Text to text\n",
        good.replace("text,", "id,", 1): "fix: add the column text with the texts; or set corpus.id to id",
    }.items():
        file.write_text(content, "utf-8")
        assert words in workspace.refusal(2, "plan")
    file.unlink()
    assert "there is no file ./predictions/second.csv" in workspace.attempt("plan").err


@pytest.mark.parametrize("form", ["columns", "scores", "logits", "lists as text", "spellings", "a wrong sum"])
def test_faulty_rows_at_the_start_are_refused_by_plan(workspace: Workspace, file: Path, form: str) -> None:
    frame = pl.read_csv(file)
    fixes = {
        "columns": (frame.with_columns(pl.col(SECOND) * 100), "fix: divide the percentages by 100\n"),
        "scores": (
            frame.select("text", label=pl.Series((SECOND * len(frame))[: len(frame)]), score=97.5),
            "fix: divide the percentages by 100, or leave out the column score if it is no probability",
        ),
        "logits": (
            frame.with_columns(pl.col(SECOND).log()),
            "fix: write the softmax of each row, if the numbers are logits or log probabilities",
        ),
        "lists as text": (
            frame.select("text", label=pl.lit("['law', 'music']")),
            "fix: write a row for each answer, or lists in all rows of a jsonl or Parquet file",
        ),
        "spellings": (
            frame.select("text", label=pl.Series(["law", "music", "Law."] + ["law"] * (len(frame) - 3))),
            "has one label in several spellings, such as Law. and law\n",
        ),
        "a wrong sum": (frame.with_columns(length=5), "If a column is no label, name the labels"),
    }
    write(fixes[form][0], file)
    assert fixes[form][1] in workspace.refusal(2, "plan")


def test_texts_in_another_spelling_are_explained(workspace: Workspace, file: Path) -> None:
    write(pl.read_csv(file).with_columns(pl.col("text").str.to_lowercase()), file)
    refused = workspace.attempt("cache-teachers")
    assert "fix: name the texts as the corpus has them, with their case and their blanks" in refused.err


def test_predictions_of_another_student_are_labels_with_a_score(workspace: Workspace, file: Path) -> None:
    every = [*workspace.texts(), *workspace.texts("test")]
    labels = (SECOND * len(every))[: len(every)]
    rows = {"row": range(2, len(every) + 2), "key": [text_key((text,)).hex() for text, _ in every], "id": ""}
    best, second = {"label": labels, "probability": 0.7}, {"label_2": labels[1:] + labels[:1], "probability_2": 0.3}
    others = {"unknown": False, "unknown_score": 1.5, "mass_first": 0.7}
    for columns in (best, best | second, best | others):
        write(pl.DataFrame({**rows, **columns}), file)
        assert "2 teachers, 8 labels" in workspace("doctor").out


SPELLINGS: dict[str, Callable[[pl.DataFrame], str]] = {
    "semicolons and decimal commas": lambda frame: "\ufeff" + frame.write_csv(separator=";", decimal_comma=True),
    "empty lines": lambda frame: frame.write_csv().replace("\n", "\n\n") + ",,,,\n",
    "blanks": lambda frame: frame.rename({"law": " law"}).with_columns(music=pl.format(" {}", "music")).write_csv(),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings_of_a_csv(workspace: Workspace, file: Path, spelling: str) -> None:
    file.write_text(SPELLINGS[spelling](pl.read_csv(file)), "utf-8", newline="")
    workspace("cache-teachers")
    text, label = workspace.texts()[0]
    assert predicted(workspace)[text_key((text,))] == pytest.approx(probabilities(text, label), abs=1e-4)


def test_a_jsonl_may_begin_with_a_byte_order_mark(fresh: Workspace) -> None:
    file = named(fresh, ".jsonl")
    write(frame_of([*fresh.texts(), *fresh.texts("test")]), file)
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    fresh("cache-teachers")


@pytest.mark.parametrize("name", ["second.csv.gz", "second.jsonl.xz"])
def test_a_file_may_be_packed(fresh: Workspace, name: str) -> None:
    suffix = Path(name).with_suffix("").suffix
    file = named(fresh, suffix)
    write(frame_of([*fresh.texts(), *fresh.texts("test")]), file)
    pack = gzip.compress if name.endswith(".gz") else lzma.compress
    file.with_name(name).write_bytes(pack(file.read_bytes()))
    fresh.edit(f"  - name: second\n    model: ./predictions/second{suffix}", f"  - ./predictions/{name}")
    fresh("cache-teachers")  # the teacher's name has no suffix
    assert len(Experiment.load(fresh.config).logits("second").collect()) == TRAIN + TEST


UNREADABLE: dict[str, tuple[Callable[[pl.DataFrame], str | bytes], str]] = {
    "a column twice": (
        lambda frame: frame.rename({"law": "music2"}).write_csv().replace("music2", "music"),
        "two columns",
    ),
    "UTF-16": (lambda frame: frame.write_csv().encode("utf-16"), "second.csv is UTF-16"),
    "a header in cp1252": (lambda frame: frame.rename({"law": "loi é"}).write_csv().encode("cp1252"), "line 1 is not"),
    "a text in cp1252": (lambda frame: frame.write_csv().encode() + b"caf\xe9,1,0,0,0\n", "line 162 is not UTF-8"),
    "a field too many": (lambda frame: frame.write_csv() + "a text,1,0,0,0,0\n", "has 6 fields, and the header 5"),
    "an open quote": (lambda frame: frame[:9].write_csv() + '"a text,1,0,0,0\n', "is broken: unexpected end"),
    "a header alone": (lambda frame: frame[:0].write_csv(), "second.csv has no rows"),
}


@pytest.mark.parametrize("fault", UNREADABLE)
def test_the_error_of_a_csv_names_its_fault(workspace: Workspace, file: Path, fault: str) -> None:
    spoiled, words = UNREADABLE[fault]
    content = spoiled(pl.read_csv(file))
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    refused = workspace.attempt("cache-teachers")
    assert (refused.code, words in refused.err, "where: teacher second" in refused.err) == (2, True, True), refused.err


def test_a_folder_may_have_the_name_of_a_file(workspace: Workspace) -> None:
    folder = workspace.config.parent
    (folder / "predictions/second.csv").unlink()
    shutil.copytree(folder / "models/second", folder / "predictions/second.csv")
    assert "2 teachers, 8 labels" in workspace("doctor").out


def test_a_column_of_objects_is_no_label(fresh: Workspace) -> None:
    frame = frame_of(fresh.texts()).select("text", label=pl.struct(name=pl.lit("law")))
    write(frame, named(fresh, ".jsonl"))
    assert "second.jsonl has no predictions: its columns are text, label" in fresh.attempt("plan").err


def test_rows_without_a_text_have_no_other_prediction(fresh: Workspace) -> None:
    frame = frame_of(fresh.texts())
    write(frame.with_columns(pl.lit(None, pl.String).alias("text")), named(fresh, ".parquet"))
    refused = fresh.attempt("cache-teachers").err
    assert "the first 100 rows of second.parquet: 100 problems" in refused
    assert "another prediction" not in refused


def test_an_id_names_one_text_of_both_parts(workspace: Workspace) -> None:
    folder = workspace.config.parent
    for part in ("train", "test"):
        rows = pl.DataFrame(workspace.texts(part), ["text", "label"], orient="row").with_row_index("number")
        rows.write_csv(folder / f"texts/{part}.csv")
    write(
        frame_of(pl.read_csv(folder / "texts/train.csv").select("text", "label").rows()).with_row_index("number"),
        folder / "predictions/second.csv",
    )
    workspace.edit("  label: label\n", "  label: label\n  id: number\n")
    refused = workspace.attempt("cache-teachers")
    assert "40 ids of corpus.train name another text of corpus.test" in refused.err


def test_labels_without_names_are_renamed(workspace: Workspace, file: Path) -> None:
    frame = pl.read_csv(file)
    write(frame.select("text", label=pl.int_range(pl.len()) % 4), file)
    assert 'set rename: {"0": NAME, ...}' in workspace.attempt("plan").err
    names = ", ".join(f"'{place}': {label}" for place, label in enumerate(SECOND))
    workspace("cache-teachers", f"teachers.1.rename={{{names}}}")
    write(frame.rename({label: str(place) for place, label in enumerate(SECOND)}), file)
    workspace("cache-teachers", f"teachers.1.rename={{{names}}}")


def test_numbers_that_begin_late_change_no_column_of_labels(workspace: Workspace, file: Path) -> None:
    rows = pl.int_range(pl.len())
    late = pl.when(rows > 110).then(rows)
    frame = pl.read_csv(file).with_columns(label=pl.Series(SECOND * ((TRAIN + TEST) // 4)), late=late)
    write(frame.select("text", "label", pl.lit(0.7).alias("score"), "late"), file)
    workspace("cache-teachers")


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_a_label_without_numbers_in_the_first_rows_is_one(fresh: Workspace, suffix: str) -> None:
    frame, rows = frame_of([*fresh.texts(), *fresh.texts("test")]), pl.int_range(pl.len())
    file = named(fresh, suffix)
    frame = frame.with_columns(law=pl.when(rows > 110).then("law"), note=pl.when(rows > 110).then(pl.lit("sure")))
    write(frame, file)
    if suffix == ".jsonl":  # without the fields that have no value
        present = [{name: value for name, value in row.items() if value is not None} for row in frame.to_dicts()]
        file.write_text("\n".join(map(json.dumps, present)), "utf-8")
    refused = fresh.attempt("plan").err
    assert f"the first 100 rows of {file.name}: 100 problems" in refused
    assert "law has no value" in refused
    assert "note" not in refused


def test_a_text_with_two_predictions_is_refused(workspace: Workspace, file: Path) -> None:
    frame = pl.read_csv(file)
    write(pl.concat([frame, frame[:1]]), file)
    workspace("cache-teachers")  # the same prediction twice is no fault
    other = frame[:1].with_columns(pl.Series(name, [value]) for name, value in zip(SECOND, [0.25] * 4, strict=True))
    write(pl.concat([frame, other]), file)
    refused = workspace.attempt("cache-teachers")
    assert f"row {len(frame) + 2}: its text has another prediction in row 2" in refused.err
    assert "keep one row of each text; or give more than half of the texts several answers" in refused.err


ANSWERS = [["law", "law", "music"], ["law", "gardening"], ["music", "music"]]
SHARES = [[0, 2 / 3, 0, 1 / 3], [0.5, 0.5, 0, 0], [0, 0, 0, 1]]
"""Shares of the answers, in the order of SECOND."""


@pytest.mark.parametrize("form", ["rows", "lists", "probabilities"])
def test_several_answers_for_each_text_are_averaged(fresh: Workspace, form: str) -> None:
    texts = [text for text, _ in [*fresh.texts(), *fresh.texts("test")]]
    answers = [ANSWERS[place % 3] for place in range(len(texts))]
    frame = pl.DataFrame({"text": texts, "label": answers})
    if form != "lists":  # in any order, as rounds of answers are
        frame = frame.explode("label").sample(fraction=1, shuffle=True, seed=0)
    if form == "probabilities":
        frame = frame.select("text", *((pl.col("label") == name).cast(pl.Float64).alias(name) for name in SECOND))
    settings = () if form == "probabilities" else (f"teachers.1.labels=[{', '.join(SECOND)}]",)
    suffix = ".jsonl" if form == "lists" else ".csv"
    write(frame, named(fresh, suffix))
    ran = fresh("cache-teachers", *settings)
    assert f"teacher second: 2 to 3 answers for each text of second{suffix}, averaged" in ran.err + ran.out
    rows = predicted(fresh, *settings)
    for place, text in enumerate(texts):
        assert rows[text_key((text,))] == pytest.approx(SHARES[place % 3], abs=1e-3)


def test_faulty_answers_of_a_list_are_named(fresh: Workspace) -> None:
    frame = frame_of([*fresh.texts(), *fresh.texts("test")]).select("text")
    lists = pl.Series("label", [SECOND, SECOND, ["law", ""], ["law", "none"], []] + [SECOND] * (len(frame) - 5))
    write(frame.with_columns(lists), named(fresh, ".jsonl"))
    refused = fresh.attempt("plan", f"teachers.1.labels=[{', '.join(SECOND)}]").err
    assert "line 3: label is empty" in refused
    assert "line 4: none is no label of this teacher" in refused
    assert "line 5: label is empty" in refused


def test_of_equal_probabilities_a_teacher_predicts_the_first_of_its_labels(workspace: Workspace, file: Path) -> None:
    equal = [pl.lit(1 / len(SECOND)).alias(label) for label in reversed(SECOND)]
    write(pl.read_csv(file).select("text", *equal), file)
    shared = f"teachers.0.rename={{cooking: {SECOND[0]}}}"  # the first label of the second teacher in the union
    test = [(text, label) for text, label in workspace.texts("test") if label not in {"cooking", SECOND[0]}]
    workspace.write(test, "test")
    workspace("report", shared)
    right = sum(label == SECOND[-1] for _, label in test)
    numbers = workspace.numbers()
    assert numbers["student_quality"]["teachers"]["own"]["second"]["right"] == right
    assert numbers["evaluation"]["systems"]["teacher:second"]["accuracy"] == right / len(test)


def test_plan_has_no_price_of_passes_where_all_settings_cost_the_same(workspace: Workspace) -> None:
    workspace.edit("  label: label\n", "  label: label\n  on_bad_row: skip\n")
    workspace("read-corpus")
    assert "passes" in workspace("plan", "--json").json["cost"]
    shutil.copytree(workspace.folder / "predictions", workspace.folder / "others")
    files = "teachers=[others/second.csv, predictions/second.csv]"
    assert "passes" not in workspace("plan", "--json", files).json["cost"]


def test_rows_may_have_one_label(workspace: Workspace, file: Path) -> None:
    frame = pl.read_csv(file)
    best = frame.select(pl.concat_list(SECOND).list.arg_max()).to_series().to_list()
    frame = frame.select("text", label=pl.Series([SECOND[place] for place in best]))
    write(frame, file)
    workspace("report")
    systems = workspace.numbers()["evaluation"]["systems"]
    own = [label for _, label in workspace.texts("test") if label in SECOND]
    assert systems["teacher:second"]["accuracy"] == pytest.approx(len(own) / len(workspace.texts("test")))
    write(frame.with_columns(pl.lit("none").alias("label")).head(1).extend(frame[1:]), file)
    refused = workspace.attempt("cache-teachers", f"teachers.1.labels=[{', '.join(SECOND)}]")
    assert "row 2: none is no label of this teacher" in refused.err
    workspace("cache-teachers", "teachers.1.catch_all=[none]")
    write(frame.with_columns(label=pl.when(pl.int_range(pl.len()) > 0).then("label")), file)
    empty = workspace.attempt("cache-teachers").err
    assert "row 2: label is empty" in empty
    assert "a label such as unsure, which `catch_all` names" in empty


def test_a_label_may_have_a_score(workspace: Workspace, file: Path) -> None:
    text = workspace.texts()[0][0]
    every = [row[0] for row in [*workspace.texts(), *workspace.texts("test")]]
    labels = [SECOND[place % 4] for place in range(len(every))]
    write(pl.DataFrame({"text": every, "label": labels, "score": [0.7] * len(every)}), file)
    workspace("cache-teachers")
    rows = predicted(workspace)
    own = SECOND.index(labels[0])  # the labels are sorted, and so are those of SECOND
    assert rows[text_key((text,))] == pytest.approx([0.7 if place == own else 0.1 for place in range(4)], abs=1e-4)
    write(pl.DataFrame({"text": every, "label": labels, "score": [0.1] * len(every)}), file)
    workspace("cache-teachers")  # with a low score, the label is still its own
    rows = predicted(workspace)
    assert [rows[text_key((text,))].argmax() for text in every] == [place % 4 for place in range(len(every))]
    write(pl.DataFrame({"text": every, "label": labels, "score": [1.7, *[0.7] * (len(every) - 1)]}), file)
    assert "row 2: score is no probability: 1.7" in workspace.attempt("cache-teachers").err
    write(pl.DataFrame({"text": every, "label": labels, "score": ["high"] * len(every)}), file)
    unread = "teacher second: the column score of second.csv is not read: it has no numbers"
    assert unread in workspace("cache-teachers").err
    write(pl.DataFrame({"text": every, "label": labels, "score": [0.7] * len(every), "confidence": 0.4}), file)
    unread = "the column confidence of second.csv is not read: score is the probability of the label"
    assert unread in workspace("cache-teachers", f"teachers.1.labels=[{', '.join(SECOND)}]").err


def test_labels_at_random_give_arbitrary_targets_and_a_note(workspace: Workspace, file: Path) -> None:
    every = [row[0] for row in [*workspace.texts(), *workspace.texts("test")]]
    for name, labels in TEACHER_LABELS.items():
        drawn = np.random.default_rng(len(name)).choice(labels, len(every))
        write(pl.DataFrame({"text": every, "label": drawn}), file.with_name(f"{name}.csv"))
    workspace.edit("./models/first", "./predictions/first.csv")
    note = "the teachers are equally certain of 100.0 % of the texts, whose targets are arbitrary"
    assert note in workspace("weigh-teachers").err
    workspace.edit("./predictions/first.csv", "./models/first")
    assert "equally certain" not in workspace("weigh-teachers").err


def test_whole_numbers_are_no_scores(workspace: Workspace, file: Path) -> None:
    every = [row[0] for row in [*workspace.texts(), *workspace.texts("test")]]
    labels = [SECOND[place % 4] for place in range(len(every))]
    whole = pl.DataFrame({"text": every, "label": labels, "round": 0, "tokens": 153})
    for columns, overrides in (
        ({}, []),
        ({"seconds": 0.5, "cost": 0.01}, [f"teachers.1.labels=[{', '.join(SECOND)}]"]),
    ):
        write(whole.with_columns(**columns), file)
        workspace("cache-teachers", *overrides)
        assert all(row.max() == pytest.approx(1, abs=1e-3) for row in predicted(workspace, *overrides).values())
    write(whole.with_columns(round=42), file)
    assert "row 2: round is no probability: 42" in workspace.attempt("cache-teachers").err


@pytest.mark.parametrize("name", ["", "__index_level_0__"])
def test_row_numbers_of_pandas_are_no_label(workspace: Workspace, file: Path, name: str) -> None:
    frame = pl.read_csv(file)
    write(frame.with_columns(pl.int_range(pl.len()).alias(name)), file)
    workspace("cache-teachers")


@pytest.mark.filterwarnings("error")
def test_an_infinite_probability_is_refused(workspace: Workspace, file: Path) -> None:
    write(pl.read_csv(file).with_columns(law=math.inf), file)
    assert "row 2: the probabilities have the sum inf" in workspace.attempt("cache-teachers").err


def test_labels_choose_columns(workspace: Workspace, file: Path) -> None:
    write(pl.read_csv(file).with_columns(confidence=pl.max_horizontal(SECOND)), file)
    refused = workspace.attempt("cache-teachers")
    assert "name the labels of this teacher: `labels: [...]`" in refused.err
    workspace("cache-teachers", f"teachers.1.labels=[{', '.join(SECOND)}]")
    absent = workspace.attempt("plan", "teachers.1.labels=[law, physics]")
    assert "second.csv has no column physics" in absent.err


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["student.method=muka-soft", "cache.passes=4"], "has no dropout passes"),
        (["student.method=muka-soft", "targets.uncertainty=mutual-information"], "such as targets.uncertainty=entropy"),
        (["student.method=layerwise"], "reads its hidden states"),
        (["targets.uncertainty=md", "student.method=muka-soft"], "reads its hidden states"),
        (["student.encoder=teacher:second"], "is no encoder"),
        (["student.method=as-dfd"], "pseudo embeddings"),
        (["student.encoder=./predictions/second.csv"], "is no encoder"),
    ],
)
def test_what_needs_a_model_is_refused(workspace: Workspace, overrides: list[str], words: str) -> None:
    assert words in workspace.refusal(2, "plan", *overrides)


def test_muka_takes_its_prediction_as_every_pass(workspace: Workspace) -> None:
    ran = workspace("build-targets", "student.method=muka-soft", "cache.passes=auto")
    assert "teacher second is a file of predictions, so its prediction counts as every pass" in ran.err + ran.out


def test_python_names_a_file_as_a_path_or_text(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workspace.folder)
    for file in ("predictions/second.csv", Path("predictions/second.csv")):
        experiment = Experiment(teachers=["models/first", file], texts=["a text"])
        assert experiment.config.teachers[1].model == "./predictions/second.csv"
    with pytest.raises(ModelError, match="there is no file"):
        Experiment(teachers=["models/first", "predictions/no.csv"], texts=["a text"]).run()


def test_all_teachers_may_be_files(workspace: Workspace) -> None:
    first = frame_of([*workspace.texts(), *workspace.texts("test")])
    names = dict(zip(SECOND, TEACHER_LABELS["first"], strict=True))
    write(first.rename(names), workspace.config.parent / "predictions/first.csv")
    workspace.edit("./models/first", "./predictions/first.csv")
    workspace("report")
    assert workspace.numbers()["verdict"]["decision"]


def test_init_and_doctor_read_its_labels(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "teachers 2 teachers, 8 labels" in " ".join(workspace("doctor").out.split())
    monkeypatch.chdir(workspace.config.parent)
    workspace.config.unlink()
    workspace("init", "--from-teachers", "models/first", "predictions/second.csv")
    written = workspace.config.read_text("utf-8")
    assert "  - name: second\n    model: ./predictions/second.csv\n    # 4 labels: gardening" in written
    file = workspace.folder / "predictions/second.csv"
    numbered = pl.read_csv(file).rename({label: str(place) for place, label in enumerate(SECOND)})
    write(numbered, file)
    workspace.config.unlink()
    made = workspace("init", "--from-teachers", "models/first", "predictions/second.csv")
    assert "the labels of second" in made.out + made.err
    assert 'rename: {"0": "?", "1": "?", "2": "?", "3": "?"}' in workspace.config.read_text("utf-8")
    refused = workspace.attempt("plan", "corpus.train=texts/train.csv")
    assert """rename: "?" is no name, for '0', '1'""" in refused.err
    write(pl.read_csv("predictions/second.csv").rename({"text": "words"}), workspace.folder / "predictions/second.csv")
    workspace.config.unlink()
    workspace("init", "--from-teachers", "models/first", "predictions/second.csv")  # corpus.text may be words


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_a_path_like_a_pattern_is_that_of_one_file(tmp_path: Path, suffix: str) -> None:
    path, texts = tmp_path / f"exp [2]?*/second{suffix}", ["one", "two", "three"]
    write(frame_of([(text, "none") for text in texts]), path)
    for decoy in ("exp 2xy", "exp 2x"):
        write(frame_of([(text, SECOND[0]) for text in texts]), tmp_path / decoy / path.name)
    corpus, keys = Corpus(), np.array([text_key((text,)) for text in texts], "S16")
    predictions = read_predictions(path, labels_in(path, None, corpus, "second"), corpus, "second")
    logits, _ = predictions.of(keys)
    assert softmax(logits) == pytest.approx(np.array([probabilities(text, "none") for text in texts]), abs=1e-4)


def test_plan_names_the_settings_of_models_that_it_does_not_use(workspace: Workspace) -> None:
    notes = workspace("plan", "teachers.1.dropout=0.2", "teachers.1.max_tokens=64", "--json").json["notes"]
    assert "dropout, max_tokens of teacher second: no effect, because ./predictions/second.csv is no model" in notes
