"""Evaluates every system on the labelled test texts over the union of labels; the main metric is accuracy.

Systems: each teacher, the ensemble, zero-shot, the student. Buckets are read in groups, and three numbers per text and
system are kept, so memory does not grow with texts times labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from amalgam.data.arrays import softmax
from amalgam.data.keys import LabelSpace
from amalgam.data.parquet import SIMILARITIES, arrow_schema, parquet_options
from amalgam.pipeline.errors import DataError, WorkError
from amalgam.pipeline.storage.store import Store, StoredFile
from amalgam.stages.common.cached.coverage import PrefixIndex
from amalgam.stages.common.corpus import Bucket, Part, fields, neighbouring_buckets, read_bucket
from amalgam.stages.common.inference.classifier import Classifier
from amalgam.stages.report.report_json import Scores

if TYPE_CHECKING:
    from amalgam.data.arrays import Array

GROUP_TEXTS = 4096
"""Texts with a score for every label in memory at a time."""


# ---- zero-shot: the label name nearest to the text in the encoder's space


def write_similarities(
    folder: Path, store: Store, test: Part, label_states: Array, pooled_states: Callable[[Bucket], Array]
) -> None:
    """Writes the cosine similarity of every test text to every label name, in key order."""
    schema = arrow_schema(SIMILARITIES, {"similarity": len(label_states)})
    with pq.ParquetWriter(folder / "similarities.parquet", schema, **parquet_options(schema)) as writer:
        for buckets in neighbouring_buckets(test.buckets, GROUP_TEXTS):
            keys = pa.concat_tables(read_bucket(store, bucket, ["key"]) for bucket in buckets).column("key")
            texts = [pooled_states(bucket) @ label_states.T for bucket in buckets]
            values = pa.array(np.concatenate(texts).astype(np.float32).reshape(-1))
            columns = [keys.combine_chunks(), pa.FixedSizeListArray.from_arrays(values, len(label_states))]
            writer.write_table(pa.table(columns, schema=schema))


# ---- predictions of all systems


@dataclass(frozen=True)
class Predictions:
    """Three numbers per text of a model's probabilities, for any number of labels."""

    label: Array
    """The most probable label of the union, the first of equals."""
    confidence: Array
    """Its probability; nan where some probability of the text is no number."""
    of_gold: Array

    @classmethod
    def of(cls, probabilities: Array, gold: Array) -> Self:
        """Takes probabilities [n, C] and gold [n] by position in the union."""
        usable = np.isfinite(probabilities).all(axis=1)
        confidence = np.where(usable, probabilities.max(axis=1, initial=-np.inf), np.nan)
        return cls(probabilities.argmax(axis=1), confidence, probabilities[np.arange(len(gold)), gold])

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        columns = ("label", "confidence", "of_gold")
        return cls(*(np.concatenate([getattr(part, column) for part in parts]) for column in columns))


@dataclass(frozen=True)
class EvaluationInputs:
    """Everything that the evaluation reads, resolved from the run by report/stage.py."""

    store: Store
    test: Part
    labels: LabelSpace
    answers: Mapping[str, PrefixIndex[StoredFile]]
    """The files of cached predictions, by teacher."""
    similarities: Path
    system: str
    """The system that the report is about."""
    student: Classifier | None
    calibration_bins: int


@dataclass(frozen=True)
class TestAnswers:
    """Predictions of every system on labelled test texts, in key order; labels are positions in the union."""

    rows: Array
    """Positions in the test part."""
    gold: Array
    own: dict[str, Array]
    """By teacher: its prediction among its own labels."""
    systems: dict[str, Predictions]
    """By system, in the order of the table."""


def predict_test(inputs: EvaluationInputs) -> TestAnswers:
    similarities, groups, first = pl.scan_parquet(inputs.similarities), [], 0
    for buckets in neighbouring_buckets(inputs.test.buckets, GROUP_TEXTS):
        rows = sum(bucket.rows for bucket in buckets)
        similar = similarities.slice(first, rows).select("similarity").collect()["similarity"]
        groups.append(_predict(inputs, buckets, first, similar.to_numpy().astype("float64")))
        first += rows
    return TestAnswers(
        np.concatenate([group.rows for group in groups]),
        np.concatenate([group.gold for group in groups]),
        {name: np.concatenate([group.own[name] for group in groups]) for name in groups[0].own},
        {name: Predictions.joined([group.systems[name] for group in groups]) for name in groups[0].systems},
    )


def gold_indices(labels: LabelSpace, table: pa.Table) -> Array:
    """Returns the position of each text's gold label in the union; -1 without one."""
    position = {name: index for index, name in enumerate(labels.names)}
    return np.array([position.get(label, -1) for label in table.column("label").to_pylist()], np.int64)


def _predict(inputs: EvaluationInputs, buckets: Sequence[Bucket], first: int, similar: Array) -> TestAnswers:
    """Leaves out texts with a gold label of no teacher: an earlier stage refused them or was set to skip them."""
    labels = inputs.labels
    table = pa.concat_tables(read_bucket(inputs.store, bucket) for bucket in buckets)
    gold = gold_indices(labels, table)
    kept = gold >= 0
    table, gold, similar = table.filter(pa.array(kept)), gold[kept], similar[kept]
    own: dict[str, Array] = {}
    systems: dict[str, Predictions] = {}
    logits = {name: _cached_logits(inputs, name, buckets, table.column("key")) for name in labels.columns}
    for name, columns in labels.columns.items():
        own[name] = np.array(columns)[logits[name].argmax(axis=1)]
        # Labels of other teachers get 0, so their NLL is infinite.
        union = np.zeros((len(gold), len(labels.names)))
        union[:, list(columns)] = softmax(logits[name])
        systems[f"teacher:{name}"] = Predictions.of(union, gold)
    if logits:
        systems["ensemble"] = Predictions.of(_ensemble(logits, labels), gold)
    systems["zero-shot"] = Predictions.of(softmax(similar), gold)
    if inputs.student is not None:
        systems[inputs.system] = Predictions.of(softmax(inputs.student.logits(fields(table))), gold)
    return TestAnswers(first + np.flatnonzero(kept), gold, own, systems)


def _cached_logits(inputs: EvaluationInputs, teacher: str, buckets: Sequence[Bucket], keys: pa.ChunkedArray) -> Array:
    """Reads the logits of these texts alone; Polars decodes the other rows of a file for no column but the key."""
    texts = pl.DataFrame({"key": pl.Series(keys, dtype=pl.Binary)})
    files = inputs.answers[teacher].overlapping([bucket.prefix for bucket in buckets])
    schema: dict[str, Any] = {"key": pl.Binary, "logits": pl.Array(pl.Float32, len(inputs.labels.columns[teacher]))}
    rows = pl.scan_parquet(
        inputs.store.verified_paths(files), schema=schema, missing_columns="insert", extra_columns="ignore"
    ).filter(pl.col("key").is_in(texts["key"].implode()))
    cached = rows.collect().drop_nulls("logits").unique("key", keep="last", maintain_order=True)
    logits = texts.join(cached, on="key", how="left", maintain_order="left")["logits"]
    if logits.null_count():
        raise AssertionError("stage cache-teachers has the logits of every test text")
    return logits.to_numpy().astype(np.float64)


def _ensemble(logits: dict[str, Array], labels: LabelSpace) -> Array:
    """Applies one softmax to the concatenated logits of all teachers, then sums the entries of shared labels."""
    probabilities = softmax(np.concatenate(list(logits.values()), axis=1))
    union = np.zeros((len(probabilities), len(labels.names)))
    columns = [label for teacher in logits for label in labels.columns[teacher]]
    for column, label in enumerate(columns):
        union[:, label] += probabilities[:, column]
    return union


# ---- metrics


def evaluate_systems(inputs: EvaluationInputs, answers: TestAnswers) -> dict[str, Scores]:
    systems = {
        name: evaluate(predictions, answers.gold, inputs.labels, inputs.calibration_bins)
        for name, predictions in answers.systems.items()
    }
    # A similarity has an order and no scale, so its probabilities mean nothing.
    systems["zero-shot"] |= {"nll_nats": None, "nll_infinite": 0, "ece": None}
    return systems


def evaluate(predictions: Predictions, gold: Array, labels: LabelSpace, bins: int) -> Scores:
    """Returns the report's figures of one model on labelled texts; gold [n] is by position in the union.

    - macro_f1: mean over the labels that occur in gold or in the predictions; one that is never right counts 0.
    - label_f1: the same by label name, None where it occurs in neither.
    - nll_nats: mean negative log-likelihood; None when some gold label has probability 0, which makes it infinite.
      nll_infinite: how many have.
    - ece: expected calibration error over equal bins of confidence: the mean over texts of |accuracy - mean confidence|
      of the text's bin.
    - slice_accuracy: over the texts whose gold label is the teacher's, predictions over the union; None without texts.
    - confusion: counts, a row per gold label, a column per predicted label.
    """
    _check(predictions, gold)
    right = predictions.label == gold
    confusion = confusion_of(predictions, gold, len(labels.names))
    occurs = confusion.sum(axis=0) + confusion.sum(axis=1)
    f1 = np.full(len(occurs), np.nan)
    np.divide(2.0 * np.diag(confusion), occurs, out=f1, where=occurs > 0)
    bin_of = calibration_bin(predictions.confidence, bins)
    gaps = np.bincount(bin_of, weights=right - predictions.confidence, minlength=bins)
    infinite = int((predictions.of_gold <= 0).sum())
    slices = {teacher: right[np.isin(gold, own)] for teacher, own in labels.columns.items()}
    return {
        "n": len(gold),
        "accuracy": float(right.mean()),
        "macro_f1": float(np.nanmean(f1)),
        "label_f1": {
            name: None if np.isnan(value) else float(value) for name, value in zip(labels.names, f1, strict=True)
        },
        "nll_nats": None if infinite else float(-np.log(predictions.of_gold).mean()),
        "nll_infinite": infinite,
        "ece": float(np.abs(gaps).sum() / len(gold)),
        "slice_accuracy": {teacher: float(own.mean()) if len(own) else None for teacher, own in slices.items()},
        "slice_n": {teacher: len(own) for teacher, own in slices.items()},
        "confusion": confusion.tolist(),
    }


def confusion_of(predictions: Predictions, gold: Array, labels: int) -> Array:
    """Returns counts with a row per gold label and a column per predicted one."""
    result: Array = np.zeros((labels, labels), dtype=np.int64)
    np.add.at(result, (gold, predictions.label), 1)
    return result


def calibration_bin(confidence: Array, bins: int) -> Array:
    """Returns the bin (low, high] of each confidence."""
    place: Array = np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)
    return place


def _check(predictions: Predictions, gold: Array) -> None:
    if not len(gold):
        raise DataError("there are no labelled texts to measure on", where="corpus.test", fix="give labelled texts")
    wrong = np.flatnonzero(~np.isfinite(predictions.confidence))
    if len(wrong):
        raise WorkError(
            f"{len(wrong):,} predictions are not numbers" if len(wrong) > 1 else "a prediction is not a number",
            where=f"rows {', '.join(map(str, wrong[:8].tolist()))}",
            fix="train the model again with a lower learning rate",
        )
