"""The share of the work that one process of several takes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from amalgam.pipeline.errors import ExperimentError

_Unit = TypeVar("_Unit")


@dataclass(frozen=True)
class WorkerShare:
    """Which part of the units is ours."""

    index: int = 0
    count: int = 1
    kind: Literal["alone", "torchrun", "part"] = "alone"

    @property
    def is_leader(self) -> bool:
        return self.index == 0

    def select(self, units: Sequence[_Unit]) -> list[_Unit]:
        return list(units[self.index :: self.count])


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
            f"asked for {processes} processes, got {share.count}",
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
            fix="--part 0/4 is the first of four parts, 3/4 the last; --part auto asks the job's scheduler",
        )
    return WorkerShare(int(index), int(count), "part")


def _scheduled(said: Mapping[str, str]) -> WorkerShare:
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
    return WorkerShare(index, count, "part")
