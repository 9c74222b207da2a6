"""Defines the errors that users see; each has a message, a place and a fix.

AmalgamError                exit 1
├── ExperimentError         exit 2   the experiment file, the command line
│   └── ModelError          exit 2   a model of the experiment cannot be used
├── DataError               exit 3   the texts
├── QualityError            exit 4   the student misses a requirement of `amalgam report`
├── WorkError               exit 1   a unit of work failed
│   └── DiskFullError       exit 1
├── DamagedError            exit 1   a stored file does not match its digest (the runner recomputes it)
├── InputChangedError       exit 1   an input file changed while it was read (the runner reads it again)
├── OutputError             exit 1   stdout cannot be written
├── FaultError              exit 70  a fault of amalgam itself
└── InterruptedRunError     exit 129, 130 or 143
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import unicodedata
from collections.abc import Iterable, Sequence

COMMAND_LINE = "command line"
"""Place of an override or an option in messages."""


class AmalgamError(Exception):
    """Holds the message (`what`), the place (`where`) and the `fix`, one line each.

    Processes exchange errors: pickle calls the class with the message alone and then restores all attributes.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.where = where and without_dots(where)
        self.fix = fix

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"where: {self.where}")
        if self.fix:
            lines.append(f"fix: {self.fix}")
        return "\n".join(lines)

    def _render_traceback_(self) -> list[str]:
        """Returns the lines that IPython shows instead of a traceback, as the command line does."""
        return f"{type(self).__name__}: {self}".splitlines()

    def to_json(self) -> dict[str, str | None]:
        return {"what": self.what, "where": self.where, "fix": self.fix}


class ExperimentError(AmalgamError):
    exit_code = 2


class ModelError(ExperimentError):
    pass


class DataError(AmalgamError):
    exit_code = 3


class QualityError(AmalgamError):
    exit_code = 4


class WorkError(AmalgamError):
    pass


class DiskFullError(WorkError):
    pass


class DamagedError(AmalgamError):
    """A committed file is absent or differs from its digest; a present one has been moved to quarantine."""

    def __init__(self, what: str, *, path: str = "", where: str | None = None, fix: str | None = None) -> None:
        fix = fix or "run the command again (in Python: experiment.run()): only the damaged part is recomputed"
        super().__init__(what, where=where, fix=fix)
        self.path = path


class InputChangedError(AmalgamError):
    """An input file changed after its digest was computed."""


class OutputError(AmalgamError):
    """The result could not be printed."""


class FaultError(AmalgamError):
    """An exception that amalgam does not expect; `where` is a file with the traceback."""

    exit_code = 70


class InterruptedRunError(AmalgamError):
    """SIGINT, SIGTERM or SIGHUP arrived; committed units stay."""

    def __init__(self, what: str, *, signal_number: int = 0, fix: str | None = None) -> None:
        super().__init__(what, fix=fix)
        self.exit_code = 128 + signal_number


def all_of(errors: Sequence[AmalgamError]) -> AmalgamError:
    """Returns the only error, or one that lists all; its exit code is that of the first."""
    if len(errors) == 1:
        return errors[0]
    parts = [f"{number}. " + str(error).replace("\n", "\n   ") for number, error in enumerate(errors, 1)]
    fix = "make each of these changes, then run the same command again"
    combined = AmalgamError("\n".join([f"{len(errors)} problems", *parts]), fix=fix)
    combined.exit_code = errors[0].exit_code
    return combined


def nearest(word: str, choices: Iterable[str], most: int = 1, *, ratio: float = 0.5) -> list[str]:
    """Returns the choices most like a misspelt word; case, blanks around it and the coding of accents do not count.

    Choices with the same letters are first: `tset` is like `test`, not like `text`.
    """
    by_folded = {folded(choice): choice for choice in choices}
    wanted = folded(word.strip())
    similar = difflib.get_close_matches(wanted, by_folded, len(by_folded) or 1, ratio)
    similar.sort(key=lambda choice: sorted(choice) != sorted(wanted))
    return [by_folded[near] for near in similar[:most]]


def folded(text: str) -> str:
    """Returns the text without differences of case, and with each accent in the letter's own character (NFC)."""
    return unicodedata.normalize("NFC", text).casefold()


MOST_LINE = 300
"""Characters of a library's message."""


def first_line(error: BaseException, *, named: bool = False) -> str:
    """Returns the first line of an error's message, after the name of its class if `named` or if there is none."""
    line = next(filter(None, map(str.strip, str(error).splitlines())), "")
    if len(line) > MOST_LINE:
        line = f"{line[:MOST_LINE].rsplit(maxsplit=1)[0]} ..."
    return ": ".join(filter(None, [type(error).__name__ if named or not line else "", line]))


# ---- errors of the system

MOST_PATH = 240
"""Characters of a path in a message; the middle of a longer one is left out."""

FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "your disk quota is used up",
    errno.EFBIG: "a file is larger than the system allows (ulimit -f)",
}
READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
"""Errors of a place that this user cannot write."""
PASSING = (errno.EIO, errno.ESTALE)
"""Errors of a disk that often pass."""

FIXES = {
    **dict.fromkeys((errno.EACCES, errno.EPERM), "give your user access to it (chmod, chown)"),
    errno.EROFS: "mount it for writing, or name another folder",
    errno.ENAMETOOLONG: "use a shorter path",
    errno.ELOOP: "remove the circular link",
    errno.EMFILE: "raise the limit of open files (ulimit -n 4096)",
    **dict.fromkeys(FULL, "free some space (`amalgam gc`)"),
    errno.EFBIG: "raise this limit (ulimit -f unlimited)",
}


def number_of(error: BaseException) -> int | None:
    """Returns the error's number; safetensors has it only in the message."""
    number = getattr(error, "errno", None)
    match = re.search(r"\(os error (\d+)\)", str(error)) if number is None else None
    return int(match[1]) if match else number


def reason_of(error: BaseException) -> str:
    """Returns the system's words for the error, without its number and path."""
    return str(getattr(error, "strerror", None) or error)


def fix_of(error: BaseException) -> str:
    return FIXES.get(number_of(error) or 0, "check the path, the disk and the mount")


def is_disk_full(error: BaseException) -> bool:
    return number_of(error) in FULL


def no_room(error: BaseException, free: str = "") -> str:
    """Returns the words for a full disk; the free space explains no quota and no limit of a file's size."""
    number = number_of(error) or errno.ENOSPC
    return FULL[number] + (f" ({free} free)" if free and number == errno.ENOSPC else "")


def without_dots(text: str) -> str:
    """Returns an absolute path without `..`, and any other text unchanged."""
    is_plain = not text.startswith("/") or "/../" not in f"{text}/" or "\0" in text
    return text if is_plain else os.path.realpath(text)


def short_path(path: str | bytes | int | os.PathLike[str]) -> str:
    """Returns the path for a message; a descriptor is its number."""
    text = str(path) if isinstance(path, int) else os.fsdecode(path)
    half = MOST_PATH // 2
    return text if len(text) <= MOST_PATH else f"{text[:half]}...{text[-half:]}"
