"""A workspace on a local or shared disk; every file appears by a link or a rename."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from amalgam.pipeline.errors import PASSING, ExperimentError, fix_of, is_disk_full
from amalgam.pipeline.storage.backend import TEMPORARY, FileInfo
from amalgam.pipeline.storage.paths import MOST_BYTES, folder_of, inside, is_below
from amalgam.pipeline.user_paths import check_new, writing

LOCK_SECONDS, POLL_SECONDS = 5.0, 0.005


class LocalStorage:
    is_remote = False

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
            if is_disk_full(error):  # the runner adds the need
                raise
            raise ExperimentError(
                f"the workspace cannot be {'written' if self.root.is_dir() else 'made'}: {error.strerror}",
                where=str(self.root),
                fix=f"{fix_of(error)}, or set execution.workspace=DIR",
            ) from error

    def read(self, paths: Sequence[str]) -> dict[str, bytes]:
        contents = {}
        for path, size in self.sizes(paths).items():
            if size <= MOST_BYTES:
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # deleted meanwhile
                    contents[path] = (self.root / path).read_bytes()
        return contents

    def sizes(self, paths: Sequence[str]) -> dict[str, int]:
        """Returns the sizes of regular files; those behind a link out of the workspace count as absent."""
        sizes, root = {}, str(self.root)
        below = cache(lambda folder: is_below(folder, self.root))
        for path in paths:  # paths as strings, because there may be a hundred thousand of them
            try:
                status = os.lstat(f"{root}/{path}")
            except PermissionError:  # the file may exist
                raise
            except (OSError, ValueError):
                continue
            if stat.S_ISREG(status.st_mode) and below(folder_of(path)):
                sizes[path] = status.st_size
        return sizes

    def list(self, folder: str = "") -> Iterator[FileInfo]:
        if is_below(folder, self.root):
            yield from _list(str(self.root / folder), f"{folder}/" if folder else "")

    def names(self, folder: str) -> set[str]:
        if not is_below(folder, self.root):
            return set()
        try:
            with os.scandir(self.root / folder) as listing:
                return {entry.name for entry in listing if not entry.is_symlink()}
        except PermissionError:
            raise
        except OSError:
            return set()

    def put_if_absent(self, path: str, content: bytes) -> bool:
        return write_if_absent(inside(self.root, path), content)

    def change(self, path: str, edit: Callable[[bytes | None], bytes | None]) -> None:
        with alone_in((self.root / path).parent):
            content = edit(self.read([path]).get(path))
            if content is not None:
                self.put({path: content})

    def put(self, files: Mapping[str, bytes | Path]) -> None:
        changed: set[Path] = set()
        for path, content in files.items():
            target = inside(self.root, path)
            make_folder(target.parent)
            changed.add(target.parent)
            if isinstance(content, Path):
                content.replace(target)
            else:
                with replacing(target) as temporary:
                    temporary.write_bytes(content)
                    sync(temporary)
        for folder in sorted(changed):
            sync(folder)

    def get(self, paths: Sequence[str]) -> set[str]:  # noqa: ARG002 - `root` is the workspace itself
        return set()

    def delete(self, paths: Sequence[str]) -> None:
        for path in paths:
            inside(self.root, path).unlink(missing_ok=True)


def _list(folder: str, inside: str) -> Iterator[FileInfo]:
    """Yields the regular files below a folder, by name; links are not followed."""
    entries = list[os.DirEntry[str]]()
    with contextlib.suppress(OSError), os.scandir(folder) as listing:
        entries = sorted(listing, key=lambda entry: entry.name)
    for entry in entries:
        with contextlib.suppress(OSError):  # deleted meanwhile
            if entry.is_file(follow_symlinks=False):
                status = entry.stat(follow_symlinks=False)
                yield FileInfo(inside + entry.name, status.st_size, status.st_mtime)
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _list(entry.path, f"{inside}{entry.name}/")


def remove_empty_folders(root: Path, paths: Iterable[str]) -> None:
    """Removes the folders that the deletion of these paths has emptied, and no other."""
    for folder in sorted({folder for path in paths for folder in (root / path).parents}, reverse=True):
        if folder != root and folder.is_relative_to(root):
            with contextlib.suppress(OSError):  # not empty, or another process writes there
                folder.rmdir()


# ---- atomic writes


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yields a temporary path next to `path` for a file or folder, and renames it to `path` after the block.

    If the block raises an exception, the temporary is removed and `path` stays as it is.
    """
    make_folder(path.parent)
    with replacing(path) as temporary:
        yield temporary
        sync(temporary)
    sync(path.parent)


def write_if_absent(path: Path, content: bytes) -> bool:
    """Writes a file, whole or not at all, and the folders above it; returns False if one exists, and keeps it."""
    if path.exists():
        return False
    make_folder(path.parent)
    temporary = temporary_path(path.parent)
    try:
        temporary.write_bytes(content)
        sync(temporary)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno in PASSING or is_disk_full(error):
                raise
            temporary.replace(path)  # without hard links: it is atomic too, but the last writer wins
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)
    return True


def write_new(path: Path, text: str) -> None:
    """Writes a text file of the user, whole or not at all, and the folders above it; refuses to replace a file."""
    check_new(path)
    with writing(path):
        is_new = write_if_absent(path, text.encode())
    if not is_new:
        check_new(path)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path like `atomic_write`, without a wait for the disk; the folder of `path` exists."""
    temporary = temporary_path(path.parent)
    try:
        yield temporary
        temporary.replace(path)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Holds the folder's lock while the block reads and replaces a file there; the lock ends with its process.

    After LOCK_SECONDS, and on a file system without locks, the block runs without it.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # no such folder yet: no other process writes there
        yield
        return
    deadline = time.monotonic() + LOCK_SECONDS
    try:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(POLL_SECONDS)
            except OSError:
                break
        yield
    finally:
        os.close(descriptor)


def temporary_path(folder: Path) -> Path:
    """Returns a unique name in the folder for a file that is not complete yet."""
    return folder / f"{TEMPORARY}{os.getpid()}-{uuid.uuid4().hex[:12]}"


def make_folder(folder: Path) -> None:
    """Creates a folder and its parents, and waits until their entries are on the disk."""
    missing = list(itertools.takewhile(lambda level: not level.exists(), (folder, *folder.parents)))
    folder.mkdir(parents=True, exist_ok=True)
    for level in reversed(missing):
        with contextlib.suppress(FileNotFoundError):  # another process removed an empty folder
            sync(level.parent)


def sync(path: Path) -> None:
    """Waits until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
