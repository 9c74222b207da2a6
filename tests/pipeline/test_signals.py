"""A signal stops a command also in a place that takes no exception, such as a destructor."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

from amalgam.pipeline.errors import InterruptedRunError
from amalgam.pipeline.signals import InterruptHandler, stopping


class InterruptedDestructor:
    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def interrupted_for(*, seconds: float) -> None:
    InterruptedDestructor()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.01)


def test_a_signal_that_arrives_in_a_destructor_stops_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    before, began = sys.unraisablehook, time.monotonic()
    with pytest.raises(InterruptedRunError), stopping():
        interrupted_for(seconds=60)
    assert time.monotonic() - began < 30
    assert sys.unraisablehook is before
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("at_terminal", [True, False])
def test_ctrl_c_at_a_terminal_is_confirmed_while_the_unit_ends(
    at_terminal: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "isatty", lambda _: at_terminal)
    handler = InterruptHandler()
    with handler.listening():
        signal.raise_signal(signal.SIGINT)
        arrived, handler.arrived = handler.arrived, None
    assert arrived == signal.SIGINT
    assert ("Ctrl-C again stops at once" in capfd.readouterr().err) == at_terminal


@pytest.mark.parametrize("by_nohup", [True, False])
def test_the_end_of_a_terminal_stops_a_command_unless_nohup_started_it(*, by_nohup: bool) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if by_nohup else lambda *_: None)
    handler = InterruptHandler()
    try:
        with handler.listening():
            signal.raise_signal(signal.SIGHUP)
            arrived, handler.arrived = handler.arrived, None
    finally:
        signal.signal(signal.SIGHUP, before)
    assert arrived == (None if by_nohup else signal.SIGHUP)


def test_a_handler_that_python_did_not_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    foreign = {signal.SIGTERM: None}  # as in a program that embeds Python, such as R
    monkeypatch.setattr(signal, "getsignal", lambda number: foreign.get(number, signal.SIG_DFL))
    with InterruptHandler().listening():
        monkeypatch.undo()
        assert signal.getsignal(signal.SIGTERM) is before
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
