"""The fuzzers themselves: they restore every file, find another result, and have the promised number of cases."""

from __future__ import annotations

import argparse
import random
import signal
from collections import Counter
from pathlib import Path

import pytest

from amalgam.tests.fuzz import experiments, flips, hostile, sequences
from amalgam.tests.fuzz.command import PARTS, planned
from amalgam.tests.fuzz.experiments import (
    EXPERIMENTS,
    Bench,
    Outcome,
    bench_of,
    difference,
    results_of,
)
from amalgam.tests.workspaces import Workspace


@pytest.fixture
def bench(workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Give commands more time than a fuzzer does: a slow machine is no fault."""
    monkeypatch.setattr(experiments, "SECONDS", 120.0)
    monkeypatch.setattr(experiments, "MOST_SECONDS", 600.0)
    return bench_of(workspace, results_of(workspace), tmp_path / "cache", tmp_path / "canary")


def test_a_flipped_bit_of_a_unit_is_caught(bench: Bench) -> None:
    unit = bench.workspace.units()[0]
    flip = flips.Flip(unit, 200, 3)
    before = unit.stat().st_mtime_ns
    flip.apply()
    assert unit.stat().st_mtime_ns == before  # as a faulty disk does
    outcomes = [bench.command(*words) for words in (("verify",), ("run",), ("verify",))]
    assert flips.judge(bench, flip, outcomes) == "caught"
    bench.made.restore()
    assert bench.made.changes() == []
    outcomes = [bench.command("verify")]
    assert flips.judge(bench, flip, outcomes) == "harmless"


def test_another_result_is_wrong(bench: Bench) -> None:
    config = bench.workspace.folder / "students/student/config.json"
    config.write_text(config.read_text().replace("banking", "bonking"))
    flip, calm = flips.Flip(config, 0, 0), Outcome(("run",), 0, "")
    assert flips.judge(bench, flip, [calm]).startswith("WRONG: another result")
    bench.made.restore()
    assert flips.judge(bench, flip, [calm]) == "harmless"
    assert flips.judge(bench, flip, [Outcome(("run",), 70, "")]).startswith("WRONG")
    (bench.canary / "thesis.tex").write_text("other")
    assert flips.judge(bench, flip, [calm]).startswith("WRONG: inputs changed")
    assert hostile.judge(bench, [calm]).startswith("WRONG: files outside changed")
    assert hostile.judge(bench, [calm]) == "unharmed"  # they are restored


def test_a_sequence_sees_every_change_of_a_users_files(bench: Bench) -> None:
    tree = sequences.TheirTree(bench)
    assert tree.changes() == []
    link = bench.workspace.artifacts / "thesis/link"
    link.unlink()
    link.symlink_to("other")
    (bench.workspace.folder / "students/notes.md").chmod(0o600)
    (bench.workspace.folder / "mine/new").write_text("new")
    assert len(tree.changes()) == 3
    tree.everything.restore()
    assert tree.changes() == []


def test_a_command_that_hangs_is_stopped(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiments, "SECONDS", 0.2)
    monkeypatch.setattr(experiments, "MOST_SECONDS", 0.2)
    monkeypatch.setattr(experiments, "amalgam", lambda *_, **__: signal.pause())
    outcome = bench.command("status")
    assert outcome.is_fault
    assert "still running" in outcome.escaped


def test_numbers_are_equal_within_rounding() -> None:
    assert difference({"a": [1.0, float("nan")]}, {"a": [1.0001, float("nan")]}) is None
    assert difference({"a": [1.0]}, {"a": [1.1]}) == "/a/0: 1.0 -> 1.1"
    assert difference({"a": 1}, {"b": 1}) is not None


def test_a_whole_run_has_the_promised_cases_each_with_its_seed() -> None:
    options = argparse.Namespace(parts=list(PARTS), experiments=list(EXPERIMENTS))
    cases = list(planned(options))
    assert len(set(cases)) == len(cases)
    assert Counter(part for part, _, _ in cases) == PARTS
    assert {name for _, name, _ in cases[:200]} == set(EXPERIMENTS)


def test_one_case_of_each_attack_ends_well(bench: Bench) -> None:
    for number in range(3):
        verdict, place, outcomes = hostile.case(bench, random.Random(f"ends well {number}"))
        assert not verdict.startswith("WRONG: files"), (verdict, place, outcomes)
