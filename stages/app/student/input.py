"""The texts that a student is asked about: a file's rows or a pipe's lines, checked first, then block by block."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from amalgam.data.keys import shown
from amalgam.data.rows import BadRow, Row, read_lines, read_rows
from amalgam.data.sources import SUFFIXES
from amalgam.pipeline.config.schema import Corpus
from amalgam.pipeline.errors import DataError, ExperimentError

BLOCK_ROWS = 8192

BLOCK_CHARACTERS = 1 << 24

PIPE = "-"


@dataclass
class InputTexts:
    """Where texts come from, and how to read them."""

    source: str
    columns: Sequence[str]
    id_column: str | None
    skip_bad_rows: bool
    skipped: Counter[str] = field(default_factory=Counter)

    def check(self) -> int | None:
        """How many rows there are, every one of them read once before anything runs; None for a pipe."""
        if self.source == PIPE:
            return None
        path = Path(self.source)
        if not path.is_file():
            raise DataError(
                "there is no file of texts", where=str(path.absolute()), fix="--input FILE, or --input - for a pipe"
            )
        if path.suffix.lower() not in (*SUFFIXES, ".txt"):
            fix = f"the kinds are {', '.join(SUFFIXES)} and .txt (one text a line)"
            raise DataError(f"{shown(path.name)} is of no kind that can be read", where=str(path), fix=fix)
        if path.suffix.lower() == ".txt" and (self.id_column or len(self.columns) > 1):
            raise ExperimentError(
                "a .txt file has no columns", where=str(path), fix="leave --id out, and --text but one"
            )
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
                raise DataError(what, where=row.where, fix=f"{row.fix}; or leave such rows out, --skip-bad-rows")

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
