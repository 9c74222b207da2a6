"""Turns exceptions of the system and of libraries into errors with a place and a fix."""

from __future__ import annotations

import os
import platform
import signal
import sys
import tempfile
import traceback

from amalgam.pipeline.errors import AmalgamError, DiskFullError, FaultError, InterruptedRunError, WorkError
from amalgam.pipeline.paths import AGAIN, FULL, fix_of, reason_of, short_path
from amalgam.pipeline.secrets import masked
from amalgam.pipeline.storage.fingerprint import library_versions

NO_MEMORY = ("allocate memory", "out of memory", "not enough memory", "std::bad_alloc")
"""Parts of the messages of libraries that have no MemoryError."""
MOST_SHOWN = 200
"""Characters of a library's message."""


def as_error(error: BaseException) -> AmalgamError:
    """Returns an error with a place and a fix; one that amalgam did not expect becomes a FaultError with a file."""
    if isinstance(error, AmalgamError):
        return error
    if isinstance(error, KeyboardInterrupt):
        what = "stopped by SIGINT; committed units stay"
        return InterruptedRunError(what, signal_number=signal.SIGINT, fix="run the same command again to continue")
    if is_out_of_memory(error):
        fix = f"close other programs, or lower execution.batch_tokens or student.batch_size, {AGAIN}"
        return WorkError(f"out of memory{_first_line(error)}", fix=fix)
    if isinstance(error, OSError) and error.errno is not None:
        place = None if error.filename is None else short_path(error.filename)
        name = f"{place.rpartition('/')[2]}: " if place else ""
        kind = DiskFullError if error.errno in FULL else WorkError
        return kind(f"{name}{reason_of(error)}", where=place, fix=f"{fix_of(error)}, {AGAIN}")
    return fault_of(error)


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(part in str(error).lower() for part in NO_MEMORY)
    )


def fault_of(error: BaseException) -> FaultError:
    """Returns the error of a fault in amalgam, and writes its traceback to a file."""
    line = masked(f"{type(error).__name__}{_first_line(error)}")
    fix = "report it with this file; --debug prints the traceback instead"
    return FaultError(f"this is a fault of amalgam: {line}", where=_write_traceback(error), fix=fix)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f": {lines[0][:MOST_SHOWN]}" if lines else ""


def _write_traceback(error: BaseException) -> str | None:
    """Writes versions, command and traceback without secrets; returns the path, or None on a full disk."""
    versions = {"python": platform.python_version(), "system": platform.platform(), **library_versions()}
    parts = [" ".join(sys.argv), *(f"{name} {version}" for name, version in versions.items())]
    text = masked("\n".join([*parts, "", "".join(traceback.format_exception(error))]))
    try:
        descriptor, path = tempfile.mkstemp(".txt", "amalgam-fault-")
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError:
        return None
    return path
