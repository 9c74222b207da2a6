"""Packed files of texts, such as texts.csv.gz: their content is read without a file for it."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from amalgam.data.keys import shown
from amalgam.data.lazy import pa
from amalgam.pipeline.errors import DataError

LINE_LIMIT = 64 << 20
"""Bytes of the longest line, because a line may be much larger than the file; a longer one comes in pieces."""


class UnpackedFile(io.BufferedReader):
    """The content of a packed file, by line; a file that is not whole is an error."""

    def __init__(self, path: Path, program: str) -> None:
        openers: dict[str, Any] = {"gzip": gzip.open, "bzip2": bz2.open, "xz": lzma.open, "zstd": _open_zstd}
        super().__init__(openers[program](path))
        self._path, self._program = path, program

    def read(self, size: int | None = -1, /) -> bytes:
        with self._unpacking():
            return super().read(size)

    def readline(self, size: int | None = -1, /) -> bytes:
        with self._unpacking():
            return super().readline(size)

    def __next__(self) -> bytes:
        if line := self.readline(LINE_LIMIT):
            return line
        raise StopIteration

    @contextmanager
    def _unpacking(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # of the system; an unpacker's has no number
                raise
            what = f"{shown(self._path.name, 200)} is not a whole file of {self._program}: {shown(str(error), 200)}"
            fix = "write it again from where it came"
            raise DataError(what, where=shown(str(self._path), 200), fix=fix) from error


def _open_zstd(path: Path) -> Any:
    return pa.CompressedInputStream(path.open("rb"), "zstd")
