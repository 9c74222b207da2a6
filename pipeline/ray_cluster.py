"""A Ray cluster as the driver sees it: its nodes, what they must have in common, and how much fits on them."""

from __future__ import annotations

import signal
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from amalgam.pipeline.errors import ExperimentError
from amalgam.pipeline.place import TEMPORARY
from amalgam.pipeline.plan import library_versions
from amalgam.pipeline.stage import Run
from amalgam.pipeline.store import open_store

LOOK_SECONDS = 5.0
"""Between two looks at the nodes."""


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

    def check(self, run: Run) -> None:
        if not self._slots:
            raise ExperimentError(
                f"no node of the cluster has {self._needs['CPU']} CPU(s) and {self._needs['GPU']:g} GPU(s)",
                where="execution.cpus, execution.gpus",
                fix="ask for less, or start a node that has them",
            )
        _check_nodes(run, self._nodes)


def attached(run: Run) -> Cluster:
    """Once for all stages of a run."""
    if "cluster" not in run.memory:
        address = run.experiment.execution.address or "auto"
        if not ray.is_initialized():
            _enter(address)
        cluster = Cluster(run)
        cluster.check(run)
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


def _check_nodes(run: Run, nodes: Mapping[str, str]) -> None:
    """Every node must see the workspace that we see, and compute with the same libraries."""
    nonce = uuid.uuid4().hex
    mark = f"{TEMPORARY}nonce-{nonce}"
    run.store.place.replace(mark, nonce)
    try:
        look = ray.remote(num_cpus=0)(look_around)
        there = {node: NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes}
        asked = [
            (nodes[node], look.options(scheduling_strategy=place).remote(run.store.place.address, mark))
            for node, place in there.items()
        ]
        for name, answer in asked:  # two nodes may be of one host
            seen, versions = ray.get(answer)
            if seen != nonce:
                raise ExperimentError(
                    f"node {name} does not see this workspace",
                    where=run.store.place.address,
                    fix="put it on a disk that all nodes share: execution.workspace=DIR",
                )
            if versions != library_versions():
                here = library_versions()
                other = [f"{key} {value} (here {here[key]})" for key, value in versions.items() if here[key] != value]
                raise ExperimentError(
                    f"node {name} has {', '.join(other)}",
                    fix="the same versions everywhere: `amalgam doctor` shows those of this machine",
                )
    finally:
        run.store.place.remove([mark])


def look_around(workspace: str, mark: str) -> tuple[str | None, dict[str, str]]:
    seen = open_store(workspace, Path("/")).place.read(mark)
    return None if seen is None else seen.decode(), library_versions()
