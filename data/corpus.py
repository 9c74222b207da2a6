"""A part of the corpus: sources in, checked and keyed texts out, one Parquet file per bucket of keys.

The result depends only on the texts: not on the order of rows or files, their names, format or duplicates.
Memory holds one run of rows, then the rows of one leading key byte (1/256 of the corpus), and 8 bytes per id.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from hashlib import blake2b, sha256
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from amalgam.data.keys import bits_for, keys_digest, overlaps, prefix_name, shown, text_key
from amalgam.data.parquet import (
    ExternalKeySort,
    key_array,
    key_list,
    parquet_options,
    read_keys,
    read_table,
    write_table,
)
from amalgam.data.rows import BadRow, Row, read_rows
from amalgam.data.schemas import CORPUS, SKIPPED, arrow_schema
from amalgam.pipeline.config.schema import Corpus
from amalgam.pipeline.errors import DataError

if TYPE_CHECKING:
    from hashlib import _Hash


Part = Literal["train", "validation", "test", "teachers", "held-out"]


SKIPPED_FILE = "skipped.parquet"

BAD_ROWS_TOLD = 5

LOOK_ON = 100_000  # rows read past the first bad one, to report others in the same message

SKIPPED_ROWS = 10_000


@dataclass(frozen=True)
class Bucket:
    prefix: str
    rows: int
    keys_digest: str
    file: str


@dataclass(frozen=True)
class PartFacts:
    """rows = texts + duplicates + over_limit + all skipped."""

    rows: int
    texts: int
    duplicates: int
    over_limit: int
    conflicts: int
    """Kept texts whose copies had different labels; the most frequent label is kept, or the first by name if equal."""
    skipped: dict[str, int]
    labels: dict[str, int]
    texts_digest: str
    labels_digest: str | None
    bits: int
    buckets: tuple[Bucket, ...]
    files: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "buckets": [asdict(bucket) for bucket in self.buckets], "files": list(self.files)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        buckets = tuple(Bucket(**bucket) for bucket in value["buckets"])
        return cls(**{**value, "buckets": buckets, "files": tuple(value["files"])})


def read_part(
    sources: Sequence[Path], corpus: Corpus, *, part: Part, folder: Path, require_label: bool = False
) -> PartFacts:
    """Reads local files (files_of, fetch_remote) into an existing, empty folder."""
    labelled = require_label or part not in {"train", "held-out"}
    with ExternalKeySort(_spill_schema(), folder) as spill, ExitStack() as stack:
        intake = CorpusReader(sources, corpus, part, labelled)
        intake.skipped_file = _SkippedFile(folder / SKIPPED_FILE, stack)
        intake.take_in(spill)
        intake.settle()
        bucketed = BucketWriter(spill, folder, corpus.limit if part in {"train", "teachers"} else None)
        bucketed.write()
    names = [bucket.file for bucket in bucketed.buckets] + ([SKIPPED_FILE] if intake.skipped else [])
    return PartFacts(
        rows=intake.rows,
        texts=bucketed.kept,
        duplicates=spill.rows - bucketed.distinct,
        over_limit=bucketed.distinct - bucketed.kept,
        conflicts=bucketed.conflicts,
        skipped=dict(sorted(intake.skipped.items())),
        labels=dict(sorted(bucketed.labels.items())),
        texts_digest=bucketed.texts_digest.hexdigest(),
        labels_digest=bucketed.labels_digest.hexdigest() if bucketed.labels else None,
        bits=bucketed.bits,
        buckets=tuple(bucketed.buckets),
        files=tuple(sorted(names)),
    )


def leaks(train: Path, test: Path) -> tuple[int, list[str]]:
    """Returns the number of texts that two parts share, and the first five by id, else by text."""
    import numpy as np

    count, examples = 0, list[str]()
    for bucket in _bucket_files(test):
        keys = read_keys(bucket)
        shared = np.zeros(len(keys), bool)
        for other in _bucket_files(train):
            if overlaps(bucket.stem, other.stem):
                shared |= np.isin(keys, read_keys(other))
        count += int(shared.sum())
        if shared.any() and len(examples) < BAD_ROWS_TOLD:
            rows = read_table(bucket, ["id", "text"]).filter(shared).slice(0, BAD_ROWS_TOLD - len(examples)).to_pylist()
            examples += [shown(row["text"] if row["id"] is None else row["id"]) for row in rows]
    return count, examples


def _bucket_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.parquet") if path.name != SKIPPED_FILE)


def _spill_schema() -> Any:
    """Returns a schema for more than 2 GB of text, the limit of a plain Arrow string column."""
    import pyarrow as pa

    schema = arrow_schema(CORPUS)
    wide = [field.with_type(pa.large_string()) if field.type == pa.string() else field for field in schema]
    return pa.schema(wide)


class _SkippedFile:
    """Created with the first skipped row."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._path, self._stack = path, stack
        self._writer: Any = None
        self._rows: list[BadRow] = []

    def add(self, bad: BadRow) -> None:
        self._rows.append(bad)
        if len(self._rows) >= SKIPPED_ROWS:
            self.flush()

    def flush(self) -> None:
        if not self._rows:
            return
        import pyarrow as pa
        import pyarrow.parquet as pq

        schema = arrow_schema(SKIPPED)
        if self._writer is None:
            writer = pq.ParquetWriter(self._path, schema, **parquet_options(schema))
            self._writer = self._stack.enter_context(writer)
        columns = zip(
            *((bad.source, bad.number, bad.id, bad.field, bad.reason, bad.value) for bad in self._rows), strict=True
        )
        arrays = [pa.array(values, field.type) for values, field in zip(columns, schema, strict=True)]
        self._writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
        self._rows.clear()


class CorpusReader:
    """Reads the sources into the spill; counts, refuses or leaves out what cannot be used."""

    skipped_file: _SkippedFile

    def __init__(self, sources: Sequence[Path], corpus: Corpus, part: Part, require_label: bool) -> None:
        self._names = _names(sources)
        self._corpus, self._part, self._require_label = corpus, part, require_label
        self._identities = IdChecker(corpus) if corpus.id != "auto" else None
        self._bad: list[BadRow] = []
        self._last = 0
        self.rows = 0
        self.good = 0
        self.skipped: Counter[str] = Counter()

    def _rows_of(self, path: Path) -> Iterator[Row | BadRow]:
        return read_rows(path, corpus=self._corpus, name=self._names[path], require_label=self._require_label)

    def take_in(self, spill: ExternalKeySort) -> None:
        for path, name in self._names.items():
            before = self.rows
            for row in self._rows_of(path):
                self.rows += 1
                if isinstance(row, BadRow):
                    self._refuse(row)
                else:
                    self._accept(row, spill)
                if self._bad and (self.rows >= self._last or len(self._bad) == BAD_ROWS_TOLD):
                    raise self._bad_rows()
            if self.rows == before:
                raise DataError(f"no rows in {shown(name)}", where=shown(str(path), 200), fix="fill it or leave it out")
        if self._bad:
            raise self._bad_rows()

    def _accept(self, row: Row, spill: ExternalKeySort) -> None:
        fields = row.fields
        if self._identities:
            self._identities.add(row)
        second = fields[1] if len(fields) > 1 else None
        self.good += 1
        spill.add((text_key(fields), fields[0], second, row.id, row.label), len(fields[0]) + len(second or ""))

    def _refuse(self, bad: BadRow) -> None:
        if self._corpus.on_bad_row == "skip":
            self.skipped[bad.reason] += 1
            self.skipped_file.add(bad)
            return
        self._last = self._last or self.rows + LOOK_ON
        self._bad.append(bad)

    def _bad_rows(self) -> DataError:
        first, count = self._bad[0], len(self._bad)
        what = f"a row of the {self._part} texts cannot be used: {first.reason}"
        if count > 1:
            reasons = "; ".join(f"{bad.source} row {bad.number} {bad.reason}" for bad in self._bad)
            more = " or more" if count == BAD_ROWS_TOLD else ""
            what = f"{count}{more} rows of the {self._part} texts cannot be used: {reasons}"
        return DataError(what, where=first.where, fix=f"{first.fix}; or leave such rows out, corpus.on_bad_row: skip")

    def settle(self) -> None:
        """Runs the checks that need all rows."""
        self.skipped_file.flush()
        if not self.good:
            names = ", ".join(shown(name) for name in list(self._names.values())[:BAD_ROWS_TOLD])
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.skipped.most_common())
            raise DataError(
                f"no rows left in {names}: {reasons}",
                where=f"the {self._part} texts",
                fix="mend them, or name other files",
            )
        if self._identities:
            self._identities.check(lambda: (row for path in self._names for row in self._rows_of(path)))


def _names(sources: Sequence[Path]) -> dict[Path, str]:
    """Returns each file once, under the shortest unique name, in order of name."""
    paths = list(dict.fromkeys(sources))
    names = [path.name for path in paths]
    if len(set(names)) < len(names):
        above = os.path.commonpath([path.absolute().parent for path in paths])
        names = [path.absolute().relative_to(above).as_posix() for path in paths]
    return dict(sorted(zip(paths, names, strict=True), key=lambda pair: pair[1]))


class BucketWriter:
    """Cuts the sorted rows into buckets, equal texts made one."""

    def __init__(self, spill: ExternalKeySort, folder: Path, limit: int | None) -> None:
        spill.flush()
        self._spill, self._folder = spill, folder
        self.distinct = sum(spill.distinct_keys(leading, leading + 1) for leading in range(256))
        self.kept = min(self.distinct, limit or self.distinct)
        self.bits = bits_for(self.distinct)  # a limit keeps the lowest keys: buckets of all rows keep their size
        self.conflicts = 0
        self.labels: Counter[str] = Counter()
        self.texts_digest, self.labels_digest = sha256(), sha256()
        self.buckets: list[Bucket] = []

    def write(self) -> None:
        span = 256 >> min(self.bits, 8)
        left = self.kept
        for first in range(0, 256, span):
            rows = self._spill.table(first, first + span)
            if len(rows) and left:
                texts = self._one_of_each(rows, left)
                left -= len(texts)
                self._digest(texts)
                self._write_buckets(texts)

    def _one_of_each(self, rows: Any, most: int) -> Any:
        """The first `most` texts; of several copies the one with the smallest id, then the first read."""
        import numpy as np
        import pyarrow as pa

        keys = key_array(rows.column("key"))
        starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
        stops = np.append(starts[1:], len(keys))[:most]
        chosen = starts[:most].copy()
        voted: dict[int, str | None] = {}
        for at in np.flatnonzero(stops - chosen > 1).tolist():
            copies = rows.slice(chosen[at], stops[at] - chosen[at])
            ids = copies.column("id").to_pylist()
            voted[at] = self._vote(copies.column("label").to_pylist())
            chosen[at] += ids.index(min(ids, key=lambda identity: identity or ""))
        texts = rows.take(chosen)
        if voted and rows.column("label").null_count < len(rows):
            labels = texts.column("label").to_pylist()
            for at, label in voted.items():
                labels[at] = label
            field = texts.schema.field("label")
            texts = texts.set_column(texts.schema.get_field_index("label"), field, pa.array(labels, field.type))
        return texts

    def _vote(self, labels: list[str | None]) -> str | None:
        votes = Counter(label for label in labels if label is not None)
        self.conflicts += len(votes) > 1
        return min(votes, key=lambda label: (-votes[label], label), default=None)

    def _digest(self, texts: Any) -> None:
        keys = key_array(texts.column("key"))
        self.texts_digest.update(keys.tobytes())
        labels = texts.column("label").to_pylist()
        self.labels.update(label for label in labels if label is not None)
        for key, label in zip(key_list(keys), labels, strict=True) if self.labels else ():
            _add_label(self.labels_digest, key, label)

    def _write_buckets(self, texts: Any) -> None:
        import numpy as np

        keys = key_array(texts.column("key"))
        leading = np.frombuffer(keys.tobytes(), ">u2")[::8]
        numbers = leading.astype(np.uint32) >> (16 - self.bits)
        edges = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
        final = texts.cast(arrow_schema(CORPUS))
        for start, stop in pairwise(edges):
            prefix = prefix_name(int(numbers[start]), self.bits)
            digest = keys_digest(keys[start:stop].tobytes())
            bucket = Bucket(prefix, stop - start, digest, f"{prefix}.parquet")
            write_table(final.slice(start, stop - start), self._folder / bucket.file)
            self.buckets.append(bucket)


def _add_label(digest: _Hash, key: bytes, label: str | None) -> None:
    if label is not None:
        data = label.encode()
        digest.update(key + len(data).to_bytes(4, "big") + data)


SUSPECTS = 100_000

TOLD = 5


def _hash(identity: str) -> bytes:
    return blake2b(identity.encode(), digest_size=8).digest()


class IdChecker:
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
