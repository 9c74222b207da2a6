"""Describes the targets on a sample of the training texts: right and wrong teachers, margins, weights, disputed texts.

Keys are hashes, so the first texts in key order are a random sample and the cost does not grow with the texts. Counts
over all texts come from the summary of stage build-targets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pyarrow as pa

from amalgam.data.arrays import softmax
from amalgam.data.keys import LabelSpace
from amalgam.data.parquet import matrix
from amalgam.pipeline.storage.store import Store
from amalgam.stages.common.corpus import Bucket, Part, read_bucket
from amalgam.stages.report.blocks import (
    DisputedText,
    Histogram,
    TargetBlock,
    TargetQuality,
    TeacherBlocks,
    UncertaintyBlock,
)
from amalgam.stages.report.student_quality import texts_of
from amalgam.stages.report.teacher_audit.audit import AuditedTexts, AuditInputs, audit_buckets
from amalgam.stages.target_methods import target_method

Array = np.ndarray[Any, np.dtype[Any]]

SAMPLE, LEAST_SAMPLE = 20_000, 2_000

MOST_WORK = 4e9
"""Bound on texts x teachers^3 x labels: the audit recomputes the union without each teacher and each pair."""

BINS = 20

MOST_DISPUTED = 12

ROUNDING = 1e-3


@dataclass(frozen=True)
class TargetQualityInputs:
    """Everything that the description of the targets reads, resolved from the run by report/stage.py."""

    train: Part
    labels: LabelSpace
    targets: Iterable[pa.Table]
    """By bucket of `train`."""
    target_facts: dict[str, Any]
    """The facts of the build-targets manifest."""
    audit: AuditInputs | None
    """None without teachers."""
    store: Store


def target_quality(inputs: TargetQualityInputs) -> TargetQuality:
    buckets = sample_of(inputs.train, len(inputs.labels.columns), len(inputs.labels.names))
    quality: TargetQuality = {
        "texts": inputs.train.texts,
        "sample": sum(bucket.rows for bucket in buckets),
        "targets": _targets(inputs, buckets),
    }
    if inputs.audit:
        sample = _Sample(inputs, inputs.audit)
        audit = audit_buckets(inputs.audit, buckets, sample.add)
        return cast("TargetQuality", {**quality, "audit": audit, **sample.blocks()})
    return quality


def sample_of(part: Part, teachers: int, labels: int) -> list[Bucket]:
    """Returns the first buckets in key order; fewer if there are very many teachers."""
    wanted = min(SAMPLE, max(LEAST_SAMPLE, MOST_WORK / max(teachers**3 * labels, 1)))
    buckets: list[Bucket] = []
    for bucket in part.buckets:
        if sum(earlier.rows for earlier in buckets) >= wanted:
            break
        buckets.append(bucket)
    return buckets


class _Sample:
    """Collects the teachers' predictions, confidences and weights on the sample."""

    def __init__(self, inputs: TargetQualityInputs, audit: AuditInputs) -> None:
        self._inputs, self._audit = inputs, audit
        self._columns = [np.array(columns) for columns in inputs.labels.columns.values()]
        self._blocks: list[tuple[Array, ...]] = []

    def add(self, texts: AuditedTexts) -> None:
        predicted = [own[rows.argmax(axis=1)] for own, rows in zip(self._columns, texts.distributions, strict=True)]
        owns = [np.isin(texts.gold_N, own) for own in self._columns]
        self._blocks.append(
            (
                np.stack(predicted, axis=1),
                np.stack(owns, axis=1),
                texts.confidence_NT,
                self._weights(texts),
                texts.gold_N,
            )
        )

    def _weights(self, texts: AuditedTexts) -> Array:
        """Returns each teacher's weight in the target of each text."""
        targets = self._audit.targets
        method = target_method(targets)
        scores = texts.confidence_NT if texts.weights_NT is None else texts.weights_NT
        if method.winner_takes_all:
            one_hot: Array = np.eye(len(self._columns))[scores.argmax(axis=1)]
            return one_hot
        given = texts.weights_NT is not None or method.confidence_is_weight
        return scores if given else softmax(scores / targets.temperature)

    def blocks(self) -> TeacherBlocks:
        predicted, owns, confidence, weights, gold = (
            np.concatenate(arrays) for arrays in zip(*self._blocks, strict=True)
        )
        labelled = owns.any(axis=1)
        by = "weights" if self._audit.weighed else "confidence"
        leading = (weights if self._audit.weighed else confidence).argmax(axis=1)
        right = owns[np.arange(len(leading)), leading] & labelled
        oracle = (predicted == gold[:, None]).any(axis=1) & labelled
        means = weights.mean(axis=0).tolist()
        return {
            "labelled": int(labelled.sum()),
            "uncertainty": _uncertainty(confidence[labelled], owns[labelled]),
            "choice": {
                "by": by,
                "n": int(labelled.sum()),
                "right": int(right.sum()),
                "chance": float(owns[labelled].mean()) if labelled.any() else None,
                "oracle": int(oracle.sum()),
            },
            "mixture": {
                "mean": dict(zip(self._inputs.labels.columns, means, strict=True)),
                "largest": histogram(weights.max(axis=1), (0.0, 1.0)),
            },
            "disputed": _disputed(self._inputs, predicted, confidence, gold),
        }


def _disputed(inputs: TargetQualityInputs, predicted: Array, confidence: Array, gold: Array) -> list[DisputedText]:
    """Returns the texts on which two teachers with different labels have the highest lower confidence."""
    if confidence.shape[1] < 2:
        return []
    strength = np.full(len(predicted), -np.inf)
    pair = np.zeros((len(predicted), 2), np.int64)
    for a in range(confidence.shape[1]):
        for b in range(a + 1, confidence.shape[1]):
            lower = np.where(predicted[:, a] == predicted[:, b], -np.inf, confidence[:, [a, b]].min(axis=1))
            higher = lower > strength
            strength[higher], pair[higher] = lower[higher], (a, b)
    order = np.argsort(-strength, kind="stable")[:MOST_DISPUTED]
    rows = [row for row in order.tolist() if np.isfinite(strength[row])]
    keys = _first_keys(inputs, max(rows, default=-1) + 1)
    texts = texts_of(inputs.store, inputs.train, {keys[row] for row in rows})
    teachers, labels = list(inputs.labels.columns), inputs.labels.names
    return [
        {
            "text": texts[keys[row]],
            "gold": labels[int(gold[row])] if gold[row] >= 0 else None,
            "sides": [
                {
                    "teacher": teachers[teacher],
                    "label": labels[int(predicted[row, teacher])],
                    "confidence": float(confidence[row, teacher]),
                }
                for teacher in pair[row].tolist()
            ],
        }
        for row in rows
    ]


def _first_keys(inputs: TargetQualityInputs, count: int) -> list[bytes]:
    keys: list[bytes] = []
    for bucket in inputs.train.buckets:
        if len(keys) >= count:
            break
        keys += read_bucket(inputs.store, bucket, ["key"]).column("key").to_pylist()
    return keys


def _uncertainty(confidence: Array, owns: Array) -> UncertaintyBlock | None:
    """Splits uncertainty, 1 - confidence, by whether the teacher has the text's gold label."""
    if not owns.any():
        return None
    values = 1 - confidence
    limits = _limits(values)
    return {
        "right": histogram(values[owns], limits),
        "wrong": histogram(values[~owns], limits),
        "separation": separation(values, owns),
    }


def _limits(values: Array) -> tuple[float, float]:
    """Returns 0 and 1, or the range of a measure with other bounds."""
    low, high = float(values.min()), float(values.max())
    return min(low, 0.0) if low < -ROUNDING else 0.0, max(high, 1.0) if high > 1 + ROUNDING else 1.0


def separation(values: Array, owns: Array) -> float | None:
    """Returns how often a right teacher is less uncertain than a wrong teacher of the same text; ties count half."""
    wins = pairs = 0.0
    for a in range(values.shape[1]):
        for b in range(values.shape[1]):
            both = owns[:, a] & ~owns[:, b]
            right, wrong = values[both, a], values[both, b]
            wins += float((right < wrong).sum() + 0.5 * (right == wrong).sum())
            pairs += len(right)
    return wins / pairs if pairs else None


def histogram(values: Array, limits: tuple[float, float]) -> Histogram:
    """Counts all values; one that is outside the limits by rounding counts in the outer bin."""
    counts, _ = np.histogram(values.clip(*limits), bins=BINS, range=limits)
    mean = float(values.mean()) if len(values) else None
    return {"n": len(values), "low": limits[0], "high": limits[1], "counts": counts.tolist(), "mean": mean}


def _targets(inputs: TargetQualityInputs, buckets: Sequence[Bucket]) -> TargetBlock:
    """Returns the margins, and how often the target's first label is the gold label."""
    labels, facts = inputs.labels, inputs.target_facts
    position = {name: index for index, name in enumerate(labels.names)}
    over_labels = facts["objective"] == "kl"
    parts: list[tuple[Array, Array, Array, Array]] = []
    for bucket, table in zip(buckets, inputs.targets, strict=False):
        names = read_bucket(inputs.store, bucket, ["label"]).column("label").to_pylist()
        gold = np.array([position.get(label, -1) for label in names], np.int64)
        first = matrix(table.column("target")).argmax(axis=1) if over_labels else np.full(len(gold), -1)
        margin = table.column("margin").to_numpy(zero_copy_only=False).astype(np.float64)
        parts.append((gold, first, margin, _owns_gold(labels, table.column("teacher").to_pylist(), gold)))
    gold, first, margin, owner = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    labelled = gold >= 0
    has_margin = bool(len(gold)) and bool(np.isfinite(margin).all())
    return {
        "labelled": int(labelled.sum()),
        "right": int((first == gold)[labelled].sum()) if over_labels and labelled.any() else None,
        "margin": _margins(margin, owner, labelled) if has_margin and len(labels.columns) > 1 else None,
        "summary": facts["summary"],
    }


def _owns_gold(labels: LabelSpace, teachers: list[str | None], gold: Array) -> Array:
    """Returns whether each text's leading teacher has its gold label."""
    columns = {name: set(own) for name, own in labels.columns.items()}
    rows = zip(teachers, gold.tolist(), strict=True)
    return np.array([teacher is not None and label in columns[teacher] for teacher, label in rows], dtype=bool)


def _margins(margin: Array, owner: Array, labelled: Array) -> dict[str, Histogram]:
    limits = _limits(margin)
    if not labelled.any():
        return {"all": histogram(margin, limits)}
    return {
        "right": histogram(margin[labelled & owner], limits),
        "wrong": histogram(margin[labelled & ~owner], limits),
    }
