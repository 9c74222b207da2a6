"""A teacher's cached states of given texts, read from the mapped files as they are asked for: memory stays small."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from amalgam.data.parquet import key_array, matrix, read_table
from amalgam.pipeline.errors import WorkError
from amalgam.pipeline.execution.stage import Run
from amalgam.pipeline.storage.store import StoredFile
from amalgam.stages.common.answers.families import family_in
from amalgam.stages.common.corpus import Bucket, read_bucket
from amalgam.stages.common.load import teachers_of
from amalgam.stages.common.states.families import Kept, encoder_states, teacher_states
from amalgam.stages.common.teachers import ResolvedTeacher

if TYPE_CHECKING:
    pass


Array = NDArray[Any]


@dataclass(frozen=True)
class States:
    """Of each text, in the order of the keys they were asked for: in which file, from which of its rows, how many."""

    teacher: str
    files: list[Array]
    """[n, blocks, width] fp16 each; mapped, so that a text's rows are read when they are needed."""
    file_of: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    """A text's rows: its tokens, or 1 where states are pooled."""

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def blocks(self) -> int:
        return int(self.files[0].shape[1])

    @property
    def width(self) -> int:
        return int(self.files[0].shape[2])

    def take(self, rows: NDArray[np.integer[Any]], blocks: slice = slice(None)) -> Array:
        """[texts, tokens, blocks, width] fp16, filled up with zeros on the right; pooled: one token."""
        longest = int(self.lengths[rows].max(initial=0))
        found = np.zeros((len(rows), longest, len(range(self.blocks)[blocks]), self.width), np.float16)
        for place, row in enumerate(rows):
            start, length = self.starts[row], self.lengths[row]
            found[place, :length] = self.files[self.file_of[row]][start : start + length, blocks]
        return found


def states_of(
    run: Run, keys: NDArray[np.bytes_], which: Callable[[Run, ResolvedTeacher], Kept] = teacher_states
) -> list[States]:
    """Of every teacher, in the order of teachers_of, for the texts with these keys."""
    return [state_of(run, teacher, keys, which) for teacher in teachers_of(run)]


def state_of(
    run: Run, teacher: ResolvedTeacher, keys: NDArray[np.bytes_], which: Callable[[Run, ResolvedTeacher], Kept]
) -> States:
    family = which(run, teacher).family
    files = [file for file in run.result("cache-features").files if family_in(file.path) == family]
    return _states(run, teacher.name, files, keys)


def _states(run: Run, teacher: str, files: list[StoredFile], wanted: NDArray[np.bytes_]) -> States:
    folders = {Path(file.path).parent for file in files}
    paths = {Path(file.path): run.store.verified_path(file) for file in files}
    tables = [read_table(paths[folder / "keys.parquet"]) for folder in sorted(folders)]
    mapped = [np.load(paths[folder / "states.npy"], mmap_mode="r") for folder in sorted(folders)]
    lengths = [table.column("rows").to_numpy().astype(np.int64) for table in tables]
    starts = [np.cumsum(one) - one for one in lengths]
    file_of = [np.full(len(one), place) for place, one in enumerate(lengths)]
    keys = np.concatenate([key_array(table.column("key")) for table in tables])
    order = np.argsort(keys, kind="stable")
    places = order[np.minimum(np.searchsorted(keys[order], wanted), len(order) - 1)]
    if not np.array_equal(keys[places], wanted):
        what = f"the cached states of teacher {teacher} lack some of the texts"
        raise WorkError(what, fix="`amalgam verify`, then run again")
    columns = [np.concatenate(part)[places] for part in (file_of, starts, lengths)]
    return States(teacher, mapped, *columns)


def features_of(run: Run, buckets: Sequence[Bucket]) -> Any:
    """[texts, width] float32, in the order of the buckets' texts: the encoder's."""
    family = encoder_states(run).family
    files = [file for file in run.result("cache-features").files if family_in(file.path) == family]
    tables = [read_table(run.store.verified_path(file)) for file in files]
    keys = np.concatenate([key_array(table.column("key")) for table in tables])
    values = np.concatenate([matrix(table.column("features")) for table in tables])
    order = np.argsort(keys, kind="stable")
    wanted = np.concatenate([key_array(read_bucket(run, bucket, ["key"]).column("key")) for bucket in buckets])
    return values[order[np.searchsorted(keys[order], wanted)]].astype(np.float32)
