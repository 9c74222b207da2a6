"""Compares build-targets with a plain Polars scan of the same files, in time and memory from 10^5 to 10^7 texts.

python benchmarks/build_targets.py [--texts 100000 1000000 10000000] [--mode soft] [--json]

The texts are keys and the answers random numbers (synthetic_workspace.py), in the format of cache-teachers.
Each figure comes from a separate process with its imports done. The files are in the page cache.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amalgam.benchmarks.protocol import interleaved, median, paired, peak_of_process_mb, row, show, spread
from amalgam.benchmarks.synthetic_workspace import (
    Shape,
    lacking,
    write_answers,
    write_corpora,
    write_experiments,
)

if TYPE_CHECKING:
    from amalgam.pipeline.execution.stage import Run

SAMPLE = 64
CLOSE = 1e-6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, nargs="+", default=[100_000, 1_000_000, 10_000_000])
    parser.add_argument("--teachers", type=int, default=2)
    parser.add_argument("--labels", type=int, default=4, help="labels of each teacher")
    parser.add_argument("--passes", type=int, default=16)
    parser.add_argument("--mode", choices=("soft", "hard", "vanilla-kd"), default="soft")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--scratch", type=Path, help="folder of the synthetic workspaces (default: the system's)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", nargs=2, metavar=("WHAT", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        what, folder = options.worker
        print(json.dumps(WORKERS[what](Path(folder), options.mode)))  # noqa: T201  the parent process reads it
        return
    rows = []
    for texts in options.texts:
        with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
            rows += _compared(Path(scratch) / "run", texts, options)
    show(rows, as_json=options.json)


def _compared(base: Path, texts: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    shape = Shape(texts, options.teachers, options.labels, options.passes, whole=True)
    experiments = write_experiments(base, shape)
    write_corpora(experiments, shape)
    write_answers(experiments.first, lacking(experiments.first), shape)
    _in_own_process("amalgam", base, options.mode)  # the first run closes the manifests of the stages before
    peaks: dict[str, list[float]] = {name: [] for name in WORKERS}
    figures: dict[str, dict[str, Any]] = {}

    def measure(worker: str) -> float:
        figures[worker] = _in_own_process(worker, base, options.mode)
        peaks[worker].append(figures[worker]["peak_rss_mb"])
        return float(figures[worker]["seconds"])

    seconds = interleaved({worker: partial(measure, worker) for worker in WORKERS}, options.repeats)
    _gate(base, shape, options.mode)
    return [
        row(
            "build-targets",
            worker,
            texts=texts,
            texts_per_s=round(texts / median(taken)),
            seconds=round(median(taken), 2),
            spread=round(spread(taken), 3),
            of_scan=round(paired(taken, seconds["polars scan"]), 2),
            peak_rss_mb=round(max(peaks[worker])),
            mb_read=round(figures[worker]["bytes"] / 1e6),
            files=figures[worker]["files"],
        )
        for worker, taken in seconds.items()
    ]


def _in_own_process(what: str, base: Path, mode: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--mode", mode, "--worker", what, str(base)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _build(base: Path, mode: str) -> dict[str, Any]:
    """Runs `amalgam build-targets`, from the search for missing units to the closed manifest."""
    for library in ("numpy.ma", "polars", "pyarrow.compute", "pyarrow.parquet"):
        import_module(library)  # before the clock starts, as Polars for the scan

    from amalgam.pipeline.execution.runner import update
    from amalgam.stages.registry import STAGES

    run = _run(base, mode)
    shutil.rmtree(run.store.root / "build-targets", ignore_errors=True)
    began = time.perf_counter()
    update(STAGES, run, target="build-targets")
    seconds = time.perf_counter() - began
    return _figures(seconds, [*_with_passes(run), *_texts(run)])


def _run(base: Path, mode: str) -> Run:
    from amalgam.pipeline.console import Console
    from amalgam.stages.app.runs import open_run

    return open_run(base / "first.yaml", [f"targets.mode={mode}"], console=Console(quiet=True))


def _with_passes(run: Run) -> list[Path]:
    """Returns the files of training texts. Test texts have only the logits without dropout."""
    manifest = run.store.record(next(run.store.root.glob("cache-teachers/*/MANIFEST.json")))
    if manifest is None:
        raise SystemExit("the synthetic workspace has no cache")
    ranges = manifest.facts["ranges"]
    return [run.store.path(file) for file in manifest.files if ranges[file.path][1] > 0]


def _texts(run: Run) -> list[Path]:
    """Returns the files of the corpus that have the keys and gold labels of the training texts."""
    from amalgam.pipeline.execution.runner import update
    from amalgam.stages.common.load import train_part
    from amalgam.stages.registry import STAGES

    update(STAGES, run, target="read-corpus")
    return [run.store.path(bucket.file) for bucket in train_part(run).buckets]


def _scan(base: Path, mode: str) -> dict[str, Any]:
    """Reads and sums the columns that build-targets uses: the minimum work on these files.

    Polars sums fp16 numbers slowly, so the passes are sums of fp32.
    """
    import polars as pl

    from amalgam.data.arrays import width

    run = _run(base, mode)
    answers, texts = _with_passes(run), _texts(run)
    empty = pl.read_parquet(answers[0], n_rows=0)
    wide = {name: pl.Array(pl.Float32, width(empty[name])) for name in ("logits", "passes")}
    began = time.perf_counter()
    sums = [pl.col(name).cast(dtype).arr.sum().sum() for name, dtype in wide.items()]
    scans = [
        pl.scan_parquet(answers).select(pl.col("key").max(), *sums),
        pl.scan_parquet(texts).select("key", "label").count(),
    ]
    pl.collect_all(scans, engine="streaming")
    return _figures(time.perf_counter() - began, [*answers, *texts])


def _figures(seconds: float, files: list[Path]) -> dict[str, Any]:
    total = sum(path.stat().st_size for path in files)
    return {"seconds": seconds, "peak_rss_mb": peak_of_process_mb(), "bytes": total, "files": len(files)}


def _gate(base: Path, shape: Shape, mode: str) -> None:
    """Checks that every text has a target, and compares a sample with NumPy's result for the raw passes."""
    import numpy as np
    import polars as pl

    from amalgam.data.arrays import softmax
    from amalgam.pipeline.execution.runner import update
    from amalgam.stages.registry import STAGES

    run = _run(base, mode)
    update(STAGES, run, target="build-targets")
    targets = pl.scan_parquet([run.store.path(file) for file in run.result("build-targets").files])
    if targets.select(pl.len()).collect().item() != shape.texts:
        raise SystemExit("some texts have no target")
    if mode != "soft":
        return
    sample = targets.head(SAMPLE).collect()
    cached = pl.scan_parquet(_with_passes(run), include_file_paths="file")
    answers = cached.filter(pl.col("key").is_in(sample["key"].implode())).collect()
    confidences = []
    for _, teacher in answers.group_by(pl.col("file").str.extract(r"([^/]+)/[^/]+/[^/]+$"), maintain_order=True):
        ordered = sample.select("key").join(teacher, on="key", how="left", maintain_order="left")
        passes = ordered["passes"].to_numpy().astype(np.float64).reshape(SAMPLE, shape.passes, shape.labels)
        mean = softmax(passes).mean(axis=1)
        confidences.append(1 + (mean * np.log(mean)).sum(axis=1) / np.log(shape.labels))
    expected = [np.sort(confidence) for confidence in np.stack(confidences, axis=1)]
    actual = np.sort(sample["confidence"].to_numpy(), axis=1)
    if not np.allclose(actual, expected, atol=1e-5) or not np.allclose(sample["target"].arr.sum(), 1, atol=CLOSE):
        raise SystemExit("the targets differ from those computed from the raw passes")


WORKERS = {"amalgam": _build, "polars scan": _scan}


if __name__ == "__main__":
    main()
