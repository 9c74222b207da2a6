"""Reads cached predictions and hidden states of texts by key.

A text's rows may be in any file of the family; each file is in the order of its keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
from amalgam.stages.common.cached.uncertainty import MEASURES, confidence, mean, sums_over_passes
from amalgam.stages.common.models.resolve import ResolvedTeacher
from amalgam.stages.target_methods import COMPARATIVE, TeacherPredictions


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
        return self._read(teacher, prefixes, keys, 0)[0]

    def predictions(self, teacher: str, prefixes: Sequence[str], keys: pl.Series) -> TeacherPredictions:
        """Returns logits, distribution and confidence, a row for each key."""
        targets, resolved = self.targets, self.teachers[teacher]
        full = self.passes if targets.passes is None else targets.passes
        comparative = targets.uncertainty in COMPARATIVE  # a placeholder: fit-statistics computes these confidences
        measure = MEASURES["entropy" if comparative else targets.uncertainty]
        is_single = bool(resolved.catch_all) and len(resolved.places) == 1  # no measure compares the label with itself
        is_exact = is_single or full == 0 or (comparative and targets.distribution == "deterministic")
        is_stored = not is_exact and "confidences" in self.manifest.facts
        outputs, raw = self._read(teacher, prefixes, keys, 0 if is_exact or is_stored else full)
        logits, share = self._of_labels(teacher, outputs), self._own_share(teacher, outputs)
        if is_single and share is not None:
            return TeacherPredictions(teacher, logits, softmax_column(logits), share, share)
        if is_stored:
            return TeacherPredictions(teacher, logits, softmax_column(logits), self._stored(teacher, prefixes, keys))
        passes = raw[:, :, resolved.places] if share is not None else raw
        flat = logits.to_numpy() if is_exact else passes.reshape(len(passes), -1)
        sums = pl.DataFrame(sums_over_passes(flat, 1 if is_exact else full, measure))
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

    def _read(self, teacher: str, prefixes: Sequence[str], keys: pl.Series, passes: int) -> tuple[pl.Series, Array]:
        """Returns the logits of all outputs with dropout off, and of the first passes [texts, passes, outputs]."""
        stored, spans = self._files(teacher, prefixes), self.manifest.facts["ranges"]
        paths = self.store.verified_paths(stored)
        files = [(path, *spans[file.path]) for path, file in zip(paths, stored, strict=True)]
        outputs = len(self.teachers[teacher].outputs)
        logits, raw, is_complete = gather_predictions(files, _keys_of(keys), outputs, passes)
        _refuse_missing(is_complete, teacher)
        return pl.Series("logits", logits), raw

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
        confidences, is_there = np.zeros(len(keys)), np.zeros(len(keys), bool)
        for _, rows, places, table in _gathered(paths, _keys_of(keys), ["confidence"]):
            column = families.index(self.families[teacher])
            confidences[rows] = matrix(table.column("confidence"))[places, column]
            is_there[rows] = True
        _refuse_missing(is_there, teacher)
        return pl.Series("confidence", confidences)


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


def _keys_of(column: pl.Series) -> Keys:
    return key_array(column.to_arrow().cast(pa.binary(KEY_BYTES)))


def _gathered(
    paths: Sequence[Path], keys: Keys, columns: Sequence[str]
) -> Iterator[tuple[int, RowNumbers, RowNumbers, pa.Table]]:
    """Yields the number of each file with some of the keys, their rows, their places in the file, and its columns.

    Of other files, such as those of test texts, the keys alone are read. No key is given twice.
    """
    order = np.argsort(keys, kind="stable")
    in_order = keys[order]
    for number, path in enumerate(paths if len(keys) else ()):
        with opened(path) as read:
            own = key_array(read(["key"]).column("key"))
            ranks = in_order.searchsorted(own).clip(max=len(keys) - 1)
            places = np.flatnonzero(in_order[ranks] == own)
            if len(places):
                yield number, order[ranks[places]], places, read(columns)


def gather_predictions(
    files: Sequence[tuple[Path, int, int]], keys: Keys, outputs: int, passes: int
) -> tuple[Array, Array, Array]:
    """Returns the logits with dropout off [texts, outputs], the first passes, and whether the files have all of a text.

    Each file has passes first..last-1, in this order. A text of two parts is in two units, whose logits differ in the
    last bits: those of the first count.
    """
    logits, raw = np.zeros((len(keys), outputs), np.float32), np.zeros((len(keys), passes, outputs), np.float16)
    has_logits, counts = np.zeros(len(keys), bool), np.zeros(len(keys), np.int64)
    columns = ["logits", "passes"] if passes else ["logits"]
    for number, rows, places, table in _gathered([path for path, *_ in files], keys, columns):
        _, first, last = files[number]
        if "logits" in table.column_names:
            new = ~has_logits[rows]
            logits[rows[new]] = matrix(table.column("logits"))[places[new]]
            has_logits[rows] = True
        if first < min(last, passes):
            part = matrix(table.column("passes")).reshape(len(table), last - first, outputs)
            raw[rows, first:last] = part[places, : passes - first]
            follows = rows[counts[rows] >= first]  # ranges may overlap after a mended loss
            counts[follows] = counts[follows].clip(min=min(last, passes))
    return logits, raw, has_logits & (counts == passes)


def _refuse_missing(is_there: Array, teacher: str) -> None:
    if not is_there.all():
        missing = int((~is_there).sum())
        fix = "run `amalgam verify`, then the same command again"
        raise WorkError(f"teacher {teacher}: the cache lacks {missing} of {len(is_there)} texts", fix=fix)


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
