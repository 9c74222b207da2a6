"""A workspace on a disk, local or shared: written aside, synced, and published by linking or renaming."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from amalgam.pipeline.errors import ExperimentError
from amalgam.pipeline.storage.backend import QUARANTINE, TEMPORARY, FileInfo


class LocalStorage:
    far = False

    def __init__(self, root: Path) -> None:
        self.root = root
        self.address = str(root)

    def check(self) -> None:
        probe = temporary_path(self.root)
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ExperimentError(
                f"the workspace cannot be written to: {error.strerror}",
                where=str(self.root),
                fix="change its permissions, or give another: execution.workspace=DIR",
            ) from error

    # ---- reading

    def read(self, inside: str) -> bytes | None:
        try:
            return (self.root / inside).read_bytes()
        except OSError:
            return None

    def texts(self, insides: Sequence[str]) -> dict[str, bytes]:
        found = ((inside, self.read(inside)) for inside in insides)
        return {inside: text for inside, text in found if text is not None}

    def sizes(self, insides: Sequence[str]) -> dict[str, int]:
        found = {}
        for inside in insides:
            with contextlib.suppress(OSError):
                found[inside] = (self.root / inside).stat().st_size
        return found

    def local_path(self, inside: str) -> Path | None:
        return self.root / inside  # whoever opens it finds out whether it is there

    def fetch(self, insides: Sequence[str]) -> None:
        """They are here."""

    def refetch(self, inside: str) -> bool:  # noqa: ARG002  it is the thing itself
        return False

    def names(self, folder: str) -> list[str]:
        try:
            return sorted(path.name for path in (self.root / folder).iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def walk(self, folder: str = "") -> Iterator[FileInfo]:
        for inside, _, names in sorted(os.walk(self.root / folder)):
            for name in sorted(names):
                path = Path(inside) / name
                with contextlib.suppress(OSError):
                    stat = path.stat()
                    yield FileInfo(str(path.relative_to(self.root)), stat.st_size, stat.st_mtime)

    # ---- writing

    def publish(self, places: Mapping[Path, str], folder: str) -> None:
        targets = {path: self.root / inside for path, inside in places.items()}
        for path, target in targets.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            path.replace(target)  # the name holds the digest: what stood there has, or should have had, these bytes
        for parent in sorted({target.parent for target in targets.values()} | {self.root / folder}):
            sync_folder(parent)

    def create(self, inside: str, text: str | bytes) -> bool:
        path = self.root / inside
        if path.exists():  # where there are no hard links, the last writer would win
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_path(path.parent)
        try:
            _write_synced(temporary, text)
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
            except OSError:  # a file system without hard links: rename is atomic too, only the last writer wins
                temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)
        return True

    def replace(self, inside: str, text: str) -> None:
        path = self.root / inside
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_path(path.parent)
        try:
            _write_synced(temporary, text)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)

    def quarantine(self, insides: Iterable[str]) -> None:
        for path in (self.root / inside for inside in insides):
            if path.exists():
                target = self.root / QUARANTINE
                target.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileNotFoundError):
                    path.rename(target / f"{uuid.uuid4().hex[:8]}-{path.name}")

    def remove(self, insides: Iterable[str]) -> None:
        for path in (self.root / inside for inside in insides):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def tidy(self) -> None:
        for folder, _, _ in os.walk(self.root, topdown=False):
            if folder != str(self.root) and not any(Path(folder).iterdir()):
                with contextlib.suppress(OSError):  # somebody writes there
                    Path(folder).rmdir()


def temporary_path(folder: Path) -> Path:
    """A name that nobody else uses, for what is not complete yet."""
    return folder / f"{TEMPORARY}{os.getpid()}-{uuid.uuid4().hex[:12]}"


def _write_synced(path: Path, text: str | bytes) -> None:
    with path.open("wb") as file:
        file.write(text.encode() if isinstance(text, str) else text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
