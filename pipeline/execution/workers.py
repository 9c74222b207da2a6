"""Where units run: in this process, shared with the others of a torchrun, as part i of n, or as tasks of a cluster.

Processes share work by the units' names and meet only in the store: nothing is gathered, nothing is sent.
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
    """Do our share of the units; True when all are done, by whomever."""
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
    """What was seen to be done is not asked for again."""
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
        return list(units)  # cheap, and nobody to wait for: each part does it, the first to commit wins
    together = stage.parallelism == "collective" and share.kind == "torchrun"
    return list(units) if share.is_leader or together else []


def wait_until(ready: Callable[[], bool], stage: Stage, run: Run, units: Sequence[Unit]) -> None:
    """The others of a torchrun are still at work; should one die, torchrun ends us all."""
    for poll in itertools.count():
        if ready():
            return
        run.signals.check()
        if poll % 10 == 0:
            _refuse_loss(stage, run, units)
        time.sleep(POLL_SECONDS)


def _refuse_loss(stage: Stage, run: Run, units: Sequence[Unit]) -> None:
    """What we alone can make again may be gone by now (another process set it aside): waiting would be for ever."""
    for _, record in run.results.values():
        for file, kind in run.store.missing_files(record):
            raise DamagedError(f"{file.path} is {kind}", path=file.path)
    commits = stage.parallelism == "units" or run.share.is_leader  # work done together is committed by the lead
    for unit in pending_units(run, _ours(stage, run.share, units)) if commits else []:
        raise DamagedError(f"{stage.name} {unit.name} is gone", path=str(unit.record_path))
