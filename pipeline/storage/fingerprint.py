"""Fingerprints: the sha256 of an identity's canonical JSON, and digests of files.

An identity is plain data that a manifest shows: no pickles, paths, times or live objects.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

from amalgam import __version__
from amalgam.pipeline.errors import InputChangedError
from amalgam.pipeline.storage.local import atomic_write
from amalgam.pipeline.storage.paths import is_regular
from amalgam.pipeline.storage.small_files import canonical, signed, verified

ABSENT = object()  # an absent field differs from a null

LENGTH = 20  # hex digits: 80 bits

DIGEST = re.compile(r"[0-9a-f]{16,}")

LIBRARIES = ("torch", "transformers", "tokenizers", "polars")
"""Results depend on the versions of these libraries."""


def fingerprint(identity: Any) -> str:
    return hashlib.sha256(canonical(identity).encode()).hexdigest()[:LENGTH]


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def differences(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yields (dotted path, "old -> new") for every leaf in which two identities differ, in order."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in [*old, *(key for key in new if key not in old)]:
            yield from differences(old.get(key, ABSENT), new.get(key, ABSENT), f"{path}.{key}" if path else str(key))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from differences(before, after, f"{path}.{index}")
    elif old is ABSENT or new is ABSENT or canonical(old) != canonical(new):  # to an identity, 1 is not 1.0 or true
        yield path, f"{_shown(old)} -> {_shown(new)}"


def _shown(value: Any, limit: int = 40) -> str:
    if value is ABSENT:
        return "nothing"
    text = value if isinstance(value, str) else canonical(value)
    if DIGEST.fullmatch(text):
        return text[:8]
    return text if len(text) <= limit else text[: limit - 3] + "..."


@cache
def library_versions() -> dict[str, str]:
    versions = {"amalgam": __version__}
    for library in LIBRARIES:
        try:
            versions[library] = version(library)
        except PackageNotFoundError:
            versions[library] = "not installed"
    return versions


# ---- files outside the workspace

SETTLED_SECONDS = 2.0  # a newer file could change again within the clock's resolution: its digest is not stored


@dataclass(frozen=True)
class FileMark:
    """Identifies a file's content without reading it."""

    device: int
    inode: int
    bytes: int
    written_ns: int
    changed_ns: int
    is_settled: bool = field(compare=False)
    """The file is old enough that another write would change the mark."""

    @classmethod
    def of(cls, path: Path) -> Self:
        stat = path.stat()
        settled = time.time() - max(stat.st_mtime, stat.st_ctime) > SETTLED_SECONDS
        return cls(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, settled)

    @property
    def key(self) -> str:
        return f"{self.device}:{self.inode}:{self.bytes}:{self.written_ns}:{self.changed_ns}"


@dataclass(frozen=True)
class InputFile:
    """A file outside the workspace, as it was when its digest was computed."""

    path: Path
    mark: FileMark
    """Taken before the file was first read."""
    sha256: str

    @classmethod
    def of(cls, path: Path, digest_of: Callable[[Path], str], mark: FileMark | None = None) -> Self:
        mark = mark or FileMark.of(path)
        return cls(path, mark, digest_of(path))

    def has_content(self) -> bool:
        """Returns whether the file has the content of the digest."""
        try:
            return file_digest(self.path) == self.sha256
        except OSError:
            return False

    def is_unchanged(self) -> bool:
        """Returns whether nothing was written; reads the file only if its mark does not show that."""
        try:
            mark = FileMark.of(self.path)
            if mark == self.mark and self.mark.is_settled:
                return True
        except OSError:
            return False
        return (mark.bytes, mark.written_ns) == (self.mark.bytes, self.mark.written_ns) and self.has_content()


@contextlib.contextmanager
def unchanged(files: Iterable[InputFile]) -> Iterator[None]:
    """Raises InputChangedError if one of the files changes in the block; it replaces an error of the block."""
    try:
        yield
    except Exception as error:
        _refuse_changed(files, error)
        raise
    _refuse_changed(files)


def _refuse_changed(files: Iterable[InputFile], cause: Exception | None = None) -> None:
    for file in files:
        if not file.is_unchanged():
            raise changed_error(file.path) from cause


def changed_error(path: Path) -> InputChangedError:
    fix = "let no other program write it, then run the same command again"
    return InputChangedError(f"{path.name} changed while it was read", where=str(path), fix=fix)


class FileDigests:
    """Caches digests of source and model files, so that `plan` does not read gigabytes again.

    The key of a digest is the exact file: device, inode, size, and both times to the nanosecond.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._digests = self._stored()
        self._fresh: dict[str, str] = {}

    def __call__(self, path: Path) -> str:
        mark = FileMark.of(path)
        if mark.key in self._digests:
            return self._digests[mark.key]
        digest = file_digest(path)
        if mark.is_settled and FileMark.of(path) == mark:
            self._digests[mark.key] = self._fresh[mark.key] = digest
        return digest

    @property
    def is_changed(self) -> bool:
        return bool(self._fresh)

    def save(self) -> None:
        """Stores new digests; a failure costs only time later."""
        if self._fresh:
            with contextlib.suppress(OSError), atomic_write(self._path) as temporary:
                temporary.write_bytes(signed({"files": {**self._stored(), **self._fresh}}))
        self._fresh = {}

    def _stored(self) -> dict[str, str]:
        """Returns no digest from a damaged file: all are computed again."""
        content = None
        with contextlib.suppress(OSError):
            content = verified(self._path.read_bytes()) if is_regular(self._path) else None
        files = content.get("files") if content else None
        return {str(key): str(digest) for key, digest in files.items()} if isinstance(files, dict) else {}
