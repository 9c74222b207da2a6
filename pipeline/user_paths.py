"""Paths of a user outside the workspace: refuses those that the system cannot look up, read or write."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from amalgam.pipeline.errors import (
    AmalgamError,
    DiskFullError,
    ExperimentError,
    fix_of,
    is_disk_full,
    no_room,
    number_of,
    reason_of,
    short_path,
)

DEFAULT_FILE = Path("amalgam.yaml")
"""The experiment file of commands without `-c FILE`."""

WEB = re.compile("(https?|ftp):/", re.IGNORECASE)  # a Path has one slash
ADDRESS = re.compile("(s3|gs|az|hf):/?(?!/)", re.IGNORECASE)
"""The start of an address that lacks slashes, as a Path of it does."""


def user_path(given: str, base: Path = Path(), kind: type[AmalgamError] = ExperimentError, where: str = "") -> Path:
    """Returns a path that a user gave, relative to `base`; refuses one that the system cannot look up.

    A path where nothing exists is returned.
    """
    where = short_path(where or given)
    if "\0" in given:
        raise kind("the path has a NUL character", where=where, fix="remove it")
    if WEB.match(given):
        fix = "download the file and name it; the texts of the corpus may also be hf:// or s3:// addresses"
        raise kind("a web address is not read here", where=where, fix=fix)
    if not os.path.exists(base / given.partition("/")[0]):  # noqa: PTH110 - no error of a long name; one may be s3:
        check_address(given, kind, where)
    try:
        path = base / expanded(given)
    except RuntimeError:
        user = given.partition("/")[0]
        what, fix = f"there is no user {user[1:]}", f"write the path in full, without {user}"
        raise kind(short_path(what), where=where, fix=short_path(fix)) from None
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        what = f"{short_path(given)} cannot be reached: {reason_of(error)}"
        raise kind(what, where=where, fix=fix_of(error)) from None
    return path


def check_utf8(path: Path) -> None:
    """Refuses a path that is not UTF-8: safetensors and Arrow open no such file."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        fix = "rename the folder or the file that has other bytes in its name"
        raise ExperimentError("the path is not UTF-8", where=short_path(path), fix=fix) from None


def check_address(given: str, kind: type[AmalgamError], where: str) -> None:
    """Refuses an address whose slashes are not two."""
    if start := ADDRESS.match(given):
        fix = f"did you mean {start[1].lower()}://{given[start.end() :]}?"
        raise kind(f"an address has two slashes after {start[1]}:", where=where, fix=short_path(fix))


def expanded(given: str) -> Path:
    """Returns the path with the home folder for a leading ~; `./~` is a folder of that name."""
    return Path(given).expanduser() if given.startswith("~") else Path(given)


def without_backslashes(given: str) -> str | None:
    """Returns a path of Windows as Linux has it, a drive as WSL does; None for a path without backslashes."""
    drive, path = re.match("([A-Za-z]):", given), given.replace("\\", "/")
    return None if path == given else f"/mnt/{drive[1].lower()}{path[2:]}" if drive else path


def check_writable(folder: Path, fix: str) -> None:
    """Refuses a folder in which this process could not write, or that it could not make; changes nothing."""
    level = folder
    try:
        while not level.exists():
            level = level.parent
        if not level.is_dir():
            what = f"{level.name} is a file, not a folder"
        elif not os.access(level, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
            what = f"{level.name or level} is not writable"
        else:
            return
    except OSError as error:
        what = f"{folder.name} cannot be reached: {reason_of(error)}"
    raise ExperimentError(what, where=str(folder), fix=fix)


@contextmanager
def readable(path: Path, kind: type[AmalgamError], where: str = "") -> Iterator[None]:
    """Turns a file that the system cannot read into an error of this kind."""
    try:
        yield
    except OSError as error:
        place = short_path(error.filename or path)
        what = f"{place.rpartition('/')[2]} cannot be read: {reason_of(error)}"
        raise kind(what, where=f"{where}: {place}" if where else place, fix=fix_of(error)) from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns a full disk into an error that names the folder of the file."""
    try:
        yield
    except OSError as error:
        if not is_disk_full(error):
            raise
        folder = short_path(path.absolute().parent)
        is_limit = number_of(error) == errno.EFBIG  # in every folder
        fix = fix_of(error) if is_limit else "free some space there, or name another folder"
        what = f"{path.name} cannot be written: {no_room(error)}"
        raise DiskFullError(what, where=folder, fix=f"{fix}, then run the same command again") from error


def check_new(path: Path, fix: str = "edit it, move it away, or give another name") -> None:
    """Refuses a path where a file or a link exists, with this fix, or cannot be written."""
    if os.path.lexists(path):
        raise ExperimentError(f"{path} exists", where=str(path.absolute()), fix=fix)
    check_writable(path.absolute().parent, "name a folder that you may write")
