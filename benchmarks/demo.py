"""Runs both demos with several draws of the teachers, and prints the spread of the students.

python benchmarks/demo.py [--draws 10] [--kinds texts data-free] [--folder demo-benchmark] [--json]

A draw is a seed of the teachers' training; texts and the student's seed stay. The student is that of `method: amalgam`:
on the demo's texts, and on steered texts. spread is the largest accuracy minus the smallest. below is the number of
draws whose student is less accurate than the ensemble. An interrupted run resumes.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amalgam.benchmarks.protocol import row, show
from amalgam.pipeline.console import Console
from amalgam.stages.app.demo import write_data_free, write_demo
from amalgam.stages.app.runs import run_without_tables
from amalgam.stages.report.stage import evaluation_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from amalgam.stages.report.json_types import Evaluation

QUIET = Console(quiet=True, tables=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--kinds", nargs="+", choices=list(DEMOS), default=list(DEMOS))
    parser.add_argument("--folder", type=Path, default=Path("demo-benchmark"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for kind in options.kinds:
        draws = [_accuracies(DEMOS[kind](options.folder / kind, draw)) for draw in range(options.draws)]
        rows += [row("demo", f"{kind}, draw {draw}", **figures) for draw, figures in enumerate(draws)]
        rows.append(row("demo", kind, **summary(draws)))
    show(rows, as_json=options.json)


def _with_texts(folder: Path, draw: int) -> Evaluation:
    write_demo(folder)
    return _evaluated(folder, draw, [f"train_teachers.seed={draw}"])


def _data_free(folder: Path, draw: int) -> Evaluation:
    write_data_free(folder, Console(quiet=True))
    run_without_tables(folder / "with-texts.yaml", [f"train_teachers.seed={draw}"], QUIET, "train-teachers")
    return _evaluated(folder, draw, ["generate.source=steered"])


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
