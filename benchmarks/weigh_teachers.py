"""Measures time and memory of the teachers' weights of `method: amalgam`, on synthetic evidence in mapped files.

python benchmarks/weigh_teachers.py [--texts 100000 1000000] [--teachers 5] [--json]

States are fp16 files, as `cache-features` writes them; 10^6 texts of five teachers take 4.6 GB of disk. Each row is a
process. peak_mb is the largest anonymous memory; pages of mapped files are not in it, because the system can drop them.
before_mb is the memory with the predictions loaded.
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
from amalgam.stages.methods import AMALGAM
from amalgam.stages.weigh_teachers import weigh
from amalgam.stages.weigh_teachers.weigh import Evidence, WeightFacts

Array = np.ndarray[Any, np.dtype[Any]]

LABELS = 4
"""Labels of each teacher."""
BLOCK = 100_000
SECONDS = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--teachers", type=int, default=5)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--scratch", type=Path, help="folder of the states (default: the system's)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(_measured(options.worker, options.teachers, options.width)))  # noqa: T201  the parent reads it
        return
    rows = []
    for texts in options.texts:
        with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
            _write(Path(scratch), texts, options.teachers, options.width)
            words = ["--worker", scratch, "--teachers", str(options.teachers), "--width", str(options.width)]
            command = [sys.executable, "-m", "amalgam.benchmarks.weigh_teachers", *words]
            figures = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        rows.append(row("weigh_teachers", f"{texts:,} texts", teachers=options.teachers, **figures))
    show(rows, as_json=options.json)


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
    def __init__(self, path: Path) -> None:
        self.states = np.load(path, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, rows: Any, /) -> Array:
        states: Array = self.states[rows].astype(np.float32)
        return states


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


def _measured(folder: Path, teachers: int, width: int) -> dict[str, Any]:
    random = np.random.default_rng(1)
    right, label = np.load(folder / "right.npy"), np.load(folder / "label.npy")
    is_own = right[:, None] == np.arange(teachers)
    answers = [(is_own * 2 + random.normal(size=is_own.shape)) for _ in range(3)]
    names = is_own + random.normal(size=is_own.shape)
    predicted = (label[:, None] + LABELS * np.arange(teachers)).astype(np.int32)
    spaces = [_Mapped(folder / f"{place}.npy") for place in range(teachers + 1)]
    sampler, began, facts = _Sampler(), time.monotonic(), WeightFacts(notes=[])
    sampler.start()
    targets = Targets.model_validate(AMALGAM)
    kinds = weigh.kinds_of(answers, spaces[:-1], names, LABELS * teachers)
    signal, shares = weigh.agreed_signal(Evidence(kinds, predicted, spaces[-1], spaces[:-1]), targets.neighbours, facts)
    weights, _ = weigh.weigh(signal, answers[0], targets, facts, shares)
    seconds = time.monotonic() - began
    return {
        "width": width,
        "seconds": round(seconds, 1),
        "us_a_text": round(1e6 * seconds / len(right)),
        "before_mb": round(sampler.first),
        "peak_mb": round(sampler.peak),
        "right": round(float((weights.argmax(axis=1) == right).mean()), 3),
    }


if __name__ == "__main__":
    main()
