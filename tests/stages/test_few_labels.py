"""The correction of weights by a few gold labels: on synthetic evidence whose right teacher is known, and by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from amalgam.pipeline.console import Console
from amalgam.stages.app.label import LabelEffect
from amalgam.stages.weigh_teachers import few_labels
from amalgam.stages.weigh_teachers.few_labels import (
    Corrected,
    Correction,
    Weighed,
    corrected,
    correction_of,
    loss_of,
    with_known,
)

Array = np.ndarray[Any, np.dtype[Any]]


def mistaken(texts: int = 600, seed: int = 0) -> tuple[Array, list[Array], Array, Array]:
    """Weights that prefer the first teacher too much, evidence, answers, and the right teacher."""
    random = np.random.default_rng(seed)
    right = random.integers(2, size=texts)
    evidence = random.normal(size=(texts, 2)) + 2.0 * np.eye(2)[right]
    scores = 2 * evidence + np.array([4.0, 0.0])
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    answers = np.stack([random.integers(2, size=texts), 2 + random.integers(2, size=texts)], axis=1)
    return weights / weights.sum(axis=1, keepdims=True), [evidence], answers, right


def accuracy(weights: Array, right: Array) -> float:
    return float((weights.argmax(axis=1) == right).mean())


def correct(
    weights: Array, kinds: list[Array], answers: Array, rows: Array, has_label: Array
) -> tuple[Corrected, Array]:
    """The fit by some labelled texts, and the weights of all texts after it."""
    texts = Weighed(weights, kinds, answers)
    fit = corrected(texts.at(rows), has_label)
    return fit, with_known(fit.correction(texts), rows, has_label)


def test_a_few_labels_correct_wrong_shares() -> None:
    weights, kinds, answers, right = mistaken()
    rows = np.arange(0, 600, 20)
    result, after = correct(weights, kinds, answers, rows, np.eye(2, dtype=bool)[right[rows]])
    others = np.setdiff1d(np.arange(600), rows)
    assert accuracy(after[others], right[others]) > accuracy(weights[others], right[others]) + 0.1
    assert result.loss_after < result.loss_before
    assert after.sum(axis=1) == pytest.approx(1)


@pytest.mark.parametrize("strength", few_labels.STRENGTHS)
def test_the_correction_converges_at_every_strength(strength: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_labels, "STRENGTHS", (strength,))
    weights, kinds, answers, right = mistaken()
    rows = np.arange(0, 600, 10)
    result, _ = correct(weights, kinds, answers, rows, np.eye(2, dtype=bool)[right[rows]])
    assert result.strength == strength
    assert result.loss_after < result.loss_before


def test_labels_that_the_weights_predict_change_the_labelled_texts_alone() -> None:
    _, kinds, answers, right = mistaken()
    weights = 0.9 * np.eye(2)[right] + 0.05
    rows = np.arange(0, 600, 60)
    result, after = correct(weights, kinds, answers, rows, np.eye(2, dtype=bool)[right[rows]])
    others = np.setdiff1d(np.arange(600), rows)
    assert result.strength is None
    assert np.array_equal(after[others], weights[others])
    assert np.array_equal(after[rows], np.eye(2)[right[rows]])


def test_one_label_changes_its_own_text_alone() -> None:
    weights, kinds, answers, right = mistaken()
    _, after = correct(weights, kinds, answers, np.array([5]), np.eye(2, dtype=bool)[right[[5]]])
    assert np.array_equal(np.delete(after, 5, axis=0), np.delete(weights, 5, axis=0))


def test_teachers_that_know_the_label_divide_a_text_by_their_weights() -> None:
    weights, kinds, answers, _ = mistaken()
    weights, kinds = (
        np.concatenate([weights, weights[:, :1]], axis=1) / 2,
        [np.concatenate([kinds[0], kinds[0][:, :1]], axis=1)],
    )
    answers = np.concatenate([answers, answers[:, :1]], axis=1)
    _, after = correct(weights, kinds, answers, np.array([0]), np.array([[True, False, True]]))
    assert after[0] == pytest.approx([0.5, 0.0, 0.5])


def test_weights_by_cross_validation_do_not_depend_on_the_own_label(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_labels, "STRENGTHS", (30.0,))
    weights, kinds, answers, right = mistaken()
    rows = np.arange(0, 600, 5)
    has_label = np.eye(2, dtype=bool)[right[rows]]
    flipped = has_label.copy()
    flipped[4] = ~flipped[4]
    own, other = (correct(weights, kinds, answers, rows, labels)[0] for labels in (has_label, flipped))
    assert own.strength == other.strength == 30.0
    fold = np.arange(len(rows)) % 10 == 4
    assert other.cross_validated[fold] == pytest.approx(own.cross_validated[fold])
    assert other.cross_validated[~fold] != pytest.approx(own.cross_validated[~fold])
    assert other.fitted[4] != pytest.approx(own.fitted[4])


def test_cross_validation_estimates_the_accuracy_on_other_texts_and_the_fit_is_optimistic() -> None:
    errors: dict[str, list[float]] = {"fitted": [], "cross_validated": []}
    for seed in range(20):
        weights, kinds, answers, right = mistaken(seed=seed)
        noise = [np.random.default_rng([seed, place]).normal(size=(600, 2)) for place in range(8)]
        rows = np.arange(0, 600, 20)
        result, after = correct(weights, [*kinds, *noise], answers, rows, np.eye(2, dtype=bool)[right[rows]])
        others = np.setdiff1d(np.arange(600), rows)
        true = accuracy(after[others], right[others])
        errors["fitted"].append(accuracy(result.fitted, right[rows]) - true)
        errors["cross_validated"].append(accuracy(result.cross_validated, right[rows]) - true)
    error = float(np.std(errors["cross_validated"])) / np.sqrt(20)
    assert abs(np.mean(errors["cross_validated"])) < 3 * error
    assert np.mean(errors["fitted"]) > np.mean(errors["cross_validated"]) + 0.02


def test_a_correction_learns_from_a_part_of_many_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, kinds, answers, right = mistaken()
    rows = np.arange(300)
    has_label = np.eye(2, dtype=bool)[right[rows]]
    monkeypatch.setattr(few_labels, "MOST_TRAINING", 60)
    result, _ = correct(weights, kinds, answers, rows, has_label)
    few, _ = correct(weights, kinds, answers, rows[:60], has_label[:60])
    assert result.strength == few.strength is not None
    assert (result.correction.coefficients == few.correction.coefficients).all()
    assert (result.cross_validated[:60] == few.cross_validated).all()
    assert (result.cross_validated[60:] == result.fitted[60:]).all()
    assert len(result.cross_validated) == len(result.fitted) == 300


def test_teachers_without_weight_share_a_text_whose_label_only_they_know() -> None:
    weights, kinds, answers, _ = mistaken()
    weights = np.concatenate([weights, np.zeros((600, 1))], axis=1)
    weights[0] = [1.0, 0.0, 0.0]
    kinds, answers = [np.zeros((600, 3))], np.concatenate([answers, answers[:, :1]], axis=1)
    _, after = correct(weights, kinds, answers, np.array([0]), np.array([[False, True, True]]))
    assert after[0] == pytest.approx([0.0, 0.5, 0.5])


def test_a_small_gain_changes_no_other_text(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, kinds, answers, right = mistaken()
    rows = np.arange(0, 600, 20)
    monkeypatch.setattr(few_labels, "LEAST_GAIN", 1e6)
    result, after = correct(weights, kinds, answers, rows, np.eye(2, dtype=bool)[right[rows]])
    assert result.strength is None
    assert np.array_equal(np.delete(after, rows, axis=0), np.delete(weights, rows, axis=0))


def test_an_answer_without_a_labelled_text_has_no_bias() -> None:
    """The first teacher is right where it answers 0, and wrong where it answers 9; no labelled text has 4 or 12."""
    answers = np.array([[0, 20], [9, 20]] * 30)
    labelled = Weighed(np.full((60, 2), 0.5), [np.zeros((60, 2))], answers)
    correction = correction_of(labelled, np.eye(2, dtype=bool)[np.arange(60) % 2], 1.0)
    others = np.array([[0, 20], [9, 20], [4, 20], [12, 20]])
    first = correction(Weighed(np.full((4, 2), 0.5), [np.zeros((4, 2))], others))[:, 0]
    assert first[0] > 0.8
    assert first[1] < 0.2
    assert first[2] == first[3] == pytest.approx(0.5, abs=0.1)


def test_one_text_that_weights_get_wrong_has_a_finite_loss() -> None:
    assert loss_of(np.array([[1.0, 0.0]]), np.array([[False, True]])) == pytest.approx(-np.log(1e-4))


def test_the_coefficients_have_the_largest_posterior_around_the_weights_without_labels() -> None:
    weights, kinds, answers, right = mistaken(60)
    texts, has_label = Weighed(weights, kinds, answers), np.eye(2, dtype=bool)[right]
    fitted = correction_of(texts, has_label, 3.0)
    centre = np.eye(len(fitted.coefficients))[0]

    def posterior(coefficients: Array) -> float:
        after = Correction(coefficients, fitted.biases)(texts)
        return -60 * loss_of(after, has_label) - 3.0 / 2 * float(((coefficients - centre) ** 2).sum())

    steps = 0.02 * np.concatenate([np.eye(len(centre)), -np.eye(len(centre))])
    assert max(posterior(fitted.coefficients + step) for step in steps) < posterior(fitted.coefficients)


@pytest.mark.parametrize(
    ("before", "after", "lines"),
    [
        (0.46, 0.48, []),
        (0.1, 0.48, ["shares without labels are outside their intervals (first, second): use the labels"]),
        (0.48, 0.2, ["shares with labels are outside their intervals (first, second): label more texts"]),
        (0.38, 0.38, []),  # less than 2 points outside
    ],
)
def test_shares_that_contradict_the_labels_are_named(
    before: float, after: float, lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    shares = {"first": (before, after), "second": (1 - before, 1 - after)}
    by_labels = dict.fromkeys(shares, (0.5, 0.39, 0.61))
    effect = LabelEffect(80, None, 0, 0, 0, 400, 9, 9, 70, shares, by_labels, None)
    effect.print_to(Console())
    printed = capsys.readouterr().out
    assert [line for line in printed.splitlines() if "outside" in line] == lines
    assert "first    " in printed
    assert "50.0 %           39.0 to 61.0" in printed
