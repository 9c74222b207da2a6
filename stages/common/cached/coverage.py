"""Finds the missing predictions of a family: all cached predictions that may be used together.

Within a family texts are spread over buckets by key prefix. Missing texts and passes are computed by key: an appended
text costs only itself, and K = 24 after 16 costs 8 passes. A second corpus reuses the texts it shares.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from amalgam.data.keys import ALL, keys_digest
from amalgam.data.parquet import read_keys
from amalgam.pipeline.execution.stage import Unit
from amalgam.pipeline.storage.fingerprint import fingerprint
from amalgam.pipeline.storage.store import Record, Store, StoredFile
from amalgam.stages.common.corpus import Bucket, Part

if TYPE_CHECKING:
    pass

if TYPE_CHECKING:
    import numpy as np


if TYPE_CHECKING:
    Keys = np.ndarray[Any, np.dtype[np.bytes_]]


ENGINE = 1
"""Version of the numerics: raised whenever the same teacher, text, pass and seed give other numbers."""


KEPT_UNITS = 64
"""Units whose keys stay in memory."""


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


@dataclass(frozen=True, slots=True)
class CachedUnit:
    """One committed unit of the family."""

    name: str
    prefix: str
    logits: bool
    first: int
    last: int
    rows: int
    file: StoredFile

    @property
    def size(self) -> int:
        return self.rows * (self.last - self.first + self.logits)


class CachedUnits:
    """A family's units in the order of pass ranges, found by bucket without looking through all of them."""

    def __init__(self, units: Iterable[CachedUnit], folder: Path) -> None:
        self.folder = folder
        self._units = sorted(units, key=lambda unit: (unit.first, unit.last, unit.prefix, unit.name))
        self._places: dict[str, list[int]] = {}
        for place, unit in enumerate(self._units):
            self._places.setdefault(unit.prefix, []).append(place)
        self._prefixes = sorted(self._places.keys() - {ALL})
        self._lengths = sorted({len(prefix) for prefix in self._prefixes})

    def __iter__(self) -> Iterator[CachedUnit]:
        return iter(self._units)

    def overlapping(self, prefix: str) -> list[CachedUnit]:
        if prefix == ALL:
            return list(self._units)
        names = [ALL, *(prefix[:length] for length in self._lengths if length <= len(prefix))]
        if self._lengths and self._lengths[-1] > len(prefix):
            after = range(bisect_right(self._prefixes, prefix), len(self._prefixes))
            names += takewhile(lambda name: name.startswith(prefix), (self._prefixes[at] for at in after))
        places = [at for name in names for at in self._places.get(name, ())]
        return [self._units[at] for at in sorted(places)]


def family_name(identity: dict[str, Any]) -> str:
    return fingerprint({"engine": ENGINE, **identity})


def family_in(path: str) -> str:
    """Returns the family of a stored file: STAGE/FAMILY/units/..."""
    return PurePosixPath(path).parts[1]


def prefix_in(path: str) -> str:
    """Returns the bucket prefix of a stored file."""
    return PurePosixPath(path).name.split("-", 1)[0]


def cached_units(store: Store, folder: Path) -> CachedUnits:
    """Returns the complete units of the family whose units are in `folder`."""
    return CachedUnits(_units_of(store.units(folder)), folder)


def has_answers(store: Store, folder: Path) -> bool:
    """Returns whether the family has any complete unit; stops at the first one."""
    return any(any(_units_of(store.units(folder, [path.stem]))) for path in store.units_in(folder))


class UnitKeys:
    """Reads the keys of cached units; KEPT_UNITS of them stay in memory, because buckets come in order."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.cached: dict[str, Keys] = {}

    def __call__(self, unit: CachedUnit) -> Keys:
        keys = self.cached.pop(unit.name, None)
        if keys is None:
            keys = read_keys(self._store.verified_path(unit.file))
        self.cached[unit.name] = keys
        if len(self.cached) > KEPT_UNITS:
            self.cached.pop(next(iter(self.cached)))
        return keys


def _units_of(records: Mapping[str, Record]) -> Iterator[CachedUnit]:
    for unit, record in records.items():
        if record.files:
            fields = {name: record.facts[name] for name in ("prefix", "logits", "first", "last", "rows")}
            yield CachedUnit(name=unit, file=record.files[0], **fields)


@dataclass
class Coverage:
    """Records for each text of a bucket whether its dropout-off logits exist, and the number of its first passes."""

    logits: Any
    passes: Any

    @classmethod
    def of(cls, texts: int) -> Coverage:
        import numpy as np

        return cls(np.zeros(texts, dtype=bool), np.zeros(texts, dtype=np.int32))

    def whole(self, wanted: Any) -> bool:
        return bool(self.logits.all() and (self.passes >= wanted).all())

    def add(self, unit: CachedUnit, rows: Any, wanted: Any) -> bool:
        """Adds a cached unit with these rows, in order of pass; returns True if it covers anything new."""
        import numpy as np

        news = False
        if unit.logits:
            news = bool((~self.logits[rows]).any())
            self.logits[rows] = True
        wanted_passes = np.broadcast_to(wanted, len(self.logits))[rows]
        extends = rows[(self.passes[rows] >= unit.first) & (self.passes[rows] < np.minimum(unit.last, wanted_passes))]
        self.passes[extends] = unit.last
        return news or len(extends) > 0

    def missing(self, wanted: Any) -> Iterator[tuple[Any, bool, int, int]]:
        """Yields (rows, lacks logits, first missing pass, wanted passes) by group of texts that lack the same."""
        import numpy as np

        wanted_passes = np.broadcast_to(wanted, len(self.logits))
        for logits in (False, True):
            for last in np.unique(wanted_passes):
                for covered in np.unique(self.passes):
                    rows = np.flatnonzero((self.logits == logits) & (self.passes == covered) & (wanted_passes == last))
                    if len(rows) and not (logits and covered >= last):
                        yield rows, not logits, int(min(covered, last)), int(last)


class BucketRequest:
    """Matches the texts of one bucket with cached units, once for all teachers.

    A unit's name includes the digest of its keys, so units of one name have the same texts. Planning therefore opens
    no unit that covers the whole bucket, and reads only changed ones.
    """

    def __init__(
        self, part: str, bucket: Bucket, read_keys: Callable[[Bucket], Keys], unit_keys: Callable[[CachedUnit], Keys]
    ) -> None:
        import numpy as np

        self.part, self.prefix, self.texts = part, bucket.prefix, bucket.rows
        self._bucket, self._read_keys, self._unit_keys = bucket, read_keys, unit_keys
        self._every = np.arange(self.texts)
        self._names: dict[tuple[bool, int, int], str] = {}
        self._rows: dict[str, Any] = {}
        self._lacking: tuple[Any, Sequence[tuple[Any, bool, int, int]]] = (None, ())

    @cached_property
    def keys(self) -> Keys:
        return self._read_keys(self._bucket)

    def name(self, rows: Any, logits: bool, first: int, last: int) -> str:
        if len(rows) < self.texts:
            return self._named(keys_digest(self.keys[rows].tobytes()), logits, first, last)
        request = (logits, first, last)
        if request not in self._names:
            self._names[request] = self._named(self._bucket.keys_digest, logits, first, last)
        return self._names[request]

    def _named(self, digest: str, logits: bool, first: int, last: int) -> str:
        return f"{self.prefix}-{fingerprint([digest, logits, first, last])[:10]}"

    def is_answered_by(self, unit: CachedUnit, wanted: Any) -> bool:
        """Returns whether the unit covers the wanted passes of the whole bucket: the usual case, without counting."""
        enough = isinstance(wanted, int) and unit.logits and unit.first == 0 and unit.last >= wanted
        return enough and self._is_all_of(unit)

    def _is_all_of(self, unit: CachedUnit) -> bool:
        return unit.rows == self.texts and unit.name == self.name(self._every, unit.logits, unit.first, unit.last)

    def rows_of(self, unit: CachedUnit) -> Any:
        """Returns the positions of the unit's texts in the bucket."""
        if unit.name not in self._rows:
            self._rows[unit.name] = self._every if self._is_all_of(unit) else self._places(self._unit_keys(unit))
        return self._rows[unit.name]

    def missing(self, coverage: Coverage, wanted: Any) -> Sequence[tuple[Any, bool, int, int]]:
        """Returns the coverage's missing groups, cached for the next teacher that lacks the same."""
        import numpy as np

        lack = (coverage.logits.tobytes(), coverage.passes.tobytes(), np.asarray(wanted).tobytes())
        if self._lacking[0] != lack:
            self._lacking = lack, list(coverage.missing(wanted))
        return self._lacking[1]

    def _places(self, keys: Keys) -> Any:
        import numpy as np

        places = np.searchsorted(self.keys, keys)
        here = (places < len(self.keys)) & (self.keys[np.minimum(places, len(self.keys) - 1)] == keys)
        return places[here]


def bucket_requests(store: Store, part: Part, unit_keys: UnitKeys) -> Iterator[BucketRequest]:
    """Yields the part's buckets. The first read of keys fetches the files of all buckets together."""
    fetch = cache(lambda: store.backend.fetch([bucket.file.path for bucket in part.buckets]))

    def read(bucket: Bucket) -> Keys:
        fetch()
        return read_keys(store.verified_path(bucket.file))

    return (BucketRequest(part.name, bucket, read, unit_keys) for bucket in part.buckets)


def units_for(teacher: str, bucket: BucketRequest, cached: CachedUnits, wanted: Any) -> Iterator[Unit]:
    """Yields the cached units that these texts use, and new units for missing predictions.

    `wanted` is the number of passes, of all texts or of each.
    """
    overlapping = cached.overlapping(bucket.prefix)
    complete = next((unit for unit in overlapping if bucket.is_answered_by(unit, wanted)), None)
    if complete:
        yield Unit(complete.name, cached.folder, complete.size, is_complete=True)
        return
    coverage = Coverage.of(bucket.texts)
    for unit in overlapping:
        rows = bucket.rows_of(unit)
        if len(rows) and coverage.add(unit, rows, wanted):
            yield Unit(unit.name, cached.folder, unit.size, is_complete=True)
            if coverage.whole(wanted):
                return
    for rows, logits, first, last in bucket.missing(coverage, wanted):
        places = rows if len(rows) < bucket.texts else None
        request = UnitRequest(teacher, bucket.part, bucket.prefix, places, logits, first, last)
        size = len(rows) * (last - first + logits)
        yield Unit(bucket.name(rows, logits, first, last), cached.folder, size, request)
