"""Which files of the cache hold the answers about some buckets, and those answers, read together.

The manifest's files are put in order once; a unit then finds its own without looking at the rest. All files of one
pass range are read as one frame, so that what follows costs the same few large steps however small the files are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import polars as pl
import pyarrow as pa

from amalgam.data.keys import ALL
from amalgam.data.parquet import read_table
from amalgam.pipeline.errors import WorkError
from amalgam.pipeline.execution.stage import Run
from amalgam.pipeline.storage.store import StoredFile
from amalgam.stages.common.answers.coverage import family_in, prefix_in

if TYPE_CHECKING:
    pass


COLUMNS = ("key", "logits", "passes")


@dataclass(frozen=True)
class Answers:
    """What the cache holds, about texts of one unit alone, from runs over passes first..last-1."""

    first: int
    last: int
    frame: pl.DataFrame


@dataclass
class FamilyIndex:
    """A family's files by the bits of their bucket."""

    files: dict[str, list[tuple[int, StoredFile]]] = field(default_factory=dict)
    """Each with its place in the manifest."""
    order: list[str] = field(default_factory=list)

    def about(self, prefixes: Sequence[str]) -> list[StoredFile]:
        """The files whose bucket overlaps any of these, each once, in the manifest's order."""
        found = {place: file for prefix in prefixes for bits in self._overlapping(prefix) for place, file in bits}
        return [found[place] for place in sorted(found)]

    def _overlapping(self, prefix: str) -> Iterator[list[tuple[int, StoredFile]]]:
        bits = _bits(prefix)
        yield from (self.files[bits[:size]] for size in range(len(bits)) if bits[:size] in self.files)
        for inner in self.order[bisect_left(self.order, bits) :]:
            if not inner.startswith(bits):
                break
            yield self.files[inner]


def read_answers(run: Run, family: str, prefixes: Sequence[str], keys: pl.Series) -> list[Answers]:
    """In the order of pass ranges; a text stands once in each."""
    ranges = run.result("cache-teachers").facts["ranges"]  # a unit's own record may be lost
    files = shelves_of(run)[family].about(prefixes) if family in shelves_of(run) else []
    tables = [read_table(path, COLUMNS) for path in run.store.verified_paths(files)]
    alike: dict[tuple[Any, ...], list[pa.Table]] = {}
    for file, table in zip(files, tables, strict=True):
        first, last = ranges[file.path]
        alike.setdefault((int(first), int(last), *table.column_names), []).append(table)
    found = [Answers(kind[0], kind[1], _about(pa.concat_tables(some), keys)) for kind, some in alike.items()]
    return sorted(found, key=lambda answers: (answers.first, answers.last))


def _about(table: pa.Table, keys: pl.Series) -> pl.DataFrame:
    frame = pl.DataFrame(table)
    if frame["key"].equals(keys):  # the rule: a bucket's texts were asked together
        return frame
    return frame.filter(pl.col("key").is_in(keys.implode())).unique("key", maintain_order=True)


def shelves_of(run: Run) -> dict[str, FamilyIndex]:
    """By family, for the manifest that stands now."""
    name = run.fingerprint("cache-teachers")
    known: tuple[str, dict[str, FamilyIndex]] = run.cache.get("shelves", ("", {}))
    if known[0] != name:
        known = run.cache["shelves"] = (name, _put_in_order(run.result("cache-teachers").files))
    return known[1]


def _put_in_order(files: Sequence[StoredFile]) -> dict[str, FamilyIndex]:
    shelves: dict[str, FamilyIndex] = {}
    for place, file in enumerate(files):
        shelf = shelves.setdefault(family_in(file.path), FamilyIndex())
        shelf.files.setdefault(_bits(prefix_in(file.path)), []).append((place, file))
    for shelf in shelves.values():
        shelf.order = sorted(shelf.files)
    return shelves


def _bits(prefix: str) -> str:
    return "" if prefix == ALL else prefix


def logits_of(run: Run, teacher: str, family: str, prefixes: Sequence[str], keys: pl.Series) -> pl.Series:
    """Dropout off."""
    return _aligned(_logits(read_answers(run, family, prefixes, keys)), keys, teacher)["logits"]


def _logits(answers: Sequence[Answers]) -> pl.DataFrame:
    found = [one.frame.select("key", "logits") for one in answers if "logits" in one.frame.columns]
    if len(found) == 1:
        return found[0]
    return pl.concat(found).unique("key", keep="first", maintain_order=True) if found else pl.DataFrame()


def _aligned(frame: pl.DataFrame, keys: pl.Series, teacher: str) -> pl.DataFrame:
    if frame.is_empty():
        raise _incomplete(teacher, len(keys), len(keys))
    if frame["key"].equals(keys):
        return frame
    joined = pl.DataFrame({"key": keys}).join(frame, on="key", how="left", maintain_order="left")
    absent = joined[joined.columns[1]].null_count()
    if absent:
        raise _incomplete(teacher, absent, len(keys))
    return joined


def _incomplete(teacher: str, absent: int, total: int) -> WorkError:
    return WorkError(
        f"teacher {teacher}: the cache lacks {absent} of {total} texts",
        fix="`amalgam verify`, then run the same command again",
    )
