"""Units as tasks of a Ray cluster: results travel through the workspace, and only receipts through Ray.

Tasks, not actors: when a node is gone, its tasks go elsewhere. A unit that kills its worker again and again is
written down and left out; the others go on, and the run ends with exit code 1.
"""

from __future__ import annotations

import uuid
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError

from amalgam.pipeline.console import Console
from amalgam.pipeline.digests import FileDigests
from amalgam.pipeline.engines import Share
from amalgam.pipeline.errors import AmalgamError, WorkError
from amalgam.pipeline.experiment import ExperimentFile
from amalgam.pipeline.plan import undone
from amalgam.pipeline.ray_cluster import GONE, Cluster, Ground, attached, common_ground, look_around
from amalgam.pipeline.stage import Run, Stage, Unit
from amalgam.pipeline.store import open_store

KILLS = 3
"""Workers that one unit alone may kill before it is left out."""
TASK_UNITS = 8
"""At most so many units in a task: a lost worker costs no more than these."""
AHEAD = 2
"""Tasks in flight for each that can run: a worker never waits for the driver."""
POLL_SECONDS = 0.5
LOST = (*GONE, OutOfMemoryError)


@dataclass(frozen=True)
class Job:
    """What a worker must know to do units of one stage; the same for all tasks of it."""

    stage: Stage
    experiment: ExperimentFile
    base: Path
    overrides: Mapping[str, Any]
    fingerprints: dict[str, str]
    name: str
    ground: Ground


def run_on_ray(stage: Stage, run: Run, units: Sequence[Unit]) -> None:
    """Return when every unit is committed, or could not be."""
    if units:
        with common_ground(run) as ground:
            _fly(stage, run, units, ground)


def _fly(stage: Stage, run: Run, units: Sequence[Unit], ground: Ground) -> None:
    cluster = attached(run, ground)
    # Said here, not later: a worker with a GPU would otherwise end with each task, and its teacher with it.
    task = ray.remote(max_calls=0)(do_units).options(**cluster.share, max_retries=0, scheduling_strategy="SPREAD")
    job = ray.put(_job_of(stage, run, ground))
    waiting = deque(_batches(units, TASK_UNITS if cluster.slots() * AHEAD * TASK_UNITS <= len(units) else 1))
    flying: dict[Any, list[Unit]] = {}
    kills: Counter[str] = Counter()
    given_up: list[Unit] = []
    try:
        while waiting or flying:
            room = cluster.slots() * AHEAD
            while waiting and len(flying) < room:
                batch = waiting.popleft()
                flying[task.remote(job, batch)] = batch
            run.signals.check()
            for done in ray.wait(list(flying), timeout=POLL_SECONDS)[0]:
                batch = flying.pop(done)
                again = _settle(done, batch, run, kills, cluster)
                given_up += [unit for unit in again if kills[unit.name] >= KILLS]
                waiting.extend([unit] for unit in again if kills[unit.name] < KILLS)
    finally:
        for task in flying:
            ray.cancel(task, force=True)
    if given_up:
        raise _left_out(stage, run, given_up)


def _settle(done: Any, batch: list[Unit], run: Run, kills: Counter[str], cluster: Cluster) -> list[Unit]:
    """What must be done again, each by itself: only then is it known which unit it was that killed a worker."""
    try:
        refusal: AmalgamError | None = ray.get(done)
    except LOST as lost:
        again = undone(run, batch)
        if len(batch) == 1:
            kills.update(unit.name for unit in again)
        said = f"{type(lost).__name__}{cluster.node_of(lost)}"
        run.console.note(f"a worker was lost ({said}); {len(again)} unit(s) go to others")
        run.console.advance(sum(unit.size for unit in batch) - sum(unit.size for unit in again))
        return again
    if refusal is not None:
        raise refusal
    run.console.advance(sum(unit.size for unit in batch))
    return []


def _left_out(stage: Stage, run: Run, units: Sequence[Unit]) -> WorkError:
    folder = run.store.root / "left-out"
    for unit in units:
        said = {"stage": stage.name, "unit": unit.name, "kills": KILLS, "texts": stage.texts(run, unit)}
        run.store.replace(folder / f"{stage.name}-{unit.name}.json", said)
    return WorkError(
        f"{stage.name}: {len(units)} unit(s) killed {KILLS} workers each and were left out: "
        + ", ".join(unit.name for unit in units[:10]),
        where=run.store.where(folder),
        fix="the keys of their texts are there: look at those, then run the same command again",
    )


def _batches(units: Sequence[Unit], size: int) -> Iterator[list[Unit]]:
    """Neighbours together: they are of the same teacher."""
    for start in range(0, len(units), size):
        yield list(units[start : start + size])


def _job_of(stage: Stage, run: Run, ground: Ground) -> Job:
    known = {name: fingerprint for name, (fingerprint, _) in run.results.items()}
    return Job(stage, run.experiment, run.base, dict(run.overrides), known, uuid.uuid4().hex, ground)


# ---- on a worker

_opened: dict[str, Run] = {}
"""The run of the latest job, with the teacher it has loaded."""


def do_units(job: Job, units: list[Unit]) -> AmalgamError | None:
    """None is the receipt: every unit is committed. An error of ours is told, so that Ray wraps and repeats nothing."""
    try:
        run = _run_for(job)
        job.stage.run_units(run, undone(run, units))
    except AmalgamError as error:
        return error
    return None


def _run_for(job: Job) -> Run:
    if job.name not in _opened:
        _opened.clear()
        refusal = look_around(job.ground)  # a node that joined later was not asked yet
        if refusal is not None:
            raise refusal
        store = open_store(job.ground.workspace, job.base)
        digests = FileDigests(store.root / "digests.json")
        run = Run(job.experiment, job.base, store, Console(quiet=True), Share(), digests, job.overrides)
        for stage, name in job.fingerprints.items():
            manifest = store.manifest(stage, name)
            if manifest is None:
                raise WorkError(f"{stage}/{name} cannot be read on this node", where=job.ground.workspace)
            run.results[stage] = (name, manifest)
        job.stage.prepare(run)
        _opened[job.name] = run
    return _opened[job.name]
