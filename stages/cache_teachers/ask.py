"""Runs the units of cache-teachers teacher by teacher and commits their answers as tables."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

from amalgam.data.parquet import matrix, read_table, write_table
from amalgam.data.schemas import CACHE_LOGITS, CACHE_PASSES, CACHE_TEXTS, arrow_schema
from amalgam.pipeline.console import Console
from amalgam.pipeline.execution.stage import Unit
from amalgam.pipeline.storage.fingerprint import library_versions
from amalgam.pipeline.storage.store import Record, Store, StoredFile
from amalgam.stages.cache_teachers.batching import CacheInputs, UnitResult, run_pooled

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from amalgam.data.tokens import TokenRows

    Array = np.ndarray[Any, Any]


def ask_teachers(inputs: CacheInputs, units: Sequence[Unit]) -> None:
    """Runs the units with one teacher in memory at a time."""
    order = {teacher.name: place for place, teacher in enumerate(inputs.teachers)}
    in_order = sorted(units, key=lambda unit: order[unit.payload.teacher])
    for name, group in groupby(in_order, key=lambda unit: unit.payload.teacher):
        requests = list(group)
        resolved = inputs.teachers[order[name]]
        teacher = inputs.loader.load(resolved, inputs.dtype, passes=max(unit.payload.last for unit in requests))
        read = inputs.reader(resolved, teacher)
        run_pooled(inputs, teacher, requests, read=read, write=partial(_commit, inputs))
        inputs.loader.log_notes(teacher)


def _commit(inputs: CacheInputs, result: UnitResult) -> None:
    unit, store = result.tokenized.unit, inputs.store
    table = answer_table(result.tokenized.keys, result.tokenized.tokens, result.logits, result.passes)
    with store.draft(unit.folder, unit.name, ".parquet") as draft:
        write_table(table, draft.folder / "unit.parquet")
        draft.facts = result.facts
        draft.made = {"libraries": library_versions(), **result.made}
    if draft.rival is not None:
        record_conflict(store, inputs.console, unit, draft.files[0], draft.rival)


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
    import numpy as np

    tables = [read_table(store.verified_path(file)) for file in (ours, first)]
    if any(column not in table.column_names for table in tables):
        return None
    a, b = (matrix(table.column(column)).astype(np.float64) for table in tables)
    return float(np.abs(a - b).max()) if a.shape == b.shape else float("inf")


def answer_table(keys: list[bytes], tokens: TokenRows, logits: Array | None, passes: Array) -> pa.Table:
    """Returns logits, raw passes and the statistics of the passes as columns."""
    import pyarrow as pa

    columns: dict[str, Any] = {
        "key": pa.array(keys, pa.binary(16)),
        "tokens": pa.array(tokens.lengths, pa.int32()),
        "cut": pa.array(tokens.truncated),
    }
    sizes: dict[str, int] = {}
    schema = list(CACHE_TEXTS)
    if logits is not None:
        sizes["logits"] = logits.shape[1]
        columns["logits"] = _arrays(logits, pa.float32())
        schema += CACHE_LOGITS
    if passes.shape[1]:
        sizes |= {"passes": passes.shape[1] * passes.shape[2], "mean_probability": passes.shape[2]}
        columns |= _pass_columns(passes)
        schema += CACHE_PASSES
    return pa.table(columns, schema=arrow_schema(schema, sizes))


def _pass_columns(passes: Array) -> dict[str, Any]:
    import numpy as np
    import pyarrow as pa

    from amalgam.stages.common.cached.pass_statistics import statistics

    summary = statistics(passes)
    return {
        "passes": _arrays(passes.reshape(len(passes), -1), pa.float16()),
        "mean_probability": _arrays(summary.mean_probability, pa.float32()),
        "entropy_nats": pa.array(summary.entropy_nats.astype(np.float32)),
        "confidence": pa.array(summary.confidence.astype(np.float32)),
        "confidence_se": pa.array(summary.confidence_se.astype(np.float32), from_pandas=True),
    }


def _arrays(values: Array, dtype: Any) -> pa.Array:
    import pyarrow as pa

    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1), dtype), values.shape[1])
