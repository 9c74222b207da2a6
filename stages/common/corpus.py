"""A part of the corpus (train, validation, test, teachers) as the later stages see it: buckets of keyed rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from amalgam.data.parquet import read_table
from amalgam.pipeline.errors import ExperimentError
from amalgam.pipeline.execution.stage import Run
from amalgam.pipeline.storage.store import StoredFile

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
        found = self.facts["labels_digest"]
        return None if found is None else str(found)

    @property
    def labels(self) -> list[str]:
        """The gold labels that occur, by name."""
        return sorted(self.facts["labels"])


def part_of(run: Run, name: str) -> Part | None:
    """None when the experiment has no such part."""
    manifest = run.result("read-corpus")
    facts = manifest.facts["parts"].get(name)
    if facts is None:
        return None
    inside = {PurePosixPath(file.path).name: file for file in manifest.files if _part_name(file) == name}
    buckets = tuple(
        Bucket(bucket["prefix"], int(bucket["rows"]), bucket["keys_digest"], inside[bucket["file"]])
        for bucket in facts["buckets"]
    )
    return Part(name, facts, buckets)


def train_part(run: Run) -> Part:
    part = part_of(run, "train")
    if part is None:
        what = "this experiment has no training texts"
        raise ExperimentError(what, where="objective.name: as-dfd", fix="another method: `amalgam methods`")
    return part


def read_bucket(run: Run, bucket: Bucket, columns: Sequence[str] | None = None) -> pa.Table:

    return read_table(run.store.verified_path(bucket.file), columns)


def tables(run: Run, part: Part) -> Iterator[pa.Table]:
    """The part's rows, bucket by bucket, in key order."""
    for bucket in part.buckets:
        yield read_bucket(run, bucket)


def fields(table: pa.Table) -> list[tuple[str, ...]]:
    """Each row's one or two texts."""
    first = table.column("text").to_pylist()
    if table.column("text_2").null_count == table.num_rows:
        return [(text,) for text in first]
    return list(zip(first, table.column("text_2").to_pylist(), strict=True))


def _part_name(file: StoredFile) -> str:
    """A part's files stand in the folder PART-DIGEST."""
    return Path(file.path).parent.name.rsplit("-", 1)[0]


UNIT_TEXTS = 1 << 15
"""Texts of a unit: enough that its files and its calls cost little beside its numbers, few enough for any memory."""


def neighbouring_buckets(buckets: Sequence[Bucket], most: int = UNIT_TEXTS) -> Iterator[tuple[Bucket, ...]]:
    """In key order, as many as hold `most` texts between them. The corpus decides alone, so all processes agree."""
    group: list[Bucket] = []
    for bucket in buckets:
        if group and sum(one.rows for one in group) + bucket.rows > most:
            yield tuple(group)
            group = []
        group.append(bucket)
    if group:
        yield tuple(group)
