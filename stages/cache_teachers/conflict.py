"""The same unit computed twice with other bytes, as GPUs may: the first stays, and how far they differ is recorded."""

from __future__ import annotations

from amalgam.data.parquet import matrix, read_table
from amalgam.pipeline.execution.stage import Run, Unit
from amalgam.pipeline.storage.store import Record, StoredFile


def note_divergence(run: Run, unit: Unit, ours: StoredFile, standing: Record) -> None:
    largest = {name: _largest_difference(run, name, ours, standing.files[0]) for name in ("logits", "passes")}
    found = {name: value for name, value in largest.items() if value is not None}
    folder = run.store.root / "divergence"
    run.store.replace(
        folder / f"{unit.name}-{ours.sha256[:8]}.json",
        {"unit": unit.name, "kept": standing.files[0].path, "other": ours.path, "max_abs_difference": found},
    )
    said = ", ".join(f"{name} by up to {value:.3g}" for name, value in found.items())
    run.console.note(f"unit {unit.name} was computed twice and differs ({said}); the first is kept")
    run.store.backend.remove([ours.path])


def _largest_difference(run: Run, column: str, one: StoredFile, other: StoredFile) -> float | None:
    import numpy as np

    tables = [read_table(run.store.verified_path(file)) for file in (one, other)]
    if any(column not in table.column_names for table in tables):
        return None
    first, second = (matrix(table.column(column)).astype(np.float64) for table in tables)
    return float(np.abs(first - second).max()) if first.shape == second.shape else float("inf")
