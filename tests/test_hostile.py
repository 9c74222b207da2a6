"""Secrets, hostile strings and poor terminals: nothing leaks, nothing is obeyed, lines stay clean."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from amalgam.tests.forking import Forked
from amalgam.tests.workspaces import Workspace, finish, quiet_environment

CANARY = "hf_CanaryCanaryCanaryCanary"


def test_a_token_reaches_no_file_and_no_line(fresh: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", CANARY)
    result = [fresh("run"), fresh("status"), fresh("doctor"), fresh.attempt("plan", f"student.encoder={CANARY}")]
    result += [fresh.attempt("plan", f"corpus.train=https://me:{CANARY}@example.org/x.csv")]
    assert result[-1].code == 2
    assert not any(CANARY in one.out + one.err for one in result)
    for path in fresh.folder.rglob("*"):
        assert not path.is_file() or CANARY.encode() not in path.read_bytes()


HOSTILE = "\x1b[31m[red]<script>{{7*7}}\x07"


def test_hostile_labels_and_texts_are_escaped_in_the_terminal(fresh: Workspace) -> None:
    rename = json.dumps({"banking": HOSTILE})
    fresh.write([(HOSTILE + " the chef", "law"), *fresh.texts()])
    result = fresh("run", f"teachers.0.rename={rename}", "corpus.on_bad_row=skip")
    strange = fresh.attempt("cache-teachers", "cache.on_long_text=error", "cache.max_tokens=4")
    for one in (result, strange):
        assert "\x1b" not in one.out + one.err
        assert "\x07" not in one.out + one.err
    assert strange.code == 3


@pytest.mark.parametrize(
    "environment",
    [{"NO_COLOR": "1", "COLUMNS": "60"}, {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}],
    ids=["60 columns, no colour", "ASCII"],
)
def test_a_pipe_gets_clean_lines(workspace: Workspace, environment: dict[str, str]) -> None:
    workspace.edit("model: ./models/first", "model: ./models/first\n    rename: {banking: Glücksspiel → 賭け}")
    start = workspace.new_process if "PYTHONUTF8" in environment else workspace.process
    result = finish(start("build-targets", "corpus.on_bad_row=skip", **environment))
    assert result.code == 0, result.err
    looked = finish(start("plan", "corpus.on_bad_row=skip", "targets.mode=hard", **environment))
    assert looked.code == 0, looked.err
    everything = result.out + result.err + looked.out + looked.err
    assert "\x1b" not in everything
    assert "\r" not in everything
    stages = tuple(workspace.plan("corpus.on_bad_row=skip"))  # a whole line each, also where COLUMNS is small
    assert sum(line.startswith(stages) for line in looked.out.splitlines()) == len(stages)
    assert "..." not in looked.out
    if "COLUMNS" not in environment:
        assert everything.isascii()


def test_a_reader_that_leaves_early_gets_no_traceback(workspace: Workspace) -> None:
    with workspace.new_process("plan", "--json") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.wait(60)
        assert process.stderr.read() == ""


CLOSED_STDOUT = """
import os, runpy
reader, writer = os.pipe()
os.close(reader)
os.dup2(writer if {closed} else os.open("/dev/full", os.O_WRONLY), 1)
runpy.run_module("amalgam", run_name="__main__", alter_sys=True)
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has /dev/full")
@pytest.mark.parametrize("closed", [True, False])
def test_a_page_is_written_though_its_table_cannot_be_printed(workspace: Workspace, *, closed: bool) -> None:
    (script := workspace.folder / "script.py").write_text(CLOSED_STDOUT.format(closed=closed))
    before = workspace.head("report")
    arguments = ["run", "student.seed=12"]
    result = finish(Forked(arguments, workspace.folder, quiet_environment(), str(script)))
    assert result.code == 1
    assert before not in (workspace.folder / "reports/student.html").read_text()
    assert workspace.head("train-student") in (workspace.folder / "reports/student.json").read_text()
    assert ("error: the output cannot be written: No space" in result.err) is not closed, result.err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has /dev/full")
@pytest.mark.parametrize("arguments", [["x"], ["--input", "texts/test.csv"]])
def test_predictions_that_cannot_be_printed_are_an_error(desk: Workspace, tmp_path: Path, arguments: list[str]) -> None:
    (script := tmp_path / "script.py").write_text(CLOSED_STDOUT.format(closed=False))
    result = finish(Forked(["predict", *arguments], desk.folder, quiet_environment(), str(script)))
    assert result.code == 1, result.err
    assert "cannot be written: No space left" in result.err
    assert "Traceback" not in result.err
    assert "Exception ignored" not in result.err


@pytest.mark.parametrize(("arguments", "code"), [("--bogus", 2), ("targets.mode=sfot", 2), ("corpus.train=x.csv", 3)])
def test_debug_shows_the_traceback_and_keeps_the_exit_code(fresh: Workspace, arguments: str, code: int) -> None:
    err = fresh.refusal(code, "plan", arguments, "--debug")
    assert err.startswith("Traceback")
    assert "\nfix: " in err
