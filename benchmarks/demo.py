"""Runs both demos with several draws of the teachers, and prints the spread of the students.

python benchmarks/demo.py [--draws 10] [--kinds texts data-free] [--test-texts 5000] [--noise 1e-6]
    [--folder demo-benchmark] [--json]

A draw is a seed of the teachers' training; texts and the student's seed stay. The student is that of `method: amalgam`:
on the demo's texts, and on steered texts. spread is the largest accuracy minus the smallest. below is the number of
draws whose student is less accurate than the ensemble. --test-texts makes further test texts instead of the demo's
1,000, whose sampling error is part of the spread. --noise adds Gaussian noise of this deviation to every cached logit,
as another machine's rounding does; name a folder of its own. An interrupted run resumes.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import pyarrow as pa

from amalgam.benchmarks.protocol import row, show
from amalgam.data.arrays import Array
from amalgam.data.demo_corpus import generate
from amalgam.pipeline.console import Console
from amalgam.stages.app.demo import TEXTS, write_data_free, write_demo
from amalgam.stages.app.runs import run_without_tables
from amalgam.stages.cache_teachers import ask
from amalgam.stages.report.stage import evaluation_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from amalgam.stages.report.json_types import Evaluation

QUIET = Console(quiet=True, tables=False)
FURTHER_SEED = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--kinds", nargs="+", choices=list(DEMOS), default=list(DEMOS))
    parser.add_argument("--test-texts", type=int, default=0)
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--folder", type=Path, default=Path("demo-benchmark"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.noise:
        _add_noise(options.noise)
    rows, test = [], _test_texts(options.folder, options.test_texts)
    for kind in options.kinds:
        draws = [_accuracies(DEMOS[kind](options.folder / kind, draw, test)) for draw in range(options.draws)]
        rows += [row("demo", f"{kind}, draw {draw}", **figures) for draw, figures in enumerate(draws)]
        rows.append(row("demo", kind, **summary(draws)))
    show(rows, as_json=options.json)


def _test_texts(folder: Path, count: int) -> list[str]:
    """Writes `count` test texts that are not the demo's; returns the setting that names them."""
    if not count:
        return []
    own = {text for text, _ in generate(*TEXTS["test"])}
    further = {text: label for text, label in generate(2 * count, FURTHER_SEED, "test") if text not in own}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"further-{count}.parquet"
    pl.DataFrame(list(further.items())[:count], schema=["text", "label"], orient="row").write_parquet(path)
    return [f"corpus.test={path.resolve()}"]


def _add_noise(deviation: float) -> None:
    random, table = np.random.default_rng(0), ask.answer_table

    def noisy(values: Array) -> Array:
        moved: Array = (values + random.normal(0, deviation, values.shape)).astype(values.dtype)
        return moved

    def answer_table(
        keys: list[bytes], lengths: Array, truncated: Array, logits: Array | None, passes: Array
    ) -> pa.Table:
        return table(keys, lengths, truncated, None if logits is None else noisy(logits), noisy(passes))

    ask.answer_table = answer_table


def _with_texts(folder: Path, draw: int, test: Sequence[str]) -> Evaluation:
    write_demo(folder)
    return _evaluated(folder, draw, [f"train_teachers.seed={draw}", *test])


def _data_free(folder: Path, draw: int, test: Sequence[str]) -> Evaluation:
    write_data_free(folder, Console(quiet=True))
    run_without_tables(folder / "with-texts.yaml", [f"train_teachers.seed={draw}"], QUIET, "train-teachers")
    return _evaluated(folder, draw, ["generate.source=steered", *test])


def _evaluated(folder: Path, draw: int, settings: Sequence[str]) -> Evaluation:
    student = ["student.method=amalgam", f"student.name=draw-{draw}"]
    return evaluation_of(run_without_tables(folder / "amalgam.yaml", [*student, *settings], QUIET))


DEMOS = {"texts": _with_texts, "data-free": _data_free}


def _accuracies(scores: Evaluation) -> dict[str, Any]:
    systems = scores["systems"]
    return {
        "student": round(systems[scores["system"]]["accuracy"], 4),
        "ensemble": round(systems["ensemble"]["accuracy"], 4),
        "texts": scores["n"],
    }


def summary(draws: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns mean, extremes and spread of the students, and how many are below their ensemble."""
    students = [draw["student"] for draw in draws]
    return {
        "student": round(statistics.mean(students), 4),
        "ensemble": round(statistics.mean(draw["ensemble"] for draw in draws), 4),
        "lowest": min(students),
        "highest": max(students),
        "spread": round(max(students) - min(students), 4),
        "below": sum(draw["student"] < draw["ensemble"] for draw in draws),
        "draws": len(draws),
    }


if __name__ == "__main__":
    main()
