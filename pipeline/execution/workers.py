"""Runs units in this process, in the processes of a torchrun, as part i of n, or as tasks of a cluster.

Processes divide the units by position and communicate only through the store.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence

from amalgam.pipeline.errors import DamagedError, ExperimentError
from amalgam.pipeline.execution.stage import Run, Stage, Unit, WorkerShare, pending_units

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


# ---- the share of this process


def share_of(part: str | None, processes: int | None) -> WorkerShare:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if part is not None:
        if world > 1:
            raise ExperimentError("--part and torchrun were both given", fix="use one of them")
        share = _parse_part(part)
    elif world > 1:
        share = WorkerShare(int(os.environ["RANK"]), world, "torchrun")
    else:
        share = WorkerShare()
    if processes is not None and share.kind != "part" and processes != share.count:
        raise ExperimentError(
            f"expected {processes} processes, got {share.count}",
            where="execution.processes",
            fix=f"torchrun --nproc_per_node {processes} -m amalgam.cli ... (on CPUs after ACCELERATE_USE_CPU=1)",
        )
    return share


def _parse_part(part: str) -> WorkerShare:
    if part == "auto":
        return _scheduled(os.environ)
    index, slash, count = part.partition("/")
    if not (slash and index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise ExperimentError(
            f"--part {part} is not a share",
            fix="use --part 0/4 for the first of four parts, 3/4 for the last, or --part auto in a job array",
        )
    return WorkerShare(int(index), int(count), "part")


def _scheduled(environment: Mapping[str, str]) -> WorkerShare:
    """Returns the share of this task of a SLURM array or an indexed Kubernetes job."""
    try:
        if "SLURM_ARRAY_TASK_ID" in environment:
            first, step = int(environment["SLURM_ARRAY_TASK_MIN"]), int(environment.get("SLURM_ARRAY_TASK_STEP") or 1)
            index, rest = divmod(int(environment["SLURM_ARRAY_TASK_ID"]) - first, step)
            count = int(environment["SLURM_ARRAY_TASK_COUNT"])
        else:
            index, rest, count = int(environment["JOB_COMPLETION_INDEX"]), 0, int(environment["JOB_COMPLETIONS"])
    except KeyError as absent:
        raise ExperimentError(
            f"--part auto: {absent.args[0]} is not set",
            fix="start it in a SLURM array or an indexed Kubernetes job (with its completions as JOB_COMPLETIONS), "
            "or use --part 0/4",
        ) from None
    except ValueError as error:
        raise ExperimentError(f"--part auto: {error}", fix="use --part 0/4") from None
    if rest or not 0 <= index < count:
        raise ExperimentError(
            f"--part auto: task {index} of an array of {count} with gaps",
            where="SLURM_ARRAY_TASK_ID",
            fix="use an array without gaps, such as --array=0-7, or --part $SLURM_ARRAY_TASK_ID/8",
        )
    return WorkerShare(index, count, "part")
