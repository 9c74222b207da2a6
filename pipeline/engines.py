"""Where units run: in this process, shared with the others of a torchrun, as part i of n, or as tasks of a cluster.

Processes share work by the units' names and meet only in the store: nothing is gathered, nothing is sent.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from amalgam.pipeline.errors import DamagedError, ExperimentError
from amalgam.pipeline.plan import undone
from amalgam.pipeline.stage import Run, Stage, Unit

POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Share:
    """Which part of the units is ours."""

    index: int = 0
    count: int = 1
    kind: Literal["alone", "torchrun", "part"] = "alone"

    @property
    def leads(self) -> bool:
        return self.index == 0

    def mine(self, units: Sequence[Unit]) -> list[Unit]:
        return list(units[self.index :: self.count])


def share_of(part: str | None, processes: int | None) -> Share:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if part is not None:
        if world > 1:
            raise ExperimentError("--part and torchrun were both given", fix="use one of them")
        share = _parse_part(part)
    elif world > 1:
        share = Share(int(os.environ["RANK"]), world, "torchrun")
    else:
        share = Share()
    if processes is not None and share.kind != "part" and processes != share.count:
        raise ExperimentError(
            f"asked for {processes} processes, got {share.count}",
            where="execution.processes",
            fix=f"torchrun --nproc_per_node {processes} -m amalgam.cli ... (on CPUs after ACCELERATE_USE_CPU=1)",
        )
    return share


def _parse_part(part: str) -> Share:
    if part == "auto":
        return _scheduled(os.environ)
    index, slash, count = part.partition("/")
    if not (slash and index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise ExperimentError(
            f"--part {part} is not a share",
            fix="--part 0/4 is the first of four parts, 3/4 the last; --part auto asks the job's scheduler",
        )
    return Share(int(index), int(count), "part")


def _scheduled(said: Mapping[str, str]) -> Share:
    """What a SLURM array or an indexed Kubernetes job says of this task: which one it is, of how many."""
    try:
        if "SLURM_ARRAY_TASK_ID" in said:
            first, step = int(said["SLURM_ARRAY_TASK_MIN"]), int(said.get("SLURM_ARRAY_TASK_STEP") or 1)
            index, rest = divmod(int(said["SLURM_ARRAY_TASK_ID"]) - first, step)
            count = int(said["SLURM_ARRAY_TASK_COUNT"])
        else:
            index, rest, count = int(said["JOB_COMPLETION_INDEX"]), 0, int(said["JOB_COMPLETIONS"])
    except KeyError as absent:
        raise ExperimentError(
            f"--part auto: {absent.args[0]} is not set",
            fix="start it in a SLURM array or an indexed Kubernetes job (with its completions as JOB_COMPLETIONS), "
            "or say --part 0/4",
        ) from None
    except ValueError as error:
        raise ExperimentError(f"--part auto: {error}", fix="--part 0/4 says it by hand") from None
    if rest or not 0 <= index < count:
        raise ExperimentError(
            f"--part auto: task {index} of an array of {count} with gaps",
            where="SLURM_ARRAY_TASK_ID",
            fix="an array without gaps, such as --array=0-7, or --part $SLURM_ARRAY_TASK_ID/8",
        )
    return Share(index, count, "part")


def run_units(stage: Stage, run: Run, units: Sequence[Unit]) -> bool:
    """Do our share of the units; True when all are done, by whomever."""
    todo = undone(run, _ours(stage, run.share, units))
    done_before = sum(unit.size for unit in units) - sum(unit.size for unit in todo)
    with run.console.progress(stage.name, stage.measure, sum(unit.size for unit in todo), done_before):
        if run.experiment.execution.engine == "ray" and stage.spread != "alone":
            from amalgam.pipeline.ray_engine import run_on_ray

            run_on_ray(stage, run, todo)
        else:
            stage.run_units(run, todo)
    if run.share.kind == "part":
        return not undone(run, units)
    _wait_for_all(stage, run, units)
    return True


def _wait_for_all(stage: Stage, run: Run, units: Sequence[Unit]) -> None:
    """What was seen to be done is not asked for again."""
    left = list(units)

    def ready() -> bool:
        if not undone(run, left[:1]):
            left[:] = undone(run, left)
        return not left

    wait_until(ready, stage, run, units)


def _ours(stage: Stage, share: Share, units: Sequence[Unit]) -> list[Unit]:
    if stage.spread == "units":
        return share.mine(units)
    if stage.spread == "alone" and share.kind == "part":
        return list(units)  # cheap, and nobody to wait for: each part does it, the first to commit wins
    together = stage.spread == "together" and share.kind == "torchrun"
    return list(units) if share.leads or together else []


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
        for file, kind in run.store.absent(record):
            raise DamagedError(f"{file.path} is {kind}", path=file.path)
    commits = stage.spread == "units" or run.share.leads  # work done together is committed by the lead
    for unit in undone(run, _ours(stage, run.share, units)) if commits else []:
        raise DamagedError(f"{stage.name} {unit.name} is gone", path=str(unit.record_path))
