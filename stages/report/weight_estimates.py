"""Estimates accuracies without labels, from the teachers' weights on a sample of the training texts.

The mass of a predicted label is the sum of the weights of the teachers that predict it. The mean mass of every system
is too large by about the same factor, which the estimated accuracy of the targets gives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from amalgam.data.arrays import Array
from amalgam.data.lazy import np
from amalgam.stages.common.intervals import NORMAL_95
from amalgam.stages.report.verdict_types import EstimatedGap, SystemEstimate, SystemKind, WeightEstimates
from amalgam.stages.weigh_teachers.signals import AccuracyEstimate
from amalgam.stages.weigh_teachers.weigh import largest_sums, with_interval


@dataclass(frozen=True)
class WeighedTexts:
    """The teachers on some texts [texts, teachers]."""

    predicted: Array
    """Position of the first label in the union."""
    confidence: Array
    weights: Array
    held_out: Array
    """Whether the student has an estimate on the text, which it was not trained on [texts]."""

    def mass(self, labels: Array) -> Array:
        """Returns the sum of the weights of the teachers that predict each text's label."""
        return (self.weights * (self.predicted == labels[:, None])).sum(axis=1)

    @property
    def muka(self) -> Array:
        """Returns the label of the most confident teacher of each text."""
        return self.predicted[np.arange(len(self.predicted)), self.confidence.argmax(axis=1)]

    @property
    def largest(self) -> float:
        """Returns the mean of the largest mass, that of the targets."""
        return float(largest_sums(self.weights, self.predicted).mean())


def weight_estimates(
    texts: WeighedTexts, targets: AccuracyEstimate, trained: int, *, ensemble: Array, student: Array
) -> WeightEstimates:
    """Returns the estimates, and how much better the ensemble is than the student on held-out texts, if there are any.

    `targets`: the estimated accuracy of the targets of `trained` texts.
    """
    factor, held_out = targets["value"] / texts.largest, texts.held_out
    of_student, of_ensemble = texts.mass(student)[held_out], texts.mass(ensemble)

    def estimate(kind: SystemKind, mass: Array) -> SystemEstimate:
        return _estimate(kind, with_interval(factor * float(mass.mean()), len(mass)), len(mass))

    systems = [
        _estimate("targets", targets, trained),
        estimate("ensemble", of_ensemble),
        estimate("muka", texts.mass(texts.muka)),
    ]
    if not held_out.any():
        return {"systems": systems, "gap": None}
    gap = _gap(factor * (of_ensemble[held_out] - of_student))
    return {"systems": [estimate("student", of_student), *systems], "gap": gap}


def _estimate(kind: SystemKind, estimate: AccuracyEstimate, n: int) -> SystemEstimate:
    mean, low, high = estimate["value"], estimate["low"], estimate["high"]
    return {"name": kind, "kind": kind, "n": n, "mean": mean, "low": low, "high": high}


def _gap(gaps: Array) -> EstimatedGap:
    mean, error = float(gaps.mean()), NORMAL_95 * float(gaps.std()) / math.sqrt(len(gaps))
    return {"n": len(gaps), "mean": mean, "low": mean - error, "high": mean + error}
