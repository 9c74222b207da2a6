"""Evaluates every system on the labelled test texts over the union of labels.

Systems: each teacher, the ensemble, zero-shot, the student. Buckets are read in groups, and three numbers per text and
system are kept, so memory does not grow with texts times labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from amalgam.data.arrays import softmax
from amalgam.data.keys import LabelSpace
from amalgam.data.parquet import key_array, matrix, parquet_options, read_keys, read_table
from amalgam.data.schemas import SIMILARITIES, arrow_schema
from amalgam.data.tokens import TokenRows
from amalgam.pipeline.execution.stage import Unit
from amalgam.pipeline.storage.store import Store
from amalgam.stages.common.cached.read import FamilyIndex
from amalgam.stages.common.corpus import Bucket, Part, fields, neighbouring_buckets, read_bucket
from amalgam.stages.common.inference.classifier import Classifier
from amalgam.stages.common.inference.states import Encoder, words_of
from amalgam.stages.common.metrics import Predictions, evaluate
from amalgam.stages.report.blocks import Scores

Array = np.ndarray[Any, np.dtype[Any]]

GROUP_TEXTS = 4096
"""Texts with a score for every label in memory at a time."""


# ---- zero-shot: the label name nearest to the text in the encoder's space


@dataclass(frozen=True)
class ZeroShotInputs:
    store: Store
    test: Part
    labels: LabelSpace
    encoder: Encoder
    read_tokens: Callable[[Bucket], TokenRows]


def write_similarities(inputs: ZeroShotInputs, unit: Unit) -> None:
    """Writes the cosine similarity of every test text to every label name, in key order."""
    names = inputs.labels.names
    states = inputs.encoder.name_states(names)
    schema = arrow_schema(SIMILARITIES, {"similarity": len(names)})
    with inputs.store.draft(unit.folder, unit.name, ".parquet") as draft:
        with pq.ParquetWriter(draft.folder / "similarities.parquet", schema, **parquet_options(schema)) as writer:
            for buckets in neighbouring_buckets(inputs.test.buckets, GROUP_TEXTS):
                keys = pa.concat_tables(read_bucket(inputs.store, bucket, ["key"]) for bucket in buckets).column("key")
                texts = [inputs.encoder.pooled(inputs.read_tokens(bucket)) @ states.T for bucket in buckets]
                values = pa.array(np.concatenate(texts).astype(np.float32).reshape(-1))
                columns = [keys.combine_chunks(), pa.FixedSizeListArray.from_arrays(values, len(names))]
                writer.write_table(pa.table(columns, schema=schema))
        draft.facts = {"labels": {name: words_of(name) for name in names}}


def read_similarities(file: Path, first: int, rows: int) -> Array:
    """Returns [rows, labels of the union] from row `first`, in key order."""
    column = pl.scan_parquet(file).slice(first, rows).select("similarity").collect()["similarity"]
    return column.to_numpy().astype("float64")


# ---- all systems


@dataclass(frozen=True)
class EvaluationInputs:
    """Everything that the evaluation reads, resolved from the run by report/stage.py."""

    store: Store
    test: Part
    labels: LabelSpace
    families: Mapping[str, str]
    """Teacher -> family of its cached predictions."""
    answers: Mapping[str, FamilyIndex]
    """By family."""
    similarities: Path
    system: str
    """The system that the report is about."""
    student: Classifier | None
    calibration_bins: int


@dataclass(frozen=True)
class TestAnswers:
    """Predictions of every system on labelled test texts, in key order; labels are positions in the union."""

    keys: Array
    gold: Array
    own: dict[str, Array]
    """By teacher: its prediction among its own labels."""
    systems: dict[str, Predictions]
    """By system, in the order of the table."""


def predict_test(inputs: EvaluationInputs) -> TestAnswers:
    groups, first = [], 0
    for buckets in neighbouring_buckets(inputs.test.buckets, GROUP_TEXTS):
        rows = sum(bucket.rows for bucket in buckets)
        groups.append(_predict(inputs, buckets, read_similarities(inputs.similarities, first, rows)))
        first += rows
    return TestAnswers(
        np.concatenate([group.keys for group in groups]),
        np.concatenate([group.gold for group in groups]),
        {name: np.concatenate([group.own[name] for group in groups]) for name in groups[0].own},
        {name: Predictions.joined([group.systems[name] for group in groups]) for name in groups[0].systems},
    )


def _predict(inputs: EvaluationInputs, buckets: Sequence[Bucket], similar: Array) -> TestAnswers:
    """Leaves out texts with a gold label of no teacher: an earlier stage refused them or was set to skip them."""
    labels = inputs.labels
    table = pa.concat_tables(read_bucket(inputs.store, bucket) for bucket in buckets)
    position = {name: index for index, name in enumerate(labels.names)}
    gold = np.array([position.get(label, -1) for label in table.column("label").to_pylist()], dtype=np.int64)
    kept = gold >= 0
    keys, gold = key_array(table.column("key"))[kept], gold[kept]
    own: dict[str, Array] = {}
    systems: dict[str, Predictions] = {}
    if labels.columns:
        prefixes = [bucket.prefix for bucket in buckets]
        logits = {name: _cached_logits(inputs, family, prefixes, keys) for name, family in inputs.families.items()}
        for name, columns in labels.columns.items():
            own[name] = np.array(columns)[logits[name].argmax(axis=1)]
            systems[f"teacher:{name}"] = Predictions.of(_padded(softmax(logits[name]), labels, name), gold)
        systems["ensemble"] = Predictions.of(_ensemble(logits, labels), gold)
    systems["zero-shot"] = Predictions.of(softmax(similar[kept]), gold)
    if inputs.student is not None:
        texts = [text for text, keep in zip(fields(table), kept.tolist(), strict=True) if keep]
        systems[inputs.system] = Predictions.of(softmax(inputs.student.logits(texts)), gold)
    return TestAnswers(keys, gold, own, systems)


def evaluate_systems(inputs: EvaluationInputs, answers: TestAnswers) -> dict[str, Scores]:
    names = list(inputs.labels.names)
    groups = {teacher: list(columns) for teacher, columns in inputs.labels.columns.items()}
    systems = {
        name: cast("Scores", evaluate(predictions, answers.gold, names, groups, inputs.calibration_bins))
        for name, predictions in answers.systems.items()
    }
    # A similarity has an order and no scale, so its probabilities mean nothing.
    systems["zero-shot"] |= {"nll_nats": None, "nll_infinite": 0, "ece": None}
    return systems


def _cached_logits(inputs: EvaluationInputs, family: str, prefixes: Sequence[str], keys: Array) -> Array:
    """Reads the keys of a file first, and its logits only if it has one of the texts."""
    logits: Array | None = None
    filled = np.zeros(len(keys), dtype=bool)
    for file in inputs.answers[family].about(prefixes):
        path = inputs.store.verified_path(file)
        if "logits" not in pq.read_schema(path).names:
            continue
        file_keys = read_keys(path)
        place = np.searchsorted(keys, file_keys)
        wanted = np.flatnonzero((place < len(keys)) & (keys[np.minimum(place, len(keys) - 1)] == file_keys))
        if len(wanted):
            file_logits = matrix(read_table(path, ["logits"]).column("logits"))
            logits = np.empty((len(keys), file_logits.shape[1])) if logits is None else logits
            logits[place[wanted]], filled[place[wanted]] = file_logits[wanted], True
    if logits is None or not filled.all():
        raise AssertionError("stage cache-teachers has the logits of every test text")
    return logits


def _padded(probabilities: Array, labels: LabelSpace, teacher: str) -> Array:
    """Returns probabilities over the union; labels of other teachers get 0, so their NLL is infinite."""
    union = np.zeros((len(probabilities), len(labels.names)))
    union[:, list(labels.columns[teacher])] = probabilities
    return union


def _ensemble(logits: dict[str, Array], labels: LabelSpace) -> Array:
    """Applies one softmax to the concatenated logits of all teachers, then sums the entries of shared labels."""
    probabilities = softmax(np.concatenate(list(logits.values()), axis=1))
    union = np.zeros((len(probabilities), len(labels.names)))
    columns = [label for teacher in logits for label in labels.columns[teacher]]
    for column, label in enumerate(columns):
        union[:, label] += probabilities[:, column]
    return union
