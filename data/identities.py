"""Ids given by the sources must be unique and of one kind, checked with eight bytes per row.

Hashes find the suspects; a second reading of the sources, made only then, tells the duplicates by their full ids.
"""

from __future__ import annotations

import sys
from hashlib import blake2b
from typing import TYPE_CHECKING

from amalgam.data.keys import shown
from amalgam.data.rows import BadRow
from amalgam.pipeline.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from amalgam.data.rows import Row
    from amalgam.pipeline.experiment import Corpus

SUSPECTS = 100_000
TOLD = 5


def _hash(identity: str) -> bytes:
    return blake2b(identity.encode(), digest_size=8).digest()


class Identities:
    def __init__(self, corpus: Corpus) -> None:
        self._column = corpus.id
        self._kinds_may_mix = corpus.id_type == "string"
        self._hashes = bytearray()
        self._first: Row | None = None

    def add(self, row: Row) -> None:
        if self._first is None:
            self._first = row
        elif row.id_is_number is not self._first.id_is_number and not self._kinds_may_mix:
            raise self._mixed(self._first, row)
        self._hashes += _hash(row.id or "")

    def _mixed(self, one: Row, other: Row) -> DataError:
        kinds = [
            f"{_place(row)}: {'number' if row.id_is_number else 'text'} {shown(row.id or '')}" for row in (one, other)
        ]
        fix = 'store all ids as text, or corpus.id_type: string, which takes 1 and "1" for the same id'
        return DataError(f"the ids in {shown(self._column)} mix numbers and text", where="; ".join(kinds), fix=fix)

    def check(self, again: Callable[[], Iterable[Row | BadRow]]) -> None:
        """Raises if an id was given twice; `again` reads the same rows once more."""
        import numpy as np

        hashes = np.frombuffer(self._hashes, np.uint64)
        hashes.sort()
        suspects = {int(value) for value in np.unique(hashes[1:][hashes[1:] == hashes[:-1]])[:SUSPECTS]}
        if not suspects:
            return
        twice = _given_twice(again(), suspects)
        if twice:
            more = " or more" if len(twice) == TOLD else ""
            what = f"{len(twice)}{more} ids in {shown(self._column)} are given more than once"
            raise DataError(what, where="; ".join(twice), fix="make each id unique, or corpus.id: auto")


def _given_twice(rows: Iterable[Row | BadRow], suspects: set[int]) -> list[str]:
    first: dict[str, Row] = {}
    twice: dict[str, str] = {}
    for row in rows:
        if isinstance(row, BadRow) or row.id is None or _number(row.id) not in suspects:
            continue
        other = first.setdefault(row.id, row)
        if other is not row:
            twice.setdefault(row.id, f"{shown(row.id)} in {_place(other)} and {_place(row)}")
        if len(twice) == TOLD:
            break
    return list(twice.values())


def _number(identity: str) -> int:
    return int.from_bytes(_hash(identity), sys.byteorder)


def _place(row: Row) -> str:
    return f"{row.source} row {row.number}"
