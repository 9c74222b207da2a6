"""Reads built targets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from amalgam.data.parquet import read_table
from amalgam.pipeline.execution.stage import Run
from amalgam.stages.common.load import train_part

if TYPE_CHECKING:
    import pyarrow as pa


def read_targets(run: Run) -> Iterator[pa.Table]:
    """The targets, bucket by bucket of the training texts, in key order."""
    import pyarrow as pa

    files = iter(sorted(run.result("build-targets").files, key=lambda file: Path(file.path).name))
    left: pa.Table | None = None
    for bucket in train_part(run).buckets:
        while left is None or left.num_rows < bucket.rows:
            further = read_table(run.store.verified_path(next(files)))
            left = further if left is None or not left.num_rows else pa.concat_tables([left, further])
        yield left.slice(0, bucket.rows).combine_chunks()
        left = left.slice(bucket.rows)
