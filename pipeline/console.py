"""Prints progress, tables and messages: a moving line on a terminal, whole lines elsewhere.

Messages go to stderr, results to stdout. Rich prints no progress to pipes and breaks wide tables inside words, and its
import would take as long as the rest of `--help`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import sys
import textwrap
import threading
import time
import unicodedata
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

from amalgam.pipeline.errors import OutputError, reason_of
from amalgam.pipeline.secrets import masked

EVERY_SECONDS = 30.0

LEAST_LAST = 16
"""Minimal width of the last column on a terminal, where wide tables are split."""
LEAST_WRAPPED = 7
"""Minimal width at which the last column is wrapped; no text of a table is cut."""
LONGEST_RULE = 100
UNLIMITED = 1 << 20
"""Columns of a pipe, which gets whole lines."""
START_OF_LINE = "\r\x1b[2K"
"""Moves a terminal to the start of the line and clears it."""


IN_ASCII = str.maketrans({"∞": "inf", "±": "+/-", "“": '"', "”": '"'})
"""The signs of amalgam's own messages for a stream that cannot show them."""


class Progress:
    """Estimates rate and time left for one stage, from the work done by this run alone.

    The clock starts at the first finished amount, because loading a model first would distort the rate.
    """

    def __init__(self, name: str, measure: str, total: int, reused: int = 0) -> None:
        self.name, self.measure, self.total, self.reused, self.done = name, measure, total, reused, 0
        self._shown = time.monotonic()
        self._first: tuple[float, int] | None = None

    def reach(self, done: int, every: float) -> list[str]:
        """Returns the parts of the line if one is due, the most important first; a narrow terminal omits the last."""
        now = time.monotonic()
        began, before = self._first = self._first or (now, done)
        self.done = done
        if done >= self.total or now - self._shown < every:
            return []
        self._shown = now
        rate = (done - before) / (now - began) if now > began else 0.0
        left = f"{duration((self.total - done) / rate)} left" if rate else ""
        count = f"{done:,}/{self.total:,} {self.measure}"
        reused = f"{self.reused:,} reused" if self.reused else ""
        return [f"{self.name}  {100 * done // self.total}%", left, count, rate_of(rate) if rate else "", reused]


@contextlib.contextmanager
def printing(stream: TextIO) -> Iterator[None]:
    """Flushes the stream after the block; raises OutputError, which is no OSError of files, if it cannot be written."""
    try:
        yield
        stream.flush()
    except OSError as error:
        with contextlib.suppress(OSError, ValueError):  # else Python would try to write the rest when it exits
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        name = str(getattr(stream, "name", "stdout")).strip("<>")
        what, fix = f"the output cannot be written: {reason_of(error)}", "redirect it to a file on a disk with space"
        raise OutputError(what, where=name, fix=fix) from error


class Console:
    def __init__(
        self, *, quiet: bool = False, tables: bool = True, err: TextIO | None = None, out: TextIO | None = None
    ) -> None:
        """Without `tables` it prints neither tables nor verdicts: commands that run many experiments end with one."""
        self._err = err or sys.stderr
        self._out = out or sys.stdout
        self.is_quiet = quiet
        self.has_tables = tables
        self._live = self._err.isatty() and not quiet and os.environ.get("TERM") != "dumb"
        self._progress: Progress | None = None
        self._done: Progress | None = None
        """The work of the stage so far, for the line at its end."""
        self._every_seconds = 0.2 if self._live else EVERY_SECONDS

    # ---- lines

    def say(self, text: str, *, always: bool = False) -> None:
        """Prints a message; `always` prints it with --quiet too."""
        if always or not self.is_quiet:
            self._clear()
            self._write(self._err, masked(text))

    def note(self, text: str, *, always: bool = False) -> None:
        self.say(f"note: {text}", always=always)

    def stage_started(self, stage: str, why: str) -> None:
        self._done = None
        self.say(f"{stage}: running ({why})")

    def stage_reused(self, stage: str) -> None:
        self.say(f"{stage}: reused")

    def finished(self, stage: str, seconds: float, where: str) -> None:
        work = ""
        if self._done and self._done.done > 1:
            done, reused = self._done.done, self._done.reused
            rate = f" ({rate_of(done / seconds)})" if done >= 10 and seconds > 0 else ""
            work = f", {done:,} {self._done.measure}{rate}" + (f", {reused:,} reused" if reused else "")
        place = where if "://" in where else os.path.relpath(where)
        self.say(f"{stage}: done in {duration(seconds)}{work} -> {place}")

    def result(self, text: str) -> None:
        """Prints to stdout, also with --quiet."""
        self._write(self._out, text)

    def sentence(self, text: str) -> None:
        """Prints a result and wraps it at the width of the terminal, but not within a word: stages have hyphens."""
        wrapped = textwrap.wrap(
            text, _columns(100), subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
        self.result("\n".join(wrapped))

    def verdict(self, lines: Sequence[str]) -> None:
        """Prints the verdict of a run; a terminal wraps all but the last line, which can be a command to copy."""
        if not self.has_tables:
            return
        for line in lines[:-1]:
            if self._out.isatty():
                self.sentence(line)
            else:
                self.result(line)
        self.result(lines[-1])

    def json(self, value: Any) -> None:
        """Prints JSON in ASCII: a stream escapes other characters in its own way, which is not that of JSON."""
        self.result(json.dumps(value, indent=2))

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Prints plain columns; only a terminal splits a wide table, into blocks with the same first column."""
        if self.has_tables:
            self.result(self._text_table(title, header, rows))

    def _text_table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
        cells = [[_encodable(str(cell), self._out) for cell in row] for row in (header, *rows)]
        on_terminal = self._out.isatty()
        columns = _columns(100) if on_terminal else UNLIMITED
        groups = _groups(_widths(cells), columns) if on_terminal else [list(range(len(header)))]
        blocks = [_block([[row[index] for index in group] for row in cells], columns) for group in groups]
        return (f"{title}\n" if title else "") + "\n\n".join(blocks)

    # ---- progress

    @contextlib.contextmanager
    def progress(self, stage: str, measure: str, total: int, reused: int) -> Iterator[None]:
        """Shows the progress of a stage's units; a stage may have several rounds of them."""
        before = self._done
        already = before.reused if before else reused  # the first count; later ones include this run's work
        progress = self._progress = Progress(stage, measure, total, already) if total else None
        try:
            yield
        finally:
            self._progress = None
            if progress:
                self._done, progress.done = progress, progress.done + (before.done if before else 0)
            self._clear()

    def advance(self, amount: int) -> None:
        if self._progress:
            self._show(self._progress, self._progress.done + amount)

    @contextlib.contextmanager
    def steps(self, what: str, total: int, measure: str = "steps") -> Iterator[Callable[[int, str], None]]:
        """Shows the progress of a part, such as a training, inside that of its stage; `what` names the part."""
        outer = self._progress
        number = f"{outer.done + 1}/{outer.total}" if outer and outer.total > 1 else ""
        inner = Progress(f"{outer.name if outer else ''} {what or number}".strip(), measure, total)
        try:
            yield lambda done, more: self._show(inner, done, more)
        finally:
            self._progress = outer
            self._clear()

    def _show(self, progress: Progress, done: int, more: str = "") -> None:
        parts = progress.reach(done, self._every_seconds)
        if parts and not self.is_quiet:
            self._draw([part for part in (*parts, more) if part])

    def _draw(self, parts: Sequence[str]) -> None:
        """Prints the parts that fit in the terminal's width, or all of them elsewhere."""
        shown = list(parts)
        if not self._live:
            self._write(self._err, "  ".join(shown))
            return
        columns = _columns(80)
        while len(shown) > 1 and len("  ".join(shown)) >= columns:
            shown.pop()
        self._print(self._err, START_OF_LINE + _encodable("  ".join(shown)[: columns - 1], self._err))

    def _clear(self) -> None:
        if self._live:
            self._print(self._err, START_OF_LINE)

    def _write(self, stream: TextIO, text: str) -> None:
        self._print(stream, _encodable(text, stream) + "\n")

    def _print(self, stream: TextIO, text: str) -> None:
        """Writes a text as it is; lost messages end no work, but a lost result is an error."""
        try:
            with printing(stream):
                stream.write(text)
        except OutputError:
            if stream is self._out:
                raise


def _columns(default: int) -> int:
    return shutil.get_terminal_size((default, 24)).columns


def _widths(cells: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(width_of, column)) for column in zip(*cells, strict=True)]


def width_of(text: str) -> int:
    """Returns the columns of the text on a terminal: two for a wide character, none for a combining one."""
    if text.isascii():
        return len(text)
    marks = sum(unicodedata.category(letter) in {"Mn", "Me"} for letter in text)
    return len(text) - marks + sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)


def padded(text: str, width: int) -> str:
    return text + " " * (width - width_of(text))


def _groups(widths: list[int], columns: int) -> list[list[int]]:
    """Splits the indices of columns into groups that fit in the terminal's width, each with the first column."""
    groups, used = [[0]], widths[0]
    for index, width in enumerate([*widths[:-1], min(widths[-1], LEAST_LAST)][1:], start=1):
        if len(groups[-1]) > 1 and used + 2 + width > columns:
            groups.append([0])
            used = widths[0]
        groups[-1].append(index)
        used += 2 + width
    return groups


def _block(cells: Sequence[Sequence[str]], columns: int) -> str:
    """Aligns the cells; a last column that does not fit is wrapped."""
    *widths, last = _widths(cells)
    begin = sum(widths) + 2 * len(widths)
    last = min(last, max(columns - begin, LEAST_WRAPPED))
    lines = []
    for *row, end in cells:
        start = [padded(cell, width) for cell, width in zip(row, widths, strict=True)]
        first, *more = (textwrap.wrap(end, last) if width_of(end) > last else []) or [end]
        lines.append(["  ".join([*start, first]).rstrip(), *(" " * begin + line for line in more)])
    rule = "-" * min(max(width_of(line) for row in lines for line in row), columns, LONGEST_RULE)
    return "\n".join([*lines[0], rule, *(line for row in lines[1:] for line in row)])


def rate_of(rate: float) -> str:
    """Formats a rate; slow work is shown per step, not as 0/s."""
    if rate >= 10 or not rate:
        return f"{rate:,.0f}/s"
    return f"{rate:.1f}/s" if rate >= 1 else f"{1 / rate:.1f} s each"


def counted(count: int, noun: str, verb: str = "", plural: str = "") -> str:
    """Formats a number of things, with the verb in its number: "1 text is", "2,000 texts are"."""
    return f"{count:,} {noun} {verb}".rstrip() if count == 1 else f"{count:,} {noun}s {plural}".rstrip()


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def size(count: float) -> str:
    """Formats a number of bytes."""
    for unit, step in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= step:
            return f"{count / step:,.{0 if count >= 100 * step else 1}f} {unit}"
    return f"{count:.0f} bytes"


def printable(text: str, keep: str = "\n") -> str:
    """Escapes the characters of a text that are not visible, except those to keep."""
    return "".join(letter if letter in keep or letter.isprintable() else _escaped(letter) for letter in text)


def _escaped(letter: str) -> str:
    if "\udc80" <= letter <= "\udcff":  # a byte that was not UTF-8, as Python's surrogateescape keeps it
        return f"\\x{ord(letter) - 0xDC00:02x}"
    return letter.encode("unicode_escape").decode()


def _encodable(text: str, stream: TextIO) -> str:
    """Escapes control characters except line ends, and replaces characters that the stream cannot show by ASCII."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    text = printable(text).replace("→", "->")
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate(IN_ASCII).encode(encoding, "backslashreplace").decode(encoding)
    return text


SILENCING = threading.RLock()
"""A thread that read the state of a library that another one silenced would leave it silenced."""


@contextlib.contextmanager
def silenced(
    library: str, shows_bars: Callable[[], bool], hide_bars: Callable[[], object], show_bars: Callable[[], object]
) -> Iterator[None]:
    """Silences a library's warnings, messages and progress bars, because amalgam raises its own errors."""
    logger = logging.getLogger(library)
    with SILENCING, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        level, had_bars = logger.level, shows_bars()
        logger.setLevel(logging.CRITICAL)
        hide_bars()
        try:
            yield
        finally:
            logger.setLevel(level)
            if had_bars:
                show_bars()
