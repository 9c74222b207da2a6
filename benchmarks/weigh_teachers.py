"""Measures time and memory of the teachers' weights of `method: amalgam`, on synthetic evidence in mapped files.

python benchmarks/weigh_teachers.py [--texts 100000 1000000] [--processes 1 2] [--teachers 5] [--json]

States are fp16 files, as `cache-features` writes them; 10^6 texts of five teachers take 4.6 GB of disk. The first block
of texts is fitted, and the processes divide the others, as the stage does; neither its files nor cached predictions are
read. seconds is until the last process ends, without its start; cpu_seconds is of all processes. peak_mb is the largest
anonymous memory of a process; pages of mapped files are not in it, because the system can drop them. before_mb is the
memory before the work. difference is the largest of a weight from that with the first number of processes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from amalgam.benchmarks.protocol import row, show
from amalgam.pipeline.config.schema import Targets
from amalgam.stages.common.corpus import UNIT_TEXTS
from amalgam.stages.methods import AMALGAM
from amalgam.stages.weigh_teachers import weigh
from amalgam.stages.weigh_teachers.neighbours import BlockSpace, compared
from amalgam.stages.weigh_teachers.signals import Params
from amalgam.stages.weigh_teachers.weigh import Evidence

Array = np.ndarray[Any, np.dtype[Any]]

LABELS = 4
"""Labels of each teacher."""
BLOCK = 100_000
FITTED = "fitted.safetensors"
SECONDS = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--processes", type=int, nargs="+", default=[1])
    parser.add_argument("--teachers", type=int, default=5)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--scratch", type=Path, help="folder of the states (default: the system's)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--share", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(_measured(options.worker, options.teachers, *options.share)))  # noqa: T201  the parent reads it
        return
    rows = []
    for texts in options.texts:
        with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
            _write(Path(scratch), texts, options.teachers, options.width)
            for processes in options.processes:
                figures = _with_processes(Path(scratch), texts, options.teachers, processes, options.processes[0])
                about = {"teachers": options.teachers, "width": options.width, "processes": processes}
                rows.append(row("weigh_teachers", f"{texts:,} texts", **about, **figures))
    show(rows, as_json=options.json)


def _with_processes(folder: Path, texts: int, teachers: int, processes: int, first: int) -> dict[str, Any]:
    """Returns the figures of all processes, and compares their weights with those of the first number of processes."""
    words = [sys.executable, "-m", "amalgam.benchmarks.weigh_teachers", "--worker", str(folder)]
    words += ["--teachers", str(teachers), "--share"]
    commands = [[*words, str(place), str(processes)] for place in range(processes)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    outputs = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit("a process failed")
    (folder / FITTED).unlink()
    figures = [json.loads(output) for output in outputs]
    blocks = sorted((folder / f"weights-{processes}").glob("*.npy"))
    before = folder / f"weights-{first}"
    largest = max(float(np.abs(np.load(path) - np.load(before / path.name)).max()) for path in blocks)
    seconds = max(figure["ended"] for figure in figures) - min(figure["began"] for figure in figures)
    return {
        "seconds": round(seconds, 1),
        "cpu_seconds": round(sum(figure["cpu_seconds"] for figure in figures), 1),
        "us_a_text": round(1e6 * seconds / texts),
        "before_mb": max(figure["before_mb"] for figure in figures),
        "peak_mb": max(figure["peak_mb"] for figure in figures),
        "right": round(sum(figure["right"] for figure in figures) / texts, 3),
        "difference": largest,
    }


def _write(folder: Path, texts: int, teachers: int, width: int) -> None:
    """Writes clustered states: a teacher separates the classes of its own texts, and other texts are between them."""
    random = np.random.default_rng(0)
    right = random.integers(teachers, size=texts)
    classes = random.normal(size=(teachers + 1, LABELS, width)).astype(np.float32)
    label = random.integers(LABELS, size=texts)
    np.save(folder / "right.npy", right)
    np.save(folder / "label.npy", label)
    for teacher in range(teachers + 1):
        states = np.lib.format.open_memmap(folder / f"{teacher}.npy", "w+", np.float16, (texts, width))
        for start in range(0, texts, BLOCK):
            rows = slice(start, min(start + BLOCK, texts))
            noise = random.normal(size=(rows.stop - start, width)).astype(np.float32)
            own = np.where(right[rows] == teacher, 1.0, 0.2)[:, None] if teacher < teachers else 0.5
            states[rows] = own * classes[teacher][label[rows]] + noise


class _Mapped:
    def __init__(self, path: Path, rows: slice) -> None:
        self.states = np.load(path, mmap_mode="r")[rows]

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, rows: Any, /) -> Array:
        return self.states[rows].astype(np.float32)


class _Sampler(threading.Thread):
    """Samples the anonymous memory of the process, in MB."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self.first = 0.0, _anonymous_mb()

    def run(self) -> None:
        while True:
            self.peak = max(self.peak, _anonymous_mb())
            time.sleep(SECONDS)


def _anonymous_mb() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) / 1024


def _measured(folder: Path, teachers: int, share: int, processes: int) -> dict[str, Any]:
    """Computes and writes the weights of this process's blocks."""
    (folder / f"weights-{processes}").mkdir(exist_ok=True)
    texts = len(np.load(folder / "right.npy", mmap_mode="r"))
    starts = list(range(0, texts, UNIT_TEXTS))
    sampler, began, before, right = _Sampler(), time.time(), time.process_time(), 0
    sampler.start()
    for start in starts[share::processes]:
        while start and not (folder / FITTED).exists():
            time.sleep(SECONDS)
        rows = slice(start, min(start + UNIT_TEXTS, texts))
        params = Params.load(folder / FITTED) if start else Params()
        weights, own = _weights(folder, teachers, rows, slice(0, min(UNIT_TEXTS, texts)), params)
        if not start:
            params.save(folder / "new")
            (folder / "new").rename(folder / FITTED)
        np.save(folder / f"weights-{processes}" / f"{start:010d}.npy", weights)
        right += int((weights.argmax(axis=1) == own).sum())
    used = {"cpu_seconds": time.process_time() - before, "peak_mb": round(sampler.peak)}
    return {"began": began, "ended": time.time(), "right": right, "before_mb": round(sampler.first), **used}


def _weights(folder: Path, teachers: int, rows: slice, first: slice, params: Params) -> tuple[Array, Array]:
    """Returns the weights of a block, and the right teachers; predictions and names are drawn."""
    random = np.random.default_rng([1, rows.start])
    right, label = (np.load(folder / f"{name}.npy", mmap_mode="r")[rows] for name in ("right", "label"))
    is_own = right[:, None] == np.arange(teachers)
    answers = [(is_own * 2 + random.normal(size=is_own.shape)) for _ in range(3)]
    names, tokens = (is_own + random.normal(size=is_own.shape) for _ in range(2))
    predicted = (label[:, None] + LABELS * np.arange(teachers)).astype(np.int32)
    files = [folder / f"{place}.npy" for place in range(teachers + 1)]
    *own, encoder = (BlockSpace(_Mapped(file, rows), _Mapped(file, first), rows.start) for file in files)
    targets = Targets.model_validate(AMALGAM)
    labels = LABELS * teachers
    among = compared(encoder, own, own, labels, targets.neighbours)
    kinds = weigh.kinds_of(answers, among.relative, names, tokens, params)
    evidence = Evidence(kinds, predicted, labels, among.near, spaces=among.spaces)
    signal, shares = weigh.joint_signal(evidence, params)
    if signal is None:
        return weigh.by_confidence(answers[0], predicted, targets), right
    return weigh.weigh(weigh.with_maps(signal, evidence, params)[0], targets, shares, params)[0], right


if __name__ == "__main__":
    main()
