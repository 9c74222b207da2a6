"""`amalgam predict`: texts in, labels and probabilities out, and how much of them each teacher's labels hold.

A file is checked before anything runs, then asked block by block: memory does not grow with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from amalgam.data.arrays import softmax
from amalgam.data.keys import shown, text_key
from amalgam.pipeline.console import Console
from amalgam.pipeline.errors import ExperimentError
from amalgam.pipeline.execution.interrupts import InterruptHandler
from amalgam.stages.app.student.folder import StudentFolder, columns_of, finished_student
from amalgam.stages.app.student.input import PIPE, InputTexts
from amalgam.stages.app.student.output import check_place, opened

Array = np.ndarray[Any, np.dtype[Any]]

SHOWN = 200
"""Characters of a text, on a terminal."""


@dataclass(frozen=True)
class PredictOptions:
    """What is to be told of each text."""

    top: int = 1
    explain: bool = False


@dataclass(frozen=True)
class Answers:
    """Of texts in their order, the likeliest labels first."""

    labels: list[list[str]]
    probabilities: Array
    masses: Mapping[str, Array]


class Student:
    """A finished student that answers."""

    def __init__(self, finished: StudentFolder, wanted: PredictOptions) -> None:
        self._classifier = finished.load()
        self.labels = self._classifier.labels
        self.top = min(wanted.top, len(self.labels))
        self.columns = columns_of(finished, self.labels) if wanted.explain else {}

    def __call__(self, texts: Sequence[tuple[str, ...]]) -> Answers:

        probabilities = softmax(self._classifier.logits(texts))
        best = np.argsort(-probabilities, axis=1, kind="stable")[:, : self.top]
        return Answers(
            [[self.labels[place] for place in row] for row in best],
            np.take_along_axis(probabilities, best, axis=1),
            {teacher: probabilities[:, places].sum(axis=1) for teacher, places in self.columns.items()},
        )


def answer_texts(
    texts: Sequence[str], *, config: Path, student: Path | None, wanted: PredictOptions, as_json: bool
) -> None:
    """Texts that were typed."""
    if not all(text.strip() for text in texts):
        raise ExperimentError("a text is empty", where="amalgam predict", fix="give it some words")
    asked = Student(finished_student(config, student), wanted)
    answers = asked([(text,) for text in texts])
    if as_json:
        Console().json([_as_json(text, answers, row) for row, text in enumerate(texts)])
        return
    for row, text in enumerate(texts):
        _show(shown(text, SHOWN), answers, row)


def _show(text: str, answers: Answers, row: int) -> None:
    console = Console()
    console.result(text)
    named = dict(zip(answers.labels[row], answers.probabilities[row].tolist(), strict=True))
    masses = {f"labels of {teacher}": float(mass[row]) for teacher, mass in answers.masses.items()}
    width = max(map(len, [*named, *masses]))
    for name, value in [*named.items(), *masses.items()]:
        console.result(f"  {name.ljust(width)}  {value:.3f}")


def _as_json(text: str, answers: Answers, row: int) -> dict[str, Any]:
    named = zip(answers.labels[row], answers.probabilities[row].tolist(), strict=True)
    found: dict[str, Any] = {
        "text": text,
        "key": text_key((text,)).hex(),
        "labels": [{"label": label, "probability": probability} for label, probability in named],
    }
    masses = {teacher: float(mass[row]) for teacher, mass in answers.masses.items()}
    return found | ({"mass": masses} if masses else {})


def answer_file(
    finished: StudentFolder, asked: InputTexts, *, out: Path | None, wanted: PredictOptions, quiet: bool
) -> None:
    """A file's rows, or a pipe's lines, to a file or as csv to stdout."""
    signals, console = InterruptHandler(), Console(quiet=quiet)
    with signals.listening():
        total = asked.check()
        answering = Student(finished, wanted)
        with (
            opened(out, answering.top, list(answering.columns)) as writer,
            console.progress("predict", "texts", total or 0, 0),
        ):
            for block in asked.blocks():
                answers = answering([row.fields for row in block])
                signals.check()
                writer.write(block, answers.labels, answers.probabilities, answers.masses)
                console.advance(len(block))
    skipped = ", ".join(f"{count:,} {reason}" for reason, count in asked.skipped.most_common())
    if skipped:
        console.note(f"rows left out: {skipped}")
    console.say(f"{writer.rows:,} texts -> {out or 'stdout'}")


def from_commands(  # noqa: PLR0913 - the options of the command
    texts: Sequence[str],
    source: str | None,
    out: Path | None,
    *,
    config: Path,
    student: Path | None,
    columns: Sequence[str],
    id_column: str | None,
    top: int,
    explain: bool,
    skip_bad_rows: bool,
    force: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    if bool(texts) == (source is not None):
        what = "give texts, or a file of them with --input" + (", not both" if texts else "")
        raise ExperimentError(what, where="amalgam predict", fix='amalgam predict "some text", or --input texts.csv')
    wanted = PredictOptions(top, explain)
    if source is None:
        if out is not None:
            what = "--out is for texts that come from a file"
            raise ExperimentError(what, where="amalgam predict", fix="--input FILE, or --json > FILE")
        answer_texts(texts, config=config, student=student, wanted=wanted, as_json=as_json)
        return
    if as_json:
        raise ExperimentError("--json is for texts that are typed", where="amalgam predict", fix="--out FILE.parquet")
    check_place(out, force=force)
    finished = finished_student(config, student)
    lines = source == PIPE or source.lower().endswith(".txt")
    asked = InputTexts(source, columns or (["text"] if lines else finished.columns), id_column, skip_bad_rows)
    answer_file(finished, asked, out=out, wanted=wanted, quiet=quiet)
