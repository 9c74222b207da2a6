"""Zero-shot: the nearest label name in the encoder's own space, which is there without any teacher or student.

A row of every report. What it was found to be is kept apart from the report, so that all methods share it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amalgam.data.parquet import parquet_options
from amalgam.data.schemas import SIMILARITIES, arrow_schema
from amalgam.pipeline.execution.stage import Run, Unit
from amalgam.pipeline.storage.fingerprint import fingerprint
from amalgam.stages.common.corpus import Bucket, neighbouring_buckets, part_of, read_bucket
from amalgam.stages.common.load import encoder_digest, label_space

if TYPE_CHECKING:
    import numpy as np

    from amalgam.stages.common.states.encoder import Encoder

    Array = np.ndarray[Any, np.dtype[Any]]

ENCODER = "student.encoder"

VERSION = 1

NAME = "zero-shot"

AT_ONCE = 4096
"""Texts whose numbers for every label are held at a time."""


def zero_shot_identity(run: Run) -> dict[str, Any]:
    """The student's encoder, whole and before it learns: `student.layers` is not asked."""
    student = run.experiment.student
    return {"encoder": encoder_digest(run, student, ENCODER), "max_tokens": student.max_tokens, "version": VERSION}


def zero_shot_unit(run: Run) -> Unit:
    test = part_of(run, "test")
    texts = test.texts_digest if test else None
    known = fingerprint([zero_shot_identity(run), texts, list(label_space(run).names)])
    return Unit(NAME, run.store.folder("report", f"{NAME}-{known}"))


def measure(run: Run, unit: Unit) -> None:
    """The test texts' similarities to the label names, bucket by bucket."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    from amalgam.stages.common.states.encoder import Encoder, name_states, words_of

    test, names = part_of(run, "test"), label_space(run).names
    if test is None:
        raise AssertionError("report is wanted only with a test part")
    encoder = Encoder.of(run)
    labels = name_states(encoder, names)
    schema = arrow_schema(SIMILARITIES, {"similarity": len(names)})
    with run.store.draft(unit.folder, unit.name, ".parquet") as draft:
        with pq.ParquetWriter(draft.folder / "similarities.parquet", schema, **parquet_options(schema)) as writer:
            for buckets in neighbouring_buckets(test.buckets, AT_ONCE):
                keys = pa.concat_tables(read_bucket(run, bucket, ["key"]) for bucket in buckets).column("key")
                similar = np.concatenate([_states(run, encoder, bucket) @ labels.T for bucket in buckets])
                values = pa.array(similar.astype(np.float32).reshape(-1))
                columns = [keys.combine_chunks(), pa.FixedSizeListArray.from_arrays(values, len(names))]
                writer.write_table(pa.table(columns, schema=schema))
        draft.facts = {"labels": {name: words_of(name) for name in names}}


def similarities(run: Run, first: int, rows: int) -> Array:
    """[texts, labels of the union], of so many texts in the order of keys."""
    import polars as pl

    record = run.store.record(zero_shot_unit(run).record_path)
    if record is None:
        raise AssertionError("zero-shot was measured before the report")  # units are done in order
    file = pl.scan_parquet(run.store.verified_path(record.files[0]))
    found: Array = file.slice(first, rows).select("similarity").collect()["similarity"].to_numpy()
    return found.astype("float64")


def _states(run: Run, encoder: Encoder, bucket: Bucket) -> Array:
    from amalgam.stages.common.token_cache import tokens_of

    how = encoder.how
    tokens = tokens_of(run, bucket, how.tokenizer, digest=how.tokenizer_digest, limit=how.limit, types=how.types)
    return encoder.pooled(tokens)
