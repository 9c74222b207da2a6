"""Reads cached hidden states of texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amalgam.data.parquet import key_array, matrix, read_table
from amalgam.pipeline.errors import WorkError
from amalgam.pipeline.storage.store import Store
from amalgam.stages.common.corpus import Bucket, read_bucket

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
