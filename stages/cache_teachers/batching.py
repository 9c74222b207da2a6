"""Runs many units at once: texts are tokenised ahead, answers are written behind, and the device computes in between.

Texts of several units share batches. A pool holds as many units as fill a number of batches, so the device's budget
bounds the memory, and an interruption costs one pool.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

from amalgam.pipeline.console import Console
from amalgam.pipeline.execution.faults import with_retries
from amalgam.pipeline.execution.stage import Unit
from amalgam.pipeline.storage.store import Store
from amalgam.stages.common.cached.question import TokenizedUnit
from amalgam.stages.common.inference.load import TeacherLoader
from amalgam.stages.common.teachers import ResolvedTeacher

if TYPE_CHECKING:
    import numpy as np

    from amalgam.stages.common.inference.teacher import Teacher

    Array = np.ndarray[Any, Any]

POOL_LAUNCHES = 64
POOL_TEXTS = 8192
UNITS_AHEAD = 16

ReadUnit = Callable[[Unit], TokenizedUnit]


@dataclass
class Timing:
    """Seconds that the device computed, and seconds that it waited for texts or for writes."""

    computing: float = 0.0
    waiting: float = 0.0


@dataclass(frozen=True)
class CacheInputs:
    """The inputs of the inference of cache-teachers."""

    teachers: Sequence[ResolvedTeacher]
    families: Mapping[str, str]
    """Teacher name -> family of cached answers."""
    dtype: str
    passes: int
    loader: TeacherLoader
    reader: Callable[[ResolvedTeacher, Teacher], ReadUnit]
    """Returns the function that tokenises a unit's texts for this teacher."""
    store: Store
    console: Console
    check_interrupt: Callable[[], None]
    timing: Timing = field(default_factory=Timing)


@dataclass(frozen=True)
class UnitResult:
    tokenized: TokenizedUnit
    logits: Array | None
    passes: Array
    facts: dict[str, Any]
    made: dict[str, Any]


def run_pooled(
    inputs: CacheInputs,
    teacher: Teacher,
    units: Sequence[Unit],
    *,
    read: ReadUnit,
    write: Callable[[UnitResult], None],
) -> None:
    """Reads, computes and writes every unit; after an error, results computed before it are still written."""
    batch_tokens = inputs.loader.tokens_at_once(teacher)
    writes: deque[Future[None]] = deque()
    with ThreadPoolExecutor(1, "write") as writer, ThreadPoolExecutor(1, "read") as reader:
        try:
            for _, group in groupby(sorted(units, key=_kind), key=_kind):
                tokenized = _tokenize_ahead(inputs, reader, read, list(group))
                for pool in _pools(tokenized, POOL_LAUNCHES * batch_tokens, inputs.timing):
                    results = list(_compute(inputs, teacher, pool, batch_tokens))
                    _wait_for(writes, inputs.timing)
                    writes.extend(writer.submit(_write, inputs, write, result) for result in results)
                    give_memory_back()
            _wait_for(writes, inputs.timing)
        finally:
            reader.shutdown(wait=True, cancel_futures=True)


def give_memory_back() -> None:
    """Returns freed memory to the system: glibc keeps it in fragments, 80 MB over a million texts."""
    trim = malloc_trim()
    if trim is not None:
        trim(0)


@cache
def malloc_trim() -> Any:
    """Returns glibc's malloc_trim, or None for another C library."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None


def _kind(unit: Unit) -> tuple[bool, int, int]:
    return unit.payload.logits, unit.payload.first, unit.payload.last


def _tokenize_ahead(
    inputs: CacheInputs, reader: ThreadPoolExecutor, read: ReadUnit, units: Sequence[Unit]
) -> Iterator[TokenizedUnit]:
    """Yields the tokenised units in order, while the next ones are being tokenised."""
    pending: deque[Future[TokenizedUnit]] = deque()
    for unit in units:
        pending.append(reader.submit(_read, inputs, read, unit))
        if len(pending) > UNITS_AHEAD:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


def _read(inputs: CacheInputs, read: ReadUnit, unit: Unit) -> TokenizedUnit:
    return with_retries(lambda: read(unit), f"cache-teachers {unit.name}", inputs.store, inputs.console)


def _write(inputs: CacheInputs, write: Callable[[UnitResult], None], result: UnitResult) -> None:
    what = f"cache-teachers {result.tokenized.unit.name}"
    with_retries(partial(write, result), what, inputs.store, inputs.console)


def _pools(units: Iterable[TokenizedUnit], full: int, timing: Timing) -> Iterator[list[TokenizedUnit]]:
    pool: list[TokenizedUnit] = []
    tokens = texts = 0
    began = time.monotonic()
    for tokenized in units:
        request = tokenized.unit.payload
        pool.append(tokenized)
        tokens += tokenized.total * max(1, request.last - request.first)
        texts += len(tokenized.keys)
        if tokens >= full or texts >= POOL_TEXTS:
            timing.waiting += time.monotonic() - began
            yield pool
            pool, tokens, texts, began = [], 0, 0, time.monotonic()
    timing.waiting += time.monotonic() - began
    if pool:
        yield pool


def _compute(
    inputs: CacheInputs, teacher: Teacher, pool: list[TokenizedUnit], batch_tokens: int
) -> Iterator[UnitResult]:
    from amalgam.data.tokens import join
    from amalgam.stages.common.inference.batches import run_passes

    inputs.check_interrupt()
    request = pool[0].unit.payload
    began = time.monotonic()
    logits, passes = run_passes(
        teacher,
        join(tokenized.tokens for tokenized in pool),
        [key for tokenized in pool for key in tokenized.keys],
        range(request.first, request.last),
        deterministic=request.logits,
        batch_tokens=batch_tokens,
        on_progress=inputs.console.advance,
        stop=inputs.check_interrupt,
    )
    seconds = time.monotonic() - began
    inputs.timing.computing += seconds
    total = max(1, sum(tokenized.total for tokenized in pool))
    end = 0
    for tokenized in pool:
        first, end = end, end + len(tokenized.keys)
        made = {"seconds": round(seconds * tokenized.total / total, 3)}
        facts = _facts(tokenized, teacher)
        yield UnitResult(tokenized, None if logits is None else logits[first:end], passes[first:end], facts, made)


def _facts(tokenized: TokenizedUnit, teacher: Teacher) -> dict[str, Any]:
    request = tokenized.unit.payload
    return {
        "prefix": request.prefix,
        "logits": request.logits,
        "first": request.first,
        "last": request.last,
        "rows": len(tokenized.keys),
        "cut": int(tokenized.tokens.truncated.sum()),
        "tokens": tokenized.total,
        "device": str(teacher.device),
        "halved_launches": teacher.oom_splits,
    }


def _wait_for(writes: deque[Future[None]], timing: Timing) -> None:
    """Waits until the previous pool is written, so that at most one pool is in memory for writing."""
    began = time.monotonic()
    while writes:
        writes.popleft().result()
    timing.waiting += time.monotonic() - began
