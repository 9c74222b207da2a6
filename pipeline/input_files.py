"""Files outside the workspace: their kinds and digests, and whether another program wrote them while they were read."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from amalgam.pipeline.errors import InputChangedError

SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
"""Suffixes of files with a row for each text."""

PACKERS = {
    "gzip": (".gz", b"\x1f\x8b"),
    "bzip2": (".bz2", b"BZh91AY&SY"),
    "xz": (".xz", b"\xfd7zXZ\0"),
    "zstd": (".zst", b"\x28\xb5\x2f\xfd"),
}
"""Programs that pack files: the suffix, and the first bytes of a packed file."""

SMALL = 1 << 20
"""Bytes of a file that is read at once."""


def program_of(path: Path) -> str | None:
    """Returns the program that packed a file, by its suffix."""
    return next((packer for packer, (suffix, _) in PACKERS.items() if path.suffix.lower() == suffix), None)


def kind_of(path: Path) -> str:
    """Returns the suffix of a file's content, such as .csv for texts.csv and texts.csv.gz."""
    return (path.with_suffix("") if program_of(path) else path).suffix.lower()


def is_texts(path: Path) -> bool:
    """Returns whether rows can be read of a file of this name; of Parquet only if nothing packed it."""
    return kind_of(path) in SUFFIXES and (kind_of(path) != ".parquet" or program_of(path) is None)


def in_commands(path: Path) -> dict[str, str]:
    """Returns the file, its copy in this folder, and its stem, for commands that begin with `unpack` if packed."""
    file = path.absolute()
    file = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
    packer = program_of(file) if is_texts(file) else None
    unpack = f"{packer} -dk {_quoted(str(file))} && " if packer else ""
    file = file.with_suffix("") if packer else file
    names = {"file": str(file), "copy": f"utf8-{file.name}", "stem": str(file.with_suffix(""))}
    return {"unpack": unpack, **{key: _quoted(name) for key, name in names.items()}}


def _quoted(path: str) -> str:
    """Returns the path as a word of a command, which is no option."""
    return shlex.quote(f"./{path}" if path.startswith("-") else path)


def file_digest(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        if os.fstat(file.fileno()).st_size <= SMALL:  # without the buffer of file_digest, which takes longer
            return hashlib.sha256(file.read()).hexdigest()
        return hashlib.file_digest(file, "sha256").hexdigest()


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
