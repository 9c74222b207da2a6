"""A part of the corpus (train, validation, test, teachers) for later stages: buckets of keyed rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amalgam.data.parquet import read_table
from amalgam.pipeline.storage.store import Store, StoredFile

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Bucket:
    prefix: str
    rows: int
    keys_digest: str
    file: StoredFile


@dataclass(frozen=True)
class Part:
    name: str
    facts: dict[str, Any]
    buckets: tuple[Bucket, ...]

    @property
    def texts(self) -> int:
        return int(self.facts["texts"])

    @property
    def texts_digest(self) -> str:
        return str(self.facts["texts_digest"])

    @property
    def labels_digest(self) -> str | None:
        digest = self.facts["labels_digest"]
        return None if digest is None else str(digest)

    @property
    def labels(self) -> list[str]:
        """The gold labels that occur, by name."""
        return sorted(self.facts["labels"])


def read_bucket(store: Store, bucket: Bucket, columns: Sequence[str] | None = None) -> pa.Table:
    """Returns the bucket's rows, in key order."""
    return read_table(store.verified_path(bucket.file), columns)


def tables(store: Store, part: Part) -> Iterator[pa.Table]:
    """Yields the part's rows, bucket by bucket, in key order."""
    for bucket in part.buckets:
        yield read_bucket(store, bucket)


def fields(table: pa.Table) -> list[tuple[str, ...]]:
    """Returns each row's one or two texts."""
    first = table.column("text").to_pylist()
    if table.column("text_2").null_count == table.num_rows:
        return [(text,) for text in first]
    return list(zip(first, table.column("text_2").to_pylist(), strict=True))


def part_name(file: StoredFile) -> str:
    """Returns the part's name; its files are in the folder PART-DIGEST."""
    return Path(file.path).parent.name.rsplit("-", 1)[0]


UNIT_TEXTS = 1 << 15
"""Texts per unit: the overhead of files and calls is small, and a unit fits into any memory."""


def neighbouring_buckets(buckets: Sequence[Bucket], most: int = UNIT_TEXTS) -> Iterator[tuple[Bucket, ...]]:
    """Yields groups of buckets in key order, of at most `most` texts or one bucket, the same in all processes."""
    group: list[Bucket] = []
    for bucket in buckets:
        if group and sum(one.rows for one in group) + bucket.rows > most:
            yield tuple(group)
            group = []
        group.append(bucket)
    if group:
        yield tuple(group)
