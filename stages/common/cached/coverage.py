"""Finds the missing predictions of a family: all cached predictions that may be used together.

Within a family texts are spread over buckets by key prefix. Missing texts and passes are computed by key: an appended
text costs only itself, and K = 24 after 16 costs 8 passes. A second corpus reuses the texts it shares.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, Generic, NotRequired, TypedDict, TypeVar

from amalgam.data.arrays import Keys
from amalgam.data.keys import ALL, keys_digest
from amalgam.data.lazy import np
from amalgam.pipeline.execution.stage import Slot, Unit
from amalgam.pipeline.storage.fingerprint import fingerprint
from amalgam.pipeline.storage.store import Record, StoredFile
from amalgam.stages.common.corpus import Bucket

T = TypeVar("T")

ENGINE = 1
"""Version of the numerics: raised whenever the same teacher, text, pass and seed give other numbers."""

UNIT_PREDICTIONS, BUCKET_UNITS = 16_384, 4
"""A bucket with more predictions is cut into up to four units, because a killed run loses those of one unit."""


class PrefixIndex(Generic[T]):
    """Entries in a fixed order; finds those whose buckets overlap others without looking through all of them."""

    def __init__(self, entries: Iterable[tuple[str, T]]) -> None:
        """Indexes pairs of a bucket prefix and an entry."""
        self.entries: list[T] = []
        self._places: dict[str, list[int]] = {}
        for index, (prefix, entry) in enumerate(entries):
            self.entries.append(entry)
            self._places.setdefault(_bits(prefix), []).append(index)
        self._sorted = sorted(self._places)

    def overlapping(self, prefixes: Iterable[str]) -> list[T]:
        """Returns each entry whose bucket overlaps any of these, once and in order."""
        overlapping = {bits for prefix in prefixes for bits in self._overlapping(_bits(prefix))}
        return [self.entries[place] for place in sorted(place for bits in overlapping for place in self._places[bits])]

    def _overlapping(self, bits: str) -> Iterator[str]:
        yield from (bits[:size] for size in range(len(bits)) if bits[:size] in self._places)
        later = (self._sorted[index] for index in range(bisect_left(self._sorted, bits), len(self._sorted)))
        yield from takewhile(lambda inner: inner.startswith(bits), later)


def _bits(prefix: str) -> str:
    return "" if prefix == ALL else prefix


@dataclass(frozen=True)
class UnitRequest:
    """The work of one unit: these texts of a bucket, with or without the dropout-off run, passes first..last-1."""

    teacher: str
    part: str
    prefix: str
    rows: Any
    """Positions of the texts in the bucket; None: the whole bucket."""
    logits: bool
    first: int
    last: int

    def facts(self, rows: int) -> UnitFacts:
        return {"prefix": self.prefix, "logits": self.logits, "first": self.first, "last": self.last, "rows": rows}

    def facts_of_states(self, rows: int, clipped: int) -> UnitFacts:
        facts = self.facts(rows)
        return StateFacts(**facts, clipped=clipped) if clipped else facts


@dataclass(frozen=True, slots=True)
class CachedUnit:
    name: str
    prefix: str
    logits: bool
    first: int
    last: int
    rows: int
    file: StoredFile = field(compare=False)
    """Units of one name have the same texts in every family."""

    @property
    def size(self) -> int:
        return self.rows * (self.last - self.first + self.logits)


class CachedUnits(PrefixIndex[CachedUnit]):
    """The complete units of a family, in the order of pass ranges."""

    def __init__(self, units: Iterable[CachedUnit], folder: Path) -> None:
        in_order = sorted(units, key=lambda unit: (unit.first, unit.last, unit.prefix, unit.name))
        super().__init__((unit.prefix, unit) for unit in in_order)
        self.folder = folder


class UnitFacts(TypedDict):
    """The facts by which a cached unit is matched with texts."""

    prefix: str
    logits: bool
    first: int
    last: int
    rows: int


class StateFacts(UnitFacts):
    clipped: NotRequired[int]
    """Numbers beyond the largest of fp16; absent if there are none."""


class AnswerFacts(UnitFacts):
    cut: int
    """Number of truncated texts."""
    unreadable: NotRequired[int]
    """Number of texts with mostly unknown tokens."""
    tokens: int
    device: str


def family_name(identity: Mapping[str, object]) -> str:
    return fingerprint({"engine": ENGINE, **identity})


def family_in(path: str) -> str:
    """Returns the family of a stored file: STAGE/FAMILY/units/..."""
    return path.split("/", 2)[1]  # strings, because there may be a hundred thousand paths


def cached_units(records: Mapping[str, Record]) -> Iterator[CachedUnit]:
    for unit, record in records.items():
        if record.files:
            fields = {name: record.facts[name] for name in UnitFacts.__annotations__}
            yield CachedUnit(name=unit, file=record.files[0], **fields)


class Coverage:
    """Records for each text of a bucket whether its dropout-off logits exist, and the number of its first passes."""

    def __init__(self, texts: int, wanted: Any) -> None:
        """Starts without cached units; `wanted` is the number of passes, of all texts or of each."""
        self.wanted = np.broadcast_to(wanted, texts)
        self.logits = np.zeros(texts, dtype=bool)
        self.passes = np.zeros(texts, dtype=np.int32)

    @property
    def is_complete(self) -> bool:
        return bool(self.logits.all() and (self.passes >= self.wanted).all())

    def add(self, unit: CachedUnit, rows: Any) -> bool:
        """Adds a cached unit with these rows, in order of pass; returns True if it covers anything new."""
        news = False
        if unit.logits:
            news = not self.logits[rows].all()
            self.logits[rows] = True
        passes = self.passes[rows]
        extends = rows[(passes >= unit.first) & (passes < self.wanted[rows].clip(max=unit.last))]
        self.passes[extends] = unit.last
        return news or len(extends) > 0

    def missing(self) -> Iterator[tuple[Any, bool, int, int]]:
        """Yields (rows, lacks logits, first missing pass, wanted passes) by group of texts that lack the same."""
        for logits in (False, True):
            for last in np.unique(self.wanted):
                for covered in np.unique(self.passes):
                    group = (self.logits == logits) & (self.passes == covered) & (self.wanted == last)
                    rows = np.flatnonzero(group)
                    if len(rows) and not (logits and covered >= last):
                        yield rows, not logits, int(min(covered, last)), int(last)


class BucketRequest:
    """Matches the texts of one bucket with cached units, once for all teachers.

    A unit's name includes the digest of its keys, or of the bucket's keys and its place in the bucket. So units of one
    name have the same texts, and planning opens no unit of a whole bucket or of one of its equal parts.
    """

    def __init__(
        self, part: str, bucket: Bucket, read_keys: Callable[[Bucket], Keys], unit_keys: Callable[[CachedUnit], Keys]
    ) -> None:
        self.part, self.prefix, self.texts = part, bucket.prefix, bucket.rows
        self.bucket, self._read_keys, self._unit_keys = bucket, read_keys, unit_keys
        self._rows: dict[str, Any] = {}
        self._parts: dict[tuple[bool, int, int], dict[str, range]] = {}

    @cached_property
    def keys(self) -> Keys:
        return self._read_keys(self.bucket)

    def name(self, rows: Any, logits: bool, first: int, last: int) -> str:
        """Returns the name of the unit with these texts; None means all texts of the bucket."""
        digest = self.bucket.keys_digest if rows is None else keys_digest(self.keys[rows].tobytes())
        return f"{self.prefix}-{fingerprint([digest, logits, first, last])[:10]}"

    def parts(self, logits: bool, first: int, last: int) -> dict[str, range]:
        """Returns the units into which the whole bucket is cut, by name; their keys need not be read."""
        if (logits, first, last) not in self._parts:
            units = max(1, min(-(-self.texts * (last - first + logits) // UNIT_PREDICTIONS), BUCKET_UNITS, self.texts))
            ends = [self.texts * number // units for number in range(units + 1)]
            parts = [range(*part) for part in pairwise(ends)]
            self._parts[logits, first, last] = {self._part_name(part, logits, first, last): part for part in parts}
        return self._parts[logits, first, last]

    def _part_name(self, part: range, logits: bool, first: int, last: int) -> str:
        if len(part) == self.texts:
            return self.name(None, logits, first, last)
        places = [self.bucket.keys_digest, part.start, part.stop, logits, first, last]
        return f"{self.prefix}-{fingerprint(places)[:10]}"

    def complete_units(self, cached: Iterable[CachedUnit], wanted: Any) -> list[CachedUnit]:
        """Returns a unit of the whole bucket with the wanted passes, or all its parts: the usual case; no numpy."""
        if not isinstance(wanted, int):
            return []
        by_name = {unit.name: unit for unit in cached if unit.logits and unit.first == 0 and unit.last >= wanted}
        whole = [unit for unit in by_name.values() if self._is_all_of(unit)]
        parts = self.parts(True, 0, wanted)
        return whole[:1] or ([by_name[name] for name in parts] if parts.keys() <= by_name.keys() else [])

    def _is_all_of(self, unit: CachedUnit) -> bool:
        return unit.rows == self.texts and unit.name == self.name(None, unit.logits, unit.first, unit.last)

    def rows_of(self, unit: CachedUnit) -> Any:
        """Returns the positions of the unit's texts in the bucket."""
        if self._is_all_of(unit):
            return np.arange(self.texts)
        part = self.parts(unit.logits, unit.first, unit.last).get(unit.name)
        if part:
            return np.arange(part.start, part.stop)
        if unit.name not in self._rows:
            keys = self._unit_keys(unit)
            places = self.keys.searchsorted(keys).clip(max=self.texts - 1)
            self._rows[unit.name] = places[self.keys[places] == keys]
        return self._rows[unit.name]

    def missing(self, coverage: Coverage) -> Iterator[tuple[str, Any, bool, int, int]]:
        """Yields the missing units: name, positions, and the missing predictions.

        Each part that is missing completely is one, and all other texts, as appended ones, are another.
        """
        for rows, logits, first, last in coverage.missing():
            rest = np.ones(len(rows), bool)
            for name, part in self.parts(logits, first, last).items():
                is_inside = (rows >= part.start) & (rows < part.stop)
                if is_inside.sum() == len(part):
                    rest &= ~is_inside
                    yield name, rows[is_inside], logits, first, last
            if rest.any():
                yield self.name(rows[rest], logits, first, last), rows[rest], logits, first, last


def units_for(teacher: str, bucket: BucketRequest, cached: CachedUnits, wanted: Any) -> Iterator[Unit]:
    """Yields the cached units that these texts use, and new units for missing predictions.

    `wanted` is the number of passes, of all texts or of each. Slots do not change as units are completed, also by a
    unit of other texts that include some of these.
    """
    overlapping, group = cached.overlapping([bucket.prefix]), f"{teacher} {bucket.part} {bucket.prefix}"
    most = wanted if isinstance(wanted, int) else int(np.max(wanted))
    starts = [part.start for part in bucket.parts(True, 0, most).values()]

    def unit_at(row: int, unit: CachedUnit) -> Unit:
        return Unit(unit.name, cached.folder, unit.size, is_complete=True, slot=slot(row))

    def slot(row: int) -> Slot:
        return Slot(group, bisect_right(starts, row) - 1, len(starts))

    complete = bucket.complete_units(overlapping, wanted)
    if complete:
        yield from map(unit_at, starts, complete)
        return
    coverage = Coverage(bucket.texts, wanted)
    units: list[tuple[tuple[int, int, int], Unit]] = []
    for unit in overlapping:
        rows = bucket.rows_of(unit)
        if len(rows) and coverage.add(unit, rows):
            units.append(((rows[0], unit.first, unit.last), unit_at(rows[0], unit)))
        if coverage.is_complete:
            break
    for name, rows, logits, first, last in bucket.missing(coverage):
        places = rows if len(rows) < bucket.texts else None
        request = UnitRequest(teacher, bucket.part, bucket.prefix, places, logits, first, last)
        size = len(rows) * (last - first + logits)
        units.append(((rows[0], first, last), Unit(name, cached.folder, size, request, slot=slot(rows[0]))))
    yield from (unit for _, unit in sorted(units, key=lambda each: (each[0], each[1].name)))
