"""Events from outside during a run: signals, transient I/O errors and a full disk."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TypeVar

from amalgam.pipeline.console import Console
from amalgam.pipeline.errors import DiskFullError, InterruptedRunError, WorkError
from amalgam.pipeline.paths import AGAIN, FULL, OTHER_FIX, fix_of, reason_of, short_path
from amalgam.pipeline.storage.store import Store

PASSING = (errno.EIO, errno.ESTALE)

ATTEMPTS = 3

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

T = TypeVar("T")


class InterruptHandler:
    """The first SIGINT, SIGTERM or SIGHUP stops the run at the next safe place, a second SIGINT stops it at once."""

    def __init__(self) -> None:
        self.arrived: int | None = None

    def requested(self) -> bool:
        return self.arrived is not None

    def check(self) -> None:
        """Raises InterruptedRunError after a signal; committed units stay."""
        if self.arrived is not None:
            raise InterruptedRunError(
                f"stopped by {signal.Signals(self.arrived).name}; committed units stay",
                signal_number=self.arrived,
                fix="run the same command again to continue",
            )

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
            yield
            return
        handled = [number for number in STOPPING if not _is_ignored_hangup(number)]
        before = {number: signal.signal(number, self._arrive) for number in handled}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _arrive(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.arrived == signal.SIGINT:
            os._exit(128 + signal.SIGINT)
        self.arrived = number


def _is_ignored_hangup(number: int) -> bool:
    """Returns whether nohup started the process: it survives the end of its terminal."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


def with_retries(work: Callable[[], T], what: str, store: Store, console: Console) -> T:
    """Runs the work again after a transient I/O error; a full disk ends the run at once."""
    attempt = 1
    while True:
        try:
            return work()
        except Exception as error:
            transient = isinstance(error, OSError) and error.errno in PASSING
            if is_disk_full(error) or (transient and attempt == ATTEMPTS):
                raise storage_error(error, what, store) from error
            if not transient:
                raise
            console.note(f"{what}: {reason_of(error)}; trying again ({attempt} of {ATTEMPTS})")
            time.sleep(0.1 * 4**attempt)
            attempt += 1


def is_disk_full(error: Exception) -> bool:
    """Returns whether the disk is full; safetensors reports the error number only in the message."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in FULL
    number = re.search(r"\(os error (\d+)\)", str(error))
    return number is not None and int(number[1]) in FULL


def storage_error(error: Exception, what: str, store: Store) -> WorkError:
    """Returns the error with a fix; `what` names the work that failed."""
    if is_disk_full(error):
        free = shutil.disk_usage(store.root).free / 1e9
        return DiskFullError(
            f"{what}: the disk is full ({free:.1f} GB free)",
            where=str(store.root),
            fix="free some space (`amalgam gc`), then run the same command again: committed units stay",
        )
    return WorkError(
        f"{what}: {reason_of(error)}",
        where=short_path(getattr(error, "filename", None) or store.root),
        fix=f"{fix_of(error) if isinstance(error, OSError) else OTHER_FIX}, {AGAIN}",
    )
