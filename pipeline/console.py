"""Progress, tables and messages: one line that moves on a terminal, clean lines elsewhere.

Everything that informs goes to stderr, results (tables, JSON) to stdout. Text that came from data is never markup.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from amalgam.pipeline.errors import AmalgamError
    from amalgam.pipeline.plan import StageState

EVERY_SECONDS = 30.0


class Progress:
    """Rate and time left for one stage, from the work done by this run alone."""

    def __init__(self, console: Console, stage: str, measure: str, total: int, reused: int) -> None:
        self._console, self._stage, self._measure, self._total, self._reused = console, stage, measure, total, reused
        self._began = self._said = time.monotonic()
        self._done = self._began_with = 0

    def advance(self, amount: int) -> None:
        self.reach(self._done + amount)

    def reach(self, done: int, more: str = "") -> None:
        if not self._done:
            self._began_with = done - 1 if more else 0  # a resumed training starts in the middle
        self._done = done
        now = time.monotonic()
        if now - self._said >= (0.2 if self._console.live else EVERY_SECONDS):
            self._said = now
            self._console.show_progress(self.line(now) + more)

    def line(self, now: float) -> str:
        rate = (self._done - self._began_with) / max(now - self._began, 1e-9)
        left = (self._total - self._done) / rate if rate else 0.0
        reused = f", {self._reused:,} reused" if self._reused else ""
        share = 100 * self._done // max(self._total, 1)
        return (
            f"{self._stage}  {share}%  {self._done:,}/{self._total:,} {self._measure}{reused}"
            f"  {_rate(rate)}  {duration(left)} left"
        )


class Console:
    def __init__(self, *, quiet: bool = False, err: TextIO | None = None, out: TextIO | None = None) -> None:
        self._err = err or sys.stderr
        self._out = out or sys.stdout
        self._quiet = quiet
        self.live = self._err.isatty() and not quiet and os.environ.get("TERM") != "dumb"
        self._progress: Progress | None = None

    # ---- lines

    def note(self, text: str) -> None:
        self._line(f"note: {text}")

    def say(self, text: str) -> None:
        self._line(text)

    def starting(self, state: StageState) -> None:
        why = f"{state.reason}{': ' + state.detail if state.detail else ''}"
        there = f", {state.done} of {state.total} units there" if state.done else ""
        self._line(f"{state.stage}: running ({why}{there})")

    def reused(self, state: StageState) -> None:
        self._line(f"{state.stage}: reused")

    def finished(self, state: StageState, seconds: float, folder: Path) -> None:
        self._line(f"{state.stage}: done in {duration(seconds)} -> {_relative(folder)}")

    def result(self, text: str) -> None:
        """To stdout, whatever --quiet says: this is what was asked for."""
        self._write(self._out, text)

    def sentence(self, text: str) -> None:
        """As `result`, over as many lines as the terminal is narrow."""
        columns = shutil.get_terminal_size((100, 24)).columns
        self.result(textwrap.fill(text, columns, subsequent_indent="  ", break_long_words=False))

    def json(self, value: Any) -> None:
        self._write(self._out, json.dumps(value, indent=2, ensure_ascii=False))

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self._write(self._out, table(title, header, rows, shutil.get_terminal_size((100, 24)).columns))

    # ---- progress

    @contextlib.contextmanager
    def progress(self, stage: str, measure: str, total: int, reused: int) -> Iterator[None]:
        self._progress = Progress(self, stage, measure, total, reused) if total else None
        try:
            yield
        finally:
            self._progress = None
            self._clear()

    def advance(self, amount: int) -> None:
        if self._progress:
            self._progress.advance(amount)

    @contextlib.contextmanager
    def steps(self, what: str, total: int) -> Iterator[Callable[[int, int, float], None]]:
        """Progress of a training, within the stage's own."""
        outer, inner = self._progress, Progress(self, what, "steps", total, 0)

        def show(step: int, _total: int, loss: float) -> None:
            inner.reach(step, f"  loss {loss:.4f}")

        try:
            yield show
        finally:
            self._progress = outer
            self._clear()

    def show_progress(self, text: str) -> None:
        if self._quiet:
            return
        if not self.live:
            self._write(self._err, text)
            return
        columns = shutil.get_terminal_size((80, 24)).columns
        self._err.write("\r\x1b[2K" + _encodable(text[: columns - 1], self._err))
        self._err.flush()

    def _clear(self) -> None:
        if self.live:
            self._err.write("\r\x1b[2K")
            self._err.flush()

    def _line(self, text: str) -> None:
        if not self._quiet:
            self._clear()
            self._write(self._err, text)

    def _write(self, stream: TextIO, text: str) -> None:
        stream.write(_encodable(text, stream) + "\n")
        stream.flush()


def print_error(error: AmalgamError) -> None:
    """What, where, fix: three lines on stderr."""
    Console().say(f"error: {error}")


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], columns: int) -> str:
    """Plain columns that survive a pipe and 60 columns: the last column is cut, and said to be, when it must."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(header))]
    room = max(columns - sum(widths[:-1]) - 2 * (len(widths) - 1), 8)
    widths[-1] = min(widths[-1], room)
    lines = []
    for row in cells:
        shown = [*row[:-1], row[-1] if len(row[-1]) <= widths[-1] else row[-1][: widths[-1] - 3] + "..."]
        lines.append("  ".join(cell.ljust(width) for cell, width in zip(shown, widths, strict=True)).rstrip())
    rule = "-" * min(max(map(len, lines)), columns)
    return "\n".join([*([title] if title else []), lines[0], rule, *lines[1:]])


def _rate(rate: float) -> str:
    """Slow work is told by the step, not as 0/s."""
    if rate >= 10 or not rate:
        return f"{rate:,.0f}/s"
    return f"{rate:.1f}/s" if rate >= 1 else f"{1 / rate:.1f} s each"


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def _encodable(text: str, stream: TextIO) -> str:
    """Control characters escaped (but for line ends), and ASCII stand-ins where the stream cannot show a character."""
    safe = "".join(ch if ch == "\n" or ch.isprintable() else ch.encode("unicode_escape").decode() for ch in text)
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return safe.replace("→", "->").encode(encoding, "backslashreplace").decode(encoding)


def _relative(path: Path) -> str:
    try:
        return os.path.relpath(path)
    except ValueError:
        return str(path)
