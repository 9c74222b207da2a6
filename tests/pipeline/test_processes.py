"""Real processes: two runs at once, torchrun's ranks, and signals through the real command over toy stages."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from amalgam.pipeline.execution.runner import update
from amalgam.pipeline.execution.stage import Run
from amalgam.pipeline.storage.backend import TEMPORARY
from amalgam.pipeline.storage.store import MANIFEST
from amalgam.tests.forking import LIGHT, Forked
from amalgam.tests.pipeline.toy_stages import (
    PATIENCE_SECONDS,
    SIGNAL,
    calls,
    outcome,
    toy_base,
    toy_run,
    toy_stages,
)


def _command(base: Path, *arguments: str, seconds: float | str = 0.0, **environment: str) -> Forked:
    words = [str(seconds), *arguments]
    return Forked(words, base, {**os.environ, **environment}, "amalgam.tests.pipeline.toy_stages", LIGHT)


def _end(child: Forked) -> tuple[int, str]:
    _, err = child.communicate(timeout=PATIENCE_SECONDS)
    return child.wait(), err


def _until_it_works_on(base: Path, unit: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while unit not in calls(base):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _alone(base: Path) -> Run:
    run = toy_run(toy_base(base))
    update(toy_stages(), run)
    return run


def test_two_runs_at_once_both_finish_with_one_result(tmp_path: Path) -> None:
    base = toy_base(tmp_path / "twice")
    with _command(base, "run", seconds=0.1) as one, _command(base, "run", seconds=0.15) as two:
        assert [_end(one)[0], _end(two)[0]] == [0, 0]
    assert outcome(toy_run(base)) == outcome(_alone(tmp_path / "alone"))
    assert len(list((base / "artifacts").rglob(MANIFEST))) == 3
    assert len(list((base / "artifacts" / "letters").glob("*/*.txt"))) == 3  # each unit exists once
    assert not (base / "artifacts" / "quarantine").exists()
    assert not list((base / "artifacts").rglob(f"{TEMPORARY}*"))


def test_the_processes_of_a_torchrun_share_the_units_and_meet_in_the_store(tmp_path: Path) -> None:
    base = toy_base(tmp_path / "shared")
    with (
        _command(base, "run", WORLD_SIZE="2", RANK="0") as lead,
        _command(base, "run", WORLD_SIZE="2", RANK="1") as other,
    ):
        assert [_end(lead)[0], _end(other)[0]] == [0, 0]
    assert sorted(calls(base)) == ["a", "b", "c", "joined", "pair"]
    assert outcome(toy_run(base)) == outcome(_alone(tmp_path / "alone"))


def test_a_damaged_unit_of_the_other_process_is_recomputed_without_waiting_for_ever(tmp_path: Path) -> None:
    base = toy_base(tmp_path / "shared")
    run = _alone(base)
    path = run.store.path(run.result("letters").files[1])  # b: the second process's share
    path.write_bytes(b"X" + path.read_bytes()[1:])
    changed = "targets.temperature=0.5"
    with (
        _command(base, "run", changed, WORLD_SIZE="2", RANK="0") as lead,
        _command(base, "run", changed, WORLD_SIZE="2", RANK="1") as other,
    ):
        assert [_end(lead)[0], _end(other)[0]] == [0, 0]
    whole = toy_run(toy_base(tmp_path / "whole"), targets={"temperature": 0.5})
    update(toy_stages(), whole)
    assert outcome(toy_run(base)) == outcome(whole)
    assert calls(base).count("b") == 2


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_after_the_unit_at_hand_and_keeps_it(
    tmp_path: Path, number: signal.Signals, status: int
) -> None:
    base = toy_base(tmp_path / "base")
    with _command(base, "run", seconds=SIGNAL) as child:
        _until_it_works_on(base, "b")
        child.send_signal(number)
        code, err = _end(child)
    assert code == status
    error, fix = err.splitlines()[-2:]
    assert error.startswith("error: ")
    assert number.name in error
    assert fix.startswith("fix: ")
    assert "Traceback" not in err
    assert calls(base) == ["a", "b"]
    again = toy_run(base)
    update(toy_stages(), again)
    assert calls(base) == ["a", "b", "c", "joined", "pair"]
    assert outcome(again) == outcome(_alone(tmp_path / "alone"))


def test_a_second_interrupt_ends_at_once(tmp_path: Path) -> None:
    base = toy_base(tmp_path / "base")
    with _command(base, "run", seconds=PATIENCE_SECONDS) as child:
        _until_it_works_on(base, "a")
        began = time.monotonic()
        child.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.5)
        while child.poll() is None and time.monotonic() - began < PATIENCE_SECONDS / 2:
            child.send_signal(signal.SIGINT)  # on a busy machine, the second could be merged with the first
            time.sleep(0.1)
        assert _end(child)[0] == 130
    assert time.monotonic() - began < PATIENCE_SECONDS / 2


def test_one_process_where_two_were_asked_for_is_an_error_of_use(tmp_path: Path) -> None:
    base = toy_base(tmp_path)
    with _command(base, "run", "execution.processes=2") as child:
        code, err = _end(child)
    assert code == 2
    assert re.search("^error: .*2 processes", err, re.MULTILINE)
    assert calls(base) == []


def test_parts_are_run_by_the_command(tmp_path: Path) -> None:
    base = toy_base(tmp_path / "parts")
    with _command(base, "run", "--part", "1/2") as child:
        code, err = _end(child)
    assert code == 0
    assert re.search("letters: .*1 of 3 units", err)
    with _command(base, "run", "--part", "0/2") as child:
        assert _end(child)[0] == 0
    assert outcome(toy_run(base)) == outcome(_alone(tmp_path / "alone"))


def test_of_three_parts_at_once_a_killed_one_stops_no_other_and_a_rerun_completes_it(tmp_path: Path) -> None:
    """No part holds anything that another waits for."""
    base = toy_base(tmp_path / "parts")
    with (
        _command(base, "run", "--part", "0/3", seconds=2.0) as one,
        _command(base, "run", "--part", "1/3", seconds=PATIENCE_SECONDS) as other,
        _command(base, "run", "--part", "2/3", seconds=2.0) as third,
    ):
        for unit in "abc":
            _until_it_works_on(base, unit)
        other.kill()
        ended = [_end(one), _end(third)]
    assert [code for code, _ in ended] == [0, 0]
    assert re.search("letters: .*2 of 3 units", "".join(err for _, err in ended))
    assert sorted(calls(base)) == ["a", "b", "c"]
    with _command(base, "run") as again:
        assert _end(again)[0] == 0
    assert sorted(calls(base)) == ["a", "b", "b", "c", "joined", "pair"]
    assert outcome(toy_run(base)) == outcome(_alone(tmp_path / "alone"))
