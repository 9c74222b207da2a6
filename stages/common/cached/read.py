"""Reads cached predictions and hidden states of texts by key.

A text's rows may be in any file of the family. All files of one pass range are read as one frame: few large steps for
any size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from amalgam.data.arrays import Array, Keys, RowNumbers, side_by_side, softmax_column, width
from amalgam.data.keys import KEY_BYTES
from amalgam.data.lazy import np, pa, pl
from amalgam.data.parquet import key_array, matrix, opened, read_table
from amalgam.pipeline.config.schema import Targets
from amalgam.pipeline.errors import WorkError
from amalgam.pipeline.storage.store import Record, Store, StoredFile
from amalgam.stages.common.cached.coverage import PrefixIndex
from amalgam.stages.common.cached.uncertainty import COUNT, MEASURES, Measure, confidence, mean, sums_over_passes
from amalgam.stages.common.models.resolve import ResolvedTeacher
from amalgam.stages.target_methods import COMPARATIVE, TeacherPredictions


@dataclass(frozen=True)
class PassRange:
    """Cached predictions of some texts, from passes first..last-1."""

    first: int
    last: int
    frame: pl.DataFrame


@dataclass(frozen=True)
class CacheReader:
    store: Store
    manifest: Record
    """The manifest of cache-teachers."""
    indexes: Mapping[str, PrefixIndex[StoredFile]]
    families: Mapping[str, str]
    """By teacher."""
    teachers: Mapping[str, ResolvedTeacher]
    targets: Targets
    passes: int
    """Passes that the experiment caches for each text, or the most of them."""

    def logits(self, teacher: str, prefixes: Sequence[str], keys: pl.Series) -> pl.Series:
        """Returns the logits with dropout off; `prefixes` are the buckets of the keys."""
        return self._of_labels(teacher, self.outputs(teacher, prefixes, keys))

    def predicts_none(self, teacher: str, prefixes: Sequence[str], keys: pl.Series) -> Array:
        """Returns the texts for which the teacher predicts an output of its catch_all, and no label."""
        places = sorted(self.teachers[teacher].catch_all)
        if not places:
            return np.zeros(len(keys), bool)
        return self.outputs(teacher, prefixes, keys).arr.arg_max().is_in(places).to_numpy()

    def outputs(self, teacher: str, prefixes: Sequence[str], keys: pl.Series) -> pl.Series:
        """Returns the logits of all outputs with dropout off, those of catch_all included."""
        schema: dict[str, Any] = {"key": pl.Binary, "logits": pl.Array(pl.Float32, len(self.teachers[teacher].outputs))}
        paths = self.store.verified_paths(self._files(teacher, prefixes))
        # Polars decodes no column but the key for other texts.
        cached = scan(paths, schema).filter(pl.col("key").is_in(keys.implode())).collect().drop_nulls("logits")
        return _aligned(_one_of_each(cached), keys, teacher)["logits"]

    def predictions(self, teacher: str, prefixes: Sequence[str], keys: pl.Series) -> TeacherPredictions:
        """Returns logits, distribution and confidence, a row for each key."""
        targets = self.targets
        ranges = self._ranges(teacher, prefixes, keys)
        outputs = _aligned(_logits(ranges), keys, teacher)["logits"]
        logits, share = self._of_labels(teacher, outputs), self._own_share(teacher, outputs)
        if share is not None and width(logits) == 1:  # no measure compares the label with itself
            return TeacherPredictions(teacher, logits, softmax_column(logits), share, share)
        full = self.passes if targets.passes is None else targets.passes
        comparative = targets.uncertainty in COMPARATIVE  # a placeholder: fit-statistics computes these confidences
        measure = MEASURES["entropy" if comparative else targets.uncertainty]
        if full == 0 or (comparative and targets.distribution == "deterministic"):
            sums = pl.DataFrame(sums_over_passes(logits.to_numpy(), 1, measure))
        elif "confidences" in self.manifest.facts:
            return TeacherPredictions(teacher, logits, softmax_column(logits), self._stored(teacher, prefixes, keys))
        else:
            places = self.teachers[teacher].places if share is not None else None
            sums = _aligned(_summed(ranges, full, measure, places), keys, teacher)
        distribution = mean(sums, "probability") if targets.distribution == "mc-mean" else softmax_column(logits)
        certain = confidence(sums, measure)
        return TeacherPredictions(teacher, logits, distribution, certain if share is None else certain * share, share)

    def _of_labels(self, teacher: str, outputs: pl.Series) -> pl.Series:
        """Returns the columns of the teacher's labels, without catch_all."""
        places = self.teachers[teacher].places
        return outputs if len(places) == width(outputs) else side_by_side([outputs.arr.get(each) for each in places])

    def _own_share(self, teacher: str, outputs: pl.Series) -> pl.Series | None:
        """Returns the probability of all labels together; None if the teacher has no catch_all."""
        if not self.teachers[teacher].catch_all:
            return None
        return self._of_labels(teacher, softmax_column(outputs)).arr.sum()

    def _ranges(self, teacher: str, prefixes: Sequence[str], keys: pl.Series) -> list[PassRange]:
        """Returns the rows of these keys in the order of pass ranges; a text occurs once in each.

        Next to files with passes, a file without passes usually has only test texts: then its keys suffice.
        """
        files, spans = self._files(teacher, prefixes), self.manifest.facts["ranges"]
        in_order = np.sort(key_array(keys.to_arrow().cast(pa.binary(KEY_BYTES))))
        have_passes = any(first < last for first, last in (spans[file.path] for file in files))
        groups: dict[tuple[Any, ...], list[pa.Table]] = {}
        for file, path in zip(files, self.store.verified_paths(files), strict=True):
            first, last = spans[file.path]
            with opened(path) as read:
                may_be_tests = have_passes and first == last
                if may_be_tests and not _has_any(in_order, key_array(read(["key"]).column("key"))):
                    continue
                table = read(["key", "logits", "passes"])
            groups.setdefault((int(first), int(last), *table.column_names), []).append(table)
        tables = ((*kind[:2], pa.concat_tables(group)) for kind, group in groups.items())
        ranges = [PassRange(first, last, _rows_of(table, keys)) for first, last, table in tables]
        return [part for part in ranges if len(part.frame)]

    def _files(self, teacher: str, prefixes: Sequence[str]) -> list[StoredFile]:
        """Returns the files of these buckets in the order of pass ranges."""
        family, ranges = self.families[teacher], self.manifest.facts["ranges"]  # a unit's own record may be lost
        files = self.indexes[family].overlapping(prefixes) if family in self.indexes else []
        return sorted(files, key=lambda file: ranges[file.path])

    def _stored(self, teacher: str, prefixes: Sequence[str], keys: pl.Series) -> pl.Series:
        """Returns the confidences that the last decisions about adaptive passes contain."""
        stored, families = self.manifest.facts["confidences"], distinct(self.families)
        wanted = {stored[prefix] for prefix in prefixes}
        paths = self.store.verified_paths([file for file in self.manifest.files if file.path in wanted])
        column = pl.col("confidence").arr.get(families.index(self.families[teacher])).cast(pl.Float64)
        frame = pl.concat([pl.read_parquet(path, glob=False).select("key", column) for path in paths])
        return _aligned(frame, keys, teacher)["confidence"]


def distinct(families: Mapping[str, str]) -> list[str]:
    """Returns each family once, in an order of their own: teachers of the same model are one."""
    return sorted(set(families.values()))


def passes_differ(path: Path, passes: int) -> bool:
    """Returns whether the passes of any text of the file differ."""
    raw = matrix(read_table(path, ["passes"]).column("passes"))
    raw = raw.reshape(len(raw), passes, -1)
    return bool((raw != raw[:, :1]).any())


def scan(paths: list[Path], schema: dict[str, Any]) -> pl.LazyFrame:
    """Scans files of one family; not all of them have every column."""
    return pl.scan_parquet(paths, schema=schema, missing_columns="insert", extra_columns="ignore", glob=False)


def _has_any(in_order: Keys, keys: Keys) -> bool:
    """Returns whether any of the keys is among sorted ones."""
    return bool((in_order[in_order.searchsorted(keys).clip(max=len(in_order) - 1)] == keys).any())


def _rows_of(table: pa.Table, keys: pl.Series) -> pl.DataFrame:
    frame = pl.DataFrame(table)
    if frame["key"].equals(keys):  # the usual case: one unit covers the whole bucket
        return frame
    return _one_of_each(frame.filter(pl.col("key").is_in(keys.implode())))


def _one_of_each(rows: pl.DataFrame) -> pl.DataFrame:
    """Returns the first row of each text: a text of two parts is in two units, whose logits differ in the last bits."""
    return rows.unique("key", keep="first", maintain_order=True)


def _logits(ranges: Sequence[PassRange]) -> pl.DataFrame:
    frames = [part.frame.select("key", "logits") for part in ranges if "logits" in part.frame.columns]
    if len(frames) == 1:
        return frames[0]
    return _one_of_each(pl.concat(frames)) if frames else pl.DataFrame()


def _aligned(frame: pl.DataFrame, keys: pl.Series, teacher: str) -> pl.DataFrame:
    if not frame.is_empty() and frame["key"].equals(keys):
        return frame
    missing = len(keys)
    if not frame.is_empty():
        frame = pl.DataFrame({"key": keys}).join(frame, on="key", how="left", maintain_order="left")
        missing = frame[frame.columns[1]].null_count()
    if missing:
        fix = "run `amalgam verify`, then the same command again"
        raise WorkError(f"teacher {teacher}: the cache lacks {missing} of {len(keys)} texts", fix=fix)
    return frame


def _summed(ranges: Sequence[PassRange], take: int, measure: Measure, places: Sequence[int] | None) -> pl.DataFrame:
    """Sums over the first `take` passes of all texts. Ranges follow each other: [0, 16), then [16, 24); where they
    overlap, as after a mended loss, each pass counts once. `places` are the outputs that count; None is all.
    """
    total = pl.DataFrame()
    for part in ranges:
        frame, last = part.frame, min(part.last, take)
        if "passes" not in frame.columns or part.first >= take:
            continue
        classes = width(frame["passes"]) // (part.last - part.first)
        for count, rows in _by_count(frame, total):
            if part.first <= count < last:
                raw = rows["passes"].to_numpy()[:, (count - part.first) * classes : (last - part.first) * classes]
                if places is not None:
                    raw = raw.reshape(len(raw), -1, classes)[:, :, places].reshape(len(raw), -1)
                sums = sums_over_passes(raw, last - count, measure)
                total = _grown(total, pl.DataFrame({"key": rows["key"], **sums}))
    return total if total.is_empty() else total.filter(pl.col(COUNT) == take)


def _by_count(frame: pl.DataFrame, total: pl.DataFrame) -> list[tuple[int, pl.DataFrame]]:
    """Groups the texts of a file by the number of passes summed already."""
    if total.is_empty():
        return [] if frame.is_empty() else [(0, frame)]
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


# ---- hidden states


@dataclass(frozen=True)
class States:
    """A teacher's states of some texts, in the order of the requested keys, read from mapped files on demand."""

    teacher: str
    files: list[Array]
    """[n, blocks, width] fp16 each, memory-mapped."""
    file_of: RowNumbers
    """The file of each text."""
    starts: RowNumbers
    """The first row of each text in its file."""
    lengths: RowNumbers
    """Rows of each text: its tokens, or 1 for pooled states."""

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def blocks(self) -> int:
        return int(self.files[0].shape[1])

    @property
    def width(self) -> int:
        return int(self.files[0].shape[2])

    def take(self, rows: RowNumbers, blocks: slice = slice(None)) -> Array:
        """Returns [texts, tokens, blocks, width] in fp16, padded with zeros; pooled states have one token."""
        longest = int(self.lengths[rows].max(initial=0))
        states = np.zeros((len(rows), longest, len(range(self.blocks)[blocks]), self.width), np.float16)
        tokens = np.arange(longest)
        is_token, places = tokens < self.lengths[rows, None], self.starts[rows, None] + tokens
        for number in np.unique(self.file_of[rows]):
            of_file = is_token & (self.file_of[rows] == number)[:, None]
            states[of_file] = self.files[number][places[of_file], blocks]
        return states


def open_states(teacher: str, units: Sequence[Mapping[str, Path]], wanted: Keys) -> States:
    """Maps the states of the wanted keys; each unit has the files keys.parquet and states.npy."""
    tables = [read_table(files["keys.parquet"]) for files in units]
    mapped = [np.load(files["states.npy"], mmap_mode="r") for files in units]
    lengths = [table.column("rows").to_numpy().astype(np.int64) for table in tables]
    starts = [np.cumsum(sizes) - sizes for sizes in lengths]
    file_of = [np.full(len(sizes), index) for index, sizes in enumerate(lengths)]
    places = _places(tables, wanted, f"teacher {teacher}")
    return States(teacher, mapped, *(np.concatenate(part)[places] for part in (file_of, starts, lengths)))


@dataclass(frozen=True)
class Features:
    """The encoder's states of some texts [texts, width], in the order of the requested keys, read on demand."""

    paths: Sequence[Path]
    file_of: RowNumbers
    """The file of each text."""
    rows: RowNumbers
    """The row of each text in its file."""
    read: Callable[[int], Array]
    """Returns the states of a file by its place; the last one stays in memory."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, wanted: Any, /) -> Array:
        """Returns the states in float32; `wanted` is a slice or an array of places."""
        files, rows = self.file_of[wanted], self.rows[wanted]
        numbers = np.unique(files).tolist() or range(len(self.paths))[:1]  # where no text is wanted, for the width
        parts = {number: self.read(number)[rows[files == number]] for number in numbers}
        states = np.empty((len(rows), max((part.shape[1] for part in parts.values()), default=0)), np.float32)
        for number, part in parts.items():
            states[files == number] = part
        return states


def open_features(paths: Sequence[Path], wanted: Keys) -> Features:
    tables = [read_table(path, ["key"]) for path in paths]
    file_of = np.concatenate([np.full(len(table), index) for index, table in enumerate(tables)])
    rows = np.concatenate([np.arange(len(table)) for table in tables])
    places = _places(tables, wanted, "the encoder")
    read = lru_cache(1)(lambda number: matrix(read_table(paths[number], ["features"]).column("features")))
    return Features(paths, file_of[places], rows[places], read)


def _places(tables: Sequence[pa.Table], wanted: Keys, owner: str) -> RowNumbers:
    """Returns the row of each wanted key in the tables, counted over all of them."""
    keys = np.concatenate([key_array(table.column("key")) for table in tables])
    order = np.argsort(keys, kind="stable")
    places: RowNumbers = order[np.searchsorted(keys[order], wanted).clip(max=len(order) - 1)]
    if not np.array_equal(keys[places], wanted):
        what = f"the cached states of {owner} lack texts of the corpus"
        raise WorkError(what, fix="run `amalgam verify`, then the same command again")
    return places
