"""Plain text, one text a line, as rows: of a file or a pipe, in bounded memory. Blank lines are none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amalgam.data.keys import shown
from amalgam.data.rows import FIELD_LIMIT, BadRow, Row
from amalgam.pipeline.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO


def lines_of(file: BinaryIO, name: str) -> Iterator[Row | BadRow]:
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
