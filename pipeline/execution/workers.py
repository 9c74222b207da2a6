"""Runs units in this process, in the processes of a torchrun, as part i of n, or as tasks of a cluster.

Processes divide the units by position and communicate only through the store.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

from amalgam.pipeline.errors import DamagedError
from amalgam.pipeline.execution.share import WorkerShare
from amalgam.pipeline.execution.stage import Run, Stage, Unit, pending_units

POLL_SECONDS = 0.1


def run_units(stage: Stage, run: Run, units: Sequence[Unit]) -> bool:
    """Runs this process's share of the units; returns True when the units of all processes are complete."""
    todo = pending_units(run, _ours(stage, run.share, units))
    done_before = sum(unit.size for unit in units) - sum(unit.size for unit in todo)
    with run.console.progress(stage.name, stage.unit_label, sum(unit.size for unit in todo), done_before):
        if run.experiment.execution.engine == "ray" and stage.parallelism != "single":
            from amalgam.pipeline.execution.ray_backend import run_on_ray

            run_on_ray(stage, run, todo)
        else:
            stage.run_units(run, todo)
    if run.share.kind == "part":
        return not pending_units(run, units)
    _wait_for_all(stage, run, units)
    return True


def _wait_for_all(stage: Stage, run: Run, units: Sequence[Unit]) -> None:
    """Waits for the units of all processes; a unit that is complete is not checked again."""
    left = list(units)

    def ready() -> bool:
        if not pending_units(run, left[:1]):
            left[:] = pending_units(run, left)
        return not left

    wait_until(ready, stage, run, units)


def _ours(stage: Stage, share: WorkerShare, units: Sequence[Unit]) -> list[Unit]:
    if stage.parallelism == "units":
        return share.select(units)
    if stage.parallelism == "single" and share.kind == "part":
        return list(units)  # cheap, and no other part to wait for: each part runs it, the first to commit wins
    together = stage.parallelism == "collective" and share.kind == "torchrun"
    return list(units) if share.is_leader or together else []


def wait_until(ready: Callable[[], bool], stage: Stage, run: Run, units: Sequence[Unit]) -> None:
    """Polls until the other processes of a torchrun are ready; if one dies, torchrun ends all."""
    for poll in itertools.count():
        if ready():
            return
        run.signals.check()
        if poll % 10 == 0:
            _refuse_loss(stage, run, units)
        time.sleep(POLL_SECONDS)


def _refuse_loss(stage: Stage, run: Run, units: Sequence[Unit]) -> None:
    """Raises if another process quarantined a file that only this process recomputes: waiting would never end."""
    for _, record in run.results.values():
        for file, kind in run.store.missing_files(record):
            raise DamagedError(f"{file.path} is {kind}", path=file.path)
    commits = stage.parallelism == "units" or run.share.is_leader  # work done together is committed by the lead
    for unit in pending_units(run, _ours(stage, run.share, units)) if commits else []:
        raise DamagedError(f"{stage.name} {unit.name} is missing", path=str(unit.record_path))
