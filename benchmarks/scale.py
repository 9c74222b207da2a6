"""Measures planning at any number of texts, with real records of random keys and commands in separate processes.

python benchmarks/scale.py --texts 100000 1000000 10000000 --teachers 10 [--json]

10^7 texts need 6 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amalgam.benchmarks.protocol import median, peak_of_process_mb, row, show, spread

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from amalgam.benchmarks.synthetic_workspace import Experiments, Shape

PASSES = 16
LABELS = 4


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        _work(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, nargs="+", default=[100_000])
    parser.add_argument("--teachers", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--whole", action="store_true", help="write every column of the answers, at its real size")
    parser.add_argument("--folder", type=Path, help="folder of the temporary workspaces")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    show((figures for texts in options.texts for figures in _scaled(texts, options)), as_json=options.json)


def _scaled(texts: int, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    from amalgam.benchmarks.synthetic_workspace import Shape, write_experiments

    shape = Shape(texts, options.teachers, LABELS, PASSES, options.whole)
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        yield from _rows(write_experiments(Path(scratch) / "scale", shape), shape, options.repeats)


def _rows(experiments: Experiments, shape: Shape, repeats: int) -> Iterator[dict[str, Any]]:
    """Measures each state of the workspace, and checks the units of every plan."""
    from amalgam.benchmarks.synthetic_workspace import (
        changed_buckets,
        half_of,
        lacking,
        write_answers,
        write_corpora,
        write_targets,
    )

    began = time.perf_counter()
    write_corpora(experiments, shape)
    units = lacking(experiments.first)
    late = half_of(units, f"teacher-{shape.teachers - 1}")
    absent = {unit.record_path for unit in late}
    write_answers(experiments.first, [unit for unit in units if unit.record_path not in absent], shape)
    built = time.perf_counter() - began
    total = len(units)
    yield _planned("half of one teacher missing", experiments.first, shape, repeats, (total - len(late), total))
    write_answers(experiments.first, late, shape)
    spent = measured("cache-teachers", "-q", "-c", str(experiments.first))
    yield _row("cache-teachers, nothing missing", shape, **spent.figures)
    write_targets(experiments.first)
    yield _planned("current", experiments.first, shape, repeats, (total, total))
    yield _row("run up to build-targets, current", shape, **_current(experiments.first, repeats))
    added = total // shape.teachers
    yield _planned("a new teacher", experiments.new_teacher, shape, repeats, (total, total + added))
    added = shape.teachers * changed_buckets(experiments)
    yield _planned("1 % appended", experiments.appended, shape, repeats, (total, total + added))
    for name, figures in stored(experiments.first.parent / "artifacts", shape.texts).items():
        yield _row(f"stored: {name}", shape, **figures)
    yield _row("built in", shape, seconds=round(built, 1))


def _row(name: str, shape: Shape, **figures: Any) -> dict[str, Any]:
    return row("scale", name, texts=shape.texts, teachers=shape.teachers, **figures)


def _planned(name: str, config: Path, shape: Shape, repeats: int, expected: tuple[int, int]) -> dict[str, Any]:
    spent = [measured("plan", "--json", "-c", str(config)) for _ in range(repeats)]
    for run in spent:
        state = next(state for state in json.loads(run.output)["stages"] if state["stage"] == "cache-teachers")
        if state["units"] != {"done": expected[0], "total": expected[1]}:
            raise SystemExit(f"{name}: plan reports {state['units']} units instead of {expected}")
    names = {"seconds": "plan_s", "spread": "spread", "cpu_s": "plan_cpu_s", "peak_rss_mb": "plan_rss_mb"}
    return _row(name, shape, **{names[figure]: value for figure, value in _medians(spent).items()})


def _current(config: Path, repeats: int) -> dict[str, Any]:
    """Returns the median cost of `amalgam build-targets` where all stages before it, and it, are reused."""
    runs = [measured("build-targets", "-c", str(config)) for _ in range(repeats)]
    if any("build-targets: reused" not in run.messages for run in runs):
        raise SystemExit("build-targets is not current")
    return _medians(runs)


def _medians(runs: Sequence[Spent]) -> dict[str, float]:
    """Returns the median cost of several runs, and the largest peak."""
    seconds = [run.seconds for run in runs]
    return {
        "seconds": round(median(seconds), 2),
        "spread": round(spread(seconds), 2),
        "cpu_s": round(median([run.cpu_seconds for run in runs]), 2),
        "peak_rss_mb": round(max(run.peak_mb for run in runs)),
    }


def stored(workspace: Path, texts: int) -> dict[str, dict[str, float]]:
    """Returns files, records and bytes on the disk, by stage and in total."""
    counts: dict[str, Counter[str]] = {}
    for path in workspace.rglob("*"):
        if path.is_file():
            stage = path.relative_to(workspace).parts[0] if path.parent != workspace else "the rest"
            kind = "records" if path.suffix == ".json" else "files"
            size = path.stat().st_size
            counts.setdefault(stage, Counter()).update({kind: 1, f"bytes_of_{kind}": size})
    by_stage = {}
    for stage, counter in {**counts, "all": sum(counts.values(), Counter())}.items():
        figures = {name: counter[name] for name in ("files", "records", "bytes_of_files", "bytes_of_records")}
        each = (figures["bytes_of_files"] + figures["bytes_of_records"]) / texts
        by_stage[stage] = {**figures, "bytes_per_text": round(each, 1)}
    return by_stage


# ---- separate processes


@dataclass(frozen=True)
class Spent:
    """Holds the cost of a command's process."""

    seconds: float
    cpu_seconds: float
    peak_mb: float
    output: str
    messages: str
    """Its stderr."""

    @property
    def figures(self) -> dict[str, float]:
        return {
            "seconds": round(self.seconds, 2),
            "cpu_s": round(self.cpu_seconds, 2),
            "peak_rss_mb": round(self.peak_mb),
        }


def measured(*arguments: str) -> Spent:
    began = time.perf_counter()
    worker = [sys.executable, __file__, "--worker", *arguments]
    done = subprocess.run(worker, check=False, capture_output=True, text=True)
    seconds = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)}: {done.returncode}\n{done.stderr}")
    *output, figures = done.stdout.splitlines()
    cpu, peak = (float(figure) for figure in figures.split())
    return Spent(seconds, cpu, peak, "\n".join(output), done.stderr)


def _work(arguments: list[str]) -> None:
    """Runs a command, and prints its processor seconds and peak memory."""
    from amalgam.cli import main as amalgam

    sys.argv = ["amalgam", *arguments]
    try:
        amalgam()
    except SystemExit as leaving:
        if leaving.code:
            raise
    print(time.process_time(), peak_of_process_mb())  # noqa: T201  the parent process reads it


if __name__ == "__main__":
    main()
