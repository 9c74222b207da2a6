"""One protocol for every benchmark: rivals in one run, interleaved, medians with their spread, one row per line."""

from __future__ import annotations

import json
import os
import platform
import resource
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

LIBRARIES = ("amalgam", "torch", "transformers", "tokenizers", "polars", "pyarrow")


def row(benchmark: str, name: str, **figures: Any) -> dict[str, Any]:
    return {"benchmark": benchmark, "row": name, **figures, "versions": versions(), "machine": machine()}


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for library in LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            found[library] = "not installed"
    return found


def machine() -> dict[str, Any]:
    found: dict[str, Any] = {"cpu": _cpu_model(), "cores": os.cpu_count()}
    torch = sys.modules.get("torch")
    if torch is not None:
        found["threads"] = torch.get_num_threads()
        if torch.cuda.is_available():
            found["gpu"] = torch.cuda.get_device_name()
    return found


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123  no file of ours
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def interleaved(candidates: Mapping[str, Callable[[], float | None]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each candidate, run in turn after one warm-up; a candidate may return its own seconds."""
    for work in candidates.values():
        work()
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(repeats):
        for name, work in candidates.items():
            began = time.perf_counter()
            own = work()
            seconds[name].append(time.perf_counter() - began if own is None else own)
    return seconds


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def spread(values: Sequence[float]) -> float:
    """Half the distance from the fastest to the slowest, as a share of the median."""
    return (max(values) - min(values)) / 2 / median(values)


def paired(above: Sequence[float], below: Sequence[float]) -> float:
    """The median of ratios of neighbours in time: what slows the machine for a while slows both."""
    return median([a / b for a, b in zip(above, below, strict=True)])


def peak_rss_mb() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak / 1e3


def show(rows: Sequence[dict[str, Any]], *, as_json: bool) -> None:
    """JSON lines, or a table of what is a number or a word."""
    if as_json:
        for one in rows:
            print(json.dumps(one))  # noqa: T201  a benchmark's output
        return
    plain = [{k: v for k, v in one.items() if k not in {"benchmark", "versions", "machine"}} for one in rows]
    names = list(dict.fromkeys(name for one in plain for name in one))
    cells = [names, *([_cell(one.get(name)) for name in names] for one in plain)]
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


def texts_from(path: Path, count: int, seed: int = 0) -> list[str]:
    """A random sample, so that lengths are those of the whole file."""
    import numpy as np
    import pyarrow.parquet as pq

    texts = pq.read_table(path, columns=["text"]).column("text").to_pylist()
    chosen = np.random.default_rng(seed).permutation(len(texts))[:count]
    return [str(texts[i]) for i in chosen]
