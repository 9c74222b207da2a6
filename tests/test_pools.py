"""cache-teachers computes many units at once, which changes its time and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from amalgam.pipeline.errors import WorkError
from amalgam.stages.cache_teachers import ask as pools
from amalgam.stages.common.inference import batches as launches
from amalgam.tests.workspaces import TOLERANCE, Workspace, largest_difference


class Watched:
    """run_passes, counted; it fails at the call after `last`."""

    def __init__(self, last: int = 1 << 30) -> None:
        self.texts: list[int] = []
        self._real = launches.run_passes
        self._last = last

    def __call__(self, teacher: Any, tokens: Any, keys: Any, passes: range, **how: Any) -> Any:
        if len(self.texts) == self._last:
            raise WorkError("the device is gone")
        self.texts.append(len(keys))
        return self._real(teacher, tokens, keys, passes, **how)


def many_rows(workspace: Workspace) -> None:
    labels = sorted({label for _, label in workspace.texts()})
    workspace.write([(f"word{i % 90} word{i * 7 % 90} number {i}", labels[i % len(labels)]) for i in range(600)])


def test_units_share_a_pool_and_results_do_not_depend_on_it(fresh: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    many_rows(fresh)
    other = fresh.copy(fresh.folder.parent / "other")
    watched = Watched()
    monkeypatch.setattr(pools, "run_passes", watched)
    assert fresh("build-targets").code == 0
    units = len(fresh.units())
    assert len(watched.texts) < units
    together, watched.texts = len(watched.texts), []
    monkeypatch.setattr(pools, "POOL_LAUNCHES", 1)
    assert other("build-targets", "execution.batch_tokens=256").code == 0
    assert len(watched.texts) == units > together
    assert largest_difference(fresh.targets(), other.targets()) < TOLERANCE


def test_memory_is_given_back_after_each_pool(fresh: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    many_rows(fresh)
    watched = Watched()
    given: list[int] = []
    monkeypatch.setattr(pools, "run_passes", watched)
    monkeypatch.setattr(pools, "malloc_trim", lambda: given.append)
    monkeypatch.setattr(pools, "POOL_LAUNCHES", 1)
    assert fresh("cache-teachers", "execution.batch_tokens=256").code == 0
    assert given == [0] * len(watched.texts)


def test_a_c_library_without_the_call_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    import ctypes

    pools.malloc_trim.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: object())
    assert pools.malloc_trim()(0) is None
    pools.malloc_trim.cache_clear()


def test_answers_before_a_failure_are_kept(fresh: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    many_rows(fresh)
    monkeypatch.setattr(pools, "POOL_LAUNCHES", 1)
    monkeypatch.setattr(pools, "run_passes", Watched(last=2))
    result = fresh.attempt("cache-teachers", "execution.batch_tokens=256")
    assert result.code != 0
    assert len(fresh.units()) == 2
    monkeypatch.undo()
    with fresh.counting() as asked:
        assert fresh("cache-teachers").code == 0
    assert asked[0].units == len(fresh.units()) - 2


def test_a_disk_that_fails_behind_the_device_fails_the_run(fresh: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: Any) -> None:
        raise PermissionError(13, "Permission denied", "units")

    monkeypatch.setattr(pools, "write_table", refuse)
    assert "Permission denied" in fresh.refusal(1, "cache-teachers")


def test_a_note_of_a_teacher_is_printed_once(fresh: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that its dropout runs in separate steps: found in the middle, no reason to stop."""
    real = launches.run_passes

    def noting(teacher: Any, *what: Any, **how: Any) -> Any:
        teacher.notes += (f"teacher {teacher.name}: dropout runs in separate, slower steps",)
        return real(teacher, *what, **how)

    monkeypatch.setattr(pools, "POOL_LAUNCHES", 1)
    monkeypatch.setattr(pools, "run_passes", noting)
    result = fresh("cache-teachers", "execution.batch_tokens=256")
    families = {path.parent.parent for path in fresh.units()}
    assert (result.out + result.err).count("dropout runs in separate, slower steps") == len(families)
