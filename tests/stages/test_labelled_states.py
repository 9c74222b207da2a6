"""Maps from states, learned from a few gold labels: they find the texts of a teacher that the weights have lost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from amalgam.stages.weigh_teachers import few_labels
from amalgam.stages.weigh_teachers.labelled_states import PartlyLabelled, fit_labels, ridge
from amalgam.stages.weigh_teachers.linear_map import CONSTANT, RIDGE, preferred
from amalgam.stages.weigh_teachers.neighbours import Centred

Array = Any

LABELS = 6


def lost_teacher(texts: int = 1200, labelled: int = 50, seed: int = 0) -> tuple[PartlyLabelled, Array]:
    """The second of two teachers is right for 0.3 of the texts, and the weights give it none."""
    random = np.random.default_rng(seed)
    gold = random.choice(LABELS, texts, p=[0.3, 0.2, 0.2, 0.1, 0.1, 0.1])
    right = gold // 3
    answers = np.stack([random.integers(3, size=texts) + 3 * teacher for teacher in range(2)], axis=1)
    answers[np.arange(texts), right] = gold
    centres = np.random.default_rng(9).normal(size=(2, LABELS, 24))
    states = [own[gold] + 1.5 * random.normal(size=(texts, 24)) for own in centres]
    spaces = [Centred.of(own.astype(np.float32)) for own in states]
    weights = np.tile([0.97, 0.03], (texts, 1))
    rows = np.sort(random.choice(texts, labelled, replace=False))
    noise = [random.normal(size=(texts, 2))]
    has_label = np.eye(2, dtype=bool)[right[rows]]
    return PartlyLabelled(weights, noise, answers, spaces, rows, has_label, gold[rows]), right


def rightly(weights: Array, right: Array, rows: Array) -> float:
    others = np.setdiff1d(np.arange(len(right)), rows)
    return float((weights.argmax(axis=1) == right)[others].mean())


def test_a_few_labels_find_the_texts_of_a_lost_teacher() -> None:
    texts, right = lost_teacher()
    without = fit_labels(replace(texts, spaces=[]), [], LABELS)
    assert rightly(without.weights, right, texts.rows) < 0.75
    assert rightly(fit_labels(texts, [], LABELS).weights, right, texts.rows) > 0.85


def test_other_blocks_have_the_evidence_of_the_same_maps() -> None:
    first, _ = lost_teacher()
    second, right = lost_teacher(texts=600, labelled=10, seed=1)
    fit = fit_labels(first, [second], LABELS)
    more = fit.maps(second.spaces, second.predicted)
    weights = fit.result.correction(second.with_kinds(more))
    assert rightly(weights, right, second.rows) > 0.85
    assert len(fit.result.cross_validated) == 60


def test_labels_in_other_blocks_alone_are_learned() -> None:
    first, right = lost_teacher()
    second, _ = lost_teacher(seed=1)
    none = replace(first, rows=first.rows[:0], has_label=first.has_label[:0], gold=first.gold[:0])
    assert rightly(fit_labels(none, [second], LABELS).weights, right, first.rows) > 0.8


def test_a_block_with_one_label_is_fitted() -> None:
    first, right = lost_teacher()
    second, _ = lost_teacher(texts=300, labelled=1, seed=1)
    fit = fit_labels(first, [second], LABELS)
    assert rightly(fit.weights, right, first.rows) > 0.85
    assert len(fit.result.cross_validated) == 51


def test_a_value_of_the_map_to_teachers_leaves_the_text_out() -> None:
    texts, _ = lost_teacher(texts=60)
    states, targets = texts.spaces[0][:], np.random.default_rng(0).normal(size=(60, 2))
    coefficients, leave_one_out = ridge(states, targets)
    inputs = np.concatenate([states, np.full((60, 1), CONSTANT)], axis=1).astype(np.float64)
    for text in (0, 17, 59):
        others = np.arange(60) != text
        products = inputs[others].T @ inputs[others] + RIDGE * np.eye(25)
        without = np.linalg.solve(products, inputs[others].T @ targets[others])
        assert leave_one_out[text] == pytest.approx(inputs[text] @ without, abs=1e-4)
    whole = np.linalg.solve(inputs.T @ inputs + RIDGE * np.eye(25), inputs.T @ targets)
    assert coefficients == pytest.approx(whole, abs=1e-4)


def test_more_labels_than_the_map_learns_have_values_too(monkeypatch: pytest.MonkeyPatch) -> None:
    texts, right = lost_teacher(labelled=200)
    monkeypatch.setattr(few_labels, "MOST_TRAINING", 60)
    assert rightly(fit_labels(texts, [], LABELS).weights, right, texts.rows) > 0.85


def test_states_that_say_nothing_about_teachers_are_not_used() -> None:
    texts, right = lost_teacher()
    random = np.random.default_rng(1)
    spaces = [Centred.of(random.normal(size=(1200, 24)).astype(np.float32)) for _ in range(2)]
    evidence = 2.0 * np.eye(2)[right] + random.normal(size=(1200, 2))
    texts = replace(texts, kinds=[evidence], spaces=spaces)
    fit, plain = fit_labels(texts, [], LABELS), fit_labels(replace(texts, spaces=[]), [], LABELS)
    assert plain.result.strength is not None
    assert fit.maps.to_labels == []
    assert np.allclose(fit.weights, plain.weights, atol=1e-6)


def test_labels_show_which_of_two_teachers_with_the_same_labels_is_right() -> None:
    texts, right = lost_teacher()
    random, gold = np.random.default_rng(2), texts.predicted[np.arange(1200), right]
    errors = random.integers(1, LABELS, size=(1200, 2)) * (random.random((1200, 2)) < [0.6, 0.05])
    answers = (gold[:, None] + errors) % LABELS
    texts = replace(texts, predicted=answers, has_label=np.ones_like(texts.has_label))
    others = np.setdiff1d(np.arange(1200), texts.rows)
    targets = preferred(fit_labels(texts, [], LABELS).weights, answers)
    assert (preferred(texts.weights, answers) == gold)[others].mean() < 0.5
    assert (targets == gold)[others].mean() > 0.9


def test_of_teachers_without_a_shared_label_the_one_that_has_it_is_right() -> None:
    texts, _ = lost_teacher()
    wrong = (texts.predicted + np.random.default_rng(2).integers(2, size=(1200, 2))) % 3 + [0, 3]
    texts = replace(texts, predicted=wrong)
    assert not (wrong[texts.rows] == texts.gold[:, None]).any(axis=1).all()
    assert np.array_equal(texts.is_right, texts.has_label)
