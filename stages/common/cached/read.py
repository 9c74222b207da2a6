"""Reads cached predictions and hidden states of texts by key.

A manifest's files are indexed once. All files of one pass range are read as one frame: few large steps for any size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from amalgam.data.arrays import softmax_column, width
from amalgam.data.keys import ALL
from amalgam.data.parquet import key_array, matrix, read_table
from amalgam.pipeline.config.schema import Targets
from amalgam.pipeline.errors import WorkError
from amalgam.pipeline.storage.store import Record, Store, StoredFile
from amalgam.stages.common.cached.coverage import family_in, prefix_in
from amalgam.stages.common.cached.pass_statistics import sums_over_raw
from amalgam.stages.common.cached.uncertainty import COUNT, confidence, counted, mean_probability, sums_over_passes
from amalgam.stages.common.corpus import Bucket, read_bucket
from amalgam.stages.target_methods import COMPARATIVE, Evidence

COLUMNS = ("key", "logits", "passes")


@dataclass(frozen=True)
class Answers:
    """Cached predictions for the texts of one unit, from passes first..last-1."""

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
        """Returns each file whose bucket overlaps any of these, once, in the manifest's order."""
        files = {place: file for prefix in prefixes for bits in self._overlapping(prefix) for place, file in bits}
        return [files[place] for place in sorted(files)]

    def _overlapping(self, prefix: str) -> Iterator[list[tuple[int, StoredFile]]]:
        bits = _bits(prefix)
        yield from (self.files[bits[:size]] for size in range(len(bits)) if bits[:size] in self.files)
        for inner in self.order[bisect_left(self.order, bits) :]:
            if not inner.startswith(bits):
                break
            yield self.files[inner]


@dataclass(frozen=True)
class AnswerReader:
    """Reads the cached predictions of all teachers by key: a text's rows may be in any file of the family."""

    store: Store
    manifest: Record
    """The manifest of cache-teachers."""
    indexes: Mapping[str, FamilyIndex]
    families: Mapping[str, str]
    """By teacher."""
    targets: Targets
    passes: int
    """Cached passes of a text (K)."""
    adaptive: bool

    def logits(self, teacher: str, prefixes: Sequence[str], keys: pl.Series) -> pl.Series:
        """Returns the logits with dropout off; `prefixes` are the buckets of the keys."""
        return _aligned(_logits(self._answers(teacher, prefixes, keys)), keys, teacher)["logits"]

    def evidence(self, teacher: str, prefixes: Sequence[str], keys: pl.Series) -> Evidence:
        """Returns logits, distribution and confidence, a row for each key."""
        targets = self.targets
        answers = self._answers(teacher, prefixes, keys)
        logits = _aligned(_logits(answers), keys, teacher)["logits"]
        full = self.passes if targets.passes is None else targets.passes
        comparative = targets.uncertainty in COMPARATIVE  # a placeholder: fit-statistics computes these confidences
        measure = "entropy" if comparative else targets.uncertainty
        if full == 0 or (comparative and targets.distribution == "deterministic"):
            sums, full = pl.DataFrame(sums_over_passes([logits], measure)), 0
        else:
            frames = [
                _summed(
                    answers if rows is None else [_only(part, rows) for part in answers],
                    count,
                    targets.uncertainty,
                    adaptive=self.adaptive,
                )
                for count, rows in self._pass_counts(prefixes, full)
            ]
            sums = _aligned(pl.concat([frame for frame in frames if not frame.is_empty()] or frames[:1]), keys, teacher)
        distribution = mean_probability(sums) if targets.distribution == "mc-mean" else softmax_column(logits)
        return Evidence(teacher, logits, distribution, confidence(sums, measure, full))

    def _answers(self, teacher: str, prefixes: Sequence[str], keys: pl.Series) -> list[Answers]:
        """Returns the rows of these keys in the order of pass ranges; a text occurs once in each."""
        ranges = self.manifest.facts["ranges"]  # a unit's own record may be lost
        family = self.families[teacher]
        files = self.indexes[family].about(prefixes) if family in self.indexes else []
        tables = [read_table(path, COLUMNS) for path in self.store.verified_paths(files)]
        alike: dict[tuple[Any, ...], list[pa.Table]] = {}
        for file, table in zip(files, tables, strict=True):
            first, last = ranges[file.path]
            alike.setdefault((int(first), int(last), *table.column_names), []).append(table)
        answers = [Answers(kind[0], kind[1], _about(pa.concat_tables(group), keys)) for kind, group in alike.items()]
        return sorted(answers, key=lambda part: (part.first, part.last))

    def _pass_counts(self, prefixes: Sequence[str], full: int) -> list[tuple[int, pl.DataFrame | None]]:
        """Returns how many passes of which texts count; None means all texts. Only adaptive passes differ by text."""
        stored = self.manifest.facts.get("pass_counts")
        if stored is None:
            return [(full, None)]
        wanted = {stored[prefix] for prefix in prefixes}
        files = [file for file in self.manifest.files if file.path in wanted]
        counts = pl.concat([pl.read_parquet(path) for path in self.store.verified_paths(files)])
        counts = counts.with_columns(pl.col("passes").clip(upper_bound=full))
        return [(int(count), rows.select("key")) for (count,), rows in counts.group_by("passes", maintain_order=True)]


def _only(answers: Answers, rows: pl.DataFrame) -> Answers:
    return replace(answers, frame=answers.frame.join(rows, on="key", how="semi"))


def _about(table: pa.Table, keys: pl.Series) -> pl.DataFrame:
    frame = pl.DataFrame(table)
    if frame["key"].equals(keys):  # the usual case: one unit covers the whole bucket
        return frame
    return frame.filter(pl.col("key").is_in(keys.implode())).unique("key", maintain_order=True)


def index_files(files: Sequence[StoredFile]) -> dict[str, FamilyIndex]:
    """Returns the files by family and bucket, in the order of the manifest."""
    indexes: dict[str, FamilyIndex] = {}
    for place, file in enumerate(files):
        index = indexes.setdefault(family_in(file.path), FamilyIndex())
        index.files.setdefault(_bits(prefix_in(file.path)), []).append((place, file))
    for index in indexes.values():
        index.order = sorted(index.files)
    return indexes


def _bits(prefix: str) -> str:
    return "" if prefix == ALL else prefix


def _logits(answers: Sequence[Answers]) -> pl.DataFrame:
    frames = [one.frame.select("key", "logits") for one in answers if "logits" in one.frame.columns]
    if len(frames) == 1:
        return frames[0]
    return pl.concat(frames).unique("key", keep="first", maintain_order=True) if frames else pl.DataFrame()


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


def _summed(answers: Sequence[Answers], take: int, measure: str, *, adaptive: bool) -> pl.DataFrame:
    """Sums over the first `take` passes of every text. Ranges follow each other: [0, 16), then [16, 24); where they
    overlap, as after a mended loss, each pass counts once.
    """
    total = pl.DataFrame()
    for first, last, frame in ((one.first, one.last, one.frame) for one in answers):
        if "passes" not in frame.columns or first >= take or frame.is_empty():
            continue
        classes = width(frame["passes"]) // (last - first)
        for count, rows in _by_count(frame, total):
            if first <= count < min(last, take):
                until = min(last, take)
                raw = rows["passes"].to_numpy()[:, (count - first) * classes : (until - first) * classes]
                sums = counted(until - count, len(raw)) | sums_over_raw(raw, classes, measure, squares=adaptive)
                total = _grown(total, pl.DataFrame({"key": rows["key"], **sums}))
    return total if total.is_empty() else total.filter(pl.col(COUNT) == take)


def _by_count(frame: pl.DataFrame, total: pl.DataFrame) -> list[tuple[int, pl.DataFrame]]:
    """Groups the texts of a file by the number of passes summed already."""
    if total.is_empty():
        return [(0, frame)]
    joined = frame.select("key").join(total.select("key", COUNT), on="key", how="left", maintain_order="left")
    counts = joined[COUNT].fill_null(0)
    return [(int(count), frame.filter(counts == count)) for count in counts.unique(maintain_order=True)]


def _grown(total: pl.DataFrame, sums: pl.DataFrame) -> pl.DataFrame:
    """Adds sums to `total`, which has all of their texts or none."""
    both = total if total.is_empty() else total.join(sums, on="key", how="semi")
    if both.is_empty():
        return pl.concat([frame for frame in (total, sums) if not frame.is_empty()])
    after = both.select("key").join(sums, on="key", how="left", maintain_order="left")
    added = {name: both[name] + after[name] for name in both.columns if name != "key"}
    return pl.concat([total.join(sums, on="key", how="anti"), pl.DataFrame({"key": both["key"], **added})])


Array = NDArray[Any]


@dataclass(frozen=True)
class States:
    """A teacher's states of some texts, in the order of the requested keys, read from mapped files on demand."""

    teacher: str
    files: list[Array]
    """[n, blocks, width] fp16 each, memory-mapped."""
    file_of: NDArray[np.int64]
    """The file of each text."""
    starts: NDArray[np.int64]
    """The first row of each text in its file."""
    lengths: NDArray[np.int64]
    """Rows of each text: its tokens, or 1 for pooled states."""

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def blocks(self) -> int:
        return int(self.files[0].shape[1])

    @property
    def width(self) -> int:
        return int(self.files[0].shape[2])

    def take(self, rows: NDArray[np.integer[Any]], blocks: slice = slice(None)) -> Array:
        """Returns [texts, tokens, blocks, width] in fp16, padded with zeros; pooled states have one token."""
        longest = int(self.lengths[rows].max(initial=0))
        states = np.zeros((len(rows), longest, len(range(self.blocks)[blocks]), self.width), np.float16)
        for place, row in enumerate(rows):
            start, length = self.starts[row], self.lengths[row]
            states[place, :length] = self.files[self.file_of[row]][start : start + length, blocks]
        return states


def open_states(teacher: str, pairs: Sequence[tuple[Path, Path]], wanted: NDArray[np.bytes_]) -> States:
    """Maps the states of the wanted keys from pairs of files: keys.parquet and states.npy."""
    tables = [read_table(path) for path, _ in pairs]
    mapped = [np.load(path, mmap_mode="r") for _, path in pairs]
    lengths = [table.column("rows").to_numpy().astype(np.int64) for table in tables]
    starts = [np.cumsum(sizes) - sizes for sizes in lengths]
    file_of = [np.full(len(sizes), place) for place, sizes in enumerate(lengths)]
    keys = np.concatenate([key_array(table.column("key")) for table in tables])
    order = np.argsort(keys, kind="stable")
    places = order[np.minimum(np.searchsorted(keys[order], wanted), len(order) - 1)]
    if not np.array_equal(keys[places], wanted):
        what = f"the cached states of teacher {teacher} lack texts of the corpus"
        raise WorkError(what, fix="run `amalgam verify`, then the same command again")
    columns = [np.concatenate(part)[places] for part in (file_of, starts, lengths)]
    return States(teacher, mapped, *columns)


def read_features(store: Store, paths: Sequence[Path], buckets: Sequence[Bucket]) -> Array:
    """Returns the encoder's states [texts, width] in float32, in the order of the buckets' texts."""
    tables = [read_table(path) for path in paths]
    keys = np.concatenate([key_array(table.column("key")) for table in tables])
    values = np.concatenate([matrix(table.column("features")) for table in tables])
    order = np.argsort(keys, kind="stable")
    wanted = np.concatenate([key_array(read_bucket(store, bucket, ["key"]).column("key")) for bucket in buckets])
    features: Array = values[order[np.searchsorted(keys[order], wanted)]].astype(np.float32)
    return features
