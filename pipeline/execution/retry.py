"""Retries transient I/O errors, and reports a full disk."""

from __future__ import annotations

import errno
import re
import shutil
import time
from collections.abc import Callable
from typing import Protocol

from amalgam.pipeline.console import Console
from amalgam.pipeline.errors import DiskFullError, WorkError
from amalgam.pipeline.storage.store import Store

PASSING = (errno.EIO, errno.ESTALE)

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

RETRIES = 3


class Workspace(Protocol):
    """The parts of a run that a retry uses."""

    @property
    def store(self) -> Store: ...

    @property
    def console(self) -> Console: ...


def with_retries(work: Callable[[], None], run: Workspace, what: str) -> None:
    """Runs the work again after a transient I/O error; a full disk ends the run at once."""
    for attempt in range(1, RETRIES + 1):
        try:
            return work()
        except Exception as error:
            if is_disk_full(error):
                raise disk_full(run, what) from error
            if not isinstance(error, OSError) or error.errno not in PASSING:
                raise
            if attempt == RETRIES:
                raise WorkError(
                    f"{what}: {error.strerror}, {RETRIES} times",
                    where=str(error.filename or run.store.root),
                    fix="check the disk or the mount, then run the same command again",
                ) from error
            run.console.note(f"{what}: {error.strerror}; trying again ({attempt} of {RETRIES})")
            time.sleep(0.1 * 4**attempt)
    return None


def is_disk_full(error: Exception) -> bool:
    """Returns whether the disk is full; safetensors reports the error number only in the message."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in FULL
    number = re.search(r"\(os error (\d+)\)", str(error))
    return number is not None and int(number[1]) in FULL


def disk_full(run: Workspace, what: str) -> DiskFullError:
    free = shutil.disk_usage(run.store.root).free / 1e9
    return DiskFullError(
        f"{what}: the disk is full ({free:.1f} GB free)",
        where=str(run.store.root),
        fix="free some space (`amalgam gc`), then run the same command again: committed units stay",
    )
