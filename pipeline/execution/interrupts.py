"""SIGINT and SIGTERM: the first stops the run at the next safe place, a second SIGINT stops it at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from amalgam.pipeline.errors import InterruptedRunError


class InterruptHandler:
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
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number in before:
            signal.signal(number, self._arrive)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _arrive(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.arrived == signal.SIGINT:
            os._exit(128 + signal.SIGINT)
        self.arrived = number
