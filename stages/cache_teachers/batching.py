"""Many units at once: texts are read and tokenised ahead, answers written behind, and the device works in between.

Texts of several units share launches: a pool is as many units as fill a number of launches, so memory is bounded by
the device's budget and not by the corpus, and what an interruption costs is one pool.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

from amalgam.pipeline.execution.retry import with_retries
from amalgam.pipeline.execution.stage import Run, Unit
from amalgam.stages.common.answers.question import TokenizedUnit

if TYPE_CHECKING:
    import numpy as np

    from amalgam.stages.common.inference.teacher import Teacher


if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]


POOL_LAUNCHES = 64

POOL_TEXTS = 8192

UNITS_AHEAD = 16


@dataclass(frozen=True)
class UnitResult:
    question: TokenizedUnit
    logits: Array | None
    passes: Array
    facts: dict[str, Any]
    made: dict[str, Any]


@dataclass
class Timing:
    """How long the device was busy, and how long it waited for texts to come or answers to be written."""

    asking: float = 0.0
    waiting: float = 0.0


def run_pooled(  # noqa: PLR0913  the two ends of the line and what stands between
    run: Run,
    teacher: Teacher,
    units: Sequence[Unit],
    *,
    batch_tokens: int,
    read: Callable[[Unit], TokenizedUnit],
    write: Callable[[UnitResult], None],
) -> Timing:
    """Every unit is read, answered and written. Leaving on an error still writes what was answered before it."""
    clock = Timing()
    written: deque[Future[None]] = deque()
    with ThreadPoolExecutor(1, "write") as writer, ThreadPoolExecutor(1, "read") as reader:
        try:
            for _, kind in groupby(sorted(units, key=_kind), key=_kind):
                for pool in _pools(_ahead(reader, read, list(kind), run), POOL_LAUNCHES * batch_tokens, clock):
                    answers = list(_answered(run, teacher, pool, batch_tokens, clock))
                    _wait_for(written, clock)
                    written.extend(writer.submit(_written, run, write, answer) for answer in answers)
                    give_memory_back()
            _wait_for(written, clock)
        finally:
            reader.shutdown(wait=True, cancel_futures=True)
    return clock


def give_memory_back() -> None:
    """Glibc keeps what was freed, in pieces, and the more of them the longer the work: 80 MB over a million texts."""
    trim = malloc_trim()
    if trim is not None:
        trim(0)


@cache
def malloc_trim() -> Any:
    """None: another C library, which has no such call."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None


def _kind(unit: Unit) -> tuple[bool, int, int]:
    return unit.payload.logits, unit.payload.first, unit.payload.last


def _ahead(
    reader: ThreadPoolExecutor, read: Callable[[Unit], TokenizedUnit], units: Sequence[Unit], run: Run
) -> Iterator[TokenizedUnit]:
    """The units' questions in order, a few of them always in the making."""
    coming: deque[Future[TokenizedUnit]] = deque()
    for unit in units:
        coming.append(reader.submit(_read, run, read, unit))
        if len(coming) > UNITS_AHEAD:
            yield coming.popleft().result()
    while coming:
        yield coming.popleft().result()


def _read(run: Run, read: Callable[[Unit], TokenizedUnit], unit: Unit) -> TokenizedUnit:
    found: list[TokenizedUnit] = []
    with_retries(lambda: found.append(read(unit)), run, f"cache-teachers {unit.name}")
    return found[-1]


def _written(run: Run, write: Callable[[UnitResult], None], answer: UnitResult) -> None:
    with_retries(partial(write, answer), run, f"cache-teachers {answer.question.unit.name}")


def _pools(questions: Iterable[TokenizedUnit], enough: int, clock: Timing) -> Iterator[list[TokenizedUnit]]:
    pool: list[TokenizedUnit] = []
    tokens = texts = 0
    began = time.monotonic()
    for question in questions:
        ask = question.unit.payload
        pool.append(question)
        tokens += question.total * max(1, ask.last - ask.first)
        texts += len(question.keys)
        if tokens >= enough or texts >= POOL_TEXTS:
            clock.waiting += time.monotonic() - began
            yield pool
            pool, tokens, texts, began = [], 0, 0, time.monotonic()
    clock.waiting += time.monotonic() - began
    if pool:
        yield pool


def _answered(
    run: Run, teacher: Teacher, pool: list[TokenizedUnit], batch_tokens: int, clock: Timing
) -> Iterator[UnitResult]:
    from amalgam.data.tokens import join
    from amalgam.stages.common.inference.batches import run_passes

    run.signals.check()
    ask = pool[0].unit.payload
    began = time.monotonic()
    logits, passes = run_passes(
        teacher,
        join(question.tokens for question in pool),
        [key for question in pool for key in question.keys],
        range(ask.first, ask.last),
        deterministic=ask.logits,
        batch_tokens=batch_tokens,
        on_progress=run.console.advance,
        stop=run.signals.check,
    )
    seconds = time.monotonic() - began
    clock.asking += seconds
    total = max(1, sum(question.total for question in pool))
    end = 0
    for question in pool:
        first, end = end, end + len(question.keys)
        facts = _facts(question, teacher)
        made = {"seconds": round(seconds * question.total / total, 3)}
        yield UnitResult(question, None if logits is None else logits[first:end], passes[first:end], facts, made)


def _facts(question: TokenizedUnit, teacher: Teacher) -> dict[str, Any]:
    ask = question.unit.payload
    return {
        "prefix": ask.prefix,
        "logits": ask.logits,
        "first": ask.first,
        "last": ask.last,
        "rows": len(question.keys),
        "cut": int(question.tokens.cut.sum()),
        "tokens": question.total,
        "device": str(teacher.device),
        "halved_launches": teacher.halved,
    }


def _wait_for(written: deque[Future[None]], clock: Timing) -> None:
    """No more than one pool is ever waiting to be written."""
    began = time.monotonic()
    while written:
        written.popleft().result()
    clock.waiting += time.monotonic() - began
