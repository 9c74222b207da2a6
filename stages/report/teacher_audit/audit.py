"""The teachers' audit: reads cached predictions and counts wins, conflicts, duplicates and the effect of each teacher.

Every number is a sum over texts, so memory does not grow with the texts. Shapes: N texts, T teachers, L labels of the
union, C labels of one teacher.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from amalgam.data.keys import LabelSpace
from amalgam.pipeline.config.schema import Targets
from amalgam.pipeline.storage.store import Store
from amalgam.stages.common.corpus import Bucket, neighbouring_buckets, read_bucket
from amalgam.stages.common.models.resolve import ModelFiles, same_models
from amalgam.stages.report.blocks import (
    AuditBlock,
    AuditedLabel,
    AuditedTeacher,
    Conflicts,
    Duplicate,
    GoldLabel,
    LeftOut,
    SharedLabels,
)
from amalgam.stages.target_methods import COMPARATIVE, Evidence, target_method

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]

BLOCK_TEXTS = 4096

CONFIDENT = 0.5
"""Least confidence of both teachers of a conflict."""

LEAST_AGREEMENT, MOST_DISTANCE = 0.98, 0.05
"""Duplicates: two teachers of the same labels with this agreement and this mean distance of probabilities."""

STANDARD_ERRORS = 2.0
"""A gain of more standard errors than this is significant."""


@dataclass(frozen=True)
class AuditInputs:
    """Everything that the audit reads, resolved from the run by report/stage.py."""

    labels: LabelSpace
    models: Mapping[str, ModelFiles]
    """By teacher."""
    targets: Targets
    weighed: bool
    """The teacher weights of stage weigh-teachers exist."""
    by_domain: bool
    """The confidence of a teacher is its domain score."""
    store: Store
    read_evidence: Callable[[Sequence[str], pa.ChunkedArray], Sequence[Evidence]]
    """(bucket prefixes, text keys) -> one entry per teacher, in the order of `labels`."""
    read_weights: Callable[[Bucket, int], Array]
    """(first bucket, rows) -> teacher weights [rows, teachers]."""


@dataclass(frozen=True)
class AuditedTexts:
    """Predictions of all teachers on a block of texts."""

    distributions: Sequence[Array]
    """By teacher: [N, C] over its own labels, dropout off."""
    confidence_NT: Array  # noqa: N815
    weights_NT: Array | None  # noqa: N815
    """Of stage weigh-teachers, where it ran."""
    gold_N: Array  # noqa: N815
    """Position in the union; -1 without a gold label."""


@dataclass(frozen=True)
class WeightRule:
    """Computes weights of any subset of the teachers."""

    temperature: float
    hard: bool

    def weights(self, texts: AuditedTexts, teachers: Sequence[int]) -> Array:
        """Returns [N, len(teachers)]; every row sums to 1."""
        scores = (texts.confidence_NT if texts.weights_NT is None else texts.weights_NT)[:, list(teachers)]
        if self.hard:
            one_hot: Array = np.eye(len(teachers))[scores.argmax(axis=1)]
            return one_hot
        if texts.weights_NT is not None:
            sums = scores.sum(axis=1, keepdims=True)
            return np.where(sums > 0, scores / np.where(sums > 0, sums, 1.0), 1 / len(teachers))
        raised = np.exp((scores - scores.max(axis=1, keepdims=True)) / self.temperature)
        softmax: Array = raised / raised.sum(axis=1, keepdims=True)
        return softmax


class AuditCounts:
    """The sums of the audit, by teacher unless a comment states otherwise."""

    def __init__(self, labels: LabelSpace, rule: WeightRule) -> None:
        self.columns = [np.array(own) for own in labels.columns.values()]
        self.rule, self.width = rule, len(labels.names)
        teachers = len(self.columns)
        # Pairs of teachers, with the labels of both.
        self.shared = {
            (a, b): frozenset(self.columns[a].tolist()) & frozenset(self.columns[b].tolist())
            for a, b in combinations(range(teachers), 2)
        }
        self.texts = self.labelled = self.right = 0
        self.confidence = np.zeros(teachers)
        self.wins, self.heaviest, self.changed, self.gained, self.lost = np.zeros((5, teachers), np.int64)
        self.conflicts = np.zeros((teachers, teachers), np.int64)
        # By teacher and own label.
        self.predicted = [np.zeros(len(own), np.int64) for own in self.columns]
        self.predicted_and_won = [np.zeros(len(own), np.int64) for own in self.columns]
        # By label of the union.
        self.gold_texts, self.gold_right = np.zeros((2, self.width), np.int64)
        self.gold_won = np.zeros((self.width, teachers), np.int64)
        # By pair: texts on which both predict a shared label, texts of these on which they differ, summed distance.
        self.met, self.differed = (dict.fromkeys(self.shared, 0) for _ in range(2))
        self.distance = dict.fromkeys(self.shared, 0.0)
        # By the teacher left out: agreement of a held-out teacher with the union of the rest, with and without the
        # left-out teacher. A text counts if both labels of the union are labels of the held-out teacher.
        self.comparable, self.agreed_with, self.agreed_without = np.zeros((3, teachers), np.int64)
        self.only_with, self.only_without = np.zeros((2, teachers), np.int64)

    def add(self, texts: AuditedTexts) -> None:
        predicted_NT = np.stack(  # noqa: N806
            [own[rows.argmax(axis=1)] for own, rows in zip(self.columns, texts.distributions, strict=True)], axis=1
        )
        self.texts += len(predicted_NT)
        self.confidence += texts.confidence_NT.sum(axis=0)
        winner_N = self._count_wins(texts, predicted_NT)  # noqa: N806
        confident_NT = texts.confidence_NT >= CONFIDENT  # noqa: N806
        for a, b in self.shared:
            self._count_pair(texts, predicted_NT, confident_NT, a, b)
        self._count_left_out(texts, predicted_NT, winner_N)

    def _count_wins(self, texts: AuditedTexts, predicted_NT: Array) -> Array:  # noqa: N803
        """Returns each text's winner: the largest weight, else the largest confidence; the first of equals."""
        teachers = len(self.columns)
        winner_N: Array = texts.confidence_NT.argmax(axis=1)  # noqa: N806
        self.wins += np.bincount(winner_N, minlength=teachers)
        if texts.weights_NT is not None:
            winner_N = texts.weights_NT.argmax(axis=1)  # noqa: N806
            self.heaviest += np.bincount(winner_N, minlength=teachers)
        for teacher, own in enumerate(self.columns):
            column = np.zeros(self.width, np.int64)
            column[own] = np.arange(len(own))
            label_N = column[predicted_NT[:, teacher]]  # noqa: N806
            self.predicted[teacher] += np.bincount(label_N, minlength=len(own))
            self.predicted_and_won[teacher] += np.bincount(label_N[winner_N == teacher], minlength=len(own))
        return winner_N

    def _count_pair(self, texts: AuditedTexts, predicted_NT: Array, confident_NT: Array, a: int, b: int) -> None:  # noqa: N803
        differ = predicted_NT[:, a] != predicted_NT[:, b]
        both = int((differ & confident_NT[:, a] & confident_NT[:, b]).sum())
        self.conflicts[a, b] += both
        self.conflicts[b, a] += both
        shared = self.shared[a, b]
        meet = np.isin(predicted_NT[:, [a, b]], list(shared)).all(axis=1)
        self.met[a, b] += int(meet.sum())
        self.differed[a, b] += int((meet & differ).sum())
        if len(shared) == len(self.columns[a]) == len(self.columns[b]):
            self.distance[a, b] += float(np.abs(self._padded(texts, a) - self._padded(texts, b)).sum() / 2)

    def _count_left_out(self, texts: AuditedTexts, predicted_NT: Array, winner_N: Array) -> None:  # noqa: N803
        """Compares the union's label, argmax of sum w_i pad_i(T_i), with and without each teacher and each pair."""
        teachers = range(len(self.columns))
        padded = [self._padded(texts, teacher) for teacher in teachers]
        unions: dict[frozenset[int], Array] = {}

        def union_without(*left_out: int) -> Array:
            key = frozenset(left_out)
            if key not in unions:
                rest = [teacher for teacher in teachers if teacher not in key]
                weights = self.rule.weights(texts, rest)
                total = sum(weights[:, [column]] * padded[teacher] for column, teacher in enumerate(rest))
                unions[key] = np.asarray(total).argmax(axis=1)
            return unions[key]

        whole = union_without()
        self._count_gold(texts, whole, winner_N)
        if len(self.columns) == 1:
            return
        labelled = texts.gold_N >= 0
        right = labelled & (whole == texts.gold_N)
        for left_out in teachers:
            without = union_without(left_out)
            self.changed[left_out] += int((without != whole).sum())
            right_without = labelled & (without == texts.gold_N)
            self.gained[left_out] += int((right_without & ~right).sum())
            self.lost[left_out] += int((right & ~right_without).sum())
        for a, b in self.shared if len(self.columns) > 2 else ():
            both_out = union_without(a, b)
            self._count_agreement(predicted_NT[:, b], union_without(b), both_out, left_out=a, held_out=b)
            self._count_agreement(predicted_NT[:, a], union_without(a), both_out, left_out=b, held_out=a)

    def _count_agreement(
        self,
        predicted: Array,
        with_it: Array,
        without_it: Array,
        *,
        left_out: int,
        held_out: int,
    ) -> None:
        """Counts agreement of teacher `held_out` with unions that exclude it, with and without `left_out`."""
        own = self.columns[held_out]
        comparable = np.isin(with_it, own) & np.isin(without_it, own)
        agrees, agrees_without = comparable & (with_it == predicted), comparable & (without_it == predicted)
        self.comparable[left_out] += int(comparable.sum())
        self.agreed_with[left_out] += int(agrees.sum())
        self.agreed_without[left_out] += int(agrees_without.sum())
        self.only_with[left_out] += int((agrees & ~agrees_without).sum())
        self.only_without[left_out] += int((agrees_without & ~agrees).sum())

    def _count_gold(self, texts: AuditedTexts, whole: Array, winner_N: Array) -> None:  # noqa: N803
        rows = np.flatnonzero(texts.gold_N >= 0)
        gold = texts.gold_N[rows]
        right = whole[rows] == gold
        self.labelled += len(rows)
        self.right += int(right.sum())
        self.gold_texts += np.bincount(gold, minlength=self.width)
        self.gold_right += np.bincount(gold[right], minlength=self.width)
        np.add.at(self.gold_won, (gold, winner_N[rows]), 1)

    def _padded(self, texts: AuditedTexts, teacher: int) -> Array:
        padded = np.zeros((len(texts.confidence_NT), self.width))
        padded[:, self.columns[teacher]] = texts.distributions[teacher]
        return padded


def audit_buckets(
    inputs: AuditInputs, buckets: Sequence[Bucket], also: Callable[[AuditedTexts], None] | None = None
) -> AuditBlock:
    """Returns the audit of these buckets. `also` receives every block of texts, so a caller needs no second read."""
    labels, targets, weighed = inputs.labels, inputs.targets, inputs.weighed
    counts = AuditCounts(labels, WeightRule(targets.temperature, target_method(targets).winner_takes_all))
    for group in neighbouring_buckets(buckets):
        for texts in _blocks(inputs, group):
            counts.add(texts)
            if also:
                also(texts)
    by_entropy = targets.uncertainty in COMPARATIVE and not inputs.by_domain
    return {
        "texts": counts.texts,
        "labelled": counts.labelled,
        "weights": targets.teacher_weights if weighed else "muka",
        "uncertainty": "entropy" if by_entropy else targets.uncertainty,
        "accuracy": _share(counts.right, counts.labelled),
        "teachers": list(_teachers(counts, labels, weighed=weighed)),
        "conflicts": _conflicts(counts, labels),
        "shared_labels": list(_shared(counts, labels)),
        "labels": list(_labels(counts, labels)),
        "gold": list(_gold(counts, labels)),
        "duplicates": list(_duplicates(inputs.models, counts, labels)),
    }


def _blocks(inputs: AuditInputs, buckets: tuple[Bucket, ...]) -> Iterator[AuditedTexts]:
    rows = pa.concat_tables(read_bucket(inputs.store, bucket, ["key", "label"]) for bucket in buckets)
    evidence = inputs.read_evidence([bucket.prefix for bucket in buckets], rows.column("key"))
    distributions = [teacher.distribution.to_numpy() for teacher in evidence]
    confidence = np.stack([teacher.confidence.to_numpy() for teacher in evidence], axis=1)
    position = {name: index for index, name in enumerate(inputs.labels.names)}
    gold = np.array([position.get(label, -1) for label in rows.column("label").to_pylist()], np.int64)
    weights = inputs.read_weights(buckets[0], rows.num_rows) if inputs.weighed else None
    for start in range(0, len(gold), BLOCK_TEXTS):
        block = slice(start, start + BLOCK_TEXTS)
        block_weights = None if weights is None else weights[block]
        yield AuditedTexts([rows[block] for rows in distributions], confidence[block], block_weights, gold[block])


# ---- from sums to shares


def _teachers(counts: AuditCounts, labels: LabelSpace, *, weighed: bool) -> Iterator[AuditedTeacher]:
    for index, (name, own) in enumerate(labels.columns.items()):
        yield {
            "teacher": name,
            "labels": len(own),
            "mean_confidence": _share(counts.confidence[index], counts.texts),
            "wins": _share(counts.wins[index], counts.texts),
            "wins_by_weights": _share(counts.heaviest[index], counts.texts) if weighed else None,
            "left_out": _left_out(counts, index) if len(labels.columns) > 1 else None,
        }


def _left_out(counts: AuditCounts, index: int) -> LeftOut:
    gained, lost, comparable = counts.gained[index], counts.lost[index], counts.comparable[index]
    harmful = None
    if counts.labelled:
        harmful = _significant(gained, lost)
    elif comparable:
        harmful = _significant(counts.only_without[index], counts.only_with[index])
    return {
        "changed": _share(counts.changed[index], counts.texts),
        "accuracy": _share(counts.right + gained - lost, counts.labelled),
        "gain": _share(gained - lost, counts.labelled),
        "gain_error": _share(math.sqrt(gained + lost), counts.labelled),
        "held_out_agreement": {
            "texts": int(comparable),
            "with": _share(counts.agreed_with[index], comparable),
            "without": _share(counts.agreed_without[index], comparable),
        },
        "harmful": harmful,
    }


def _significant(better: int, worse: int) -> bool:
    """Applies McNemar's test to the texts that became right and those that became wrong."""
    return bool(better - worse > STANDARD_ERRORS * math.sqrt(better + worse))


def _conflicts(counts: AuditCounts, labels: LabelSpace) -> Conflicts:
    shares = (counts.conflicts / max(counts.texts, 1)).tolist()
    return {"teachers": list(labels.columns), "confident_from": CONFIDENT, "shares": shares}


def _shared(counts: AuditCounts, labels: LabelSpace) -> Iterator[SharedLabels]:
    teachers = list(labels.columns)
    for pair, shared in counts.shared.items():
        if shared:
            yield {
                "teachers": [teachers[index] for index in pair],
                "labels": [labels.names[index] for index in sorted(shared)],
                "texts": counts.met[pair],
                "disagree": _share(counts.differed[pair], counts.met[pair]),
            }


def _labels(counts: AuditCounts, labels: LabelSpace) -> Iterator[AuditedLabel]:
    for teacher, (name, own) in enumerate(labels.columns.items()):
        for column, label in enumerate(own):
            predicted = int(counts.predicted[teacher][column])
            wins = _share(counts.predicted_and_won[teacher][column], predicted)
            yield {"teacher": name, "label": labels.names[label], "predicted": predicted, "wins": wins}


def _gold(counts: AuditCounts, labels: LabelSpace) -> Iterator[GoldLabel]:
    for label, texts in enumerate(counts.gold_texts.tolist()):
        if texts:
            won = {name: _share(counts.gold_won[label, index], texts) for index, name in enumerate(labels.columns)}
            right = _share(counts.gold_right[label], texts)
            yield {"label": labels.names[label], "texts": texts, "won": won, "right": right}


def _duplicates(models: Mapping[str, ModelFiles], counts: AuditCounts, labels: LabelSpace) -> Iterator[Duplicate]:
    names = list(labels.columns)
    identical = [set(group) for group in same_models(dict(models))]
    for pair, shared in counts.shared.items():
        a, b = pair
        same_model = any({names[a], names[b]} <= group for group in identical)
        same_labels = len(shared) == len(counts.columns[a]) == len(counts.columns[b])
        agreement = _share(counts.met[pair] - counts.differed[pair], counts.texts) if same_labels else None
        distance = _share(counts.distance[pair], counts.texts) if same_labels else None
        alike = (agreement or 0.0) >= LEAST_AGREEMENT and distance is not None and distance <= MOST_DISTANCE
        if same_model or alike:
            teachers = [names[a], names[b]]
            yield {"teachers": teachers, "agreement": agreement, "distance": distance, "same_model": same_model}


def _share(part: Any, whole: Any) -> float | None:
    return float(part) / float(whole) if whole else None
