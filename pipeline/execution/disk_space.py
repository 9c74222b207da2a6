"""Checks before the work of a stage that its results, and those of later stages, fit on the disk."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from amalgam.pipeline.console import size
from amalgam.pipeline.errors import DataError, DiskFullError, ExperimentError
from amalgam.pipeline.execution.plan import StageState, stage_state
from amalgam.pipeline.execution.stage import PendingDependencyError, Run, Stage


def check_disk_space(
    stages: Sequence[Stage], run: Run, states: Sequence[StageState], *, first: str | None = None
) -> str:
    """Refuses a disk without room for the least that the missing results need; returns need and room for a message.

    `first`: the stage that is about to run; those before it are complete.
    """
    needed = [stage for stage in stages if stage.is_needed(run.experiment)]
    names = [stage.name for stage in needed]
    state_of = {state.stage: state for state in states}
    later = needed[names.index(first) if first else 0 :]
    by_stage = {stage.name: _need(stage, run, state_of.get(stage.name)) for stage in later}
    lines = []
    for folder, needs in _by_disk(run, by_stage).items():
        total, disk = sum(needs.values()), shutil.disk_usage(folder)
        if not disk.total:  # the file system does not state its size, as that of /proc
            continue
        free = disk.free
        if total > free:
            parts = ", ".join(f"{name} {size(need)}" for name, need in needs.items() if need)
            raise DiskFullError(
                f"the disk has too little space: {size(total)} are needed, {size(free)} are free ({parts})",
                where=str(folder),
                fix=f"free some space (`amalgam gc{run.file_option}`), "
                "or set execution.workspace to a folder on another disk",
            )
        lines.append(f"{size(free)} free in {folder}" + (f", at least {size(total)} needed" if total else ""))
    return "; ".join(lines)


def add_need(error: DiskFullError, stages: Sequence[Stage], run: Run, first: str) -> None:
    """Adds to the message the least that the results of a stage and of the later ones still need."""
    names = [stage.name for stage in stages]
    later = stages[names.index(first) :]
    total = sum(sum(_need(stage, run, None, may_reuse=False)) for stage in later)
    copy = later[0].least_bytes(run, None)[1]  # of a complete result
    if total or copy:
        error.what += f"; {'the missing results need' if total else 'this copy needs'} at least {size(total or copy)}"
        error.args = (error.what,)  # of which processes make it again


def _need(stage: Stage, run: Run, state: StageState | None, *, may_reuse: bool = True) -> tuple[int, int]:
    """Returns the least number of bytes in the workspace, and next to the experiment file.

    `may_reuse`: a stage that waits for an input needs none if it has a result, which may be that of this experiment.
    """
    try:
        state = state or stage_state(stage, run)
        if may_reuse and state.fingerprint is None and run.store.last(stage.name) is not None:
            return 0, 0
        missing = None if state.fingerprint is None else state.missing
        return (0, 0) if state.state == "current" else stage.least_bytes(run, missing)
    except (PendingDependencyError, DataError, ExperimentError):  # other checks report faulty inputs
        return 0, 0


def _by_disk(run: Run, by_stage: Mapping[str, tuple[int, int]]) -> dict[Path, dict[str, int]]:
    """Returns the need by stage of each disk, under the first folder on it."""
    disks: dict[int, Path] = {}
    needs: dict[Path, dict[str, int]] = {}
    for index, root in enumerate((run.store.root, run.base)):
        folder = next(level for level in (root, *root.parents) if level.is_dir())
        disk = disks.setdefault(folder.stat().st_dev, folder)
        disk_needs = needs.setdefault(disk, {})
        for name, need in by_stage.items():
            disk_needs[name] = disk_needs.get(name, 0) + need[index]
    return needs
