"""A Ray cluster as the driver sees it: its nodes, what they must have in common, and how much fits on them."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import LocalRayletDiedError, NodeDiedError, TaskUnschedulableError, WorkerCrashedError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from amalgam.pipeline.errors import ExperimentError
from amalgam.pipeline.place import TEMPORARY
from amalgam.pipeline.plan import library_versions
from amalgam.pipeline.stage import Run
from amalgam.pipeline.store import open_store

LOOK_SECONDS = 5.0
"""Between two looks at the nodes."""
GONE = (WorkerCrashedError, NodeDiedError, LocalRayletDiedError)
_entering = threading.Lock()
"""Students of a sweep may be the first to need the cluster, several at once."""


@dataclass(frozen=True)
class Ground:
    """What a node must have in common with the driver: its storage, known by a mark, and its versions."""

    workspace: str
    mark: str
    nonce: str
    versions: Mapping[str, str]


@contextlib.contextmanager
def common_ground(run: Run) -> Iterator[Ground]:
    """The mark stands while units are out: nodes that join later look for it too."""
    nonce = uuid.uuid4().hex
    place = run.store.place
    ground = Ground(place.address, f"{TEMPORARY}nonce-{nonce}", nonce, library_versions())
    place.replace(ground.mark, nonce)
    try:
        yield ground
    finally:
        place.remove([ground.mark])


def look_around(ground: Ground) -> ExperimentError | None:
    """On a node: why it cannot work with us."""
    name, here = socket.gethostname(), library_versions()
    if open_store(ground.workspace, Path("/")).place.read(ground.mark) != ground.nonce.encode():
        return ExperimentError(
            f"node {name} does not see this workspace",
            where=ground.workspace,
            fix="put it on a disk that all nodes share: execution.workspace=DIR",
        )
    if here != ground.versions:
        other = [
            f"{key} {value} (here {ground.versions.get(key)})"
            for key, value in here.items()
            if ground.versions.get(key) != value
        ]
        return ExperimentError(
            f"node {name} has {', '.join(other)}",
            fix="the same versions everywhere: `amalgam doctor` shows those of this machine",
        )
    return None


class Cluster:
    def __init__(self, run: Run) -> None:
        execution = run.experiment.execution
        self._needs = {"CPU": execution.cpus, "GPU": execution.gpus}
        self._console = run.console
        self._looked, self._slots = 0.0, 0
        self._nodes: dict[str, str] = {}
        self.share: dict[str, Any] = {"num_cpus": execution.cpus, "num_gpus": execution.gpus}
        """Of a node, for one task."""
        self._look()

    def slots(self) -> int:
        """Tasks that can run at once, as of some seconds ago: nodes come and go."""
        if time.monotonic() - self._looked > LOOK_SECONDS:
            self._look()
        return max(self._slots, 1)

    def _look(self) -> None:
        alive = [node for node in ray.nodes() if node["Alive"]]
        now = {node["NodeID"]: str(node["NodeManagerHostname"]) for node in alive}
        for gone in self._nodes.keys() - now.keys():
            self._console.note(f"node {self._nodes[gone]} ({gone[:8]}) is gone; {len(now)} left")
        self._nodes, self._looked = now, time.monotonic()
        needs = {name: amount for name, amount in self._needs.items() if amount}
        self._slots = sum(min(int(node["Resources"].get(name, 0) / needs[name]) for name in needs) for node in alive)

    def node_of(self, lost: Exception) -> str:
        """Of a task that was lost, where Ray says it: some seconds before its list of nodes does."""
        found = re.search(r"node ID: (\w+)", str(lost))
        return f" on node {self._nodes.get(found[1], 'unknown')}, {found[1][:8]}" if found else ""

    def check(self, ground: Ground) -> None:
        if not self._slots:
            raise ExperimentError(
                f"no node of the cluster has {self._needs['CPU']} CPU(s) and {self._needs['GPU']:g} GPU(s)",
                where="execution.cpus, execution.gpus",
                fix="ask for less, or start a node that has them",
            )
        _check_nodes(ground, self._nodes)


def attached(run: Run, ground: Ground) -> Cluster:
    """Once for all stages of a run."""
    if "cluster" not in run.memory:
        address = run.experiment.execution.address or "auto"
        with _entering:
            if not ray.is_initialized():
                _enter(address)
        cluster = Cluster(run)
        cluster.check(ground)
        run.memory["cluster"] = cluster
    found: Cluster = run.memory["cluster"]
    return found


def _enter(address: str) -> None:
    """Ray tries for minutes where nobody listens, and takes SIGTERM for itself: neither is wanted."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        host, _, port = address.rpartition(":")
        if port.isdigit():
            socket.create_connection((host.rpartition("/")[2], int(port)), timeout=10).close()
        ray.init(address=address, logging_level="ERROR", log_to_driver=False)
    except OSError as error:
        raise ExperimentError(
            f"no Ray cluster at {address}",
            where="execution.address",
            fix="`ray start --head` starts one here; execution.address=HOST:PORT names another",
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _check_nodes(ground: Ground, nodes: Iterable[str]) -> None:
    look = ray.remote(num_cpus=0)(look_around)
    there = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
    for answer in [look.options(scheduling_strategy=place).remote(ground) for place in there]:
        with contextlib.suppress(*GONE, TaskUnschedulableError):  # a node that vanishes meanwhile need not agree
            if (refusal := ray.get(answer)) is not None:
                raise refusal
