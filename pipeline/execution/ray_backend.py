"""Runs units as tasks of a Ray cluster; results are exchanged through the workspace, not through Ray.

Tasks of a lost node run on other nodes. A unit that kills its workers repeatedly is recorded and left out, and the
run ends with exit code 1.
"""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import threading
import time
import traceback
import uuid
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from amalgam.pipeline.config.schema import ExperimentConfig
from amalgam.pipeline.console import Console
from amalgam.pipeline.errors import AmalgamError, ExperimentError, InputChangedError, WorkError
from amalgam.pipeline.execution.faults import expected_error
from amalgam.pipeline.execution.plan import identity_of
from amalgam.pipeline.execution.stage import Run, Stage, Unit, WorkerShare, once, pending_units
from amalgam.pipeline.storage.backend import TEMPORARY
from amalgam.pipeline.storage.fingerprint import FileDigests, fingerprint, library_versions
from amalgam.pipeline.storage.store import Record, open_store

LOOK_SECONDS = 5.0
"""Interval between two queries of the nodes."""

MARK_SECONDS = 3600.0
"""Interval between two writes of the marker: `amalgam gc` deletes an unfinished file that is older than a day."""

KILLS = 3
"""Number of workers that one unit may kill before it is left out."""

TASK_UNITS = 8
"""Maximal number of units in a task: a lost worker loses no more than these."""

AHEAD = 2
"""Submitted tasks per slot, so that a worker never waits for the driver."""

POLL_SECONDS = 0.5

MARK = b"amalgam"
"""Content of the marker."""

GONE = (exceptions.WorkerCrashedError, exceptions.NodeDiedError, exceptions.LocalRayletDiedError)

LOST = (*GONE, exceptions.OutOfMemoryError)

_entering = threading.Lock()
"""Several students of a sweep may connect to the cluster at the same time."""


@dataclass(frozen=True)
class RayJob:
    """The data that all tasks of one stage share."""

    stage: Stage
    experiment: ExperimentConfig
    base: Path
    results: Mapping[str, tuple[str, Record]]
    workspace: str
    marker: str
    """File that every node must find in the workspace; its name is unique."""
    versions: Mapping[str, str]
    identity: str
    """Fingerprint of the stage's inputs on the driver."""


class Cluster:
    def __init__(self, run: Run) -> None:
        execution = run.experiment.execution
        needs = {"CPU": execution.ray.cpus, "GPU": execution.ray.gpus}
        self._needs = {name: amount for name, amount in needs.items() if amount}
        self._console = run.console
        self._looked, self._slots = 0.0, 0
        self._nodes: dict[str, str] = {}
        self._look()
        if not self._slots:
            what = f"no node of the cluster has {execution.ray.cpus} CPU(s) and {execution.ray.gpus:g} GPU(s)"
            fix = "request fewer, or start a node that has them"
            raise ExperimentError(what, where="execution.ray.cpus, execution.ray.gpus", fix=fix)

    def slots(self) -> int:
        """Returns the number of tasks that can run at once; the nodes are queried every LOOK_SECONDS."""
        if time.monotonic() - self._looked > LOOK_SECONDS:
            self._look()
        return max(self._slots, 1)

    def _look(self) -> None:
        alive = [node for node in ray.nodes() if node["Alive"]]
        now = {node["NodeID"]: str(node["NodeManagerHostname"]) for node in alive}
        for node in self._nodes.keys() - now.keys():
            self._console.note(f"node {self._nodes[node]} ({node[:8]}) is lost; {len(now)} left")
        self._nodes, self._looked, needs = now, time.monotonic(), self._needs
        self._slots = sum(min(int(node["Resources"].get(name, 0) / needs[name]) for name in needs) for node in alive)

    def node_of(self, lost: Exception) -> str:
        """Returns the node of a lost task from Ray's message, which precedes the change of its list of nodes."""
        node = re.search(r"node ID: (\w+)", str(lost))
        return f" on node {self._nodes.get(node[1], 'unknown')}, {node[1][:8]}" if node else ""

    def check(self, job: RayJob) -> None:
        """Raises if one of the nodes cannot share the work."""
        look = ray.remote(num_cpus=0)(check_node)
        strategies = [NodeAffinitySchedulingStrategy(node, soft=False) for node in self._nodes]
        for answer in [look.options(scheduling_strategy=strategy).remote(job) for strategy in strategies]:
            with contextlib.suppress(*GONE, exceptions.TaskUnschedulableError):  # the node was lost in the meantime
                if (refusal := ray.get(answer)) is not None:
                    raise refusal


def check_node(job: RayJob) -> ExperimentError | None:
    """Runs on a node; returns an error if the node cannot share the work."""
    name, here = socket.gethostname(), library_versions()
    backend = open_store(job.workspace, Path("/")).backend
    if not backend.sizes([job.marker]):
        what, fix = f"node {name} does not see this workspace", "put it on a disk that all nodes share"
        return ExperimentError(what, where=job.workspace, fix=f"{fix}: execution.workspace=DIR")
    strange = {key: value for key, value in here.items() if job.versions.get(key) != value}
    if strange:
        versions = [f"{key} {value} (here {job.versions.get(key)})" for key, value in strange.items()]
        fix = "install the same versions everywhere: `amalgam doctor` shows those of this machine"
        return ExperimentError(f"node {name} has {', '.join(versions)}", fix=fix)
    return None


@once
def _connect(run: Run) -> Cluster:
    """Connects to Ray after a quick test of the port, and restores the SIGTERM handler that Ray replaces."""
    address = run.experiment.execution.ray.address or "auto"
    before = signal.getsignal(signal.SIGTERM)
    host, _, port = address.rpartition(":")
    with _entering:
        try:
            if port.isdigit() and not ray.is_initialized():
                socket.create_connection((host.rpartition("/")[2], int(port)), timeout=10).close()
            if not ray.is_initialized():
                ray.init(address=address, logging_level="ERROR", log_to_driver=False)
        except OSError as error:
            fix = "`ray start --head` starts one here; execution.ray.address=HOST:PORT names another"
            raise ExperimentError(f"no Ray cluster at {address}", where="execution.ray.address", fix=fix) from error
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, before)
    return Cluster(run)


def run_on_ray(stage: Stage, run: Run, units: Sequence[Unit]) -> None:
    """Runs the units on the cluster; raises WorkError if some could not be committed."""
    if not units:
        return
    backend, marker = run.store.backend, f"{TEMPORARY}nonce-{uuid.uuid4().hex}"
    versions, identity = library_versions(), fingerprint(identity_of(stage, run))
    job = RayJob(stage, run.experiment, run.base, dict(run.results), backend.address, marker, versions, identity)
    backend.put({marker: MARK})  # it stays while tasks run, because nodes that join later check it too
    try:
        given_up = _run_tasks(job, run, units)
    finally:
        backend.delete([marker])
    if given_up:
        raise _left_out(stage, run, given_up)


def _run_tasks(job: RayJob, run: Run, units: Sequence[Unit]) -> list[Unit]:
    """Returns the units that were left out because they kill workers."""
    cluster, marked = _connect(run), time.monotonic()
    cluster.check(job)
    resources = run.experiment.execution.ray
    # max_calls=0 keeps the worker and its loaded teacher after each task, also with a GPU.
    task = ray.remote(max_calls=0)(run_task).options(
        num_cpus=resources.cpus, num_gpus=resources.gpus, max_retries=0, scheduling_strategy="SPREAD"
    )
    stored_job = ray.put(job)
    size = TASK_UNITS if cluster.slots() * AHEAD * TASK_UNITS <= len(units) else 1
    # A batch has neighbouring units, which share a teacher.
    waiting = deque(list(units[start : start + size]) for start in range(0, len(units), size))
    running: dict[Any, list[Unit]] = {}
    kills: Counter[Path] = Counter()
    given_up: list[Unit] = []
    try:
        while waiting or running:
            room = cluster.slots() * AHEAD
            while waiting and len(running) < room:
                batch = waiting.popleft()
                running[task.remote(stored_job, batch)] = batch
            run.signals.check()
            if time.monotonic() - marked > MARK_SECONDS:
                run.store.backend.put({job.marker: MARK})
                marked = time.monotonic()
            for done in ray.wait(list(running), timeout=POLL_SECONDS)[0]:
                again = _settle(done, running.pop(done), run, kills, cluster)
                given_up += [unit for unit in again if kills[unit.record_path] >= KILLS]
                waiting.extend([unit] for unit in again if kills[unit.record_path] < KILLS)
    finally:
        for reference in running:
            ray.cancel(reference, force=True)
    return given_up


def _settle(done: Any, batch: list[Unit], run: Run, kills: Counter[Path], cluster: Cluster) -> list[Unit]:
    """Returns the units to run again, one per task, which identifies the unit that kills workers."""
    again: list[Unit] = []
    try:
        refusal: AmalgamError | None = ray.get(done)
        if refusal is not None:
            raise refusal
    except LOST as lost:
        again = pending_units(run, batch)
        if len(batch) == 1:
            kills.update(unit.record_path for unit in again)
        reason = f"{type(lost).__name__}{cluster.node_of(lost)}"
        run.console.note(f"a worker was lost ({reason}); {len(again)} unit(s) go to others")
    run.console.advance(sum(unit.size for unit in batch) - sum(unit.size for unit in again))
    return again


def _left_out(stage: Stage, run: Run, units: Sequence[Unit]) -> WorkError:
    folder = run.store.root / "failed-units"
    for unit in units:
        record = run.store.inside(unit.record_path)  # units of several teachers share a name
        failure = {"stage": stage.name, "unit": unit.name, "record": record, "kills": KILLS}
        path = folder / f"{stage.name}-{unit.name}-{fingerprint(record)[:8]}.json"
        run.store.replace(path, {**failure, "texts": stage.text_keys(run, unit)})
    names = ", ".join(unit.name for unit in units[:10])
    what = f"{stage.name}: {len(units)} unit(s) killed {KILLS} workers each and were left out: {names}"
    fix = "inspect their texts (the files there list the keys), then run the same command again"
    return WorkError(what, where=run.store.where(folder), fix=fix)


# ---- on a worker

_opened: dict[str, Run] = {}
"""The run of the latest job by its marker, with its loaded teacher."""


def run_task(job: RayJob, units: list[Unit]) -> AmalgamError | None:
    """Runs the units of a task; returns an error with a fix instead of raising it, so that Ray does not retry.

    The traceback, which shows whether a model failed, stays on the worker: --debug prints its text.
    """
    try:
        run = _run_for(job)
        job.stage.run_units(run, pending_units(run, units))
    except AmalgamError as error:
        return error
    except Exception as error:
        expected = expected_error(error)
        if expected is None:
            raise
        expected.add_note("".join(traceback.format_exception(error)))
        return expected
    return None


def _run_for(job: RayJob) -> Run:
    if job.marker not in _opened:
        _opened.clear()
        refusal = check_node(job)  # a node that joined later was not checked yet
        if refusal is not None:
            raise refusal
        store = open_store(job.workspace, job.base)
        digests = FileDigests(store.root / "digests.json")
        run = Run(job.experiment, job.base, store, Console(quiet=True), WorkerShare(), digests)
        run.results.update(job.results)
        job.stage.resolve_inputs(run)
        if fingerprint(identity_of(job.stage, run)) != job.identity:
            what = f"the inputs of {job.stage.name} on node {socket.gethostname()} differ from those of the driver"
            raise InputChangedError(what, where=str(job.base), fix="give all nodes the same files, then run it again")
        _opened[job.marker] = run
    return _opened[job.marker]
