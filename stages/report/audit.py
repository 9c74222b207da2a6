"""The teachers' audit: reads cached predictions and counts wins, conflicts, duplicates and the effect of each teacher.

Every number is a sum over texts, so memory does not grow with the texts. Shapes: N texts, T teachers, L labels of the
union, C labels of one teacher.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from amalgam.data.arrays import Array
from amalgam.data.keys import LabelSpace
from amalgam.data.lazy import np, pa, pl
from amalgam.data.parquet import matrix
from amalgam.pipeline.config.schema import Targets
from amalgam.pipeline.storage.store import Store
from amalgam.stages.cache_teachers.sample import PassAudit
from amalgam.stages.common.corpus import Bucket, neighbouring_buckets, read_bucket
from amalgam.stages.common.intervals import errors_of
from amalgam.stages.common.models.resolve import ModelFiles, same_models
from amalgam.stages.report import json_types
from amalgam.stages.report.conditions import LEAST_TEXTS
from amalgam.stages.report.evaluation import gold_indices
from amalgam.stages.target_methods import (
    MukaSoft,
    Ranking,
    TargetInputs,
    TeacherPredictions,
    WeightedSum,
    predicted_labels,
    target_method,
)
from amalgam.stages.weigh_teachers.label_sets import LabelSets

BLOCK_TEXTS = 4096

COLUMNS = ("logits", "distribution", "confidence")
"""Columns of `TeacherPredictions` that a block of texts cuts."""

CONFIDENT = 0.5
"""Least confidence of both teachers of a conflict."""

LEAST_AGREEMENT, MOST_DISTANCE = 0.98, 0.05
"""Duplicates: two teachers of the same labels with this agreement and this mean distance of probabilities."""


@dataclass(frozen=True)
class AuditInputs:
    """Everything that the audit reads, resolved from the run by report/load.py."""

    labels: LabelSpace
    models: Mapping[str, ModelFiles]
    """By teacher."""
    targets: Targets
    read_weights: Callable[[Sequence[Bucket]], pa.Table] | None
    """Reads the teacher weights of stage weigh-teachers on the texts of neighbouring buckets, if it ran."""
    uncertainty: str
    """The measure of the confidences."""
    store: Store
    read_predictions: Callable[[Sequence[str], pa.ChunkedArray], Sequence[TeacherPredictions]]
    """(bucket prefixes, text keys) -> one entry per teacher, in the order of `labels`."""
    are_learned: Callable[[Sequence[str], pa.ChunkedArray], Array]
    """(bucket prefixes, text keys) -> which texts no accuracy counts.

    Their gold labels set weights and targets (`labels`), or trained teachers learned them.
    """
    passes: PassAudit | None
    """Counts on a sample of texts, which ran passes that the others did not."""


class AuditedTexts:
    """The predictions of all teachers on a block of texts, and the targets that they give."""

    def __init__(
        self,
        inputs: TargetInputs,
        targets: Targets,
        gold_N: Array,  # noqa: N803
        learned_N: Array | bool = False,  # noqa: N803
    ) -> None:
        method = target_method(targets)
        self.inputs, self.method = inputs, method if isinstance(method, WeightedSum) else MukaSoft(targets)
        self.columns = [np.array(inputs.space.columns[teacher.name]) for teacher in inputs.predictions]
        self.distributions = [teacher.distribution.to_numpy() for teacher in inputs.predictions]
        """By teacher: [N, C] over its own labels, dropout off."""
        self.confidence_NT = np.stack([teacher.confidence.to_numpy() for teacher in inputs.predictions], axis=1)
        self.predicted_NT = predicted_labels(inputs)
        self.gold_N = gold_N
        """By position in the union; -1 without a gold label."""
        self.counted_N = np.where(learned_N, -1, gold_N)
        """The same; -1 also where weights or teachers learned the label, so that no accuracy counts it."""
        ranking, self.shares_NT = self.weighed(range(len(self.columns)))
        self.leader_N = ranking.leader.to_numpy()
        """The teacher with the largest weight, by position."""

    def weighed(self, teachers: Sequence[int]) -> tuple[Ranking, Array]:
        """Compares some of the teachers, and returns the weights that they have among each other."""
        predictions, weights = [self.inputs.predictions[place] for place in teachers], self.inputs.weights
        if len(teachers) < len(self.columns) and weights is not None:
            weights = pl.Series(_of_remaining(weights.to_numpy(), teachers, LabelSets.of(self.inputs.space).groups))
        elif len(teachers) < len(self.columns) and self.method.confidence_is_weight:
            shares = _rescaled(self.confidence_NT[:, teachers])
            predictions = [
                replace(teacher, confidence=pl.Series(row)) for teacher, row in zip(predictions, shares.T, strict=True)
            ]
        inputs = replace(self.inputs, predictions=predictions, weights=weights)
        ranking = self.method.ranking(inputs, self.predicted_NT[:, teachers])
        return ranking, self.method.shares(ranking, inputs).to_numpy()

    def padded(self) -> list[Array]:
        """Returns the distribution of each teacher over the union [N, L]; the target is their weighted sum."""
        padded = []
        for positions, distribution in zip(self.columns, self.method.distributions(self.inputs), strict=True):
            padded.append(np.zeros((len(self.gold_N), len(self.inputs.space.names))))
            padded[-1][:, positions] = distribution.to_numpy()
        return padded

    def first_labels(self, padded: Sequence[Array], *left_out: int) -> Array:
        """Returns the first label of the target of the other teachers, argmax of sum w_i pad_i(T_i)."""
        rest = [index for index in range(len(self.columns)) if index not in left_out]
        shares = self.weighed(rest)[1] if left_out else self.shares_NT
        total = sum(shares[:, [column]] * padded[teacher] for column, teacher in enumerate(rest))
        return np.asarray(total).argmax(axis=1)


def _of_remaining(weights: Array, teachers: Sequence[int], groups: Sequence[Sequence[int]]) -> Array:
    """Returns the weights of some teachers; those with the labels of a removed one get its weight."""
    remaining = weights[:, teachers]
    for group in groups:
        kept = [column for column, teacher in enumerate(teachers) if teacher in group]
        if kept:
            remaining[:, kept] = _rescaled(remaining[:, kept]) * weights[:, list(group)].sum(axis=1, keepdims=True)
    return _rescaled(remaining)


def _rescaled(weights: Array) -> Array:
    """Returns weights whose rows sum to 1; equal ones where all are 0."""
    sums = weights.sum(axis=1, keepdims=True)
    return np.where(sums > 0, weights / np.where(sums > 0, sums, 1.0), 1 / weights.shape[1])


def audited_texts(inputs: AuditInputs, buckets: Sequence[Bucket]) -> Iterator[AuditedTexts]:
    for group in neighbouring_buckets(buckets):
        rows = pa.concat_tables(read_bucket(inputs.store, bucket, ["key", "label"]) for bucket in group)
        prefixes, keys = [bucket.prefix for bucket in group], rows.column("key")
        predictions, is_learned = inputs.read_predictions(prefixes, keys), inputs.are_learned(prefixes, keys)
        weights = None
        if inputs.read_weights is not None:
            weights = pl.Series(matrix(inputs.read_weights(group).column("weight")).astype(np.float64))
        names = pl.Series("label", rows.column("label"), dtype=pl.String)
        gold = gold_indices(inputs.labels, rows)
        for start in range(0, rows.num_rows, BLOCK_TEXTS):
            block = slice(start, start + BLOCK_TEXTS)
            cut = [
                replace(teacher, **{name: getattr(teacher, name)[block] for name in COLUMNS}) for teacher in predictions
            ]
            given = TargetInputs(inputs.labels, names[block], cut, None if weights is None else weights[block])
            yield AuditedTexts(given, inputs.targets, gold[block], is_learned[block])


def audit_texts(inputs: AuditInputs, parts: Iterable[AuditedTexts]) -> json_types.AuditSection:
    labels, targets = inputs.labels, inputs.targets
    counts = AuditCounts(labels)
    for texts in parts:
        counts.add(texts)
    conflicts = (counts.conflicts / max(counts.texts, 1)).tolist()
    section: json_types.AuditSection = {
        "texts": counts.texts,
        "labelled": counts.labelled,
        "weights": "muka" if inputs.read_weights is None else targets.teacher_weights,
        "uncertainty": inputs.uncertainty,
        "accuracy": _share(counts.right, counts.labelled),
        "teachers": list(_teachers(counts, labels, weighed=inputs.read_weights is not None)),
        "conflicts": {"teachers": list(labels.columns), "confident_from": CONFIDENT, "shares": conflicts},
        "shared_labels": list(_shared(counts, labels)),
        "labels": list(_labels(counts, labels)),
        "gold": list(_gold(counts, labels)),
        "duplicates": list(_duplicates(inputs.models, counts, labels)),
    }
    if inputs.passes:
        section["passes"] = inputs.passes
    return section


# ---- sums


class AuditCounts:
    """The sums of the audit, by teacher unless a comment states otherwise."""

    def __init__(self, labels: LabelSpace) -> None:
        self.columns = [np.array(positions) for positions in labels.columns.values()]
        self.width = len(labels.names)
        teachers = len(self.columns)
        # Pairs of teachers, with the labels of both.
        self.shared = {
            (a, b): sorted({*self.columns[a].tolist()} & {*self.columns[b].tolist()})
            for a, b in combinations(range(teachers), 2)
        }
        self.texts = self.labelled = self.right = 0
        self.confidence = np.zeros(teachers)
        self.wins, self.wins_by_weights, self.changed, self.gained, self.lost = np.zeros((5, teachers), np.int64)
        # By pair: confident conflicts, and texts on which both predict a shared label, the same or another one, or
        # one does (row: this teacher). The distance is summed for teachers with the same labels.
        self.conflicts, self.met, self.differed, self.given = np.zeros((4, teachers, teachers), np.int64)
        self.distance = np.zeros((teachers, teachers))
        # By teacher and label of the union.
        self.predicted, self.predicted_and_won = np.zeros((2, teachers, self.width), np.int64)
        # By label of the union; the texts won by teacher too.
        self.gold_texts, self.gold_right = np.zeros((2, self.width), np.int64)
        self.gold_won = np.zeros((self.width, teachers), np.int64)
        # By the teacher left out: agreement of a held-out teacher with the union of the rest, with and without the
        # left-out teacher. A text counts if both labels of the union are labels of the held-out teacher.
        self.comparable, self.agreed_with, self.agreed_without = np.zeros((3, teachers), np.int64)
        # Sum of squares of each text's agreements gained without the left-out teacher; a text counts once in a test.
        self.squares = np.zeros(teachers, np.int64)

    def add(self, texts: AuditedTexts) -> None:
        padded = texts.padded()
        whole_N = texts.first_labels(padded)  # noqa: N806
        self._count_wins(texts, whole_N)
        for a, b in self.shared:
            self._count_pair(texts, a, b)
        if len(self.columns) > 1:
            self._count_left_out(texts, padded, whole_N)

    def _count_wins(self, texts: AuditedTexts, whole_N: Array) -> None:  # noqa: N803
        """Counts the winners by confidence and by weight; the first of equals."""
        most_confident_N, winner_N = texts.confidence_NT.argmax(axis=1), texts.leader_N  # noqa: N806
        self.texts += len(whole_N)
        self.confidence += texts.confidence_NT.sum(axis=0)
        self.wins += np.bincount(most_confident_N, minlength=len(self.wins))
        self.wins_by_weights += np.bincount(winner_N, minlength=len(self.wins))
        for teacher, label_N in enumerate(texts.predicted_NT.T):  # noqa: N806
            self.predicted[teacher] += np.bincount(label_N, minlength=self.width)
            self.predicted_and_won[teacher] += np.bincount(label_N[winner_N == teacher], minlength=self.width)
        labelled, right = texts.counted_N >= 0, texts.counted_N == whole_N
        gold_N = texts.counted_N[labelled]  # noqa: N806
        self.labelled += len(gold_N)
        self.right += int(right.sum())
        self.gold_texts += np.bincount(gold_N, minlength=self.width)
        self.gold_right += np.bincount(texts.counted_N[right], minlength=self.width)
        np.add.at(self.gold_won, (gold_N, winner_N[labelled]), 1)

    def _count_pair(self, texts: AuditedTexts, a: int, b: int) -> None:
        predicted_NT = texts.predicted_NT  # noqa: N806
        differ = predicted_NT[:, a] != predicted_NT[:, b]
        confident = (texts.confidence_NT[:, [a, b]] >= CONFIDENT).all(axis=1)
        self.conflicts[[a, b], [b, a]] += (differ & confident).sum()
        are_shared = np.isin(predicted_NT[:, [a, b]], self.shared[a, b])
        self.given[[a, b], [b, a]] += are_shared.sum(axis=0)
        meet = are_shared.all(axis=1)
        self.met[a, b] += meet.sum()
        self.differed[a, b] += (meet & differ).sum()
        if self.same_labels(a, b):
            first, second = (texts.distributions[teacher][:, self.columns[teacher].argsort()] for teacher in (a, b))
            self.distance[a, b] += np.abs(first - second).sum() / 2

    def same_labels(self, a: int, b: int) -> bool:
        return len(self.shared[a, b]) == len(self.columns[a]) == len(self.columns[b])

    def _count_left_out(self, texts: AuditedTexts, padded: Sequence[Array], whole_N: Array) -> None:  # noqa: N803
        """Compares the label of the union with that of the union without each teacher and each pair."""
        teachers = len(self.columns)
        without = np.stack([texts.first_labels(padded, teacher) for teacher in range(teachers)])
        right, right_without = whole_N == texts.counted_N, without == texts.counted_N  # -1 where there is none
        self.changed += (without != whole_N).sum(axis=1)
        self.gained += (right_without & ~right).sum(axis=1)
        self.lost += (right & ~right_without).sum(axis=1)
        gained_TN = np.zeros(without.shape, np.int64)  # noqa: N806
        for a, b in self.shared if teachers > 2 else ():
            both_out = texts.first_labels(padded, a, b)
            for left_out, held_out in ((a, b), (b, a)):
                positions, label_N = self.columns[held_out], texts.predicted_NT[:, held_out]  # noqa: N806
                comparable = np.isin(without[held_out], positions) & np.isin(both_out, positions)
                agrees, agrees_without = (comparable & (union == label_N) for union in (without[held_out], both_out))
                self.comparable[left_out] += comparable.sum()
                self.agreed_with[left_out] += agrees.sum()
                self.agreed_without[left_out] += agrees_without.sum()
                gained_TN[left_out] += agrees_without.astype(np.int64) - agrees
        self.squares += (gained_TN**2).sum(axis=1)


# ---- from sums to shares


def _teachers(counts: AuditCounts, labels: LabelSpace, *, weighed: bool) -> Iterator[json_types.AuditedTeacher]:
    for index, (name, columns) in enumerate(labels.columns.items()):
        yield {
            "teacher": name,
            "labels": len(columns),
            "mean_confidence": _share(counts.confidence[index], counts.texts),
            "wins": _share(counts.wins[index], counts.texts),
            "wins_by_weights": _share(counts.wins_by_weights[index], counts.texts) if weighed else None,
            "left_out": left_out(counts, index) if len(labels.columns) > 1 else None,
        }


def left_out(counts: AuditCounts, index: int) -> json_types.LeftOut:
    """Returns the effect of leaving out a teacher; `harmful` needs gold labels, as most teachers may be wrong."""
    gained, lost, comparable = counts.gained[index], counts.lost[index], counts.comparable[index]
    teachers, agreed = len(counts.gained), counts.agreed_without[index] - counts.agreed_with[index]
    by_gold = _significant(gained - lost, gained + lost, teachers)
    labelled = counts.labelled if by_gold or counts.labelled >= LEAST_TEXTS else 0
    return {
        "changed": _share(counts.changed[index], counts.texts),
        "accuracy": _share(counts.right + gained - lost, labelled),
        "gain": _share(gained - lost, labelled),
        "gain_error": _share(math.sqrt(gained + lost), labelled),
        "held_out_agreement": {
            "texts": int(comparable),
            "with": _share(counts.agreed_with[index], comparable),
            "without": _share(counts.agreed_without[index], comparable),
        },
        "harmful": by_gold if labelled else None,
        "disagrees": _significant(agreed, counts.squares[index], teachers) if comparable else None,
    }


def _significant(gained: int, squares: int, teachers: int) -> bool:
    """Applies McNemar's test to a sum of gains by text and that of their squares; of `teachers` tests (Bonferroni)."""
    return bool(gained > errors_of(teachers) * math.sqrt(squares))


def _shared(counts: AuditCounts, labels: LabelSpace) -> Iterator[json_types.SharedLabels]:
    teachers = list(labels.columns)
    for (a, b), shared in counts.shared.items():
        if shared:
            yield {
                "teachers": [teachers[a], teachers[b]],
                "labels": [labels.names[label] for label in shared],
                "given": [int(counts.given[a, b]), int(counts.given[b, a])],
                "same": int(counts.met[a, b] - counts.differed[a, b]),
            }


def _labels(counts: AuditCounts, labels: LabelSpace) -> Iterator[json_types.AuditedLabel]:
    for teacher, (name, columns) in enumerate(labels.columns.items()):
        for label in columns:
            predicted = int(counts.predicted[teacher, label])
            wins = _share(counts.predicted_and_won[teacher, label], predicted)
            yield {"teacher": name, "label": labels.names[label], "predicted": predicted, "wins": wins}


def _gold(counts: AuditCounts, labels: LabelSpace) -> Iterator[json_types.AuditedGold]:
    for label, texts in enumerate(counts.gold_texts.tolist()):
        if texts:
            won = {name: _share(counts.gold_won[label, index], texts) for index, name in enumerate(labels.columns)}
            right = _share(counts.gold_right[label], texts)
            yield {"label": labels.names[label], "texts": texts, "won": won, "right": right}


def _duplicates(
    models: Mapping[str, ModelFiles], counts: AuditCounts, labels: LabelSpace
) -> Iterator[json_types.Duplicates]:
    names = list(labels.columns)
    identical = [set(group) for group in same_models(dict(models))]
    for a, b in counts.shared:
        pair, agreement, distance = [names[a], names[b]], None, None
        same_model = any(group.issuperset(pair) for group in identical)
        if counts.same_labels(a, b):
            agreement = _share(counts.met[a, b] - counts.differed[a, b], counts.texts)
            distance = _share(counts.distance[a, b], counts.texts)
        alike = (agreement or 0.0) >= LEAST_AGREEMENT and distance is not None and distance <= MOST_DISTANCE
        if same_model or alike:
            yield {"teachers": pair, "agreement": agreement, "distance": distance, "same_model": same_model}


def _share(part: Any, whole: Any) -> float | None:
    return float(part) / float(whole) if whole else None
