"""The contract between the store and a storage backend, such as a disk or an object store.

Every file is named by its path inside the workspace. A stored file is complete or absent; `put` and `change`
replace one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

TEMPORARY = ".tmp-"
"""Prefix of files that are not complete yet."""

PROBE = "put-if-absent.json"
"""Object that the check of an object store puts twice: the second put must be refused."""

QUARANTINE = "quarantine"
"""Folder of damaged files."""


@dataclass(frozen=True)
class FileInfo:
    path: str
    bytes: int
    modified: float
    """Seconds since 1970."""
    packed: bool = False
    """The file is part of a pack, which is listed with its own size."""


class StorageBackend(Protocol):
    """Stores the files of one workspace. A new backend is a class with these members and a line in store.BACKENDS."""

    root: Path
    """Local folder: the workspace itself, or the cache of a remote workspace."""
    address: str
    """The workspace as the user writes it."""
    is_remote: bool
    """Files must be copied to `root` before they are read."""

    def check(self) -> None:
        """Raises ExperimentError if the workspace is not writable or `put_if_absent` overwrites."""

    def read(self, paths: Sequence[str]) -> dict[str, bytes]:
        """Returns the content of small files; missing and too large ones are left out. Other failures raise."""
        ...

    def sizes(self, paths: Sequence[str]) -> dict[str, int]:
        """Returns the sizes of the files that exist."""
        ...

    def list(self, folder: str = "") -> Iterator[FileInfo]:
        """Yields every file below a folder."""
        ...

    def names(self, folder: str) -> set[str]:
        """Returns the names of the files and folders in a folder."""
        ...

    def put_if_absent(self, path: str, content: bytes) -> bool:
        """Stores a small file and returns True; returns False if the file exists. Atomic between all writers."""
        ...

    def change(self, path: str, edit: Callable[[bytes | None], bytes | None]) -> None:
        """Replaces a small file by `edit` of its content, None if it is absent; if `edit` returns None, the file stays.

        No change of another writer is lost: `edit` is called again if one came first.
        """

    def put(self, files: Mapping[str, bytes | Path]) -> None:
        """Stores complete files by path and replaces earlier ones. A local file is moved under `root`."""

    def get(self, paths: Sequence[str]) -> set[str]:
        """Copies files into `root`, replaces earlier copies, and returns the copied paths; a disk copies none."""
        ...

    def delete(self, paths: Sequence[str]) -> None:
        """Deletes the files that exist."""
