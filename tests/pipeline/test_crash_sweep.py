"""Killed at every change to the file system: readers see all or nothing, and running again is resuming."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from amalgam.pipeline.execution.plan import identity_of
from amalgam.pipeline.execution.runner import update
from amalgam.pipeline.execution.stage import Run
from amalgam.pipeline.storage.backend import TEMPORARY
from amalgam.pipeline.storage.fingerprint import fingerprint
from amalgam.pipeline.storage.store import MANIFEST
from amalgam.stages.app import maintenance
from amalgam.stages.app.maintenance import find_garbage
from amalgam.tests.pipeline.crashing import in_small_process, killed_at
from amalgam.tests.pipeline.toy_stages import built_toy, calls, outcome, toy_base, toy_run, toy_stages

UNITS = ["a", "b", "c", "joined", "pair"]


def _records(run: Run) -> list[Path]:
    """Returns every record of a unit or stage that a reader could find."""
    paths = [path for stage in ("letters", "joined", "pair") for path in run.store.root.glob(f"{stage}/*/*.json")]
    return [path for path in paths if not path.name.startswith(TEMPORARY)]


def _assert_all_or_nothing(run: Run) -> list[str]:
    """Assert that committed units are complete, to the byte, and return their names."""
    standing = []
    for path in _records(run):
        record = run.store.record(path)
        assert record is not None, path
        assert run.store.missing_files(record) == []
        assert [fault for file in record.files if (fault := run.store.check_file(file))] == []
        assert all(run.store.verified_path(file).is_file() for file in record.files)
        standing.append(path.stem)
    return standing


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return outcome(built_toy(toy_base(tmp_path_factory.mktemp("whole"))))


def kill_at_every_change(folder: Path) -> None:
    uninterrupted = outcome(built_toy(toy_base(folder / "whole")))
    points, only_manifest_missing, leftovers = 0, 0, 0
    while True:
        base = toy_base(folder / str(points))
        if not killed_at(points + 1, base / "artifacts", lambda base=base: built_toy(base)):  # type: ignore[misc]
            break
        points += 1
        standing = _assert_all_or_nothing(toy_run(base))
        only_manifest_missing += {"a", "b", "c"} <= set(standing) and Path(MANIFEST).stem not in standing
        leftovers += any((base / "artifacts").rglob(f"{TEMPORARY}*"))
        (base / "calls.log").unlink(missing_ok=True)
        assert outcome(built_toy(base)) == uninterrupted
        assert calls(base) == [unit for unit in UNITS if unit not in standing]  # committed is never done again
    assert points > 110
    assert only_manifest_missing >= 3
    assert leftovers > 10


def test_killed_at_every_change_a_run_resumes_and_ends_the_same(tmp_path: Path) -> None:
    in_small_process(kill_at_every_change, tmp_path)


def kill_at_every_change_while_mending(folder: Path) -> None:
    changed = {"targets": {"temperature": 0.5}}
    expected = outcome(built_toy(toy_base(folder / "whole"), **changed))
    damaged = toy_base(folder / "damaged")
    run = built_toy(damaged)
    first, second, _ = [run.store.path(file) for file in run.result("letters").files]
    first.write_bytes(first.read_bytes()[:-1])
    second.write_bytes(b"X" + second.read_bytes()[1:])
    points = 0
    while True:
        base = folder / str(points)
        shutil.copytree(damaged, base)
        work = lambda base=base: built_toy(base, **changed)  # noqa: E731
        if not killed_at(points + 1, base / "artifacts", work):
            break
        points += 1
        assert outcome(built_toy(base, **changed)) == expected
        assert calls(base).count("c") == 1  # complete units were not computed again
    assert points > 60


def test_killed_at_every_change_while_mending_a_run_still_ends_the_same(tmp_path: Path) -> None:
    in_small_process(kill_at_every_change_while_mending, tmp_path)


@pytest.mark.parametrize("changes", [40, 57])
def test_killed_again_and_again_a_run_gets_there(tmp_path: Path, uninterrupted: dict[str, Any], changes: int) -> None:
    base = toy_base(tmp_path / "base")
    kills = 0
    while killed_at(changes, base / "artifacts", lambda: built_toy(base)):
        kills += 1
        assert kills < 20
    assert kills >= 2
    assert outcome(toy_run(base)) == uninterrupted


def test_killed_between_the_last_unit_and_the_manifest_no_unit_is_done_again(
    tmp_path: Path, uninterrupted: dict[str, Any]
) -> None:
    base = toy_base(tmp_path / "base")
    run = built_toy(base)
    for manifest in (base / "artifacts").rglob(MANIFEST):
        manifest.unlink()
    (base / "calls.log").unlink()
    states = update(toy_stages(), again := toy_run(base))
    assert calls(base) == []
    assert [(state.reason, state.done, state.total) for state in states] == [
        ("missing", 3, 3),
        ("missing", 1, 1),
        ("missing", 1, 1),
    ]
    assert outcome(again) == outcome(run) == uninterrupted


def test_data_without_its_record_are_not_there(tmp_path: Path) -> None:
    base = toy_base(tmp_path / "base")
    run = built_toy(base)
    folder = run.store.folder("letters", fingerprint(identity_of(toy_stages()[0], run)))
    (folder / "b.json").unlink()
    (folder / MANIFEST).unlink()
    (base / "calls.log").unlink()
    built_toy(base)
    assert calls(base) == ["b"]


def test_temporaries_of_the_dead_are_ignored_and_listed_by_gc_after_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "STAGES", toy_stages())
    base = toy_base(tmp_path / "base")
    event = 1
    while not list((base / "artifacts").rglob(f"{TEMPORARY}*/*")):
        shutil.rmtree(base / "artifacts", ignore_errors=True)
        assert killed_at(event, base / "artifacts", lambda: built_toy(base))
        event += 1
    orphan = next((base / "artifacts").rglob(f"{TEMPORARY}*/*"))
    run = built_toy(base)
    assert orphan.exists()
    assert find_garbage(run, unused=False) == ([], 0)
    old = time.time() - 25 * 3600
    os.utime(orphan, (old, old))
    garbage, _ = find_garbage(run, unused=False)
    assert [row["path"] for row in garbage] == [str(orphan.relative_to(run.store.root))]
