"""Signals that stop a command: SIGINT, SIGTERM and SIGHUP."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from amalgam.pipeline.errors import InterruptedRunError

SECONDS_UNTIL_AGAIN = 0.01
"""Delay of a signal that is sent again, because its exception was lost."""

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class InterruptHandler:
    """The first signal stops the run at the next safe place, a second SIGINT stops it at once."""

    def __init__(self) -> None:
        self.arrived: int | None = None

    def requested(self) -> bool:
        return self.arrived is not None

    def check(self) -> None:
        """Raises InterruptedRunError after a signal; committed units stay."""
        if self.arrived is not None:
            raise interrupted(self.arrived)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        with _handled_by(self._arrive):
            yield
        if self.arrived is not None:  # after the last check: the caller may have more work, as a sweep has
            signal.raise_signal(self.arrived)

    def _arrive(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.arrived == signal.SIGINT:
            os._exit(128 + signal.SIGINT)
        if number == signal.SIGINT and os.isatty(2):  # written directly: a handler may interrupt a print
            os.write(2, b"\nstopping at the end of this unit; Ctrl-C again stops at once\n")
        self.arrived = number


class StopSignal(BaseException):
    """A signal arrived outside a run; no `except Exception` of a library catches it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def stopping() -> Iterator[None]:
    """Raises InterruptedRunError after the first signal, so that temporary files are deleted; a second one kills."""
    arrived: list[int] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        arrived.append(number)
        for each in STOPPING:
            signal.signal(each, signal.SIG_DFL)
        raise StopSignal(number)

    before = sys.unraisablehook

    def again(unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, StopSignal):
            before(unraisable)
            return
        number = unraisable.exc_value.number
        signal.signal(number, stop)
        threading.Timer(SECONDS_UNTIL_AGAIN, os.kill, (os.getpid(), number)).start()

    sys.unraisablehook = again  # a destructor or a callback of a compiled module takes no exception
    try:
        with _handled_by(stop):
            yield
    except (Exception, StopSignal) as error:
        if arrived or isinstance(error, InterruptedRunError):  # no traceback if a second one arrives during the exit
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        if arrived and not isinstance(error, InterruptedRunError):  # importing a compiled module gives an ImportError
            raise interrupted(arrived[0]) from None
        raise
    finally:
        sys.unraisablehook = before


@contextlib.contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return
    nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # the process survives the end of its terminal
    # Python cannot set a handler again that is not its own, as a program has that embeds it.
    own = [number for number in STOPPING if signal.getsignal(number) is not None]
    handled = [number for number in own if not (nohup and number == signal.SIGHUP)]
    before = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextlib.contextmanager
def as_keyboard_interrupt() -> Iterator[None]:
    """Raises KeyboardInterrupt where Python's own handler would: no `except Exception` of a program catches it."""
    try:
        yield
    except InterruptedRunError as error:
        by_keyboard = error.exit_code == 128 + signal.SIGINT
        if by_keyboard and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            raise KeyboardInterrupt(str(error)) from None
        raise


@contextlib.contextmanager
def without_units(end: str) -> Iterator[None]:
    """Replaces the message of a signal for work that the same command cannot continue; `end` is the output's state."""
    try:
        yield
    except (StopSignal, InterruptedRunError) as error:
        number = error.number if isinstance(error, StopSignal) else error.exit_code - 128
        raise interrupted(number, end, "run the same command again, which starts over") from None


def interrupted(
    number: int, end: str = "committed units stay", fix: str = "run the same command again to continue"
) -> InterruptedRunError:
    return InterruptedRunError(f"stopped by {signal.Signals(number).name}; {end}", signal_number=number, fix=fix)
