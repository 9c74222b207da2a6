"""Runs experiments, and rivals interleaved in one process; prints medians with their spread, one row per line."""

from __future__ import annotations

import json
import os
import platform
import resource
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from amalgam.pipeline.execution.stage import Run

LIBRARIES = ("amalgam-distill", "torch", "transformers", "tokenizers", "polars", "pyarrow")


def row(benchmark: str, name: str, **figures: Any) -> dict[str, Any]:
    return {"benchmark": benchmark, "row": name, **figures, "versions": versions(), "machine": machine()}


def versions() -> dict[str, str]:
    releases = {"python": platform.python_version()}
    for library in LIBRARIES:
        try:
            releases[library] = version(library)
        except PackageNotFoundError:
            releases[library] = "not installed"
    return releases


def machine() -> dict[str, Any]:
    facts: dict[str, Any] = {"cpu": _cpu_model(), "cores": os.cpu_count()}
    torch = sys.modules.get("torch")
    if torch is not None:
        facts["threads"] = torch.get_num_threads()
        if torch.cuda.is_available():
            facts["gpu"] = torch.cuda.get_device_name()
    return facts


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123  a system file
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def interleaved(candidates: Mapping[str, Callable[[], float | None]], repeats: int) -> dict[str, list[float]]:
    """Returns the seconds of each candidate, run in turn after a warm-up. A candidate may return its own seconds.

    Every second round is in reverse order, because a candidate leaves caches that suit its successor or not.
    """
    for work in candidates.values():
        work()
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(repeats):
        for name, work in list(candidates.items())[:: -1 if turn % 2 else 1]:
            began = time.perf_counter()
            own = work()
            seconds[name].append(time.perf_counter() - began if own is None else own)
    return seconds


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def spread(values: Sequence[float]) -> float:
    """Returns half the distance from the fastest to the slowest run, as a share of the median."""
    return (max(values) - min(values)) / 2 / median(values)


def paired(above: Sequence[float], below: Sequence[float]) -> float:
    """Returns the median ratio of consecutive runs. A temporary load on the machine slows both runs."""
    return median([a / b for a, b in zip(above, below, strict=True)])


def peak_rss_mb() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak / 1e3


def peak_of_process_mb() -> float:
    """Returns the peak of this process alone; getrusage on Linux includes that of its parent."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1e3


def show(rows: Iterable[dict[str, Any]], *, as_json: bool) -> None:
    """Prints the rows as JSON lines, each as soon as it is measured, or as a table of the figures."""
    if as_json:
        for figures in rows:
            print(json.dumps(figures), flush=True)  # noqa: T201  a benchmark's output
        return
    plain = [{k: v for k, v in line.items() if k not in {"benchmark", "versions", "machine"}} for line in rows]
    names = list(dict.fromkeys(name for figures in plain for name in figures))
    cells = [names, *([_cell(figures.get(name)) for name in names] for figures in plain)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())  # noqa: T201


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return (
        f"{value:,.3g}"
        if isinstance(value, float) and abs(value) < 1000
        else f"{value:,.0f}"
        if isinstance(value, float)
        else str(value)
    )


def updated(config: Path, overrides: Sequence[str], without: Collection[str] = (), target: str | None = None) -> Run:
    """Runs the stages of an experiment up to `target`."""
    from amalgam.pipeline.console import Console
    from amalgam.pipeline.execution.runner import update
    from amalgam.stages.app.runs import open_run, working
    from amalgam.stages.registry import STAGES

    run = open_run(config, overrides, console=Console(out=sys.stderr))
    with working(run):
        update([stage for stage in STAGES if stage.name not in without], run, target=target)
    return run


def texts_from(path: Path | None, count: int, seed: int = 0) -> list[str]:
    """Returns a random sample, so that lengths represent the whole file; without a file, the embedded corpus."""
    if path is None:
        from amalgam.data.demo_corpus import generate

        return [str(text) for text, _ in generate(count, seed)]
    import numpy as np
    import pyarrow.parquet as pq

    texts = pq.read_table(path, columns=["text"]).column("text").to_pylist()
    chosen = np.random.default_rng(seed).permutation(len(texts))[:count]
    return [str(texts[i]) for i in chosen]
