"""Runs units teacher by teacher: texts are tokenised ahead, answers are written behind, the device computes in between.

Texts of several units share batches. A pool holds as many units as fill a number of batches, so the device's budget
bounds the memory. A killed run loses the pool that it computes, and the one before it if that is not written yet.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from amalgam.data.arrays import Array
from amalgam.data.parquet import CACHE_LOGITS, CACHE_PASSES, CACHE_TEXTS, build_table, matrix, read_table, write_table
from amalgam.data.tokens import join, unreadable_texts
from amalgam.pipeline.config.schema import Corpus
from amalgam.pipeline.console import Console
from amalgam.pipeline.execution.faults import with_retries
from amalgam.pipeline.execution.stage import Unit
from amalgam.pipeline.storage.store import Record, Store, StoredFile
from amalgam.stages.common.cached.coverage import AnswerFacts, UnitRequest
from amalgam.stages.common.cached.uncertainty import summarise_passes
from amalgam.stages.common.inference.batches import run_passes
from amalgam.stages.common.inference.states import write_pooled
from amalgam.stages.common.inference.teacher import Teacher, TeacherLoader
from amalgam.stages.common.models.resolve import ResolvedTeacher
from amalgam.stages.common.token_cache import TokenizedUnit, UnitTexts

POOL_LAUNCHES, POOL_TEXTS = 64, 8192
"""Full launches, or texts, after which a pool takes no further unit."""

UNITS_AHEAD = 16
"""Units whose texts are tokenised before their pool is computed."""


@dataclass(frozen=True)
class StateUnits:
    """Units of hidden states that a run without dropout gives too; cache-features computes the others."""

    folder: Path
    parts: Collection[str]
    present: Collection[str]
    """Names of the units that exist."""

    def lacks(self, unit: Unit) -> bool:
        """Returns whether the unit of states with these texts is missing; without passes it has the same name."""
        request: UnitRequest = unit.payload
        return request.last == 0 and request.part in self.parts and unit.name not in self.present


@dataclass(frozen=True)
class CacheInputs:
    teachers: Sequence[ResolvedTeacher]
    dtype: str
    loader: TeacherLoader
    texts: UnitTexts
    store: Store
    console: Console
    check_interrupt: Callable[[], None]
    may_repeat: bool
    """Whether a teacher without dropout is no error: its prediction counts as every pass."""
    passes: int
    """Passes of each text; 0 if only a sample has passes."""
    corpus: Corpus
    states: Mapping[str, StateUnits]
    """By teacher, if the method reads the last layer's states."""


def ask_teachers(inputs: CacheInputs, units: Sequence[Unit]) -> None:
    """Runs the units with one teacher in memory at a time."""
    for resolved in inputs.teachers:
        requests = [unit for unit in units if unit.payload.teacher == resolved.name]
        if requests:
            passes = max(unit.payload.last for unit in requests)
            teacher = inputs.loader.load(resolved, inputs.dtype, passes=0 if inputs.may_repeat else passes)
            if inputs.may_repeat and passes and not teacher.has_active_dropout:
                where = " in its last layer and head" if teacher.last_layer else ""
                is_keyed = teacher.keyed_sites is not None
                why = f"it has no active dropout{where}" if is_keyed else "its dropout cannot be keyed"
                what = f"{why}, so its prediction without dropout counts as every pass"
                inputs.loader.note_once(f"teacher {teacher.name}: {what}")
            _run_pooled(inputs, teacher, requests, inputs.texts.tokenizer(resolved, teacher))
            inputs.loader.log_notes(teacher)


def _run_pooled(
    inputs: CacheInputs, teacher: Teacher, units: Sequence[Unit], tokenize: Callable[[Unit], TokenizedUnit]
) -> None:
    """Reads, computes and writes every unit; after an error, answers computed before it are still written."""
    batch_tokens = inputs.loader.tokens_at_once(teacher)
    writes: list[Future[None]] = []
    states = inputs.states.get(teacher.name) if teacher.fast_encoder else None

    def kind(unit: Unit) -> tuple[bool, bool, int, int]:
        with_states = states is not None and states.lacks(unit)
        return with_states, unit.payload.logits, unit.payload.first, unit.payload.last

    with ThreadPoolExecutor(1, "write") as writer, ThreadPoolExecutor(1, "read") as reader:
        try:
            for (with_states, *_), group in groupby(sorted(units, key=kind), key=kind):
                ahead = _tokenize_ahead(inputs, reader, tokenize, group)
                for pool in _pools(ahead, POOL_LAUNCHES * batch_tokens, count_once=teacher.last_layer):
                    commits = _compute(inputs, teacher, pool, states if with_states else None, batch_tokens)
                    _await(writes)  # at most one pool is in memory for writing
                    writes = [writer.submit(commit) for commit in commits]
                    malloc_trim()(0)
            _await(writes)
        finally:
            reader.shutdown(wait=True, cancel_futures=True)


def _await(writes: Iterable[Future[None]]) -> None:
    for write in writes:
        write.result()


@cache
def malloc_trim() -> Callable[[int], Any]:
    """Returns glibc's function that gives freed memory to the system: else 80 MB of fragments over a million texts."""
    try:
        trim: Callable[[int], Any] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library
        return lambda _padding: None
    return trim


def _tokenize_ahead(
    inputs: CacheInputs, reader: ThreadPoolExecutor, tokenize: Callable[[Unit], TokenizedUnit], units: Iterable[Unit]
) -> Iterator[TokenizedUnit]:
    """Yields the tokenised units in order, while the next ones are being tokenised."""

    def read(unit: Unit) -> TokenizedUnit:
        return with_retries(partial(tokenize, unit), f"cache-teachers {unit.name}", inputs.store, inputs.console)

    pending: deque[Future[TokenizedUnit]] = deque()
    for unit in units:
        pending.append(reader.submit(read, unit))
        if len(pending) > UNITS_AHEAD:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


def _pools(units: Iterable[TokenizedUnit], full: int, *, count_once: bool) -> Iterator[list[TokenizedUnit]]:
    """Yields groups of units with about `full` tokens, counted once or for each pass, or POOL_TEXTS texts."""
    pool: list[TokenizedUnit] = []
    tokens = texts = 0
    for tokenized in units:
        request = tokenized.unit.payload
        pool.append(tokenized)
        passes = 1 if count_once else max(1, request.last - request.first)
        tokens += tokenized.tokens.ids.values.size * passes
        texts += len(tokenized.keys)
        if tokens >= full or texts >= POOL_TEXTS:
            yield pool
            pool, tokens, texts = [], 0, 0
    if pool:
        yield pool


def _compute(
    inputs: CacheInputs, teacher: Teacher, pool: list[TokenizedUnit], states: StateUnits | None, batch_tokens: int
) -> list[Callable[[], None]]:
    """Runs the texts of a pool together; returns the functions that commit the answers of each unit, and its states."""
    inputs.check_interrupt()
    request = pool[0].unit.payload
    began = time.monotonic()
    wanted = range(request.first, request.last)
    repeats = inputs.may_repeat and len(wanted) > 0 and not teacher.has_active_dropout
    counts = len(wanted) + request.logits if repeats else 1
    keys = [key for tokenized in pool for key in tokenized.keys]
    pooled = np.empty((len(keys), teacher.width), np.float16) if states else None
    logits, passes = run_passes(
        teacher,
        join(tokenized.tokens for tokenized in pool),
        keys,
        range(0) if repeats else wanted,
        deterministic=request.logits or repeats,
        repeats=repeats,
        batch_tokens=batch_tokens,
        states=pooled,
        on_progress=lambda rows: inputs.console.advance(counts * rows),
        stop=inputs.check_interrupt,
    )
    if repeats and logits is not None:
        passes = np.repeat(logits[:, None].astype(passes.dtype), len(wanted), axis=1)
        logits = logits if request.logits else None
    seconds = time.monotonic() - began
    total = max(1, sum(tokenized.tokens.ids.values.size for tokenized in pool))
    commits: list[Callable[[], None]] = []
    end = 0
    for tokenized in pool:
        first, end = end, end + len(tokenized.keys)
        answers = None if logits is None else logits[first:end], passes[first:end]
        facts = _facts(tokenized, teacher)
        commit = partial(_commit, inputs, tokenized, answers, facts, seconds * facts["tokens"] / total)
        what = f"cache-teachers {tokenized.unit.name}"
        if states and pooled is not None:
            write = partial(_commit_states, inputs, tokenized, states.folder, pooled[first:end])
            commits.append(partial(with_retries, write, what, inputs.store, inputs.console))
        commits.append(partial(with_retries, commit, what, inputs.store, inputs.console))
    return commits


def _facts(tokenized: TokenizedUnit, teacher: Teacher) -> AnswerFacts:
    request: UnitRequest = tokenized.unit.payload
    return {
        **request.facts(len(tokenized.keys)),
        "cut": int(tokenized.tokens.truncated.sum()),
        "unreadable": unreadable_texts(tokenized.tokens.ids, teacher.tokenizer),
        "tokens": tokenized.tokens.ids.values.size,
        "device": str(teacher.device),
    }


def _commit(
    inputs: CacheInputs,
    tokenized: TokenizedUnit,
    answers: tuple[Array | None, Array],
    facts: AnswerFacts,
    seconds: float,
) -> None:
    tokens = tokenized.tokens
    table = answer_table(tokenized.keys, tokens.lengths, tokens.truncated, *answers)
    commit_answers(inputs.store, inputs.console, tokenized.unit, table, facts, seconds)


def _commit_states(inputs: CacheInputs, tokenized: TokenizedUnit, folder: Path, states: Array) -> None:
    unit, request = tokenized.unit, tokenized.unit.payload
    with inputs.store.draft(folder, unit.name) as draft:
        draft.facts = request.facts_of_states(len(states), write_pooled(draft.folder, tokenized.keys, states))


def commit_answers(  # noqa: PLR0913 - what to write, and where
    store: Store, console: Console, unit: Unit, table: pa.Table, facts: AnswerFacts, seconds: float
) -> None:
    with store.draft(unit.folder, unit.name, ".parquet") as draft:
        write_table(table, draft.folder / "unit.parquet")
        draft.facts = facts
        draft.made = {**draft.made, "seconds": round(seconds, 3)}
    if draft.rival is not None:
        record_conflict(store, console, unit, draft.files[0], draft.rival)


def record_conflict(store: Store, console: Console, unit: Unit, ours: StoredFile, first: Record) -> None:
    """Records how far a unit's second computation differs from the first, as on GPUs; the first one is kept."""
    differences = {name: _largest_difference(store, name, ours, first.files[0]) for name in ("logits", "passes")}
    largest = {name: value for name, value in differences.items() if value is not None}
    store.replace(
        store.root / "divergence" / f"{unit.name}-{ours.sha256[:8]}.json",
        {"unit": unit.name, "kept": first.files[0].path, "other": ours.path, "max_abs_difference": largest},
    )
    listed = ", ".join(f"{name} by up to {value:.3g}" for name, value in largest.items())
    console.note(f"unit {unit.name} was computed twice and differs ({listed}); the first is kept")
    store.backend.delete([ours.path])


def _largest_difference(store: Store, column: str, ours: StoredFile, first: StoredFile) -> float | None:
    tables = [read_table(store.verified_path(file)) for file in (ours, first)]
    if any(column not in table.column_names for table in tables):
        return None
    a, b = (matrix(table.column(column)).astype(np.float64) for table in tables)
    return float(np.abs(a - b).max()) if a.shape == b.shape else float("inf")


def answer_table(keys: list[bytes], lengths: Array, truncated: Array, logits: Array | None, passes: Array) -> pa.Table:
    """Returns logits, raw passes and the statistics of the passes as columns; `lengths` are in tokens."""
    columns, values = list(CACHE_TEXTS), {"key": keys, "tokens": lengths, "cut": truncated}
    if logits is not None:
        columns += CACHE_LOGITS
        values["logits"] = logits
    if passes.shape[1]:
        summary = summarise_passes(passes)
        columns += CACHE_PASSES
        values |= {
            "passes": passes.reshape(len(passes), -1),
            "mean_probability": summary.mean_probability,
            "entropy_nats": summary.entropy_nats.astype(np.float32),
            "confidence": summary.confidence.astype(np.float32),
            "confidence_se": pa.array(summary.confidence_se.astype(np.float32), from_pandas=True),
        }
    return build_table(columns, values)
