"""Inputs that another program writes while a run reads them: the results are those of one content, or there are none.

A hook writes the file at a chosen moment, in place, as `cp` does.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from amalgam.pipeline.execution import runner
from amalgam.pipeline.execution.runner import MAX_REPAIRS
from amalgam.stages.app import sweep
from amalgam.stages.app.predict import InputTexts, Pipe
from amalgam.stages.common import load
from amalgam.stages.common.inference.teacher import TeacherLoader
from amalgam.stages.generate import texts as generating
from amalgam.stages.read_corpus import stage as reading
from amalgam.tests.test_bad_input import assert_three_lines
from amalgam.tests.workspaces import TEST, Workspace, age, largest_difference, scale_weights

Hook = Callable[[], object]


@pytest.fixture(autouse=True)
def every_run_loads_its_teachers(teachers_stay_loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo the cache of teachers that tests share: these tests look at the loaded models."""
    monkeypatch.setattr(TeacherLoader, "load", teachers_stay_loaded)


def once(hook: Hook) -> Hook:
    """Return a hook that acts at its first call only."""
    waiting = [hook]
    return lambda: waiting.pop()() if waiting else None


def around(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *, before: Hook | None, after: Hook | None) -> None:
    function = getattr(owner, name)

    def hooked(*arguments: Any, **options: Any) -> Any:
        if before:
            before()
        value = function(*arguments, **options)
        if isinstance(value, Iterator):
            value = iter(list(value))
        if after:
            after()
        return value

    monkeypatch.setattr(owner, name, hooked)


def settled(folder: Path) -> None:
    """Make files old, so that no digest is computed again because a file is young."""
    for path in folder.rglob("*"):
        os.utime(path, (time.time() - 100, time.time() - 100), follow_symlinks=False)


def writing(path: Path, source: Path) -> Hook:
    """Return a hook that writes another content in place."""
    content = source.read_bytes()
    return lambda: path.write_bytes(content)


def other_weights(workspace: Workspace, folder: Path, model: str, tensor: str = "classifier.weight") -> Path:
    """Return a folder with the model and other weights of one tensor."""
    shutil.copytree(workspace.folder / "models" / model, folder)
    scale_weights(folder, tensor, 3.0)
    return folder


def assert_as_made_in_one_go(changed: Workspace, result_err: str, name: str, tmp_path: Path) -> None:
    """The results equal those of a workspace that never had the first content, and nothing of the first is left."""
    assert f"{name} changed while it was read" in result_err
    alone = changed.without_artifacts(tmp_path / "alone")
    alone("build-targets")
    assert largest_difference(changed.targets(), alone.targets()) == 0
    assert changed.digests("cache-teachers") == alone.digests("cache-teachers")
    assert changed.stale("student.epochs=1") <= {"train-student", "report"}


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_teacher_written_while_it_is_loaded_is_read_again(
    fresh: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, moment: str
) -> None:
    other = other_weights(fresh, tmp_path / "other", "first")
    if name != "model.safetensors":
        shutil.copyfile(fresh.folder / "models/first/model.safetensors", other / "model.safetensors")
        text = (other / name).read_text()
        changed = re.sub(r'dropout_prob": [\d.]+', 'dropout_prob": 0.4', text)
        changed = changed.replace('"the"', '"teh"')
        assert changed != text
        (other / name).write_text(changed)
    hook = once(writing(fresh.folder / "models/first" / name, other / name))
    kind = transformers.AutoTokenizer if name == "tokenizer.json" else transformers.AutoModelForSequenceClassification
    around(
        monkeypatch,
        kind,
        "from_pretrained",
        before=hook if moment == "before" else None,
        after=hook if moment == "after" else None,
    )
    result = fresh("build-targets")
    assert_as_made_in_one_go(fresh, result.err, name, tmp_path)


def test_a_file_that_appears_in_a_teachers_folder_while_it_is_loaded_counts(
    fresh: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    added = fresh.folder / "models/first/added_tokens.json"
    hook = once(lambda: added.write_text("{}"))
    around(monkeypatch, transformers.AutoTokenizer, "from_pretrained", before=hook, after=None)
    assert_as_made_in_one_go(fresh, fresh("build-targets").err, added.name, tmp_path)


@pytest.mark.parametrize("settle", [True, False])
@pytest.mark.parametrize("part", ["train", "test"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_texts_written_while_they_are_read_are_read_again(
    fresh: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, moment: str, *, settle: bool
) -> None:
    path, other = fresh.folder / f"texts/{part}.csv", tmp_path / "other.csv"
    header, rows = path.read_text().split("\n", 1)
    other.write_text(f"{header}\n{rows.replace('a', 'e', 5)}")  # as long as before
    if settle:
        settled(fresh.folder / "texts")
    calls = 0

    def hook() -> None:
        nonlocal calls
        calls += 1
        if calls == (1 if part == "train" else 2):
            writing(path, other)()

    around(
        monkeypatch,
        reading,
        "read_part",
        before=hook if moment == "before" else None,
        after=hook if moment == "after" else None,
    )
    result = fresh("build-targets")
    assert_as_made_in_one_go(fresh, result.err, path.name, tmp_path)


def test_texts_that_are_half_written_when_they_are_read_are_read_again(
    fresh: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fresh.folder / "texts/train.csv"
    whole = path.read_bytes()
    around(
        monkeypatch,
        reading,
        "read_part",
        before=once(lambda: path.write_bytes(whole[: len(whole) // 2] + b'"')),
        after=None,
    )
    around(monkeypatch, runner, "_resolve_inputs", before=lambda: path.write_bytes(whole), after=None)
    assert_as_made_in_one_go(fresh, fresh("build-targets").err, path.name, tmp_path)


def test_texts_that_are_always_written_end_the_run_with_their_name(
    fresh: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fresh.folder / "texts/train.csv"

    def append() -> None:
        with path.open("a") as file:
            file.write("one more text,law\n")

    around(monkeypatch, reading, "read_part", before=None, after=append)
    err = fresh.refusal(1, "run")
    assert err.count("reading it again") == MAX_REPAIRS
    assert_three_lines("\n".join(err.splitlines()[-3:]))
    assert "train.csv changed while it was read" in err
    assert not list((fresh.artifacts / "read-corpus").glob("part-*/train-*"))


def test_an_encoder_written_while_it_is_loaded_is_read_again(
    fresh: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh("build-targets")
    other = other_weights(fresh, tmp_path / "other", "encoder", "embeddings.word_embeddings.weight")
    weights = "model.safetensors"
    hook = once(writing(fresh.folder / "models/encoder" / weights, other / weights))
    around(monkeypatch, transformers.AutoModelForSequenceClassification, "from_pretrained", before=None, after=hook)
    result = fresh("train-student")
    assert f"{weights} changed while it was read" in result.err
    alone = fresh.without_artifacts(tmp_path / "alone")
    alone("train-student")
    students = [one.folder / "students/student" / weights for one in (fresh, alone)]
    assert students[0].read_bytes() == students[1].read_bytes()
    assert fresh.stale() <= {"report"}


def test_a_corpus_of_generate_written_while_it_is_read_is_read_again(
    generated: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = generated.without_artifacts(tmp_path / "workspace")
    path = fresh.folder / "texts/test.csv"
    header, rows = path.read_text().split("\n", 1)
    other = f"{header}\n{rows.replace('a', 'e', 5)}"
    overrides = ("generate.source=cross-domain", "generate.corpus=texts/test.csv", "generate.language_model=null")
    around(monkeypatch, generating, "read_rows", before=None, after=once(lambda: path.write_text(other)))
    result = fresh("generate", *overrides)
    assert "test.csv changed while it was read" in result.err
    alone = generated.without_artifacts(tmp_path / "alone")
    (alone.folder / "texts/test.csv").write_text(other)
    alone("generate", *overrides)
    files = [sorted((one.artifacts / "generate").glob("*/texts-*.parquet")) for one in (fresh, alone)]
    assert [path.read_bytes() for path in files[0]] == [path.read_bytes() for path in files[1]]
    assert fresh.plan(*overrides)["generate"]["state"] == "current"


# ---- the experiment file


def test_an_experiment_file_written_while_it_is_read_runs_nothing(
    fresh: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = fresh.config.read_text()
    fresh.config.write_text(text.partition("student:")[0] + "student: {encoder: ./models/encoder}\n")  # half is valid
    around(monkeypatch, runner, "_up_to", before=once(lambda: fresh.config.write_text(text)), after=None)
    err = fresh.refusal(1, "run")
    assert_three_lines(err)
    assert "amalgam.yaml changed while it was read" in err
    assert not fresh.artifacts.exists()


def test_an_edit_of_the_experiment_file_during_a_run_is_said_at_the_end(
    fresh: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit = once(lambda: fresh.edit("epochs: 1", "epochs: 2"))
    around(monkeypatch, reading, "read_part", before=edit, after=None)
    result = fresh("run")
    assert "amalgam.yaml changed during the run" in result.err.splitlines()[-1]
    assert fresh.stale() == {"train-student", "report"}
    assert "changed during" not in fresh("run").err


def test_an_edit_of_the_experiment_file_ends_a_sweep(fresh: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh("build-targets")
    edit = once(lambda: fresh.edit("learning_rate: 1e-3", "learning_rate: 1e-4"))
    around(monkeypatch, sweep, "_result", before=None, after=edit)
    err = fresh.refusal(1, "sweep", "student.seed=0,1")
    assert "amalgam.yaml changed during the sweep; seed-1 and later" in err
    assert sorted(path.name for path in (fresh.folder / "students").iterdir()) == ["seed-0"]


# ---- names


ODD = "exp [v2]?* {a,b} %41 file:x \n $HOME `x` 'q\" caf\u00e9 e\u0301 -rf"


def test_a_run_in_a_folder_of_an_odd_name_equals_any_other(fresh: Workspace, built: Workspace, tmp_path: Path) -> None:
    """Decoys have names that a pattern or a shell would find instead."""
    for decoy in ("exp 2x a", "A", "x", "exp 2b b"):
        shutil.copytree(fresh.folder, tmp_path / decoy, dirs_exist_ok=True)
        (tmp_path / decoy / "texts/train.csv").write_text("text,label\ndecoy,law\n")
    odd = fresh.copy(tmp_path / ODD / "file:x")
    for old, new in (("texts", "t[e]xts?*"), ("models/first", "models/[f]irst*"), ("models/encoder", "models/%41")):
        (odd.folder / old).rename(odd.folder / new)
        odd.edit(old, new)
    odd.edit("  train: t[e]xts?*/train.csv", '  train: "t[e]xts?*/tr*n.csv"')
    odd("run")
    assert odd.digests("cache-teachers") == built.digests("cache-teachers")
    assert largest_difference(odd.targets(), built.targets()) == 0
    assert odd("verify", "--json").json["damaged"] == []
    assert odd.stale() == set()
    (odd.folder / "file:y").mkdir()
    shutil.copyfile(odd.folder / "t[e]xts?*/test.csv", odd.folder / "file:y/-rf[1].csv")
    odd("predict", "--input", "file:y/-rf[1].csv", "--out", "file:y/a*.parquet")
    odd("predict", "--input", "file:y/a*.parquet", "--text", "label", "--out", "file:y/b?.csv")
    assert len((odd.folder / "file:y/b?.csv").read_text().splitlines()) == TEST + 1


def test_a_name_that_is_not_utf8_is_refused_but_for_files_of_texts(fresh: Workspace, tmp_path: Path) -> None:
    name = os.fsdecode(b"b\xff")
    (fresh.folder / f"{name}.yaml").write_bytes(fresh.config.read_bytes())
    for workspace, options in ((fresh.copy(tmp_path / name), []), (fresh, ["-c", f"{name}.yaml"])):
        err = workspace.refusal(2, "run", *options)
        assert_three_lines(err)
        assert "error: the path is not UTF-8" in err
    (fresh.folder / "texts/train.csv").rename(fresh.folder / "texts/a.csv")
    (fresh.folder / f"texts/{name}.csv").write_text("text,label\n")
    fresh.edit("texts/train.csv", "texts/[!t]*.csv")
    assert r"note: no row is used of 1 train file: b\xff.csv" in fresh("read-corpus", "corpus.on_bad_row=skip").err


def test_remote_texts_with_other_content_than_at_first_are_refused(
    fresh: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = [(fresh.folder / "texts/train.csv").read_text()]
    fresh.edit("texts/train.csv", "s3://bucket/train.csv")

    def fetch_remote(_: str, folder: Path) -> Path:
        (folder / "train.csv").write_text(contents[-1])
        return folder / "train.csv"

    monkeypatch.setattr(load, "fetch_remote", fetch_remote)
    fresh("read-corpus")
    before = fresh.plan()["read-corpus"]["fingerprint"]
    contents.append(contents[0].replace("a", "e", 9))
    for _ in range(2):
        shutil.rmtree(fresh.artifacts / "read-corpus")
        err = fresh.refusal(3, "read-corpus")
        assert "other content" in err
        assert "s3://bucket/train.csv" in err
    contents.pop()
    fresh("read-corpus")
    assert fresh.plan()["read-corpus"]["fingerprint"] == before


def test_gc_keeps_the_copies_of_remote_texts_that_the_experiment_or_its_results_read(
    fresh: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, fetched = (fresh.folder / "texts/train.csv").read_text(), list[str]()
    fresh.edit("texts/train.csv", "s3://bucket/train.csv")

    def fetch_remote(source: str, folder: Path) -> Path:
        fetched.append(source)
        (folder / "train.csv").write_text(text)
        return folder / "train.csv"

    monkeypatch.setattr(load, "fetch_remote", fetch_remote)
    fresh("read-corpus")
    copies = sorted(fresh.artifacts.glob("read-corpus/remote/*"))
    assert len(copies) == 2
    for overrides in ([], ["corpus.train=texts/test.csv"]):  # the last result has read the copy
        age(fresh.artifacts)
        fresh("gc", "--unused", "--yes", *overrides)
        assert sorted(fresh.artifacts.glob("read-corpus/remote/*")) == copies
    fresh("read-corpus")
    assert fetched == ["s3://bucket/train.csv"]
    fresh("read-corpus", "corpus.train=texts/test.csv")
    age(fresh.artifacts)
    fresh("gc", "--unused", "--yes")  # the file names the copy
    assert sorted(fresh.artifacts.glob("read-corpus/remote/*")) == copies
    fresh("gc", "--unused", "--yes", "corpus.train=texts/test.csv")
    assert not list(fresh.artifacts.glob("read-corpus/remote/*"))


# ---- a pipe


def test_lines_of_a_slow_pipe_are_predicted_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    monkeypatch.setattr("amalgam.stages.app.predict.BLOCK_SECONDS", 0.02)
    with os.fdopen(reading) as stdin, os.fdopen(writing, "wb", 0) as writer:
        monkeypatch.setattr(sys, "stdin", stdin)
        blocks = InputTexts("-", ["text"], None, skip_bad_rows=False, pipe=Pipe()).blocks()
        texts = ([row.fields[0] for row in block] for block in blocks)
        writer.write(b"one\ntwo\nthr")
        assert next(texts) == ["one", "two"]
        writer.write(b"ee\n" + b"fast\n" * 3000)
        assert next(texts) == ["three", *["fast"] * 3000]
        writer.write(b"last")
        writer.close()
        assert list(texts) == [["last"]]
