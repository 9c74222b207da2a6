"""Where a workspace's bytes lie: what the store asks of a disk, and of an object store alike.

Everything is named by its path inside the workspace. What is published is complete or absent, and never changes
afterwards, but for the few files that `replace` writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

TEMPORARY = ".tmp-"

QUARANTINE = "quarantine"


@dataclass(frozen=True)
class FileInfo:
    """A file as a listing tells of it."""

    inside: str
    bytes: int
    changed: float
    """In seconds since 1970."""
    packed: bool = False
    """It stands in a larger file, whose bytes are told of by themselves."""


class StorageBackend(Protocol):
    root: Path
    """On this machine: the workspace itself, or the cache of one that lies elsewhere."""
    address: str
    """As a person names the workspace."""
    far: bool
    """Whether files are copied to this machine to be read."""

    def check(self) -> None:
        """Before any work: can it be written to, and does it keep the first of two writers?"""

    def read(self, inside: str) -> bytes | None:
        """A small file; None where there is none that can be read."""
        ...

    def texts(self, insides: Sequence[str]) -> dict[str, bytes]:
        """Small files, those that are there."""
        ...

    def sizes(self, insides: Sequence[str]) -> dict[str, int]:
        """Of the files that are there."""
        ...

    def local_path(self, inside: str) -> Path | None:
        """Where this machine can read it, fetched if need be; None where there is none."""
        ...

    def fetch(self, insides: Sequence[str]) -> None:
        """Many that will be read soon, at once."""

    def refetch(self, inside: str) -> bool:
        """Fetch again what is a copy; False where there is nothing that it is a copy of."""
        ...

    def names(self, folder: str) -> list[str]:
        """Of the files and folders in a folder, sorted."""
        ...

    def walk(self, folder: str = "") -> Iterator[FileInfo]:
        """Every file under a folder."""
        ...

    def publish(self, places: Mapping[Path, str], folder: str) -> None:
        """Complete files, from this machine to where they belong, all under `folder`."""

    def create(self, inside: str, text: str | bytes) -> bool:
        """Publish a small file if none is there; False if one is."""
        ...

    def replace(self, inside: str, text: str) -> None: ...

    def quarantine(self, insides: Iterable[str]) -> None:
        """Into quarantine: a person may want to see what happened."""

    def remove(self, insides: Iterable[str]) -> None: ...

    def tidy(self) -> None:
        """Empty folders go."""
