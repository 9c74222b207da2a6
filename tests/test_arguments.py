"""`amalgam.Experiment(teachers=..., texts=...)`: an experiment without a file, from objects of every kind."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections import UserList
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import polars as pl
import pyarrow as pa
import pytest

from amalgam.pipeline.errors import AmalgamError, DataError, ExperimentError
from amalgam.stages.app.api import Experiment
from amalgam.stages.common.inference import teacher as loading
from amalgam.tests.workspaces import TEACHER_LABELS, TEST, TRAIN, Workspace

TEACHERS = FIRST, SECOND = ["models/first", "./models/second"]
SETTINGS: dict[str, Any] = {
    "cache": {"passes": 4, "max_tokens": 32, "dtype": "fp32"},
    "targets": {"mode": "soft"},
    "student": {"encoder": "./models/encoder", "max_tokens": 32, "epochs": 1, "learning_rate": 1e-3},
}


@pytest.fixture
def shop(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """A workspace that is up to date, without its file, as the current folder."""
    workspace.config.unlink()
    monkeypatch.chdir(workspace.folder)
    return workspace


def frame_of(shop: Workspace, part: str = "train") -> pl.DataFrame:
    return pl.read_csv(shop.folder / f"texts/{part}.csv")


def test_texts_of_every_kind_reuse_the_predictions_of_a_file(shop: Workspace) -> None:
    frame, test = frame_of(shop), frame_of(shop, "test")
    kinds: dict[str, Any] = {
        "frame": frame,
        "pandas": frame.to_pandas(),
        "column": frame["text"],
        "pandas column": frame.to_pandas()["text"],
        "list": frame["text"].to_list(),
        "array": np.array(frame["text"].to_list()),
        "columns": {"text": frame["text"].to_list()},
        "Arrow column": frame.to_arrow()["text"],
        "batches": frame.to_arrow().select(["text"]).to_reader(),
        "index": pd.Index(frame["text"]),
        "other columns": frame.to_pandas()[["text"]].assign(more=[1, "one", *[object()] * (TRAIN - 2)]),
        "column of a dataset": UserList(frame["text"].to_list()),
        "address": "texts/train.csv",
        "path": Path("texts/train.csv").absolute(),
        "paths": [Path("texts/train.csv")],
    }
    files = dict[str, str]()
    with shop.counting() as work:
        for kind, texts in kinds.items():
            experiment = Experiment(TEACHERS, texts, test=test, quiet=True, **SETTINGS)
            [files[kind]] = experiment.config.corpus.train or []
            experiment.run(until="build-targets")
            assert len(experiment.targets.collect()) == TRAIN
            assert len(experiment.texts("test").collect()) == TEST
    assert work[0].units == 0
    assert files["frame"] == files["pandas"]
    assert len({files[kind] for kind in kinds if kind not in {"frame", "pandas", "address", "path", "paths"}}) == 1
    assert (files["path"], files["paths"]) == ("./texts/train.csv", "./texts/train.csv")


def test_the_command_line_continues_a_written_experiment(shop: Workspace) -> None:
    experiment = Experiment(TEACHERS, frame_of(shop), test="texts/test.csv", quiet=True, **SETTINGS)
    made = {stage.stage: stage.outcome for stage in experiment.run()}
    assert made["cache-teachers"] == "reused"
    path = experiment.write("mine.yaml")
    assert path == shop.folder / "mine.yaml"
    assert str(shop.folder) not in path.read_text()
    assert (shop.folder / path.read_text().partition("\n")[0].rpartition("$schema=")[2]).is_file()
    states = shop("plan", "-c", "mine.yaml", "--json").json["stages"]
    assert {state["state"] for state in states} == {"current"}
    assert Experiment.load(path, quiet=True).config == experiment.config
    assert experiment.write("mine.yaml") == path
    path.write_text(f"{path.read_text()}# edited\n")
    with pytest.raises(AmalgamError, match=r"exists[\s\S]*give another name"):
        experiment.write("mine.yaml")
    with pytest.raises(AmalgamError, match="another folder"):
        experiment.write("models/mine.yaml")
    with pytest.raises(AmalgamError, match="has a file"):
        Experiment.load(path, quiet=True).write("more.yaml")


def test_an_experiment_whose_stored_texts_were_deleted_is_made_again(shop: Workspace) -> None:
    experiment = Experiment(TEACHERS, frame_of(shop), quiet=True, **SETTINGS)
    shutil.rmtree(shop.artifacts)
    for use in (experiment.plan, experiment.run):
        with pytest.raises(AmalgamError, match=r"was deleted[\s\S]*fix: make the experiment again from its texts"):
            use()
    again = Experiment(TEACHERS, frame_of(shop), quiet=True, **SETTINGS)
    assert again.plan()[0].state == "missing"
    assert experiment.plan()[0].reason == "first-run"
    [file] = (shop.artifacts / "given").iterdir()
    file.write_bytes(file.read_bytes()[:-9])
    Experiment(TEACHERS, frame_of(shop), quiet=True, **SETTINGS).run("read-corpus")
    assert experiment.texts().collect().height == TRAIN


def test_an_experiment_keeps_its_file_when_the_program_changes_its_folder(
    shop: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    Experiment(TEACHERS, "texts/train.csv", quiet=True, **SETTINGS).write()
    experiment = Experiment.load(quiet=True)
    shutil.copyfile("amalgam.yaml", "texts/amalgam.yaml")
    monkeypatch.chdir("texts")
    assert experiment.run("read-corpus").is_complete
    assert experiment.workspace == shop.artifacts


def test_a_pair_of_columns_takes_pairs_of_texts(shop: Workspace) -> None:
    pairs = [("a cat", "an animal"), ("the law", "a rule")]
    experiment = Experiment(TEACHERS, pairs, quiet=True, corpus={"text": ["premise", "hypothesis"]}, **SETTINGS)
    experiment.run(until="read-corpus")
    assert set(experiment.texts().select("text", "text_2").collect().iter_rows()) == set(pairs)


def test_teachers_have_the_names_of_their_folders_and_their_own_fields(shop: Workspace) -> None:
    for folder in ("more/first", "run/checkpoint-20", "checkpoint-20"):
        shutil.copytree("models/first", folder)
    labels = [f"my {label}" for label in TEACHER_LABELS["second"]]
    teachers: list[str | Path | dict[str, Any]] = [
        FIRST,
        Path("more/first"),
        "run/checkpoint-20",
        "./checkpoint-20",
        {"name": "mine", "model": Path("models/second"), "labels": labels},
    ]
    config = Experiment(teachers, ["a text"], quiet=True).config
    assert [(teacher.name, teacher.model) for teacher in config.teachers] == [
        ("first", "./models/first"),
        ("first-2", "./more/first"),
        ("run-20", "./run/checkpoint-20"),
        ("checkpoint-20", "./checkpoint-20"),
        ("mine", "./models/second"),
    ]
    assert config.teachers[-1].labels == labels
    assert (config.student.method, config.corpus.label) == ("amalgam", None)


def test_an_argument_of_none_is_left_out(shop: Workspace) -> None:
    config = Experiment(TEACHERS, ["a text"], quiet=True, cache=None, generate=None).config
    assert config == Experiment(TEACHERS, ["a text"], quiet=True).config


@pytest.mark.parametrize("item", [1, b"a text", {"text": "a text"}], ids=["number", "bytes", "row"])
def test_an_item_that_is_not_a_text_is_refused_with_the_form_that_is(shop: Workspace, item: object) -> None:
    with pytest.raises(AmalgamError, match=r"texts\[1\] = .*\nfix: pass each text as a str, and labelled texts as a "):
        Experiment(TEACHERS, ["a text", item], quiet=True)


def test_logits_and_passes_are_those_of_the_experiments_own_texts(shop: Workspace) -> None:
    experiment = Experiment(TEACHERS, frame_of(shop)["text"].head(9), quiet=True, **SETTINGS)
    experiment.run(until="cache-teachers")  # files of the cache have all texts of the workspace
    assert len(experiment.logits("first").collect()) == len(experiment.passes("first").collect()) == 9


def test_labels_of_the_texts_are_in_the_column_label(shop: Workspace) -> None:
    frame = frame_of(shop)
    first_labels = pl.when(pl.int_range(len(frame)) < 9).then("label").alias("label")
    experiment = Experiment(TEACHERS, frame.with_columns(first_labels), labels="corpus", quiet=True, **SETTINGS)
    assert (experiment.config.labels, experiment.config.corpus.label) == ("corpus", "label")
    experiment.run(until="build-targets")
    assert (experiment.targets.collect()["weight"] == 1).sum() >= 9


def test_categories_are_read_as_their_texts(shop: Workspace) -> None:
    frame, test = frame_of(shop), frame_of(shop, "test")
    labels = pl.Enum(sorted(set(test["label"])))
    of_polars = (
        frame.with_columns(pl.col("text").cast(pl.Categorical)),
        test.with_columns(pl.col("label").cast(labels)),
    )
    of_pandas = frame.to_pandas().astype("category"), test.to_pandas().astype({"label": "category"})
    made = []
    for train, tests in (of_polars, of_pandas):
        experiment = Experiment(TEACHERS, train, test=tests, quiet=True, **SETTINGS)
        experiment.run(until="read-corpus")
        made.append((experiment.texts("train").collect(), experiment.texts("test").collect()))
    assert len(made[0][0]) == TRAIN
    assert set(made[0][1]["label"]) == set(test["label"])
    assert all(one.equals(other) for one, other in zip(*made, strict=True))
    null = pl.DataFrame({"text": pl.Series(["a", None], dtype=pl.Categorical)})
    with pytest.raises(AmalgamError, match="row 1"):
        Experiment(TEACHERS, null, quiet=True, **SETTINGS)


def test_whole_numbers_that_pandas_stores_as_floats_are_labels_and_ids(shop: Workspace) -> None:
    frame = pd.DataFrame({"text": ["a", "b", "c"], "label": [0, None, 10], "uid": [7.0, 2.5, 1e20]})
    assert str(frame["label"].dtype) == "float64"
    corpus = {"on_bad_row": "skip", "id": "uid", "labels": [*"0123456789", "10"]}
    experiment = Experiment(TEACHERS, frame, test=frame, quiet=True, corpus=corpus)
    experiment.run(until="read-corpus")
    rows = {row[0]: row[1:] for row in experiment.texts("test").select("text", "label", "id").collect().rows()}
    assert rows == {"a": ("0", "7"), "c": ("10", "100000000000000000000")}


def test_test_texts_in_memory_keep_how_they_were_picked(shop: Workspace) -> None:
    whys = ["random"] * 20 + ["small margin"] * 5
    test = frame_of(shop, "test").head(25).with_columns(pl.Series("why", whys))
    test.write_csv("texts/labelled.csv")
    evaluations = []
    for given in (test, test.to_pandas(), "texts/labelled.csv"):
        experiment = Experiment(TEACHERS, frame_of(shop), test=given, quiet=True, **SETTINGS)
        experiment.run()
        numbers = json.loads(experiment.report.with_suffix(".json").read_text())
        evaluations.append((numbers["evaluation"]["n"], numbers["evaluation"]["selected"]))
    assert evaluations == 3 * [(20, {"texts": 5, "random": 20, "unused": 5})]


def test_rows_without_a_text_are_skipped_on_request(shop: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["a text", None, "another one"]
    experiment = Experiment(TEACHERS, texts, quiet=True, corpus={"on_bad_row": "skip"})
    experiment.run(until="read-corpus")
    assert capsys.readouterr() == ("", "")  # quiet in Python prints nothing
    assert len(experiment.texts().collect()) == 2


class Model:
    def save_pretrained(self, folder: str) -> None: ...


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "a mapping as a file": (lambda: Experiment.load({"teachers": TEACHERS}), "write Experiment(teachers=[...]"),  # type: ignore[arg-type]
    "no arguments": (Experiment, "  corpus.train: is required"),
    "a file": (lambda: Experiment("amalgam.yaml"), "Experiment.load('amalgam.yaml')"),
    "an empty list": (lambda: Experiment(TEACHERS, []), "the train texts have no rows"),
    "no texts": (lambda: Experiment(TEACHERS), "the arguments texts, validation and test are the fields"),
    "no text column": (lambda: Experiment(TEACHERS, pl.DataFrame({"body": ["a"]})), "the columns are body"),
    "null": (lambda: Experiment(TEACHERS, ["a", None]), "row 1, counted from 0: None"),
    "blank": (lambda: Experiment(TEACHERS, pl.DataFrame({"text": ["a", " "]})), "row 1, counted from 0: ' '"),
    "numbers": (lambda: Experiment(TEACHERS, [1]), "texts[0] = 1"),
    "a column of numbers": (lambda: Experiment(TEACHERS, {"text": [1]}), "store it as text, or set corpus.text"),
    "one text as a column": (lambda: Experiment(TEACHERS, {"text": "the onion"}), "put the texts into a list"),
    "two columns of one name": (
        lambda: Experiment(TEACHERS, pa.Table.from_arrays([pa.array(["a"])] * 2, ["text", "text"])),
        "two columns named text",
    ),
    "two columns of pandas of one name": (
        lambda: Experiment(TEACHERS, pd.DataFrame([["a", "b"]], columns=["text", "text"])),
        "a name of its own",
    ),
    "two types": (lambda: Experiment(TEACHERS, {"text": ["a", 1]}), "give each column one type"),
    "texts in Latin-1": (
        lambda: Experiment(TEACHERS, pa.table({"text": pa.array([b"caf\xe9"], pa.binary()).view(pa.string())})),
        "cannot be read as a table: Invalid UTF8",
    ),
    "a type that no file has": (
        lambda: Experiment(
            TEACHERS, ["a"], labels={"text": ["a"], "label": pa.RunEndEncodedArray.from_arrays([1], "b")}
        ),
        "cannot be read as a table: Unhandled type",
    ),
    "an object": (lambda: Experiment(TEACHERS, object()), "pass a list of texts"),
    "an open file": (lambda: Experiment(TEACHERS, io.StringIO("text,label\na,law\n")), "pass a list of texts"),
    "tables": (lambda: Experiment(TEACHERS, {"train": pl.DataFrame()}), 'texts=tables["train"]'),
    "parts": (lambda: Experiment(TEACHERS, {"train": ["a"], "test": ["b"]}), 'such as texts=parts["train"]'),
    "blanks in a name": (lambda: Experiment(TEACHERS, pl.DataFrame({"text ": ["a"]})), 'the columns are "text "'),
    "NA among texts": (lambda: Experiment(TEACHERS, ["a", pd.NA]), "a row of the train texts has no text"),
    "no such file": (lambda: Experiment(TEACHERS, "texts/tran.csv"), "train.csv"),
    "one text": (lambda: Experiment(TEACHERS, "one text"), "a text itself goes in a list"),
    "one long text": (lambda: Experiment(TEACHERS, "a text " * 100), "a text itself goes in a list"),
    "names of files": (lambda: Experiment(TEACHERS, ["a.csv", "b.csv"]), "Path('a.csv')"),
    "no column in a file": (lambda: Experiment(TEACHERS, "texts/train.csv", corpus={"text": "body"}), "text, label"),
    "test without labels": (lambda: Experiment(TEACHERS, ["a"], test=["b"]), "no column label in the test texts"),
    "a file without labels": (
        lambda: Experiment(TEACHERS, ["a"], test="texts/test.csv", corpus={"label": "gold"}),
        "no column gold in test.csv",
    ),
    "a null label": (
        lambda: Experiment(TEACHERS, ["a"], test={"text": ["b", "c"], "label": ["law", None]}),
        "a row of the test texts has no label",
    ),
    "a name twice": (
        lambda: Experiment([{"name": "a", "model": FIRST}, {"name": "a", "model": SECOND}], ["a"]),
        "the name 'a' is given twice",
    ),
    "a model twice": (lambda: Experiment([FIRST, FIRST], ["a"]), "./models/first is given twice"),
    "a model above twice": (lambda: Experiment([Path("../x")] * 2, ["a"]), "teacher ../x is given twice"),
    "no folder": (lambda: Experiment(["./models/frist", SECOND], ["a"]), "models, such as first"),
    "no folder, like an id": (lambda: Experiment(["models/frist", SECOND], ["a"]), "write hub:models/frist"),
    "two problems": (lambda: Experiment(["./models/frist", "./secnd"], ["a"]), "2 models cannot be teachers"),
    "no encoder": (
        lambda: Experiment(TEACHERS, ["a"], student={"encoder": "./models/encodr"}),
        "models, such as encoder",
    ),
    "no such user": (lambda: Experiment(["~nobody-here/first", SECOND], ["a"]), "there is no user nobody-here"),
    "a text as a teacher": (lambda: Experiment(["a text " * 100, SECOND], ["a"]), "File name too long"),
    "no such user's workspace": (lambda: Experiment(TEACHERS, ["a"], workspace="~nobody-here/a"), "there is no user"),
    "no model": (lambda: Experiment(["./texts", SECOND], ["a"]), "no config.json"),
    "a model in memory": (lambda: Experiment([Model(), SECOND], ["a"]), "save_pretrained(FOLDER)"),  # type: ignore[list-item]
    "a mapping of teachers": (
        lambda: Experiment({"a": FIRST, "b": SECOND}, ["a"]),  # type: ignore[arg-type]
        f"teachers=[{{'name': 'a', 'model': {FIRST!r}}}, ...]",
    ),
    "no reference": (lambda: Experiment([{"name": FIRST}, SECOND], ["a"]), "a teacher has no model"),
    "too few labels": (lambda: Experiment([{"model": FIRST, "labels": ["a"]}], ["a"]), "exactly 4 labels"),
    "no such section": (lambda: Experiment(TEACHERS, ["a"], studnt={"method": "uhc"}), "did you mean 'student'?"),
    "no such field": (lambda: Experiment(TEACHERS, ["a"], student={"epoch": 3}), "did you mean 'epochs'?"),
    "true for a number": (lambda: Experiment(TEACHERS, ["a"], student={"seed": True}), "whole number (given true)"),
    "a field": (lambda: Experiment(TEACHERS, ["a"], epochs=3), "student={'epochs': 3}"),  # type: ignore[arg-type]
    "texts by their part": (lambda: Experiment(TEACHERS, train=99 * ["a"]), "fix: write texts=['a', 'a', "),  # type: ignore[arg-type]
    "a field by another name": (lambda: Experiment(TEACHERS, ["a"], text_column="b"), "write corpus={'text': 'b'}"),  # type: ignore[arg-type]
    "one teacher": (lambda: Experiment(texts=["a"], teacher=[FIRST]), f"write teachers=[{FIRST!r}]"),  # type: ignore[arg-type]
    "no section": (lambda: Experiment(TEACHERS, ["a"], student="uhc"), "student={'method': 'uhc'}"),  # type: ignore[arg-type]
    "an encoder as a section": (lambda: Experiment(TEACHERS, ["a"], student="m/x"), "student={'encoder': 'm/x'}"),  # type: ignore[arg-type]
    "a folder as a section": (lambda: Experiment(TEACHERS, ["a"], student="models"), "student={'encoder': 'models'}"),  # type: ignore[arg-type]
    "a teacher as a section": (lambda: Experiment(TEACHERS, ["a"], student="teacher:x"), "{'encoder': 'teacher:x'}"),  # type: ignore[arg-type]
    "test texts without labels": (lambda: Experiment(TEACHERS, ["a"], test=["b"]), '{"text": [...], "label": [...]}'),
    "NaN among texts": (lambda: Experiment(TEACHERS, ["a", float("nan")]), "a row of the train texts has no text"),
    "no value": (lambda: Experiment(TEACHERS, ["a"], student={"encoder": Model()}), "no plain value"),
    "a frame in a section": (
        lambda: Experiment(TEACHERS, ["a"], train_teachers={"texts": pl.DataFrame({"text": ["a", "b"]})}),
        "a DataFrame is no plain value: shape: (2, 1)\\n",
    ),
    "a secret": (lambda: Experiment(TEACHERS, ["a"], student={"name": "hf_" + 20 * "a"}), "looks like a secret"),
    "texts twice": (lambda: Experiment(TEACHERS, ["a"], corpus={"train": "b.csv"}), "the train texts are given twice"),
    "no workspace": (lambda: Experiment(TEACHERS, ["a"], workspace=3), "workspace is 3"),  # type: ignore[arg-type]
    "no folder to write": (lambda: Experiment(TEACHERS, ["a"], workspace="texts/train.csv"), "train.csv is a file"),
}


@pytest.fixture
def no_model_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(loading.Teacher, "__init__", refuse)


@pytest.mark.usefixtures("no_model_loads")
def test_wrong_arguments_are_refused_at_once_with_the_way_out(shop: Workspace) -> None:
    for name, (make, piece) in WRONG.items():
        with pytest.raises(AmalgamError) as refused:
            make()
        assert piece in str(refused.value), name
        assert refused.value.fix, name
        assert len(str(refused.value)) < 700, name


def test_errors_of_a_file_and_its_overrides_name_the_call_in_python(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("teachers: [./models/a, ./models/b]\ncorpus: {train: train.csv}\n")

    def refused(name: str, *overrides: str) -> ExperimentError:
        with pytest.raises(ExperimentError) as error:
            Experiment.load(tmp_path / name, overrides)
        assert not re.search("command line| -c ", str(error.value))
        return error.value

    error = refused("one.yaml", "targets.temperature=hot")
    assert error.what.startswith("overrides: 1 problem\n  targets.temperature: must be a number")
    assert error.where == "Experiment.load(overrides=...)"
    (tmp_path / "one.yaml").write_text("teachers: [./models/a, ./models/b]\ncorpus: {trian: train.csv}\n")
    assert "\n  overrides, targets.temperature: must be" in refused("one.yaml", "targets.temperature=hot").what
    assert f"did you mean {tmp_path}/one.yaml?" in str(refused("ones.yaml").fix)
    assert 'by Experiment.load("FILE")' in str(refused("absent/x.yaml").fix)


@pytest.mark.parametrize(
    ("labels", "places"),
    [
        (
            [True] * 7,
            ("the first 5 are: texts['test'] row 0 not text", "texts['test'] row 0, field label", ".astype(str)"),
        ),
        (["law", *["sailing"] * 6], ("6 test texts", "column label: texts['test'] row 1, texts['test'] row 2,")),
    ],
)
def test_an_error_names_the_rows_of_a_frame(shop: Workspace, labels: list[object], places: tuple[str, ...]) -> None:
    test = frame_of(shop).head(7).with_columns(label=pl.Series(labels))
    with pytest.raises(DataError) as refused:
        Experiment(TEACHERS, frame_of(shop).head(8), test=test, workspace="rows", quiet=True, **SETTINGS).run(
            until="cache-teachers"
        )
    assert [place for place in places if place not in str(refused.value)] == []
    assert ".parquet" not in str(refused.value)


def test_audit_and_label_without_a_file_name_the_call(shop: Workspace) -> None:
    texts = frame_of(shop).head(4)
    experiment = Experiment(TEACHERS, texts, test=texts, workspace="elsewhere", **SETTINGS)
    with pytest.raises(ExperimentError, match="not in the cache") as audit:
        experiment.audit()
    assert audit.value.fix == "experiment.run(until='cache-teachers'), then experiment.audit()"
    with pytest.raises(ExperimentError, match="is a test text") as label:
        experiment.label()
    assert str(label.value.fix).endswith(": experiment.run()")
