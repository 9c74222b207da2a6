"""The share of the units that one of several processes runs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from amalgam.pipeline.errors import ExperimentError

_Unit = TypeVar("_Unit")


@dataclass(frozen=True)
class WorkerShare:
    """Selects this process's part of the units."""

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
