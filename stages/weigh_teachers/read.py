"""Reads the teacher weights of a bucket."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amalgam.data.parquet import read_table
from amalgam.pipeline.execution.stage import Run

if TYPE_CHECKING:
    import pyarrow as pa


def weights_of(run: Run) -> pa.Table:
    """In the order of the corpus's buckets and their keys."""
    name = run.fingerprint("weigh-teachers")
    known = run.cache.get("weights", ("", None))
    if known[0] != name:
        known = run.cache["weights"] = (
            name,
            read_table(run.store.verified_path(run.result("weigh-teachers").files[0])),
        )
    return known[1]
