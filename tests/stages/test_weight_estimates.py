"""Tests the accuracies that the teachers' weights estimate without labels, on made texts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from amalgam.stages.report.verdict_types import WeightEstimates
from amalgam.stages.report.weight_estimates import WeighedTexts, weight_estimates
from amalgam.stages.weigh_teachers.name_order import UNCLEAR_ORDER, as_good_orders
from amalgam.stages.weigh_teachers.signals import AccuracyEstimate
from amalgam.stages.weigh_teachers.weigh import estimated_accuracy

Array = Any
TARGETS: AccuracyEstimate = {"low": 0.6, "value": 0.8, "high": 0.9}
TEXTS = WeighedTexts(
    predicted=np.array([[0, 2, 0], [1, 2, 3], [1, 1, 2], [0, 3, 2]]),
    confidence=np.array([[0.1, 0.5, 0.3], [0.9, 0.5, 0.3], [0.1, 0.2, 0.3], [0.5, 0.4, 0.3]]),
    weights=np.array([[0.3, 0.5, 0.2], [0.1, 0.2, 0.7], [0.3, 0.3, 0.4], [0.25, 0.25, 0.5]]),
    held_out=np.ones(4, dtype=bool),
)


def test_weights_of_teachers_with_the_same_label_add_up() -> None:
    assert TEXTS.mass(np.array([0, 1, 1, 1])) == pytest.approx([0.5, 0.1, 0.6, 0.0])
    assert TEXTS.muka.tolist() == [2, 1, 2, 0]
    assert TEXTS.largest == pytest.approx((0.5 + 0.7 + 0.6 + 0.5) / 4)


def made(student: Array, n: int = 2000) -> tuple[WeightEstimates, dict[str, float]]:
    """Returns the estimates and true accuracies of three teachers whose weights are the probabilities to be right.

    A share `student` of the student's labels are those of the targets; the others are of no teacher.
    """
    rng = np.random.default_rng(0)
    weights = rng.dirichlet([0.3] * 3, n)
    gold = (rng.random((n, 1)) > weights.cumsum(axis=1)).sum(axis=1)
    predicted = np.tile(np.arange(3), (n, 1))
    texts = WeighedTexts(predicted, rng.random((n, 3)), weights, np.arange(n) < n // 2)
    targets, ensemble = weights.argmax(axis=1), np.where(rng.random(n) < 0.5, weights.argmax(axis=1), 0)
    own = np.where(rng.random(n) < student, targets, 3)
    value = float(weights.max(axis=1).mean())
    estimate: AccuracyEstimate = {"low": value - 0.1, "value": value, "high": value + 0.1}
    labels = {"student": own, "targets": targets, "ensemble": ensemble, "muka": texts.muka}
    right = {name: float((label == gold).mean()) for name, label in labels.items()}
    return weight_estimates(texts, estimate, n, ensemble=ensemble, student=own), right


def test_calibrated_weights_estimate_every_system_and_the_gap() -> None:
    estimates, right = made(0.6)
    rows = {row["kind"]: row for row in estimates["systems"]}
    assert list(rows) == ["student", "targets", "ensemble", "muka"]
    assert [rows[kind]["n"] for kind in ("student", "targets", "ensemble")] == [1000, 2000, 2000]
    for kind, row in rows.items():
        assert row["mean"] == pytest.approx(right[kind], abs=0.03)
        assert row["low"] < row["mean"] < row["high"]
    gap = estimates["gap"]
    assert gap is not None
    assert gap["mean"] == pytest.approx(right["ensemble"] - right["student"], abs=0.04)
    assert gap["low"] < gap["mean"] < gap["high"]
    assert gap["high"] - gap["low"] < 0.1
    better = made(1.0)[0]["gap"]
    assert better is not None
    assert better["high"] < 0


def test_a_student_with_the_labels_of_its_targets_has_their_estimate() -> None:
    predicted = np.array([[0, 2], [1, 2], [1, 3]] * 10)
    weights = np.array([[0.9, 0.1], [0.2, 0.8], [0.7, 0.3]] * 10)
    texts = WeighedTexts(predicted, np.ones((30, 2)), weights, np.ones(30, dtype=bool))
    labels = np.array([0, 2, 1] * 10)
    accuracy = estimated_accuracy([0.8], 30)
    estimates = weight_estimates(texts, accuracy, 30, ensemble=labels, student=labels)
    student, targets, ensemble, muka = estimates["systems"]
    for row in (student, targets, ensemble):
        figures = row["low"], row["mean"], row["high"]
        assert figures == pytest.approx((accuracy["low"], accuracy["value"], accuracy["high"]), abs=2e-4)
    assert muka["mean"] < targets["mean"]
    assert estimates["gap"] == {"n": 30, "mean": 0, "low": 0, "high": 0}


def test_without_held_out_texts_the_student_has_no_estimate() -> None:
    texts = replace(TEXTS, held_out=np.zeros(4, dtype=bool))
    labels = np.array([0, 1, 1, 0])
    estimates = weight_estimates(texts, TARGETS, 4, ensemble=labels, student=labels)
    assert [row["kind"] for row in estimates["systems"]] == ["targets", "ensemble", "muka"]
    assert estimates["gap"] is None


def test_a_student_whose_labels_no_teacher_predicts_has_an_interval_above_zero() -> None:
    labels = np.array([0, 1, 1, 0])
    estimates = weight_estimates(TEXTS, TARGETS, 4, ensemble=labels, student=labels + 9)
    student = estimates["systems"][0]
    assert 0 <= student["low"] <= student["mean"] < 0.01 < student["high"] < 1


@pytest.mark.parametrize("turn", [0, 1, 5])
def test_names_in_the_wrong_order_fit_no_better_than_random_ones(turn: int) -> None:
    draw = np.random.default_rng(turn)
    names = draw.normal(size=(64, 12))
    topics = draw.integers(12, size=400)
    states = names.T[topics] + 4 * draw.normal(size=(400, 64))
    share = as_good_orders(states, names, (topics + turn) % 12)
    assert share is not None
    assert (share > UNCLEAR_ORDER) == bool(turn)
    assert as_good_orders(states, names[:, :5], topics % 5) is None
    assert as_good_orders(states[:24], names, np.arange(24) % 12) is None
