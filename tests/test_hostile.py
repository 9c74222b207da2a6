"""Secrets, hostile strings and poor terminals: nothing leaks, nothing is obeyed, lines stay clean."""

from __future__ import annotations

import json

import pytest

from amalgam.tests.workshop import Shop, finish

CANARY = "hf_CanaryCanaryCanaryCanary"


def test_a_token_reaches_no_file_and_no_line(fresh: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", CANARY)
    said = [fresh("run"), fresh("status"), fresh("doctor"), fresh.tries("plan", f"student.encoder={CANARY}")]
    said += [fresh.tries("plan", f"corpus.train=https://me:{CANARY}@example.org/x.csv")]
    assert said[-1].code == 2
    assert not any(CANARY in one.out + one.err for one in said)
    for path in fresh.folder.rglob("*"):
        assert not path.is_file() or CANARY.encode() not in path.read_bytes()


HOSTILE = "\x1b[31m[red]<script>{{7*7}}\x07"


def test_hostile_labels_and_texts_are_escaped_in_the_terminal(fresh: Shop) -> None:
    rename = json.dumps({"banking": HOSTILE})
    fresh.write([(HOSTILE + " the chef", "law"), *fresh.texts()])
    said = fresh("run", f"teachers.0.rename={rename}", "corpus.on_bad_row=skip")
    strange = fresh.tries("cache-teachers", "cache.on_long_text=error", "cache.max_tokens=4")
    for one in (said, strange):
        assert "\x1b" not in one.out + one.err
        assert "\x07" not in one.out + one.err
    assert strange.code == 3


@pytest.mark.parametrize(
    "environment",
    [{"NO_COLOR": "1", "COLUMNS": "60"}, {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}],
    ids=["60 columns, no colour", "ASCII"],
)
def test_a_pipe_gets_clean_lines(shop: Shop, environment: dict[str, str]) -> None:
    shop.edit("model: ./models/first", "model: ./models/first\n    rename: {banking: Glücksspiel → 賭け}")
    start = shop.new_process if "PYTHONUTF8" in environment else shop.process
    said = finish(start("build-targets", "corpus.on_bad_row=skip", **environment))
    assert said.code == 0, said.err
    looked = finish(start("plan", "corpus.on_bad_row=skip", "targets.mode=hard", **environment))
    assert looked.code == 0, looked.err
    everything = said.out + said.err + looked.out + looked.err
    assert "\x1b" not in everything
    assert "\r" not in everything
    if "COLUMNS" in environment:
        assert max(map(len, looked.out.splitlines())) <= 60
    else:
        assert everything.isascii()


def test_a_reader_that_leaves_early_gets_no_traceback(shop: Shop) -> None:
    with shop.new_process("plan", "--json") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.wait(60)
        assert process.stderr.read() == ""


def test_debug_shows_the_traceback(fresh: Shop) -> None:
    from amalgam.pipeline.errors import ExperimentError

    with pytest.raises(ExperimentError):
        fresh.tries("plan", "targets.mode=sfot", "--debug")


def test_an_option_that_is_not_there_is_a_usage_error(fresh: Shop) -> None:
    assert fresh.tries("plan", "--jason").code == 2
    assert fresh.tries("plna").code == 2
