"""Prints progress, tables and messages: a moving line on a terminal, whole lines elsewhere.

Messages go to stderr, results to stdout. Not rich: pipes get whole lines, `--help` starts fast.
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
from dataclasses import dataclass
from typing import Any, TextIO

from amalgam.pipeline.errors import AmalgamError

EVERY_SECONDS = 30.0

LEAST_LAST = 16
"""Minimal width of the last column on a terminal, where wide tables are split."""
LEAST_CUT = 7
"""Minimal width of the last column on a pipe; it is the only one that is shortened."""


class Progress:
    """Estimates rate and time left for one stage, from the work done by this run alone.

    The clock starts at the first finished amount, because loading a model first would distort the rate.
    """

    def __init__(self, console: Console, stage: str, measure: str, total: int, reused: int) -> None:
        self.stage, self.total, self.done = stage, total, 0
        self._console, self._measure, self._reused = console, measure, reused
        self._said = time.monotonic()
        self._first: tuple[float, int] | None = None

    def advance(self, amount: int) -> None:
        self.reach(self.done + amount)

    def reach(self, done: int, more: str = "") -> None:
        now = time.monotonic()
        self._first = self._first or (now, done)
        self.done = done
        if done < self.total and now - self._said >= (0.2 if self._console.live else EVERY_SECONDS):
            self._said = now
            self._console.show_progress([*self.parts(now), more])

    def parts(self, now: float) -> list[str]:
        """Returns the parts of the line, the most important first; a narrow terminal leaves out the last ones."""
        began, with_ = self._first or (now, self.done)
        rate = (self.done - with_) / (now - began) if now > began else 0.0
        left = f"{duration((self.total - self.done) / rate)} left" if rate else ""
        count = f"{self.done:,}/{self.total:,} {self._measure}"
        reused = f"{self._reused:,} reused" if self._reused else ""
        share = f"{self.stage}  {100 * self.done // max(self.total, 1)}%"
        return [share, left, count, rate_of(rate) if rate else "", reused]


@dataclass
class Tally:
    """Counts the work of a stage in this run, for the line at its end."""

    measure: str = ""
    done: int = 0
    reused: int = 0

    def summary(self, seconds: float) -> str:
        if self.done < 2:
            return ""
        rate = f" ({rate_of(self.done / seconds)})" if self.done >= 10 and seconds > 0 else ""
        reused = f", {self.reused:,} reused" if self.reused else ""
        return f", {self.done:,} {self.measure}{rate}{reused}"


class Console:
    def __init__(self, *, quiet: bool = False, err: TextIO | None = None, out: TextIO | None = None) -> None:
        self._err = err or sys.stderr
        self._out = out or sys.stdout
        self._quiet = quiet
        self.live = self._err.isatty() and not quiet and os.environ.get("TERM") != "dumb"
        self._progress: Progress | None = None
        self._tally = Tally()

    # ---- lines

    def note(self, text: str) -> None:
        self._line(f"note: {text}")

    def say(self, text: str) -> None:
        self._line(text)

    def stage_started(self, stage: str, why: str) -> None:
        self._tally = Tally()
        self._line(f"{stage}: running ({why})")

    def stage_reused(self, stage: str) -> None:
        self._line(f"{stage}: reused")

    def finished(self, stage: str, seconds: float, where: str) -> None:
        self._line(f"{stage}: done in {duration(seconds)}{self._tally.summary(seconds)} -> {_relative(where)}")

    def result(self, text: str) -> None:
        """Prints to stdout, also with --quiet."""
        self._write(self._out, text)

    def sentence(self, text: str) -> None:
        """Prints a result and wraps it at the width of the terminal."""
        columns = shutil.get_terminal_size((100, 24)).columns
        self.result(textwrap.fill(text, columns, subsequent_indent="  ", break_long_words=False))

    def json(self, value: Any) -> None:
        self._write(self._out, json.dumps(value, indent=2, ensure_ascii=False))

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        columns = shutil.get_terminal_size((100, 24)).columns
        blocks = list(_blocks(header, rows, columns)) if self._out.isatty() else [(header, rows)]
        shown = [table(title if not number else "", *block, columns) for number, block in enumerate(blocks)]
        self._write(self._out, "\n\n".join(shown))

    # ---- progress

    @contextlib.contextmanager
    def progress(self, stage: str, measure: str, total: int, reused: int) -> Iterator[None]:
        before = self._tally
        already = before.reused if before.measure else reused  # the first count; later ones include this run's work
        progress = self._progress = Progress(self, stage, measure, total, already) if total else None
        try:
            yield
        finally:
            self._progress = None
            if progress:
                self._tally = Tally(measure, before.done + progress.done, already)
            self._clear()

    def advance(self, amount: int) -> None:
        if self._progress:
            self._progress.advance(amount)

    @contextlib.contextmanager
    def steps(self, what: str, total: int) -> Iterator[Callable[[int, int, float], None]]:
        """Shows the progress of a training inside that of its stage; `what` names a phase of the training."""
        outer = self._progress
        number = f"{outer.done + 1}/{outer.total}" if outer and outer.total > 1 else ""
        inner = Progress(self, f"{outer.stage if outer else ''} {what or number}".strip(), "steps", total, 0)

        def show(step: int, _total: int, loss: float) -> None:
            inner.reach(step, f"loss {loss:.4f}")

        try:
            yield show
        finally:
            self._progress = outer
            self._clear()

    def show_progress(self, parts: Sequence[str]) -> None:
        """Prints the parts that fit in the terminal's width, or all of them elsewhere."""
        if self._quiet:
            return
        shown = [part for part in parts if part]
        if not self.live:
            self._write(self._err, "  ".join(shown))
            return
        columns = shutil.get_terminal_size((80, 24)).columns
        while len(shown) > 1 and len("  ".join(shown)) >= columns:
            shown.pop()
        self._err.write("\r\x1b[2K" + _encodable("  ".join(shown)[: columns - 1], self._err))
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
    """Prints the message, place and fix of an error to stderr."""
    Console().say(f"error: {error}")


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], columns: int) -> str:
    """Formats plain columns for pipes and narrow terminals; a last column that does not fit is cut and marked."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(header))]
    room = max(columns - sum(widths[:-1]) - 2 * (len(widths) - 1), LEAST_CUT)
    widths[-1] = min(widths[-1], room)
    lines = []
    for row in cells:
        shown = [*row[:-1], row[-1] if len(row[-1]) <= widths[-1] else row[-1][: widths[-1] - 3] + "..."]
        lines.append("  ".join(cell.ljust(width) for cell, width in zip(shown, widths, strict=True)).rstrip())
    rule = "-" * min(max(map(len, lines)), columns)
    return "\n".join([*([title] if title else []), lines[0], rule, *lines[1:]])


def _blocks(
    header: Sequence[str], rows: Sequence[Sequence[str]], columns: int
) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Splits a table that is wider than the terminal into blocks, each with the first column."""
    widths = [max(len(str(row[index])) for row in (header, *rows)) for index in range(len(header))]
    widths[-1] = min(widths[-1], LEAST_LAST)
    taken, used = [0], widths[0]
    for index in range(1, len(header)):
        if len(taken) > 1 and used + 2 + widths[index] > columns:
            yield [header[place] for place in taken], [[row[place] for place in taken] for row in rows]
            taken, used = [0], widths[0]
        taken.append(index)
        used += 2 + widths[index]
    yield [header[place] for place in taken], [[row[place] for place in taken] for row in rows]


def rate_of(rate: float) -> str:
    """Formats a rate; slow work is shown per step, not as 0/s."""
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
    """Escapes control characters except line ends, and replaces characters that the stream cannot show by ASCII."""
    safe = "".join(ch if ch == "\n" or ch.isprintable() else ch.encode("unicode_escape").decode() for ch in text)
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return safe.replace("→", "->").encode(encoding, "backslashreplace").decode(encoding)


def _relative(where: str) -> str:
    try:
        return where if "://" in where else os.path.relpath(where)
    except ValueError:
        return where
