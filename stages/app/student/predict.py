"""Predicts labels and probabilities of texts, and the summed probability of each teacher's labels (`amalgam predict`).

A file is checked before the model loads, then read in blocks; memory does not grow with it.
"""

from __future__ import annotations

import csv
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self, TextIO

import numpy as np

from amalgam.data.arrays import softmax
from amalgam.data.keys import shown, text_key
from amalgam.data.parquet import parquet_options
from amalgam.data.rows import BadRow, Row, read_lines, read_rows
from amalgam.data.schemas import Column, arrow_schema, predictions
from amalgam.data.sources import SUFFIXES
from amalgam.pipeline.config.schema import Corpus
from amalgam.pipeline.console import Console
from amalgam.pipeline.errors import DataError, ExperimentError
from amalgam.pipeline.execution.interrupts import InterruptHandler
from amalgam.pipeline.storage.local import atomic_write
from amalgam.stages.app.student.folder import StudentFolder, columns_of, finished_student

Array = np.ndarray[Any, np.dtype[Any]]

SHOWN = 200
"""Largest number of characters of a text on a terminal."""


@dataclass(frozen=True)
class PredictOptions:
    """Number of labels for each text, and whether to add each teacher's probability."""

    top: int = 1
    explain: bool = False


@dataclass(frozen=True)
class Answers:
    """Predictions in the order of the texts, the most likely labels first."""

    labels: list[list[str]]
    probabilities: Array
    masses: Mapping[str, Array]


class Student:
    """Predicts with a trained student."""

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
    """Prints the predictions of texts from the command line."""
    if not all(text.strip() for text in texts):
        raise ExperimentError("a text is empty", where="amalgam predict", fix="remove it")
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
    entry: dict[str, Any] = {
        "text": text,
        "key": text_key((text,)).hex(),
        "labels": [{"label": label, "probability": probability} for label, probability in named],
    }
    masses = {teacher: float(mass[row]) for teacher, mass in answers.masses.items()}
    return entry | ({"mass": masses} if masses else {})


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


BLOCK_ROWS = 8192

BLOCK_CHARACTERS = 1 << 24

PIPE = "-"


@dataclass
class InputTexts:
    """Source of the input texts, and how to read it."""

    source: str
    columns: Sequence[str]
    id_column: str | None
    skip_bad_rows: bool
    skipped: Counter[str] = field(default_factory=Counter)

    def check(self) -> int | None:
        """Reads every row once and returns their number, or None for a pipe."""
        if self.source == PIPE:
            return None
        path = Path(self.source)
        if not path.is_file():
            raise DataError(
                "the input file does not exist",
                where=str(path.absolute()),
                fix="set --input FILE, or - for a pipe",
            )
        if path.suffix.lower() not in (*SUFFIXES, ".txt"):
            fix = f"supported types: {', '.join(SUFFIXES)} and .txt (one text a line)"
            raise DataError(f"{shown(path.name)} has no supported file type", where=str(path), fix=fix)
        if path.suffix.lower() == ".txt" and (self.id_column or len(self.columns) > 1):
            raise ExperimentError("a .txt file has no columns", where=str(path), fix="omit --id, and give --text once")
        count = sum(1 for _ in self.rows())
        self.skipped.clear()
        if not count:
            raise DataError(f"no rows in {shown(path.name)}", where=str(path), fix="fill it, or name another")
        return count

    def blocks(self) -> Iterator[list[Row]]:
        block, characters = list[Row](), 0
        for row in self.rows():
            block.append(row)
            characters += sum(map(len, row.fields))
            if len(block) == BLOCK_ROWS or characters >= BLOCK_CHARACTERS:
                yield block
                block, characters = [], 0
        if block:
            yield block

    def rows(self) -> Iterator[Row]:
        for row in self._found():
            if isinstance(row, Row):
                yield row
            elif self.skip_bad_rows:
                self.skipped[row.reason] += 1
            else:
                what = f"a row cannot be used: {row.reason}"
                raise DataError(what, where=row.where, fix=f"{row.fix}; or skip such rows with --skip-bad-rows")

    def _found(self) -> Iterator[Row | BadRow]:
        if self.source == PIPE:
            yield from read_lines(sys.stdin.buffer, "the pipe")
            return
        path = Path(self.source)
        if path.suffix.lower() == ".txt":
            with path.open("rb") as file:
                yield from read_lines(file, shown(path.name, 200))
            return
        corpus = Corpus(train=None, text=list(self.columns), id=self.id_column or "auto")
        yield from read_rows(path, corpus=corpus, setting="--{} ")


KINDS = (".parquet", ".csv")

DIGITS = 6
"""Decimals of a probability in csv."""


class Writer(Protocol):
    rows: int

    def write(
        self, rows: Sequence[Row], labels: Sequence[Sequence[str]], probabilities: Any, masses: Mapping[str, Any]
    ) -> None: ...


@contextmanager
def opened(out: Path | None, top: int, teachers: Sequence[str]) -> Iterator[Writer]:
    """Yields a writer to a temporary file, which replaces the output once it is complete."""
    columns = predictions(top, teachers)
    if out is None:
        yield _Csv(sys.stdout, columns)
        return
    with atomic_write(out) as temporary:
        if out.suffix.lower() == ".csv":
            with temporary.open("w", encoding="utf-8", newline="") as file:
                yield _Csv(file, columns)
        else:
            with _Parquet(temporary, columns) as writer:
                yield writer


def check_place(out: Path | None, *, force: bool) -> None:
    """Refuses an output file that could not be written, before the model loads."""
    if out is None:
        return
    if out.suffix.lower() not in KINDS:
        what = f"{shown(out.name)} has no supported file type"
        raise ExperimentError(what, where=f"--out {out}", fix=f"end it in {' or '.join(KINDS)}")
    if not out.absolute().parent.is_dir():
        raise ExperimentError("the folder does not exist", where=f"--out {out}", fix=f"mkdir -p {out.parent}")
    if out.exists() and not force:
        raise ExperimentError(f"{shown(out.name)} exists", where=f"--out {out}", fix="add --force, or name another")


class _Csv:
    def __init__(self, file: TextIO, columns: Sequence[Column]) -> None:
        self.rows = 0
        self._writer = csv.writer(file, lineterminator="\n")
        self._writer.writerow([column.name for column in columns])

    def write(
        self, rows: Sequence[Row], labels: Sequence[Sequence[str]], probabilities: Any, masses: Mapping[str, Any]
    ) -> None:
        self.rows += len(rows)
        shares = zip(*(mass.tolist() for mass in masses.values()), strict=True) if masses else ((),) * len(rows)
        for row, names, values, share in zip(rows, labels, probabilities.tolist(), shares, strict=True):
            named = [cell for name, value in zip(names, values, strict=True) for cell in (name, round(value, DIGITS))]
            own = [row.number, text_key(row.fields).hex(), "" if row.id is None else row.id]
            self._writer.writerow([*own, *named, *(round(value, DIGITS) for value in share)])


class _Parquet:
    def __init__(self, path: Path, columns: Sequence[Column]) -> None:
        import pyarrow.parquet as pq

        self.rows = 0
        self._schema = arrow_schema(columns)
        self._writer: Any = pq.ParquetWriter(path, self._schema, **parquet_options(self._schema))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()

    def write(
        self, rows: Sequence[Row], labels: Sequence[Sequence[str]], probabilities: Any, masses: Mapping[str, Any]
    ) -> None:
        import pyarrow as pa

        self.rows += len(rows)
        own = [[row.number for row in rows], [text_key(row.fields) for row in rows], [row.id for row in rows]]
        named = [
            values
            for place in range(probabilities.shape[1])
            for values in ([names[place] for names in labels], probabilities[:, place])
        ]
        values = [*own, *named, *masses.values()]
        arrays = [pa.array(column, field.type) for column, field in zip(values, self._schema, strict=True)]
        self._writer.write_table(pa.Table.from_arrays(arrays, schema=self._schema))
