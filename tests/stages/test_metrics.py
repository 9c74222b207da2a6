"""Metrics against numbers worked out by hand."""

from __future__ import annotations

import json
import math
from statistics import NormalDist

import numpy as np
import pytest

from amalgam.data.keys import LabelSpace
from amalgam.pipeline.errors import DataError, WorkError
from amalgam.stages.report.evaluation import SystemPredictions, ensemble, evaluate
from amalgam.stages.report.quality import unknown_quality
from amalgam.stages.report.tables import unknown_line

LABELS = LabelSpace(("a", "b", "c", "d"), {"left": (0, 1), "right": (2, 3)})
# Predictions a, a, c, b; the third is sure, the others are not.
PROBABILITIES = np.array(
    [[0.7, 0.1, 0.1, 0.1], [0.6, 0.2, 0.1, 0.1], [0.0, 0.0, 1.0, 0.0], [0.1, 0.5, 0.4, 0.0]], dtype=np.float64
)
GOLD = np.array([0, 1, 2, 2])


def test_of_equal_logits_the_ensemble_takes_that_of_the_surer_teacher_in_any_order() -> None:
    left, right = np.array([[5.0, 4.5], [5.0, 0.0]]), np.array([[5.0, 0.0], [4.9921875, -9.0]])
    for teachers in ({"left": left, "right": right}, {"right": right, "left": left}):
        assert ensemble(teachers, LABELS).argmax(axis=1).tolist() == [2, 0]


def test_every_figure_equals_the_one_worked_out_by_hand() -> None:
    metrics = evaluate(SystemPredictions.of(PROBABILITIES, GOLD), GOLD, LABELS, bins=5)
    assert metrics["n"] == 4
    assert metrics["accuracy"] == 0.5
    # a: 1 right of gold 1 + predicted 2; b: never right; c: 1 right of gold 2 + predicted 1; d occurs nowhere.
    assert metrics["label_f1"] == {"a": pytest.approx(2 / 3), "b": 0.0, "c": pytest.approx(2 / 3), "d": None}
    assert metrics["macro_f1"] == pytest.approx((2 / 3 + 0 + 2 / 3) / 3)
    assert metrics["nll_nats"] == pytest.approx(-(math.log(0.7) + math.log(0.2) + math.log(1.0) + math.log(0.4)) / 4)
    assert metrics["nll_infinite"] == 0
    # (0.4, 0.6]: 0.6 and 0.5, none right; (0.6, 0.8]: 0.7, right; (0.8, 1]: 1.0, right.
    assert metrics["ece"] == pytest.approx((2 * 0.55 + 1 * 0.3 + 1 * 0.0) / 4)
    assert metrics["slice_accuracy"] == {"left": 0.5, "right": 0.5}
    assert metrics["slice_n"] == {"left": 2, "right": 2}
    assert metrics["confusion"] == [[1, 0, 0, 0], [1, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0]]


def test_texts_read_in_parts_have_the_scores_of_one_read() -> None:
    parts = [SystemPredictions.of(PROBABILITIES[rows], GOLD[rows]) for rows in (slice(0, 1), slice(1, 1), slice(1, 4))]
    at_once = evaluate(SystemPredictions.of(PROBABILITIES, GOLD), GOLD, LABELS, bins=5)
    assert evaluate(SystemPredictions.joined(parts), GOLD, LABELS, bins=5) == at_once


def test_a_slices_accuracy_is_over_the_union_and_not_its_own_labels() -> None:
    # Within {c, d} alone this text would be right.
    probabilities = np.array([[0.5, 0.0, 0.4, 0.1]])
    metrics = evaluate(SystemPredictions.of(probabilities, np.array([2])), np.array([2]), LABELS, bins=10)
    assert metrics["slice_accuracy"] == {"left": None, "right": 0.0}
    assert metrics["slice_n"] == {"left": 0, "right": 1}


def test_an_infinite_likelihood_is_counted_and_the_result_is_plain_json() -> None:
    gold = np.array([0, 1, 0, 3])
    metrics = evaluate(SystemPredictions.of(PROBABILITIES, gold), gold, LABELS, bins=5)
    assert metrics["nll_nats"] is None
    assert metrics["nll_infinite"] == 2
    assert json.loads(json.dumps(metrics, allow_nan=False)) == metrics


def test_of_equal_probabilities_the_first_label_is_predicted() -> None:
    metrics = evaluate(SystemPredictions.of(np.full((1, 4), 0.25), np.array([0])), np.array([0]), LABELS, bins=4)
    assert metrics["accuracy"] == 1.0
    # 0.25 is the upper end of the first bin, so the gap is 0.75 whatever the rounding.
    assert metrics["ece"] == pytest.approx(0.75)


def test_a_label_of_two_teachers_counts_in_both_slices() -> None:
    labels = LabelSpace(LABELS.names, {"left": (0, 1), "right": (1, 2)})
    metrics = evaluate(SystemPredictions.of(PROBABILITIES, GOLD), GOLD, labels, bins=5)
    assert metrics["slice_n"] == {"left": 2, "right": 3}
    assert metrics["slice_accuracy"]["right"] == pytest.approx(1 / 3)


def test_no_texts_and_predictions_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(DataError, match="labelled texts"):
        evaluate(SystemPredictions.of(np.zeros((0, 4)), GOLD[:0]), GOLD[:0], LABELS, bins=5)
    broken = PROBABILITIES.copy()
    broken[2, 1] = np.nan
    with pytest.raises(WorkError, match="where: rows 2"):
        evaluate(SystemPredictions.of(broken, GOLD), GOLD, LABELS, bins=5)


def test_auroc_counts_the_pairs_that_the_unknown_score_orders() -> None:
    """Of 2 x 3 pairs, 4 are in order and 1 is equal; the threshold 2.5 flags one of three and one of two texts."""
    quality = unknown_quality(np.array([1.0, 2.0, 4.0]), np.array([2.0, 5.0]), 2.5)
    auroc, low, high = quality["auroc"] or 0.0, quality["low"] or 0.0, quality["high"] or 0.0
    assert auroc == pytest.approx(4.5 / 6)
    assert (quality["labelled_flagged"], quality["unknown_flagged"]) == (1, 1)
    assert low < auroc < high <= 1
    assert quality["curve"][0] == {"labelled": 0, "unknown": 0}
    assert quality["curve"][-1] == {"labelled": 1, "unknown": 1}
    one, none = np.zeros(1), np.zeros(0)
    assert unknown_line(unknown_quality(one, none, 1.0)) == "the student flags 0.0 % of 1 test text as unknown"
    flagged = "the student flags 100.0 % of 1 unknown test text and 0.0 % of 1 other as unknown (AUROC 1.000, "
    assert unknown_line(unknown_quality(one, one + 2, 1.0)).startswith(flagged)


@pytest.mark.parametrize(
    ("labelled", "unknown", "distance"), [(80, 40, 1.5), (200, 10, 2.7), (200, 5, 3.6), (5, 200, 2.7)]
)
def test_the_interval_of_auroc_has_the_true_value_in_95_of_100_samples(
    labelled: int, unknown: int, distance: float
) -> None:
    """Of unit normals, AUROC is the normal distribution at their distance / sqrt(2): 0.856 to 0.995."""
    random, inside, auroc = np.random.default_rng(0), 0, NormalDist().cdf(distance / math.sqrt(2))
    for _ in range(200):
        quality = unknown_quality(random.normal(size=labelled), random.normal(size=unknown) + distance, 0.0)
        inside += (quality["low"] or 0.0) <= auroc <= (quality["high"] or 0.0)
    assert inside >= 180


def test_an_auroc_of_1_on_few_texts_is_not_certain_and_one_on_many_is_nearly() -> None:
    lows = [unknown_quality(np.zeros(500), np.ones(texts), 0.5)["low"] or 0.0 for texts in (1, 5, 500)]
    assert lows == sorted(lows)
    assert lows[0] < 0.5 < lows[1] < 0.9 < lows[2]
