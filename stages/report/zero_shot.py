"""Zero-shot: the nearest label name in the encoder's own space, which is there without any teacher or student.

A row of every report. What it was found to be is kept apart from the report, so that all methods share it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amalgam.pipeline.fingerprint import fingerprint
from amalgam.pipeline.stage import Run, Unit
from amalgam.stages.models.encoder import encoder_digest
from amalgam.stages.read_corpus.parts import part_of, read_bucket
from amalgam.stages.teachers import label_space

if TYPE_CHECKING:
    import numpy as np

    from amalgam.stages.cache_features.pooling import Encoder
    from amalgam.stages.read_corpus.parts import Bucket

    Array = np.ndarray[Any, np.dtype[Any]]

ENCODER = "student.encoder"
VERSION = 1
NAME = "zero-shot"


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

    from amalgam.data.schemas import SIMILARITIES, arrow_schema
    from amalgam.data.shards import write_table
    from amalgam.stages.cache_features.label_names import name_states, words_of
    from amalgam.stages.cache_features.pooling import Encoder

    test, names = part_of(run, "test"), label_space(run).names
    if test is None:
        raise AssertionError("report is wanted only with a test part")
    encoder = Encoder.of(run)
    labels = name_states(encoder, names)
    similar = [_states(run, encoder, bucket) @ labels.T for bucket in test.buckets]
    keys = pa.concat_tables(read_bucket(run, bucket, ["key"]) for bucket in test.buckets).column("key")
    values = pa.array(np.concatenate(similar).astype(np.float32).reshape(-1))
    columns = [keys.combine_chunks(), pa.FixedSizeListArray.from_arrays(values, len(names))]
    with run.store.draft(unit.folder, unit.name, ".parquet") as draft:
        table = pa.table(columns, schema=arrow_schema(SIMILARITIES, {"similarity": len(names)}))
        write_table(table, draft.folder / "similarities.parquet")
        draft.facts = {"labels": {name: words_of(name) for name in names}}


def similarities(run: Run, keys: list[bytes]) -> Array:
    """[texts, labels of the union], of these texts."""
    from amalgam.data.shards import matrix, read_table

    record = run.store.record(zero_shot_unit(run).record_path)
    if record is None:
        raise AssertionError("zero-shot was measured before the report")  # units are done in order
    table = read_table(run.store.checked(record.files[0]))
    place = {key: row for row, key in enumerate(table.column("key").to_pylist())}
    return matrix(table.column("similarity"))[[place[key] for key in keys]].astype("float64")


def _states(run: Run, encoder: Encoder, bucket: Bucket) -> Array:
    from amalgam.stages.token_store import tokens_of

    how = encoder.how
    tokens = tokens_of(run, bucket, how.tokenizer, digest=how.tokenizer_digest, limit=how.limit, types=how.types)
    return encoder.pooled(tokens)
