"""Compares the inputs of the processes of a torchrun; with different ones they would wait for each other for ever.

Each process writes its inputs to the key-value store of torchrun, and process 0 compares them with its own.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any

from amalgam.pipeline.errors import ExperimentError, WorkError
from amalgam.pipeline.execution.plan import identity_of
from amalgam.pipeline.execution.stage import Run, Stage
from amalgam.pipeline.storage.fingerprint import differences, library_versions
from amalgam.pipeline.storage.store import MARK

POLL_SECONDS = 0.1
PATIENCE_SECONDS = 60.0
"""Seconds after which process 0 prints for which process it waits."""

MOST_SHOWN = 3
"""Differences in a message."""

_NUMBERS = itertools.count()


class RankInputs:
    """The inputs of one run in all processes; without a torchrun every method returns at once."""

    def __init__(self, run: Run) -> None:
        self.run, self.number = run, next(_NUMBERS)

    def compare_settings(self, stages: Sequence[Stage]) -> None:
        """Compares experiment, stages, versions and workspace, before any work."""
        if self.run.share.kind == "torchrun":
            settings, store = self.run.experiment.model_dump(mode="json", exclude={"execution"}), self.run.store
            inputs = {
                "experiment": _without_folders(settings),
                "stages": [stage.name for stage in stages],
                "versions": library_versions(),
                "workspace": str((store.read_json(store.root / MARK) or {}).get("id", "")),  # two without a shared disk
            }
            self._compare("the experiment", inputs, str)

    def compare_identity(self, stage: Stage) -> None:
        """Compares the digests of a stage's inputs, before it runs or is reused."""
        if self.run.share.kind == "torchrun":
            self._compare(stage.name, identity_of(stage, self.run), stage.input_name)

    def _compare(self, name: str, inputs: Mapping[str, Any], input_name: Callable[[str], str]) -> None:
        share = self.run.share
        if "MASTER_ADDR" not in os.environ:  # nothing to communicate with
            return
        key = f"amalgam/{self.number}/{name}"
        try:
            store = _connect(share.index, share.count)
            if not share.is_leader:
                store.set(f"{key}/{share.index}", json.dumps({"host": socket.gethostname(), "inputs": inputs}))
                return
            ours = json.loads(json.dumps(inputs))
            for rank in range(1, share.count):
                self._wait(store, f"{key}/{rank}", rank)
                other = json.loads(store.get(f"{key}/{rank}"))
                changes = [f"{input_name(path)}: {change}" for path, change in differences(ours, other["inputs"])]
                _refuse_difference(name, f"process {rank} on {other['host']}", changes)
        except RuntimeError as error:  # of torch: a connection
            what = "the processes of the torchrun cannot communicate"
            fix = "read the message of the process that failed first, and run the command again"
            raise WorkError(what, where=f"{os.environ['MASTER_ADDR']}, process {share.index}", fix=fix) from error

    def _wait(self, store: Any, key: str, rank: int) -> None:
        """Polls, so that a signal can end the process; if another process dies, torchrun ends all."""
        began, is_silent = time.monotonic(), True
        while not store.check([key]):
            self.run.signals.check()
            if is_silent and time.monotonic() - began > PATIENCE_SECONDS:
                is_silent = False
                self.run.console.note(f"waiting for process {rank}, which reads its inputs")
            time.sleep(POLL_SECONDS)


@cache
def _connect(rank: int, count: int) -> Any:
    """Connects to the store of torch that torchrun, or process 0, serves; the training's process group uses it too."""
    rendezvous = import_module("torch.distributed.rendezvous").rendezvous
    return next(iter(rendezvous("env://", rank, count)))[0]


def _without_folders(value: Any) -> Any:
    """Returns settings without the folders of paths, which may differ by machine; stages compare the digests."""
    if isinstance(value, Mapping):
        return {name: _without_folders(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_folders(item) for item in value]
    return value.rpartition("/")[2] if isinstance(value, str) else value


def _refuse_difference(name: str, process: str, changes: Sequence[str]) -> None:
    if changes:
        rest = f" (+{len(changes) - MOST_SHOWN} more)" if len(changes) > MOST_SHOWN else ""
        what = f"{process} has other inputs than process 0: {'; '.join(changes[:MOST_SHOWN])}{rest}"
        fix = "give all processes the same experiment file, texts, models, versions and workspace on a shared disk"
        raise ExperimentError(what, where=name, fix=fix)
