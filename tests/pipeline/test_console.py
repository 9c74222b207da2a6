"""Progress, notes and tables: on a terminal of any width, through a pipe, and where only ASCII can be shown."""

from __future__ import annotations

import errno
import io
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from amalgam.pipeline.console import EVERY_SECONDS, Console, counted, silenced


class Terminal(io.StringIO):
    """`io.StringIO` as a terminal; `encoding` as a plain locale has it."""

    def isatty(self) -> bool:
        return True


class Plain(io.TextIOWrapper):
    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="ascii")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Stop the clock; tests move it."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def console_of(err: io.TextIOBase, out: io.TextIOBase | None = None) -> Console:
    return Console(err=err, out=out or io.StringIO())  # type: ignore[arg-type]


def work(console: Console, clock: list[float], *, loading: float = 60.0, units: int = 10) -> None:
    """A stage that loads for a minute and then does 100 texts every 5 seconds; 500 were there."""
    console.stage_started("cache-teachers", "first-run")
    with console.progress("cache-teachers", "texts", 100 * units, 500):
        clock[0] += loading
        for _ in range(units):
            console.advance(100)
            clock[0] += 5
    console.finished("cache-teachers", loading + 5 * units, str(Path("artifacts/x").absolute()))


def test_the_time_left_converges_though_loading_took_a_minute(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    err = Terminal()
    work(console_of(err), clock)
    shown = [line.removeprefix("\x1b[2K") for line in err.getvalue().split("\r") if "%" in line]
    assert shown[0] == "cache-teachers  10%  100/1,000 texts  500 reused"  # one launch gives no rate
    assert shown[1] == "cache-teachers  20%  40.0 s left  200/1,000 texts  20/s  500 reused"
    assert shown[-1] == "cache-teachers  90%  5.0 s left  900/1,000 texts  20/s  500 reused"


@pytest.mark.parametrize("columns", [20, 40, 60, 80])
def test_a_narrow_terminal_keeps_the_share_and_the_time_left(
    columns: int, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    err = Terminal()
    work(console_of(err), clock)
    shown = [line.removeprefix("\x1b[2K").rstrip("\n") for line in err.getvalue().split("\r") if "%" in line]
    assert shown
    assert all(len(line) < columns for line in shown)
    assert all("left" in line for line in shown[1:]) == (columns >= 40)


def test_through_a_pipe_there_are_whole_lines_and_few_of_them(clock: list[float]) -> None:
    err = io.StringIO()
    work(console_of(err), clock, units=13)
    lines = err.getvalue().splitlines()
    assert lines[0] == "cache-teachers: running (first-run)"
    assert [line.split("  ")[1] for line in lines[1:-1]] == ["7%", "53%"]  # one every half a minute
    assert lines[-1] == "cache-teachers: done in 2 min 05 s, 1,300 texts (10/s), 500 reused -> artifacts/x"
    assert "\r" not in err.getvalue()
    assert "\x1b" not in err.getvalue()


@pytest.mark.parametrize(("reused", "expected"), [(0, "81 texts (1.4/s)"), (16, "81 texts (1.4/s), 16 reused")])
def test_units_of_a_stages_first_round_do_not_count_as_reused_in_its_second(reused: int, expected: str) -> None:
    """The stage generate writes blocks, then gathers them."""
    err = io.StringIO()
    console = console_of(err)
    console.stage_started("cache-teachers", "first-run")
    for done, cached in [(80, reused), (1, reused + 80)]:
        with console.progress("generate", "texts", done, cached):
            console.advance(done)
    console.finished("cache-teachers", 60, str(Path("x").absolute()))
    assert err.getvalue().splitlines()[-1] == f"cache-teachers: done in 1 min 00 s, {expected} -> x"


def test_a_sentence_is_not_wrapped_within_the_name_of_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    out = Terminal()
    console_of(io.StringIO(), out).sentence("no cost yet for the stages after read-corpus")
    assert out.getvalue() == "no cost yet for the stages after\n  read-corpus\n"


def test_one_thing_done_is_not_counted(clock: list[float]) -> None:
    err = io.StringIO()
    console = console_of(err)
    console.stage_started("cache-teachers", "first-run")
    with console.progress("train-student", "students", 1, 0):
        clock[0] += 2 * EVERY_SECONDS
        console.advance(1)
    console.finished("cache-teachers", 60, str(Path("x").absolute()))
    assert err.getvalue().splitlines()[1:] == ["cache-teachers: done in 1 min 00 s -> x"]


def test_a_training_is_named_by_its_stage_and_number(clock: list[float]) -> None:
    err = io.StringIO()
    console = console_of(err)
    with console.progress("train-teachers", "teachers", 3, 0):
        console.advance(1)
        with console.steps("", 40) as show:
            for step in (10, 20, 30):
                clock[0] += EVERY_SECONDS
                show(step, "loss 0.5000")
    assert err.getvalue().splitlines() == [
        "train-teachers 2/3  25%  10/40 steps  loss 0.5000",
        "train-teachers 2/3  50%  1 min 00 s left  20/40 steps  3.0 s each  loss 0.5000",
        "train-teachers 2/3  75%  30.0 s left  30/40 steps  3.0 s each  loss 0.5000",
    ]


def test_a_resumed_training_starts_in_the_middle(clock: list[float]) -> None:
    err = io.StringIO()
    with console_of(err).steps("", 1000) as show:
        for step in (900, 930):
            clock[0] += EVERY_SECONDS
            show(step, "loss 0.5000")
    assert "1 min 10 s left  930/1,000 steps" in err.getvalue().splitlines()[-1]


def test_where_only_ascii_can_be_shown_everything_is_and_nothing_fails() -> None:
    err, out = Plain(), Plain()
    console = console_of(err, out)
    console.say("grüße → 日本 \x1b[31m")
    console.table("", ["label", "n"], [["größe", "1"]])
    console.result("the other student “a”: 2.1 ± 0.3, NLL ∞")
    for stream in (err, out):
        stream.flush()
    text = err.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]
    assert text == "gr\\xfc\\xdfe -> \\u65e5\\u672c \\x1b[31m\n"
    printed = out.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]
    assert "gr\\xf6\\xdfe" in printed
    assert printed.endswith('the other student "a": 2.1 +/- 0.3, NLL inf\n')


def test_a_table_wider_than_the_terminal_continues_below(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    header = ["", *(f"column {number}" for number in range(9))]
    rows = [["a teacher of some name", *map(str, range(9))], ["student", *map(str, range(9))]]
    on_terminal, piped = Terminal(), io.StringIO()
    console_of(io.StringIO(), on_terminal).table("what it is", header, rows)
    console_of(io.StringIO(), piped).table("what it is", header, rows)
    blocks = on_terminal.getvalue().split("\n\n")
    assert len(blocks) == 3
    assert all("a teacher of some name" in block for block in blocks)
    assert all(len(line) <= 60 for line in on_terminal.getvalue().splitlines())
    assert sum(f"column {number}" in block for block in blocks for number in range(9)) == 9
    assert len(piped.getvalue().splitlines()) == 5  # whole lines, for grep


def test_a_table_that_fits_stays_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    out = Terminal()
    console_of(io.StringIO(), out).table("", ["stage", "why"], [["report", "y" * 200]])
    assert out.getvalue().splitlines()[2:4] == ["report  " + "y" * 52, " " * 8 + "y" * 52]
    assert out.getvalue().count("y") == 201  # none is lost; one is in "why"


def test_columns_are_aligned_as_a_terminal_shows_them() -> None:
    """Wide characters take two columns, combining ones none, and an invisible one is escaped."""
    out = io.StringIO()
    names = ["plain", "\U0001f389 party", "日本", "e\u0301te\u0301", "a\u200db"]
    console_of(io.StringIO(), out).table("", ["label", "n"], [[name, "1"] for name in names])
    lines = out.getvalue().splitlines()
    assert [line.removesuffix("1") for line in lines[2:]] == [
        "plain     ",
        "\U0001f389 party  ",
        "日本      ",
        "e\u0301te\u0301       ",
        "a\\u200db  ",
    ]


def test_the_noun_and_its_verb_have_the_number_of_the_count() -> None:
    assert [counted(count, "step", "is", "are") for count in (0, 1, 2)] == ["0 steps are", "1 step is", "2 steps are"]
    assert [counted(count, "text") for count in (1, 2000)] == ["1 text", "2,000 texts"]


def test_two_threads_leave_a_library_as_it_was() -> None:
    bars, logger, has_left = [True], logging.getLogger("silenced-by-two"), threading.Event()
    logger.setLevel(logging.INFO)

    def silence(meanwhile: Callable[[], object]) -> None:
        with silenced(logger.name, bars.pop, lambda: bars.append(False), lambda: bars.append(True)):
            meanwhile()

    second = threading.Thread(target=silence, args=[has_left.wait])

    def start_second() -> None:
        second.start()
        second.join(0.1)  # time to enter, if nothing prevents it

    silence(start_second)
    has_left.set()
    second.join()
    assert (logger.level, bars[-1]) == (logging.INFO, True)


def test_a_terminal_that_is_lost_during_a_run_ends_no_work(clock: list[float]) -> None:
    class Lost(Terminal):
        def write(self, _: str) -> int:
            raise OSError(errno.EIO, "Input/output error")

    work(console_of(Lost()), clock)
