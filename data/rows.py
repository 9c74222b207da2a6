"""Reads the texts of a local file: yields its rows with the position a person would give them.

The readers of csv, tsv, jsonl and parquet decode bytes strictly, in bounded memory, without guesses or conversions.
An unusable row becomes a BadRow with its place, the reason and the fix; the caller decides what to do with it.
"""

from __future__ import annotations

import csv
import json
import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, Protocol

from amalgam.data.keys import shown, shown_names
from amalgam.data.lazy import pa, pq
from amalgam.data.packed import UnpackedFile
from amalgam.pipeline.config.proposals import as_yaml
from amalgam.pipeline.config.schema import Corpus
from amalgam.pipeline.console import counted
from amalgam.pipeline.errors import DataError, nearest
from amalgam.pipeline.input_files import PACKERS, SUFFIXES, in_commands, kind_of, program_of
from amalgam.pipeline.user_paths import readable

FIELD_LIMIT = 16 << 20  # characters; also how far an unclosed quote is followed
MOST_CHARACTERS = 1 << 20
"""Characters of the longest text; a model reads at most some ten thousand."""
SAMPLE_LINES = 64
BATCH_ROWS = 1024
MOST_PROPOSED = 3
LONG_NAME = 4  # words; the name of a column that has more is likely a text
BOM = b"\xef\xbb\xbf"

Reason = Literal[
    "not UTF-8", "broken", "ragged", "missing", "null", "not text", "empty", "too long", "lone surrogate", "bad label"
]

FIXES: dict[Reason, str] = {
    "not UTF-8": "re-encode it: {unpack}iconv -f cp1252 -t utf-8 {file} > {copy}",
    "broken": "mend or remove it",
    "ragged": "give it as many fields as the header has, and quote fields that hold the separator",
    "missing": "give every row this field",
    "null": "fill it in or remove the row",
    "not text": "store it as text",
    "empty": "fill it in or remove the row",
    "too long": f"shorten it to {MOST_CHARACTERS:,} characters; models read only the first max_tokens tokens",
    "lone surrogate": "write the character in full; \\ud83d alone is half of one",
    "bad label": "corpus.labels allows: {labels}",
}

ONE_COLUMN = "put quotes around each text; or, if the file has no quotes, name it as tsv: {unpack}mv {file} {stem}.tsv"
"""Fix of a ragged row of a csv with one column, where each separator belongs to a text."""

QUOTES = 'close the quote; a quote within a quoted field is written ""'


def listed_reasons(counts: Mapping[str, int]) -> str:
    """Returns the counts of bad rows by reason, such as "37 not UTF-8, 23 empty"."""
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(counts.items(), key=lambda item: -item[1]))


def fix_of_rows(fixes: Mapping[str, str]) -> str:
    """Returns the fixes of bad rows, by reason."""
    return "; ".join(f"{reason}: {fix}" if len(fixes) > 1 else fix for reason, fix in fixes.items())


# ---- kinds of files

KINDS = ", ".join(SUFFIXES)

INSTEAD = {
    ".txt": """run: {{ echo text; sed '/[^[:space:]]/!d; s/"/""/g; s/.*/"&"/' {file}; }} > {stem}.csv""",
    ".json": "run: {unpack}python -c 'import polars, sys; polars.read_json(sys.argv[1]).write_ndjson(sys.argv[2])'"
    " {file} {stem}.jsonl",
    **dict.fromkeys((".xlsx", ".xls", ".ods"), "save the sheet as csv, UTF-8"),
    **dict.fromkeys((".arrow", ".feather"), "save it as Parquet: by to_parquet of datasets or write_parquet of Polars"),
    ".zip": "run: unzip {file}",
    **{suffix: f"run: {packer} -dk {{file}}" for packer, (suffix, _) in PACKERS.items()},
}
"""Fixes by suffix."""

ENCODINGS = {
    "UTF-32": rb"\xff\xfe\0\0|\0\0\xfe\xff",
    "UTF-16": rb"\xff\xfe|\xfe\xff",
    "UTF-32LE": rb"[^\0]\0\0\0",
    "UTF-32BE": rb"\0\0\0[^\0]",
    "UTF-16LE": rb"[^\0]\0[^\0]\0",
    "UTF-16BE": rb"\0[^\0]\0[^\0]",
}
"""Start of a file, as a pattern: the byte order mark; without one, characters below U+0100."""
MAGIC = {
    **{
        start: (f"is {code}, not UTF-8", f"re-encode: {{unpack}}iconv -f {code.lower()} -t utf-8 {{file}} > {{copy}}")
        for code, start in ENCODINGS.items()
    },
    rb"(\xef\xbb\xbf)?sep=.\r?\n": (
        "has a first line for Excel alone, which names the separator",
        "remove this line: {unpack}tail -n +2 {file} > {copy}",
    ),
    b"PAR1": ("is a Parquet file", "give it a name that ends in .parquet: {unpack}mv {file} {stem}.parquet"),
    b"PK\x03\x04": ("is a spreadsheet or a zip file", "save the sheet as csv, UTF-8; or unpack the file"),
    **{
        re.escape(magic): (f"is packed by {packer}", f"unpack it: {{unpack}}{packer} -dc < {{file}} > {{copy}}")
        for packer, (_, magic) in PACKERS.items()
    },
}
"""Start of a file whose rows cannot be read, as a pattern, with the message and the fix."""

JSON_LINES = (".jsonl", ".ndjson")
ARRAY = re.compile(rb"\s*\[\s*\{")
"""Start of a JSON file that is one list of objects."""
UNPACK = INSTEAD[".json"].replace(".jsonl", "-lines.jsonl")
FLATTEN = (
    "copy it out of its object: {unpack}python -c 'import polars, sys; _, file, copy, *names = sys.argv; "
    "polars.read_ndjson(file).with_columns(polars.col(names[0]).struct.field(names[1])).write_ndjson(copy)'"
    " {file} {stem}-flat.jsonl"
)


def opened(path: Path) -> IO[bytes]:
    """Opens the content of a file, which may be packed."""
    return UnpackedFile(path, program) if (program := program_of(path)) else path.open("rb")


# ---- rows


class Row(NamedTuple):
    source: str
    number: int
    """csv: the line where the record starts; jsonl: the line; parquet: the row. From 1."""
    fields: tuple[str, ...]
    id: str | None
    label: str | None


class BadRow(NamedTuple):
    source: str
    number: int
    id: str | None
    field: str | None
    reason: Reason
    value: str
    fault: str  # byte, field, reason and value: the end of `where`
    where: str
    fix: str


class MissingColumnError(DataError):
    """A file has no column of this name."""


MISSING = object()
"""Marks a value that a row does not have, which differs from null."""


def read_rows(  # noqa: PLR0913 - the rules for rows and messages
    path: Path,
    *,
    corpus: Corpus,
    name: str = "",
    require_label: bool = False,
    setting: str = "set corpus.{}: ",
    any_coding: bool = False,
) -> Iterator[Row | BadRow]:
    """Yields every row of one local file; `setting` is the format of a column's name in messages.

    A missing label column is an error only with `require_label`. A .txt file has no columns, but a text on each line.
    With `any_coding` the columns of a csv that are not read need not be UTF-8.
    """
    table = _Table(path, shown(name or path.name, 200), corpus, require_label, setting, any_coding=any_coding)
    readers = {".csv": _csv_rows, ".tsv": _csv_rows, ".parquet": _parquet_rows, ".txt": _txt_rows}
    with readable(path, DataError):
        if table.kind != ".parquet":
            check_magic(path, table.name)
        yield from readers.get(table.kind, _jsonl_rows)(table)


def check_magic(path: Path, name: str) -> None:
    """Refuses a file whose first bytes are those of another kind than its name has."""
    with opened(path) as file:
        start = file.read(1000)
    for magic, (kind, fix) in MAGIC.items():
        if re.match(magic, start):
            raise DataError(f"{name} {kind}", where=shown(str(path), 200), fix=fix.format(**in_commands(path)))
    if kind_of(path) in JSON_LINES and ARRAY.match(start.removeprefix(BOM)):
        what, fix = f"{name} is one JSON array, not an object on each line", UNPACK.format(**in_commands(path))
        raise DataError(what, where=shown(str(path), 200), fix=fix)


def no_rows(path: Path, name: str = "") -> DataError:
    """Returns the error of a file that is empty or has a header alone."""
    what, fix = f"no rows in {shown(name or path.name)}", "fill it or leave it out"
    return DataError(what, where=shown(str(path), 200), fix=fix)


def _txt_rows(table: _Table) -> Iterator[Row | BadRow]:
    with opened(table.path) as file:
        yield from read_lines(file, table.name, table.in_commands)


class Lines(Protocol):
    """A file or a pipe that is read by line."""

    def readline(self, limit: int, /) -> bytes: ...


def read_lines(file: Lines, name: str, in_commands: Mapping[str, str] | None = None) -> Iterator[Row | BadRow]:
    """Yields each line that is not blank as a row; a pipe has no name for commands."""
    number = 0
    while line := file.readline(FIELD_LIMIT):
        number += 1
        if len(line) == FIELD_LIMIT and not line.endswith(b"\n"):
            where = f"{name} line {number}"
            raise DataError(f"a line is longer than {FIELD_LIMIT:,} bytes", where=where, fix="put each text on a line")
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError:
            value = _shown_value(line)
            fix = FIXES["not UTF-8"].format(**in_commands) if in_commands else "re-encode it: iconv -f cp1252 -t utf-8"
            yield _bad_line(name, number, "not UTF-8", value, fix)
            continue
        if len(text) > MOST_CHARACTERS:
            yield _bad_line(name, number, "too long", shown(text), FIXES["too long"])
        elif text and not text.isspace():
            yield Row(name, number, (text,), None, None)


def _bad_line(name: str, number: int, reason: Reason, value: str, fix: str) -> BadRow:
    fault = f"{reason}: {value}"
    return BadRow(name, number, None, None, reason, value, fault, f"{name} line {number}: {fault}", fix)


class _Table:
    """One file: the columns to read, the rules for their values, and the messages about its rows."""

    def __init__(  # noqa: PLR0913 - the rules of read_rows
        self, path: Path, name: str, corpus: Corpus, require_label: bool, setting: str, *, any_coding: bool
    ) -> None:
        self.path, self.kind, self.name = path, kind_of(path), name
        self.corpus, self.require_label = corpus, require_label
        self._setting, self.in_commands, self.any_coding = setting, in_commands(path), any_coding
        self._width = len(corpus.text)
        self._id = None if corpus.id == "auto" else corpus.id
        self._size = self._width + (corpus.id != "auto")
        labels = corpus.labels or []
        self._labels = {label: label for label in labels}
        # Whole numbers are positions, unless a label is a number itself: 1 among ["1", "2"] is the label "1".
        if not any(label.isdecimal() for label in labels):
            self._labels |= {str(position): label for position, label in enumerate(labels)}
        if labels and corpus.unknown is not None:
            self._labels[corpus.unknown] = corpus.unknown
        self._named = {*corpus.rename, *self._labels, corpus.unknown}
        self.columns_of_inner: dict[str, str] = {}

    def columns(self, available: Sequence[str] | None) -> list[str]:
        """Returns the columns of text, id and label; a missing one is an error, if the `available` ones are known."""
        wanted = {"text": self.corpus.text, "id": [self._id] if self._id else []}
        is_late = self.kind in JSON_LINES and not self.require_label  # the label may still come in a later line
        if self.corpus.label and (self.require_label or is_late or available is None or self.corpus.label in available):
            wanted["label"] = [self.corpus.label]
        for setting, names in wanted.items():
            for name in names if available is not None and not (is_late and setting == "label") else []:
                self._check_column(name, list(available or []), self._setting.replace("{}", setting))
        return [name for names in wanted.values() for name in names]

    def _check_column(self, name: str, available: list[str], setting: str) -> None:
        where = f"{self.name} has the columns: {shown_names(available)}"
        if available.count(name) > 1:
            raise DataError(f"{self.name} has two columns named {shown(name)}", where=where, fix="rename one of them")
        if name not in available:
            own = self.corpus.text if setting != self._setting.replace("{}", "text") else ()
            others = [column for column in available if column not in own]
            near = nearest(name, others)
            quoted = shlex.quote if setting.startswith("--") else as_yaml
            any_column = "auto" if setting == "set corpus.id: " else "one of them"
            if setting.startswith("--"):
                any_column = " or ".join(quoted(column) for column in others[:MOST_PROPOSED])
            fix = setting + (quoted(near[0]) if near else any_column)
            if not others and any_column != "auto":
                fix = f"add this column to {self.name}, or name another file"
            pair = [part.strip() for part in name.split(",")]
            if len(pair) > 1 and {*pair} <= {*available}:
                fix = f"{setting}{as_yaml(pair)}"
            elif not near and any(len(column.split()) > LONG_NAME for column in available):
                fix += "; if the first line is a text, put a line with the names of the columns before it"
            elif setting == "set corpus.text: " and others:
                fix += f", if all files have it; else rename it to {shown(name)} here, or leave this file out"
            fix = self._fix_of_format(name, available) or fix
            raise MissingColumnError(f"no column {shown(name)} in {self.name}", where=where, fix=fix)

    def _fix_of_format(self, name: str, available: list[str]) -> str | None:
        """Returns the fix for other separators than the name of the file has, and for a column within an object."""
        marks = ",;|" if self.kind == ".tsv" else "\t|"
        separator = next((mark for mark in marks if len(available) == 1 and mark in available[0]), None)
        if separator == ",":
            as_csv = re.sub("[.]tsv", ".csv", self.path.name, flags=re.IGNORECASE)
            return f"it has commas: name it {shown(as_csv)}"
        if separator:
            return f"save it with commas instead of {separator!r}, or with tabs as .tsv"
        inner = name.rpartition(".")[2]
        if column := self.columns_of_inner.get(inner):
            return f"{FLATTEN.format(**self.in_commands)} {shlex.quote(column)} {shlex.quote(inner)}"
        return None

    def row(self, number: int, values: Sequence[Any]) -> Row | BadRow:
        """Applies the rules that hold for every format to the values of `columns`."""
        texts, identity, label = values[: self._width], None, None
        if self._id:
            identity = _as_text(values[self._width])
        for index, text in enumerate(texts):
            if reason := _why_not_text(text):
                return self.bad(number, reason, text, field=self.corpus.text[index], identity=identity)
        if self._id and (reason := _why_not_text(identity)):
            return self.bad(number, reason, identity, field=self._id)
        if len(values) > self._size:
            value = _as_text(values[-1])
            reason = _why_not_text(value)
            label = self._label_of(value) if reason is None else None
            if label is None and (self.require_label or reason not in ABSENT):
                return self.bad(number, reason or "bad label", value, field=self.corpus.label, identity=identity)
        return Row(self.name, number, tuple(texts), identity, label)

    def _label_of(self, value: str) -> str | None:
        """Returns the label without blanks around it, unless the experiment names it with them."""
        value = value if value in self._named else value.strip()
        value = self.corpus.rename.get(value, value)
        return self._labels.get(value) if self._labels else value

    def bad(  # noqa: PLR0913 - the parts of a message
        self,
        number: int,
        reason: Reason,
        value: object,
        *,
        field: str | None = None,
        identity: object = None,
        byte: int | None = None,
        detail: str | None = None,
    ) -> BadRow:
        unit = "line" if self.kind in JSON_LINES else "row"
        at = f" (byte {byte})" if byte is not None else ""
        at += f", field {shown(field)}" if field else ""
        value = _shown_value(value)
        fault = f"{at}: {detail or reason}" + (f": {value}" if value else "")
        where = f"{self.name} {unit} {number}{fault}"
        labels = shown_names(self.corpus.labels or [])
        fix = FIXES[reason].format(labels=labels, **self.in_commands)
        own_id = None if _why_not_text(identity) else shown(str(identity))
        return BadRow(self.name, number, own_id, field, reason, value, fault.lstrip(":, "), where, fix)

    def undecoded(self, number: int, record: Mapping[str, object], byte: int | None = None) -> BadRow:
        """Returns the bad row of a record that is not UTF-8; it was decoded with surrogates for the bad bytes."""
        field = next((name for name, value in record.items() if has_surrogate(value)), None)
        bad = self.bad(number, "not UTF-8", record[field] if field else "", field=field, byte=byte)
        return bad._replace(fix="write its texts again in UTF-8") if self.kind == ".parquet" else bad


ABSENT: set[Reason | None] = {"missing", "null", "empty"}


def _why_not_text(value: object) -> Reason | None:
    if isinstance(value, str):
        if len(value) > MOST_CHARACTERS:
            return "too long"
        return None if value and not value.isspace() else "empty"
    if value is MISSING:
        return "missing"
    return "null" if value is None or (isinstance(value, float) and math.isnan(value)) else "not text"


def _as_text(value: Any) -> Any:
    """Returns a whole number (not a bool) as text, and any other value as it is."""
    return str(value) if type(value) is int else value


def _shown_value(value: object) -> str:
    if isinstance(value, bytes):
        value = value.decode("utf-8", "surrogateescape").rstrip("\r\n")
    if value is MISSING:
        return ""
    return "null" if value is None else shown(str(value))


def has_surrogate(value: object) -> bool:
    if not isinstance(value, str) or value.isascii():
        return False
    return any("\ud800" <= character <= "\udfff" for character in value)


# ---- csv


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


def _csv_rows(table: _Table) -> Iterator[Row | BadRow]:
    csv.field_size_limit(FIELD_LIMIT)  # the csv module has one limit for all readers, and its default is too short
    with opened(table.path) as file:
        header_line = next((line for line in file if line.strip(BOM + b"\r\n")), b"")
    with opened(table.path) as file:
        lines = _Lines(file)
        records = csv.reader(lines, strict=True, delimiter=delimiter_of(table.kind, header_line))
        header = _csv_header(table, lines, records)
        places = [header.index(name) for name in table.columns(header)] if header else []
        while True:
            number = lines.next_record()
            try:
                record = next(records)
            except StopIteration:
                return
            except csv.Error as error:
                yield _broken_record(table, number, lines.raw, error)
                continue
            values = [record[place] for place in places] if len(record) == len(header) else None
            is_decoded = table.any_coding and values and not any(map(has_surrogate, values))
            if lines.bad_byte is not None and not is_decoded:
                yield table.undecoded(number, dict(zip(header, record, strict=False)), lines.bad_byte)
            elif values is not None:
                yield table.row(number, values)
            elif record:
                detail = f"{counted(len(record), 'field')} where the header has {len(header)}"
                bad = table.bad(number, "ragged", lines.raw[0], detail=detail)
                yield bad._replace(fix=ONE_COLUMN.format(**table.in_commands)) if len(header) == 1 else bad


def delimiter_of(kind: str, header: bytes) -> str:
    """Returns the character between fields; in many countries, spreadsheets save a csv with semicolons."""
    if kind == ".tsv":
        return "\t"
    names = re.sub(rb'"[^"]*"', b"", header)  # without those in quotes
    return ";" if b";" in names and b"," not in names else ","


def _csv_header(table: _Table, lines: _Lines, records: Iterator[list[str]]) -> list[str]:
    header = list[str]()
    try:
        header = next((record for record in records if record), [])
    except csv.Error as error:
        if lines.bad_byte is None:
            what = f"{table.name}: the header cannot be read: {error}"
            fix = "mend the first line, which names the columns"
            if "new-line character" in str(error):
                what = f"{table.name} has old Mac line ends"
                fix = "save it with others: {unpack}tr '\\r' '\\n' < {file} > {copy}".format(**table.in_commands)
            raise DataError(what, where=_shown_value(lines.raw[0]), fix=fix) from error
    if lines.bad_byte is not None:
        bad = table.bad(1, "not UTF-8", lines.raw[-1], byte=lines.bad_byte)
        raise DataError("the header is not UTF-8", where=bad.where, fix=bad.fix)
    return header


def _broken_record(table: _Table, number: int, raw: list[bytes], error: csv.Error) -> BadRow:
    """Returns a record that is broken within its line; raises otherwise, because the next record's start is unknown."""
    bad = table.bad(number, "broken", raw[0], detail=f"broken ({error})")
    if len(raw) == 1:
        return bad._replace(fix=QUOTES) if re.search("expected after|end of data", str(error)) else bad
    raise DataError(f"{table.name} row {number}: a quoted field does not end as it should", where=bad.where, fix=QUOTES)


# ---- jsonl


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuses an object with a key twice, of which Python would keep the last value."""
    record = dict(pairs)
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {shown(next(key for key in keys if keys.count(key) > 1))} is given twice")
    return record


def _jsonl_rows(table: _Table) -> Iterator[Row | BadRow]:
    columns = table.columns(_jsonl_columns(table))
    end = 0
    with opened(table.path) as file:
        for number, line in enumerate(file, 1):
            raw, end = line.removeprefix(BOM), end + len(line)  # joined files may have the mark before any line
            if raw.strip():
                yield _jsonl_row(table, number, raw, end - len(raw), columns)


def _jsonl_row(table: _Table, number: int, raw: bytes, start: int, columns: list[str]) -> Row | BadRow:
    bad_byte = None
    try:
        line = raw.decode()
    except UnicodeDecodeError as error:
        line, bad_byte = raw.decode("utf-8", "surrogateescape"), start + error.start + 1
    try:
        record = json.loads(line, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        return table.bad(number, "broken", raw, detail=f"broken ({str(error).partition(': line')[0]})")
    if not isinstance(record, dict):
        return table.bad(number, "broken", raw, detail="broken (not an object)")
    if bad_byte is not None:
        return table.undecoded(number, record, bad_byte)
    values = [record.get(name, MISSING) for name in columns]
    for name, value in zip(columns, values, strict=True) if "\\u" in line else ():
        if has_surrogate(value):
            return table.bad(number, "lone surrogate", value, field=name)
    return table.row(number, values)


def _jsonl_columns(table: _Table) -> list[str] | None:
    """Returns the names in the first lines, or None without an object."""
    names: dict[str, None] = {}
    with opened(table.path) as file:
        for raw in islice(file, SAMPLE_LINES):
            try:
                record = json.loads(raw.removeprefix(BOM).decode("utf-8", "surrogateescape"))
            except (ValueError, RecursionError):
                continue
            for name, value in record.items() if isinstance(record, dict) else ():
                names[name] = None
                table.columns_of_inner |= dict.fromkeys(value if isinstance(value, dict) else (), name)
    return list(names) or None


# ---- parquet


def _parquet_rows(table: _Table) -> Iterator[Row | BadRow]:
    number = 0
    try:
        # Opened here: Arrow takes a relative path such as file:x for an address.
        with table.path.open("rb") as opened, pq.ParquetFile(opened, pre_buffer=False, buffer_size=1 << 20) as file:
            names = table.columns(file.schema_arrow.names)
            for batch in file.iter_batches(BATCH_ROWS, columns=list(dict.fromkeys(names)), use_threads=False):
                columns, decoded = zip(*(_values(table, name, batch.column(name)) for name in names), strict=True)
                for values in zip(*columns, strict=True):
                    number += 1
                    if not all(decoded) and any(map(has_surrogate, values)):
                        yield table.undecoded(number, dict(zip(names, values, strict=True)))
                    else:
                        yield table.row(number, values)
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the system; Arrow's own have no number
            raise
        fix = _text_kind(table.path) or "write it again from where it came"
        what = f"{table.name} is not a whole parquet file: {shown(str(error), 200)}"
        raise DataError(what, where=shown(str(table.path.absolute()), 200), fix=fix) from error


def _text_kind(path: Path) -> str | None:
    """Returns the fix for a text file with the name of a Parquet file; None for other content."""
    with path.open("rb") as file:
        start = file.read(1000)
    if b"PAR1" in start or b"\0" in start or not start.strip():
        return None
    suffix = ".jsonl" if start.lstrip().startswith(b"{") else ".tsv" if b"\t" in start else ".csv"
    return f"it looks like {suffix[1:]}: name it {path.stem}{suffix}"


def _values(table: _Table, name: str, column: Any) -> tuple[list[Any], bool]:
    """Returns the column's values and whether all are UTF-8; refuses a type whose values Python cannot hold."""
    try:
        return _decoded(column)
    except (OverflowError, ValueError, pa.ArrowException) as error:  # a date after the year 9999, or bytes in a list
        what = f"the column {shown(name)} of {table.name} has values of type {column.type}, not text"
        raise DataError(what, where=shown(str(error), 200), fix="store it as text, or name another column") from error


def _decoded(column: Any) -> tuple[list[Any], bool]:
    """Returns the column's values and whether all are UTF-8, because Arrow does not check the bytes of a text."""
    try:
        return column.to_pylist(), True
    except UnicodeDecodeError:
        stored = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
        values = stored.cast(pa.large_binary()).to_pylist()
        return [value if value is None else value.decode("utf-8", "surrogateescape") for value in values], False
