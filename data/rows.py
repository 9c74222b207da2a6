"""One stream of rows from csv, tsv, jsonl or parquet, each with the position a person would give it.

Sources are read as bytes and decoded strictly, in bounded memory, without guesses or conversions. An unusable row
becomes a BadRow with its place, the reason and the fix; the caller decides what to do with it.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from amalgam.data.keys import shown
from amalgam.data.sources import column_to_name
from amalgam.pipeline.config.schema import Corpus
from amalgam.pipeline.errors import DataError


def read_lines(file: BinaryIO, name: str) -> Iterator[Row | BadRow]:
    number = 0
    while line := file.readline(FIELD_LIMIT):
        number += 1
        if len(line) == FIELD_LIMIT and not line.endswith(b"\n"):
            where = f"{name} line {number}"
            raise DataError(f"a line is longer than {FIELD_LIMIT:,} bytes", where=where, fix="put each text on a line")
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError:
            value = shown(line.decode("utf-8", "surrogateescape").rstrip("\r\n"))
            where = f"{name} line {number}: not UTF-8: {value}"
            yield BadRow(name, number, None, None, "not UTF-8", value, where, "re-encode it: iconv -f latin1 -t utf-8")
            continue
        if text and not text.isspace():
            yield Row(name, number, (text,), None, None)


FIELD_LIMIT = 16 << 20  # characters; also how far an unclosed quote is followed

SAMPLE_LINES = 64

BATCH_ROWS = 4096

BOM = b"\xef\xbb\xbf"


Reason = Literal["not UTF-8", "broken", "ragged", "missing", "null", "not text", "empty", "lone surrogate", "bad label"]


class Row(NamedTuple):
    source: str
    number: int
    """csv: the line where the record starts; jsonl: the line; parquet: the row. From 1."""
    fields: tuple[str, ...]
    id: str | None
    label: str | None
    id_is_number: bool = False


class BadRow(NamedTuple):
    source: str
    number: int
    id: str | None
    field: str | None
    reason: Reason
    value: str
    where: str
    fix: str


class _Missing:
    """Marks a value that a row does not have, which differs from null."""


MISSING = _Missing()

Values = tuple[Any, ...]

Cells = tuple[int, Values] | BadRow


class _Reading(NamedTuple):
    """The columns to read from one file, and its name in messages."""

    path: Path
    name: str
    corpus: Corpus
    require_label: bool
    setting: str = "set corpus.{}: "
    """Format of a column's name in messages."""

    def columns(self, available: Sequence[str] | None) -> list[str]:
        """Returns the wanted ones of text, id and label; a missing column is an error."""
        corpus = self.corpus
        wanted = {"text": corpus.text, "id": [] if corpus.id == "auto" else [corpus.id]}
        if corpus.label and (self.require_label or available is None or corpus.label in available):
            wanted["label"] = [corpus.label]
        for setting, names in wanted.items():
            for name in names if available is not None else []:
                self._must_have(name, available or [], setting)
        return [name for names in wanted.values() for name in names]

    def _must_have(self, name: str, available: Sequence[str], setting: str) -> None:
        if list(available).count(name) == 1:
            return
        where = f"{self.name} has the columns: {', '.join(shown(column) for column in available[:20])}"
        if name in available:
            raise DataError(f"{self.name} has two columns named {shown(name)}", where=where, fix="rename one of them")
        fix = column_to_name(name, available, self.setting.format(setting))
        raise DataError(f"no column {shown(name)} in {self.name}", where=where, fix=fix)

    def bad(self, number: int, reason: Reason, value: object, *, field: str | None = None, **more: str) -> BadRow:
        unit = "line" if self.path.suffix.lower() in {".jsonl", ".ndjson"} else "row"
        at = f" (byte {more['byte']})" if "byte" in more else ""
        field_note = f", field {shown(field)}" if field else ""
        value = _shown_value(value)
        where = f"{self.name} {unit} {number}{at}{field_note}: {more.get('detail', reason)}" + (
            f": {value}" if value else ""
        )
        fix = more.get("fix") or self._fix(reason)
        return BadRow(self.name, number, more.get("id"), field, reason, value, where, fix)

    def _fix(self, reason: Reason) -> str:
        if reason == "not UTF-8":
            return f"re-encode it: iconv -f latin1 -t utf-8 {self.name} > utf8-{self.name.replace('/', '-')}"
        if reason == "bad label":
            return f"corpus.labels allows: {', '.join(map(shown, (self.corpus.labels or [])[:20]))}"
        return FIXES[reason]


FIXES = {
    "broken": "mend or remove it",
    "ragged": "give it as many fields as the header has, and quote fields that hold the separator",
    "missing": "give every row this field",
    "null": "fill it in or remove the row",
    "not text": "store it as text",
    "empty": "fill it in or remove the row",
    "lone surrogate": "write the character in full; \\ud83d alone is half of one",
}


def read_rows(
    path: Path, *, corpus: Corpus, name: str | None = None, require_label: bool = False, setting: str | None = None
) -> Iterator[Row | BadRow]:
    """Yields every row of one local file; a missing label column is an error only with `require_label`."""
    reading = _Reading(path, shown(name or path.name, 200), corpus, require_label)
    reading = reading._replace(setting=setting) if setting else reading
    readers: dict[str, Callable[[_Reading], Iterator[Cells]]] = {
        ".csv": _csv_cells,
        ".tsv": _csv_cells,
        ".parquet": _parquet_cells,
    }
    cells = readers.get(path.suffix.lower(), _jsonl_cells)(reading)
    check = _Check(reading)
    try:
        for cell in cells:
            yield cell if isinstance(cell, BadRow) else check.row(*cell)
    except OSError as error:
        raise DataError(
            f"{reading.name} cannot be read: {error.strerror or error}",
            where=shown(str(path), 200),
            fix="check that it is there and that you may read it",
        ) from error


class _Check:
    """Applies the rules that hold for every format to one row's values."""

    def __init__(self, reading: _Reading) -> None:
        corpus = reading.corpus
        self._bad, self._source, self._require_label = reading.bad, reading.name, reading.require_label
        self._text, self._id, self._label, self._rename = corpus.text, corpus.id, corpus.label, corpus.rename
        self._width, self._has_id = len(corpus.text), corpus.id != "auto"
        self._size = self._width + self._has_id
        labels = corpus.labels or []
        self._names = {label: label for label in labels}
        # Whole numbers are positions, unless a label is a number itself: 1 among ["1", "2"] is the label "1".
        if not any(label.isdecimal() for label in labels):
            self._names |= {str(position): label for position, label in enumerate(labels)}

    def row(self, number: int, values: Values) -> Row | BadRow:
        texts = values if len(values) == self._width else values[: self._width]
        id_value = values[self._width] if self._has_id else None
        for text in texts:
            if type(text) is not str or not text or text.isspace():
                return self._bad_text(number, texts, id_value)
        if self._has_id and not _is_name(id_value):
            return self._bad(number, _why_not_text(id_value), id_value, field=self._id)
        label = None
        if len(values) > self._size:
            label = self._label_of(values[-1])
            if label is None and (self._require_label or not _absent(values[-1])):
                return self._bad_label(number, values[-1], id_value)
        identity = str(id_value) if self._has_id else None
        return Row(self._source, number, texts, identity, label, type(id_value) is int)

    def _label_of(self, value: object) -> str | None:
        """Returns the label's name, or None if the value is not a label."""
        value = str(value) if type(value) is int else value
        if type(value) is not str or not value or value.isspace():
            return None
        value = self._rename.get(value, value)
        return self._names.get(value) if self._names else value

    def _bad_text(self, number: int, texts: Values, id_value: object) -> BadRow:
        at = next(at for at, text in enumerate(texts) if type(text) is not str or not text or text.isspace())
        return self._bad(number, _why_not_text(texts[at]), texts[at], field=self._text[at], **_given_id(id_value))

    def _bad_label(self, number: int, value: object, id_value: object) -> BadRow:
        reason = "bad label" if _is_name(value) else _why_not_text(value)
        return self._bad(number, reason, value, field=self._label, **_given_id(id_value))


def _is_name(value: object) -> bool:
    """Returns whether the value is an integer (not a bool) or text that is not blank."""
    return type(value) is int or (type(value) is str and bool(value) and not value.isspace())


def _absent(value: object) -> bool:
    blank = isinstance(value, str) and (not value or value.isspace())
    return value is None or value is MISSING or blank or (isinstance(value, float) and math.isnan(value))


def _why_not_text(value: object) -> Reason:
    if value is MISSING:
        return "missing"
    if isinstance(value, str):
        return "empty"
    return "null" if _absent(value) else "not text"


def _given_id(value: object) -> dict[str, str]:
    return {"id": shown(str(value))} if _is_name(value) else {}


def _shown_value(value: object) -> str:
    if isinstance(value, bytes):
        value = value.decode("utf-8", "surrogateescape").rstrip("\r\n")
    if isinstance(value, str):
        return shown(value)
    if value is MISSING:
        return ""
    return "null" if value is None else shown(str(value))


class _Lines:
    """The physical lines of a file, decoded; keeps the bytes of the record being read, and where they went wrong."""

    def __init__(self, file: Iterable[bytes]) -> None:
        self._file = file
        self._end = 0
        self.count = 0
        self.raw: list[bytes] = []
        self.bad_byte: int | None = None

    def next_record(self) -> int:
        self.raw.clear()
        self.bad_byte = None
        return self.count + 1

    def __iter__(self) -> Iterator[str]:
        for raw in self._file:
            self.count += 1
            self.raw.append(raw)
            try:
                line = raw.decode()
            except UnicodeDecodeError as error:
                self.bad_byte = self.bad_byte or self._end + error.start + 1
                line = raw.decode("utf-8", "surrogateescape")
            self._end += len(raw)
            yield line.removeprefix("\ufeff") if self.count == 1 else line


def _csv_cells(reading: _Reading) -> Iterator[Cells]:
    csv.field_size_limit(FIELD_LIMIT)  # the csv module has one limit for all readers, and its default is too short
    with reading.path.open("rb") as file:
        lines = _Lines(file)
        records = csv.reader(lines, strict=True, delimiter="\t" if reading.path.suffix.lower() == ".tsv" else ",")
        header = _csv_header(reading, lines, records)
        at = [header.index(name) for name in reading.columns(header)] if header else []
        pick: Callable[[list[str]], Values] = itemgetter(*at) if len(at) > 1 else lambda record: (record[at[0]],)
        while True:
            number = lines.next_record()
            try:
                record = next(records)
            except StopIteration:
                return
            except csv.Error as error:
                yield _broken_record(reading, number, lines.raw, error)
                continue
            if lines.bad_byte is not None:
                yield _undecoded_record(reading, number, lines.bad_byte, header, record)
            elif len(record) == len(header):
                yield number, pick(record)
            elif record:
                detail = f"{len(record)} fields where the header has {len(header)}"
                yield reading.bad(number, "ragged", lines.raw[0], detail=detail)


def _csv_header(reading: _Reading, lines: _Lines, records: Iterator[list[str]]) -> list[str]:
    try:
        header = next((record for record in records if record), [])
    except csv.Error as error:
        raise DataError(
            f"{reading.name}: the header cannot be read: {error}",
            where=_shown_value(lines.raw[0]),
            fix="the first line names the columns: mend it there",
        ) from error
    if lines.raw and lines.raw[0].startswith((b"\xff\xfe", b"\xfe\xff")):
        fix = f"re-encode it: iconv -f utf-16 -t utf-8 {reading.name} > utf8-{reading.name}"
        raise DataError(f"{reading.name} is UTF-16, not UTF-8", where=reading.name, fix=fix)
    if lines.bad_byte is not None:
        bad = _undecoded_record(reading, 1, lines.bad_byte, [], header)
        raise DataError("the header is not UTF-8", where=bad.where, fix=bad.fix)
    return header


def _broken_record(reading: _Reading, number: int, raw: list[bytes], error: csv.Error) -> BadRow:
    """Returns a record that is broken within its line; raises otherwise, because the next record's start is unknown."""
    bad = reading.bad(number, "broken", raw[0], detail=f"broken ({error})")
    if len(raw) == 1:
        return bad
    fix = 'close the quote; a quote within a quoted field is written ""'
    raise DataError(f"{reading.name} row {number}: a quoted field does not end as it should", where=bad.where, fix=fix)


def _undecoded_record(reading: _Reading, number: int, byte: int, header: list[str], record: list[str]) -> BadRow:
    at = next((at for at, value in enumerate(record) if _has_surrogate(value)), len(header))
    field = header[at] if at < len(header) else None
    value = record[at] if at < len(record) else ""
    return reading.bad(number, "not UTF-8", value, field=field, byte=str(byte))


def _has_surrogate(value: object) -> bool:
    return isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value)


def _jsonl_cells(reading: _Reading) -> Iterator[Cells]:
    wanted = reading.columns(_jsonl_columns(reading))
    start = 0
    with reading.path.open("rb") as file:
        for number, line in enumerate(file, 1):
            raw = line.removeprefix(BOM) if number == 1 else line
            if raw.strip():
                yield _jsonl_row(reading, number, raw, start, wanted)
            start += len(line)


def _jsonl_row(reading: _Reading, number: int, raw: bytes, start: int, wanted: list[str]) -> Cells:
    try:
        line, whole = raw.decode(), True
    except UnicodeDecodeError as error:
        line, whole, start = raw.decode("utf-8", "surrogateescape"), False, start + error.start + 1
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        return reading.bad(number, "broken", raw, detail=f"broken ({str(error).partition(': line')[0]})")
    if not isinstance(record, dict):
        return reading.bad(number, "broken", raw, detail="broken (not an object)")
    if not whole:
        field = next((name for name, value in record.items() if _has_surrogate(value)), None)
        return reading.bad(number, "not UTF-8", record.get(field), field=field, byte=str(start))
    if "\\u" in line:
        for name in wanted:
            if _has_surrogate(record.get(name)):
                return reading.bad(number, "lone surrogate", record[name], field=name)
    return number, tuple([record.get(name, MISSING) for name in wanted])


def _jsonl_columns(reading: _Reading) -> list[str] | None:
    """Returns the names in the first lines, or None without an object; a label may still come later."""
    names: dict[str, None] = {}
    with reading.path.open("rb") as file:
        for raw in islice(file, SAMPLE_LINES):
            try:
                record = json.loads(raw.removeprefix(BOM).decode("utf-8", "surrogateescape"))
            except (ValueError, RecursionError):
                continue
            names |= dict.fromkeys(record) if isinstance(record, dict) else {}
    if names and reading.corpus.label and not reading.require_label:
        names[reading.corpus.label] = None
    return list(names) or None


def _parquet_cells(reading: _Reading) -> Iterator[Cells]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(reading.path, pre_buffer=False, buffer_size=1 << 20) as file:
            wanted = reading.columns(file.schema_arrow.names)
            number = 0
            for batch in file.iter_batches(BATCH_ROWS, columns=list(dict.fromkeys(wanted)), use_threads=False):
                columns = [_decoded(batch.column(name)) for name in wanted]
                whole = all(decoded for _, decoded in columns)
                for values in zip(*[values for values, _ in columns], strict=True):
                    number += 1
                    damaged = (
                        -1 if whole else next((at for at, value in enumerate(values) if _has_surrogate(value)), -1)
                    )
                    if damaged < 0:
                        yield number, values
                    else:
                        yield reading.bad(number, "not UTF-8", values[damaged], field=wanted[damaged])
    except pa.ArrowException as error:
        fix = "write it again from where it came"
        raise DataError(f"{reading.name} is not a whole parquet file", where=shown(str(error), 200), fix=fix) from error


def _decoded(column: Any) -> tuple[list[Any], bool]:
    """Returns the column's values and whether all are UTF-8, because Arrow does not check the bytes of a text."""
    import pyarrow as pa

    try:
        return column.to_pylist(), True
    except UnicodeDecodeError:
        stored = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
        values = stored.cast(pa.large_binary()).to_pylist()
        return [value if value is None else value.decode("utf-8", "surrogateescape") for value in values], False
