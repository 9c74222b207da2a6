"""What this machine was measured at, kept in the workspace (rates.json): each rate is measured once and by need."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable, Mapping
from typing import Any

from amalgam.pipeline.execution.stage import Run
from amalgam.pipeline.execution.versions import library_versions
from amalgam.pipeline.storage.fingerprint import fingerprint

VERSION = 1

FILE = "rates.json"

Figures = dict[str, float]


class NotMeasuredError(Exception):
    """A rate is not known, and nothing may be measured now."""


class MachineRates:
    def __init__(self, run: Run, *, measure: bool) -> None:
        self._run = run
        self._measure = measure
        self._path = run.store.root / FILE
        self._known = _whole(run.store.read_json(self._path))
        self._machine = _machine(run)

    def of(self, kind: str, about: Any, measure: Callable[[], Figures]) -> Figures:
        """The figures of `kind`, which depend on this machine and on what they are `about`."""
        key = fingerprint([VERSION, self._machine, kind, about])
        if key not in self._known:
            if not self._measure:
                raise NotMeasuredError
            self._run.console.say(f"measuring, once on this machine: {kind}")
            self._known[key] = {"kind": kind, "figures": measure()}
            with contextlib.suppress(OSError):  # a workspace that only can be read: measured again next time
                self._run.store.replace(self._path, self._known)
        return {name: float(value) for name, value in self._known[key]["figures"].items()}


def _whole(raw: Any) -> dict[str, Any]:
    whole = isinstance(raw, dict) and all(isinstance(entry, dict) and _are_figures(entry) for entry in raw.values())
    return raw if whole else {}


def _are_figures(entry: Mapping[str, Any]) -> bool:
    figures = entry.get("figures")
    return isinstance(figures, dict) and all(isinstance(value, int | float) for value in figures.values())


def _machine(run: Run) -> list[Any]:
    """The name of the node: two nodes of a cluster that share a workspace are two machines."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = os.environ.get("OMP_NUM_THREADS")
    said = run.experiment.execution
    return [platform.node(), platform.machine(), cores, threads, said.device, said.batch_tokens, library_versions()]
