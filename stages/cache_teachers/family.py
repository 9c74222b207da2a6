"""A family: all cached answers that may be used together, and which of them a set of texts still lacks.

Within a family texts are spread over buckets by key prefix. What is missing is found by key: an appended text costs
itself, K = 24 after 16 costs 8 passes, and a second corpus reuses the texts it shares.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amalgam.data.keys import overlaps
from amalgam.pipeline.fingerprint import fingerprint
from amalgam.pipeline.stage import Run, Unit
from amalgam.pipeline.store import Record

if TYPE_CHECKING:
    import numpy as np

    Keys = np.ndarray[Any, np.dtype[np.bytes_]]

ENGINE = 1
"""Version of the numerics: raised whenever the same teacher, text, pass and seed give other numbers."""


@dataclass(frozen=True)
class Ask:
    """The work of one unit: these texts of a bucket, with or without the dropout-off run, passes first..last-1."""

    teacher: str
    part: str
    prefix: str
    rows: Any
    """Where the texts stand in the bucket; None: they are the whole bucket."""
    logits: bool
    first: int
    last: int


@dataclass(frozen=True)
class CachedUnit:
    """One committed unit of the family."""

    prefix: str
    logits: bool
    first: int
    last: int
    record_path: Path
    record: Record


def family_name(identity: dict[str, Any]) -> str:
    return fingerprint({"engine": ENGINE, **identity})


def units_folder(run: Run, family: str) -> Path:
    return run.store.folder("cache-teachers", family) / "units"


def cached_units(run: Run, family: str) -> list[CachedUnit]:
    """What is there and whole, in the order of pass ranges."""
    found = []
    for path in sorted(units_folder(run, family).glob("*.json")):
        record = run.store.record(path)
        if record is not None and record.files and not run.store.absent(record):
            facts = record.facts
            found.append(CachedUnit(facts["prefix"], facts["logits"], facts["first"], facts["last"], path, record))
    return sorted(found, key=lambda unit: (unit.first, unit.last, unit.prefix, unit.record_path.name))


@dataclass
class Coverage:
    """For each key of a bucket: has it the dropout-off logits, and how many of its passes, counted from the first."""

    keys: Keys
    logits: Any
    passes: Any

    @classmethod
    def of(cls, keys: Keys) -> Coverage:
        import numpy as np

        return cls(keys, np.zeros(len(keys), dtype=bool), np.zeros(len(keys), dtype=np.int32))

    def add(self, unit: CachedUnit, keys: Keys, wanted: Any) -> bool:
        """Count a cached unit in; True if it gives anything that was not covered. Units come in order of pass."""
        import numpy as np

        places = np.searchsorted(self.keys, keys)
        here = (places < len(self.keys)) & (self.keys[np.minimum(places, len(self.keys) - 1)] == keys)
        rows = places[here]
        news = False
        if unit.logits:
            news = bool((~self.logits[rows]).any())
            self.logits[rows] = True
        asked = np.broadcast_to(wanted, len(self.keys))[rows]
        extends = rows[(self.passes[rows] >= unit.first) & (self.passes[rows] < np.minimum(unit.last, asked))]
        self.passes[extends] = unit.last
        return news or len(extends) > 0

    def missing(self, wanted: Any) -> Iterator[tuple[Any, bool, int, int]]:
        """(rows, lacks logits, first missing pass, passes wanted) for every group of texts that lacks the same."""
        import numpy as np

        asked = np.broadcast_to(wanted, len(self.keys))
        for logits in (False, True):
            for last in np.unique(asked):
                for covered in np.unique(self.passes):
                    rows = np.flatnonzero((self.logits == logits) & (self.passes == covered) & (asked == last))
                    if len(rows) and not (logits and covered >= last):
                        yield rows, not logits, int(min(covered, last)), int(last)


def units_for(  # noqa: PLR0913 - one bucket's facts, each used once
    run: Run, family: str, teacher: str, part: str, prefix: str, keys: Keys, cached: list[CachedUnit], wanted: Any
) -> Iterator[Unit]:
    """The cached units that these texts use, and new ones for what they lack; `wanted` passes, of all or of each."""
    folder = units_folder(run, family)
    coverage = Coverage.of(keys)
    for unit in cached:
        if overlaps(unit.prefix, prefix) and coverage.add(unit, unit_keys(run, unit), wanted):
            yield Unit(unit.record_path.stem, folder, _size(unit.record.facts))
    for rows, logits, first, last in coverage.missing(wanted):
        ask = Ask(teacher, part, prefix, rows if len(rows) < len(keys) else None, logits, first, last)
        mark = fingerprint([keys[rows].tobytes().hex(), logits, first, last])[:10]
        yield Unit(f"{prefix}-{mark}", folder, len(rows) * (last - first + logits), ask)


def unit_keys(run: Run, unit: CachedUnit) -> Keys:
    from amalgam.data.shards import read_keys

    known = run.memory.setdefault("unit keys", {})
    path = unit.record.files[0].path
    if path not in known:
        known[path] = read_keys(run.store.checked(unit.record.files[0]))
    found: Keys = known[path]
    return found


def _size(facts: dict[str, Any]) -> int:
    return int(facts["rows"]) * (int(facts["last"]) - int(facts["first"]) + bool(facts["logits"]))
