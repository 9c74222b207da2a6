"""Paths of a user: refuses those that the system cannot look up or write to, with the reason and a fix."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from amalgam.pipeline.errors import AmalgamError, ExperimentError

MOST_PATH = 240
"""Characters of a path in a message; the middle of a longer one is left out."""

AGAIN = "then run the same command again: committed units stay"

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

FIXES = {
    **dict.fromkeys((errno.EACCES, errno.EPERM), "give your user access to it (chmod, chown)"),
    errno.EROFS: "mount it for writing, or name another folder",
    errno.ENAMETOOLONG: "use a shorter path",
    errno.ELOOP: "remove the circular link",
    errno.EMFILE: "raise the limit of open files (ulimit -n 4096)",
    **dict.fromkeys(FULL, "free some space (`amalgam gc`)"),
}
OTHER_FIX = "check the path, the disk and the mount"


def reason_of(error: BaseException) -> str:
    """Returns the system's words for the error, without its number and path."""
    return str(getattr(error, "strerror", None) or error)


def fix_of(error: OSError) -> str:
    return FIXES.get(error.errno or 0, OTHER_FIX)


def short_path(path: str | bytes | int | os.PathLike[str]) -> str:
    """Returns the path for a message; a descriptor is its number."""
    text = str(path) if isinstance(path, int) else os.fsdecode(path)
    half = MOST_PATH // 2
    return text if len(text) <= MOST_PATH else f"{text[:half]}...{text[-half:]}"


def user_path(given: str, base: Path = Path(), kind: type[AmalgamError] = ExperimentError, where: str = "") -> Path:
    """Returns a path that a user gave, relative to `base`; refuses one that the system cannot look up.

    A path where nothing exists is returned.
    """
    where = short_path(where or given)
    if "\0" in given:
        raise kind("the path has a NUL character", where=where, fix="remove it")
    try:
        path = base / Path(given).expanduser()
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
