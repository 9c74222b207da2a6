"""Predicts typed texts, or those of a file or a pipe, with a finished student (`amalgam predict`).

A file is checked before the model loads, then read in blocks; memory does not grow with it.
"""

from __future__ import annotations

import csv
import io
import os
import re
import select
import shlex
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from amalgam.data.corpus import MissingText, count_missing, missing_notes
from amalgam.data.keys import shown, shown_name, text_key
from amalgam.data.lazy import np, pa, pq
from amalgam.data.parquet import Column, arrow_schema, parquet_options, predictions
from amalgam.data.rows import INSTEAD, BadRow, Row, fix_of_rows, has_surrogate, listed_reasons, read_lines, read_rows
from amalgam.pipeline.config import proposals
from amalgam.pipeline.config.schema import Corpus, ExperimentConfig
from amalgam.pipeline.console import Console, counted, padded, printing, width_of
from amalgam.pipeline.errors import DataError, ExperimentError, nearest
from amalgam.pipeline.input_files import SUFFIXES, in_commands, is_texts, kind_of, program_of
from amalgam.pipeline.signals import InterruptHandler, without_units
from amalgam.pipeline.storage.local import atomic_write
from amalgam.pipeline.user_paths import check_writable, expanded, user_path, writing
from amalgam.stages.app.student import Predictions, Student, StudentFolder, UnknownTexts, finished_student, name_student
from amalgam.stages.common.deliveries import STUDENTS

SHOWN = 200
"""Largest number of characters of a text on a terminal."""

BLOCK_ROWS = 8192
BLOCK_CHARACTERS = 1 << 24
BLOCK_SECONDS = 1.0
"""Longest wait of a line from a pipe for further lines, if its prediction is printed."""
PIPE_BYTES = 1 << 16
PIPE = "-"
OVERRIDE = re.compile(rf"({'|'.join(ExperimentConfig.model_fields)})\.[a-z_.]+=")
"""The start of an override, which other commands take where `predict` takes texts."""
OUTPUTS = (".parquet", ".csv")
FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""First characters with which a spreadsheet program takes a cell of csv for a formula; such a cell gets a quote."""
NUMBER = re.compile(r"[-+]?[0-9.]+")
DIGITS = 6
"""Decimals of a probability in csv."""


# ---- the command


def predict(  # noqa: PLR0913 - the options of the command
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
    unknown: bool,
    skip_bad_rows: bool,
    force: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    if bool(texts) == (source is not None):
        raise _not_one_input(texts, config)
    load = partial(Student, top=top, explain=explain, unknown=unknown)
    if source is None:
        of_files = {"--out": out, "--id": id_column, "--text": columns, "--skip-bad-rows": skip_bad_rows}
        _check_typed(texts, config, [name for name, value in of_files.items() if value])
        _predict_typed(texts, config, student, load, quiet=quiet, as_json=as_json)
        return
    if as_json:
        raise ExperimentError("--json is for texts that are typed", where="amalgam predict", fix="--out FILE.parquet")
    _check_output(out, source, force=force)
    finished = finished_student(config, student)
    _check_columns(columns, id_column, source)
    columns = columns or (["text"] if _has_lines(source) else finished.columns)
    inputs = InputTexts(source, columns, id_column, skip_bad_rows, Pipe() if source == PIPE and not out else None)
    finished.check_pairs(len(inputs.columns), f"--input {shown(source)}")
    signals, console = InterruptHandler(), Console(quiet=quiet)
    # A read that waits for a pipe continues after a signal, unless the handler raises.
    end = "no output was written" if out else "the output is incomplete"
    with without_units(end), nullcontext() if source == PIPE else signals.listening():
        total = inputs.check()
        if total == 0:
            console.note(f"no rows in {shown(Path(source).name)}: the output has no rows")
        name_student(console, finished, config, chosen=student is not None)
        model = load(finished)
        with (
            _output(out, predictions(model.top, list(model.positions), unknown=unknown)) as write,
            console.progress("predict", "texts", total or 0, 0),
        ):
            for block in inputs.blocks():
                values = _columns(block, model([row.fields for row in block]))
                signals.check()
                write(values)
                console.advance(len(block))
    if inputs.skipped:
        console.note(f"rows left out: {listed_reasons(inputs.skipped)}", always=True)
    for note in missing_notes(inputs.missing, "row"):
        console.note(note)
    _note_truncated(console, model)
    console.say(f"{counted(inputs.predicted, 'text')} -> {out or 'stdout'}")


def _predict_typed(  # noqa: PLR0913 - two options of the command
    texts: Sequence[str],
    config: Path,
    student: Path | None,
    load: Callable[[StudentFolder], Student],
    *,
    quiet: bool,
    as_json: bool,
) -> None:
    finished, console = finished_student(config, student), Console(quiet=quiet)
    finished.check_pairs(1, "amalgam predict")
    name_student(console, finished, config, chosen=student is not None)
    with without_units("the output is incomplete"):
        model = load(finished)
        _print_predictions(texts, model, as_json=as_json)
    _note_truncated(console, model)


def _note_truncated(console: Console, student: Student) -> None:
    if note := student.note:
        console.note(note)


def _print_predictions(texts: Sequence[str], student: Student, *, as_json: bool) -> None:
    result, console = student([(text,) for text in texts]), Console()
    entries: list[dict[str, Any]] = []
    for row, text in enumerate(texts):
        shares = dict(zip(result.labels[row], result.probabilities[row].tolist(), strict=True))
        masses = {teacher: float(mass[row]) for teacher, mass in result.masses.items()}
        ranked = [{"label": label, "probability": share} for label, share in shares.items()]
        key, fingerprint = text_key((text,)).hex(), student.finished.fingerprint
        entry = {"text": text, "key": key, "student": fingerprint, "labels": ranked}
        entries.append(entry | ({"mass": masses} if masses else {}) | _unknown_entry(result.unknown, row))
        if not as_json:
            console.result(shown(text, SHOWN))
            named = [(shown_name(label), share) for label, share in shares.items()]
            named += [(f"labels of {teacher}", mass) for teacher, mass in masses.items()]
            width = max(width_of(name) for name, _ in named)
            for name, value in named:
                console.result(f"  {padded(name, width)}  {value:.3f}")
            if result.unknown:
                flag = "yes" if result.unknown.flags[row] else "no"
                figures = f"score {result.unknown.scores[row]:.3f}, threshold {result.unknown.threshold:.3f}"
                console.result(f"  unknown: {flag} ({figures})")
    if as_json:
        console.json(entries)


def _unknown_entry(unknown: UnknownTexts | None, row: int) -> dict[str, Any]:
    if unknown is None:
        return {}
    flag, score = bool(unknown.flags[row]), float(unknown.scores[row])
    return {"unknown": {"flag": flag, "score": score, "threshold": unknown.threshold, "source": unknown.source}}


# ---- texts from a file or a pipe


class Pipe:
    """Reads lines of standard input, and reports whether a further one arrives in time."""

    def __init__(self) -> None:
        self._descriptor, self._lines, self._rest = sys.stdin.fileno(), deque[bytes](), b""

    def readline(self, limit: int) -> bytes:
        while not self._lines and len(self._rest) < limit:
            data = os.read(self._descriptor, PIPE_BYTES)
            if not data:
                break
            *lines, self._rest = (self._rest + data).split(b"\n")
            self._lines.extend(line + b"\n" for line in lines)
        if self._lines:
            return self._lines.popleft()[:limit]
        line, self._rest = self._rest[:limit], self._rest[limit:]
        return line

    def has_more(self, end: float) -> bool:
        """Returns whether there is a line, or bytes arrive until this time of the monotonic clock."""
        wait = max(0.0, end - time.monotonic())
        return bool(self._lines or select.select([self._descriptor], [], [], wait)[0])


@dataclass
class InputTexts:
    source: str
    columns: Sequence[str]
    id_column: str | None
    skip_bad_rows: bool
    pipe: Pipe | None = None
    """The pipe whose texts are predicted soon after they arrive."""
    skipped: Counter[str] = field(default_factory=Counter)
    predicted: int = 0
    missing: dict[str, MissingText] = field(default_factory=dict)

    def check(self) -> int | None:
        """Reads every row once and returns their number, or None for a pipe. A file without rows is no error."""
        if self.source == PIPE:
            return None
        path = _input_file(self.source)
        count, bad, fixes = 0, Counter[str](), dict[str, str]()
        for row in self._rows():
            if isinstance(row, Row):
                count += 1
            else:
                bad[row.reason] += 1
                fixes.setdefault(row.reason, row.fix)
        if bad and not count:
            what = f"no row of {shown(path.name)} can be used: {listed_reasons(bad)}"
            raise DataError(what, where=str(path), fix=fix_of_rows(fixes))
        return count

    def blocks(self) -> Iterator[list[Row]]:
        """Yields the usable rows in blocks of bounded size, and counts them and the others."""
        block, characters, end = list[Row](), 0, 0.0
        for row in self._rows():
            if isinstance(row, BadRow):
                self.skipped[row.reason] += 1
                continue
            end = end if block else time.monotonic() + BLOCK_SECONDS
            block.append(row)
            characters += sum(map(len, row.fields))
            self.predicted += 1
            count_missing(row, self.missing)
            is_full = len(block) == BLOCK_ROWS or characters >= BLOCK_CHARACTERS
            if is_full or (self.pipe and not self.pipe.has_more(end)):
                yield block
                block, characters = [], 0
        if block:
            yield block

    def _rows(self) -> Iterator[Row | BadRow]:
        """Yields every row; a row that cannot be used is an error without --skip-bad-rows."""
        for row in self._read():
            if isinstance(row, BadRow) and not self.skip_bad_rows:
                what = f"a row cannot be used: {row.reason}"
                raise DataError(what, where=row.where, fix=f"{row.fix}; or skip such rows with --skip-bad-rows")
            yield row

    def _read(self) -> Iterator[Row | BadRow]:
        if self.source == PIPE:
            yield from read_lines(self.pipe or sys.stdin.buffer, "the pipe")
        else:
            corpus = Corpus(train=None, text=list(self.columns), id=self.id_column or "auto")
            yield from read_rows(expanded(self.source), corpus=corpus, setting="--{} ")


# ---- checks


def _not_one_input(texts: Sequence[str], config: Path) -> ExperimentError:
    what = "give texts, or a file of them with --input" + (", not both" if texts else "")
    fix = f'amalgam predict "some text"{proposals.file_option(config)}, or --input texts.csv; for a pipe, --input -'
    if setting := next(filter(OVERRIDE.match, texts), None):
        what = f"predict takes no overrides, such as {shown(setting)}"
        fix = _option_for(setting, config)
    return ExperimentError(what, where="amalgam predict", fix=fix)


def _option_for(setting: str, config: Path) -> str:
    """Returns the fix for an override: the option that does the same, if there is one."""
    name, _, value = setting.partition("=")
    if name == "student.name":
        return f"write --student {shlex.quote(str(config.parent / STUDENTS / value))}"
    return "leave it out" + ("; --skip-bad-rows leaves out unusable rows" if name == "corpus.on_bad_row" else "")


def _check_typed(texts: Sequence[str], config: Path, of_files: Sequence[str]) -> None:
    """Refuses typed texts that are no texts (blank ones, settings, names of files), and options for files."""
    if not all(text.strip() for text in texts):
        raise ExperimentError("a text is empty", where="amalgam predict", fix="remove it")
    if any(map(has_surrogate, texts)):
        fix = "type it in UTF-8, or read it from a file with --input"
        raise ExperimentError("a text is not UTF-8", where="amalgam predict", fix=fix)
    for text in texts:
        if OVERRIDE.match(text):
            fix = f"{_option_for(text, config)}; --input FILE reads such texts"
            raise ExperimentError(f"{shown(text)} is a setting, not a text", where="amalgam predict", fix=fix)
        if text == PIPE:
            fix = f"amalgam predict --input {PIPE}{proposals.file_option(config)}"
            raise ExperimentError("- is a pipe, and was given as a text", where="amalgam predict", fix=fix)
        if kind_of(Path(text[-100:])) not in (*SUFFIXES, ".txt"):
            continue
        if os.path.isfile(text):  # noqa: PTH113 - no error of a long text
            fix = f"amalgam predict --input {shlex.quote(text)}{proposals.file_option(config)}"
            raise ExperimentError(f"{text} is a file, and was given as a text", where="amalgam predict", fix=fix)
        if len(text.split()) == 1:
            what, fix = f"{shown(text)} looks like a file, and does not exist", "name a file with --input FILE"
            raise ExperimentError(what, where="amalgam predict", fix=f"{fix}; pipe such a text to --input {PIPE}")
    if of_files:
        what, fix = f"{of_files[0]} is for texts that come from a file", "--input FILE, or --json > FILE"
        raise ExperimentError(what, where="amalgam predict", fix=fix)


def _input_file(source: str) -> Path:
    """Returns the path of the input; refuses one that is no file of texts."""
    path = user_path(source, kind=DataError, where="--input")
    if path.is_dir():
        names = sorted(file.name for file in path.iterdir() if kind_of(file) in (*SUFFIXES, ".txt"))
        fix = f"name a file in it, such as {shlex.quote(str(Path(source) / (names or ['texts.csv'])[0]))}"
        raise DataError("the input is a folder, not a file", where=str(path.absolute()), fix=fix)
    if "://" in source and not path.exists():
        fix = "download the file and name it"
        raise DataError("predict reads files, not addresses", where=source, fix=fix)
    if path.exists() and not path.is_file():
        what, fix = "the input is a pipe or a device, not a file", f"--input {PIPE} < {shlex.quote(source)}"
        raise DataError(what, where=str(path.absolute()), fix=f"{fix} reads a text per line")
    if not path.is_file():
        # Names are compared without their endings, which most files share.
        here = {_stem(file): file.name for file in path.parent.glob("*.*") if _is_input(file) and file.is_file()}
        stems = nearest(_stem(path), here, ratio=0.6)
        near = [shlex.quote(str(Path(source).with_name(here[stem]))) for stem in stems]
        fix = f"did you mean --input {near[0]}?" if near else "set --input FILE, or - for a pipe"
        raise DataError("the input file does not exist", where=str(path.absolute()), fix=fix)
    if not _is_input(path):
        fix = INSTEAD.get(path.suffix.lower(), f"name a file of type {', '.join(SUFFIXES)} or .txt (one text per line)")
        fix = fix.format(**in_commands(path))
        raise DataError(f"{shown(path.name)} has no supported file type", where=str(path), fix=fix)
    return path


def _is_input(path: Path) -> bool:
    return is_texts(path) or kind_of(path) == ".txt"


def _stem(path: Path) -> str:
    return (path.with_suffix("") if program_of(path) else path).stem


def _has_lines(source: str) -> bool:
    """Returns whether each line of the input is a text."""
    return source == PIPE or kind_of(Path(source)) == ".txt"


def _check_columns(columns: Sequence[str], id_column: str | None, source: str) -> None:
    """Refuses columns of lines, an empty name, and more columns than a pair of texts has."""
    if _has_lines(source) and (id_column or columns):
        what = "a pipe has no columns" if source == PIPE else "a .txt file has no columns"
        raise ExperimentError(what, where=f"--input {shown(source)}", fix="omit --text and --id, or give a csv file")
    if len(columns) > 2 or not all(columns):
        what = "--text has no name of a column" if not all(columns) else f"--text is given {len(columns)} times"
        fix = "name one column, or two for pairs of texts: --text FIRST --text SECOND"
        raise ExperimentError(what, where="amalgam predict", fix=fix)


def _check_output(out: Path | None, source: str, *, force: bool) -> None:
    """Refuses an output file that could not be written or that is the input, before the model loads."""
    if out is None:
        return
    if out.suffix.lower() not in OUTPUTS:
        what = f"{shown(str(out))} has no supported file type"
        raise ExperimentError(what, where=f"--out {out}", fix=f"end it in {' or '.join(OUTPUTS)}")
    if not user_path(str(out), where="--out").absolute().parent.is_dir():
        fix = f"mkdir -p {shlex.quote(str(out.parent))}"
        raise ExperimentError("the folder does not exist", where=f"--out {out}", fix=fix)
    check_writable(out.absolute().parent, "change its permissions, or name a file in another folder with --out")
    if out.is_dir():
        what = f"{shown(out.name)} is a folder"
        raise ExperimentError(what, where=f"--out {out}", fix=f"name a file, such as {out / 'labels.csv'}")
    if out.exists() and source != PIPE and os.path.realpath(out) == os.path.realpath(source):
        raise ExperimentError("the output is the input", where=f"--out {out}", fix="name another file")
    if out.exists() and not force:
        raise ExperimentError(f"{shown(out.name)} exists", where=f"--out {out}", fix="add --force, or name another")


# ---- predictions to a file


Values = Sequence[Sequence[Any]]
"""The values of each column, in the order of data.parquet.predictions."""


def _columns(rows: Sequence[Row], result: Predictions) -> Values:
    leading = [[row.number for row in rows], [text_key(row.fields) for row in rows], [row.id for row in rows]]
    return [*leading, *(values.tolist() if isinstance(values, np.ndarray) else values for values in result.columns)]


@contextmanager
def _output(out: Path | None, columns: Sequence[Column]) -> Iterator[Callable[[Values], None]]:
    """Yields a function that writes values to a temporary file, which replaces the output once it is complete."""
    if out is None:
        with printing(sys.stdout):
            write_rows = csv_writer(sys.stdout, columns)

        def write(values: Values) -> None:
            with printing(sys.stdout):
                write_rows(values)

        yield write
        return
    with writing(out), atomic_write(out) as temporary:
        if out.suffix.lower() == ".csv":
            with temporary.open("w", encoding="utf-8", newline="") as file:
                yield csv_writer(file, columns)
        else:
            schema = arrow_schema(columns)
            # Opened here: Arrow takes a relative path such as file:x for an address.
            with temporary.open("wb") as opened, pq.ParquetWriter(opened, schema, **parquet_options(schema)) as writer:
                yield lambda values: writer.write_table(pa.table(list(values), schema=schema))


def csv_writer(file: TextIO, columns: Sequence[Column]) -> Callable[[Values], None]:
    """Writes the header and returns a function that writes rows: in UTF-8, on a terminal in the locale's encoding."""
    on_terminal = file.isatty()
    if isinstance(file, io.TextIOWrapper):
        file.reconfigure(encoding=file.encoding if on_terminal else "utf-8", errors="backslashreplace")
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([column.name for column in columns])

    def cell(value: Any) -> Any:
        if isinstance(value, bytes):
            return value.hex()
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, str):
            value = f"'{value}" if value.startswith(FORMULA) and not NUMBER.fullmatch(value) else value
            return shown(value, len(value)) if on_terminal else value
        return round(value, DIGITS) if isinstance(value, float) else value

    return lambda values: writer.writerows(map(cell, row) for row in zip(*values, strict=True))
