"""Estimates accuracies on the labelled training texts that no student learns (`labels` of the experiment).

Teachers and ensemble use no label, so their share of right texts is an estimate. The labels choose the weights of the
teachers, so the targets are those of cross-validation, and the student's share is corrected by the same difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from amalgam.data.arrays import Array
from amalgam.data.lazy import np, pa
from amalgam.stages.build_targets.stage import UnsetTargets
from amalgam.stages.common.corpus import Bucket, Part, fields, read_bucket
from amalgam.stages.common.intervals import interval, interval_of_mean
from amalgam.stages.report.evaluation import TeacherInputs, ensemble, teacher_labels
from amalgam.stages.report.verdict_types import LabelOccurrence, SystemEstimate, SystemKind

if TYPE_CHECKING:
    from amalgam.stages.common.inference.batches import Classifier


@dataclass(frozen=True, kw_only=True)
class EstimateInputs(TeacherInputs):
    train: Part
    gold: Mapping[bytes, str]
    """The labels of the texts by key."""
    targets: Callable[[Sequence[Bucket], pa.Table], UnsetTargets | None]
    student: Classifier | None


@dataclass(frozen=True)
class RightTexts:
    """Whether each system predicts the gold label of each labelled text [texts]."""

    own: Mapping[str, Array]
    """By teacher, of the texts with one of its labels; a prediction of its catch_all is wrong."""
    teachers: Mapping[str, Array]
    ensemble: Array | None
    fitted: Array | None
    """The targets before the labels are set, with the weights that all labels chose."""
    cross_validated: Array | None
    """The same by cross-validation."""
    student: Array | None

    @property
    def corrected_student(self) -> Array | None:
        """Returns the student's right texts, minus the advantage of weights that were fitted to the same labels."""
        if self.student is None or self.fitted is None or self.cross_validated is None:
            return self.student
        return self.student.astype(float) - self.fitted + self.cross_validated

    def systems(self) -> Iterator[SystemEstimate]:
        """Yields the estimates with 95 % intervals: student, targets, ensemble, teachers."""
        student = self.corrected_student
        if student is not None:
            mean, (low, high) = float(np.clip(student.mean(), 0, 1)), interval_of_mean(student)
            yield {"name": "student", "kind": "student", "n": len(student), "mean": mean, "low": low, "high": high}
        if self.cross_validated is not None:
            yield estimate("targets", "targets", self.cross_validated)
        if self.ensemble is not None:
            yield estimate("ensemble", "ensemble", self.ensemble)
        for name, right in self.teachers.items():
            yield estimate(name, "teacher", right)
            yield estimate(name, "teacher on its own labels", self.own[name])


def estimate(name: str, kind: SystemKind, right: Array) -> SystemEstimate:
    """Returns the share of right texts with Wilson's interval."""
    share = float(right.mean()) if len(right) else 0.0
    low, high = interval(share, len(right))
    return {"name": name, "kind": kind, "n": len(right), "mean": share, "low": low, "high": high}


def right_texts(inputs: EstimateInputs) -> RightTexts:
    buckets, table = _rows(inputs)
    position = {name: index for index, name in enumerate(inputs.labels.names)}
    gold = np.array([position[inputs.gold[key]] for key in table.column("key").to_pylist()])
    logits = inputs.teacher_logits(buckets, table)
    by_teacher, columns = teacher_labels(logits, inputs.labels), inputs.labels.columns
    own, targets = inputs.own_predictions(by_teacher, buckets, table), inputs.targets(buckets, table)
    predicted = inputs.student.logits(fields(table)).argmax(axis=1) if inputs.student else None
    return RightTexts(
        own={name: (labels == gold)[np.isin(gold, columns[name])] for name, labels in own.items()},
        teachers={name: labels == gold for name, labels in by_teacher.items()},
        ensemble=ensemble(logits, inputs.labels).argmax(axis=1) == gold if logits else None,
        fitted=None if targets is None else targets.fitted == gold,
        cross_validated=None if targets is None else targets.cross_validated == gold,
        student=None if predicted is None else predicted == gold,
    )


def label_occurrences(inputs: EstimateInputs) -> list[LabelOccurrence]:
    """Counts the labels of the texts, and the ensemble's predictions for them."""
    buckets, table = _rows(inputs)
    predicted = ensemble(inputs.teacher_logits(buckets, table), inputs.labels).argmax(axis=1)
    given, counts = Counter(inputs.gold.values()), np.bincount(predicted, minlength=len(inputs.labels.names))
    return [
        {"label": name, "teachers": teachers, "n": given[name], "ensemble": count}
        for name, teachers, count in zip(inputs.labels.names, inputs.labels.owners, counts.tolist(), strict=True)
    ]


def _rows(inputs: EstimateInputs) -> tuple[list[Bucket], pa.Table]:
    """Returns the labelled texts in key order, and their buckets."""
    buckets, parts = [], []
    for bucket in inputs.train.buckets:
        keys = read_bucket(inputs.store, bucket, ["key"]).column("key").to_pylist()
        rows = [row for row, key in enumerate(keys) if key in inputs.gold]
        if rows:
            buckets.append(bucket)
            parts.append(read_bucket(inputs.store, bucket).take(rows))
    return buckets, pa.concat_tables(parts)
