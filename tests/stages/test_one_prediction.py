"""A teacher that predicts one label for nearly all texts: its own texts have no evidence for another teacher."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from amalgam.data.keys import union_of
from amalgam.stages.weigh_teachers import stage
from amalgam.stages.weigh_teachers.label_sets import DistinctTeachers, LabelSets
from amalgam.stages.weigh_teachers.load import lowered_evidence
from amalgam.stages.weigh_teachers.signals import FEW_TEXTS, ONE_LABEL, Params, one_label, standardise, with_absence
from amalgam.stages.weigh_teachers.weigh import by_range

Array = np.ndarray[Any, np.dtype[Any]]

TEXTS = 2000


DETECTOR = union_of({"topics": ("law", "music"), "spam": ("spam",)})


def three_teachers(share: float, seed: int = 0) -> tuple[Array, Array, Array]:
    """Return the right teachers, evidence and predictions; teacher 0 predicts one label and has weak evidence."""
    random = np.random.default_rng(seed)
    right = random.choice(3, TEXTS, p=[share, (1 - share) / 2, (1 - share) / 2])
    signal = random.normal(size=(TEXTS, 3)) + np.array([0.3, 2.5, 2.5]) * (right[:, None] == np.arange(3))
    predicted = np.stack([np.zeros(TEXTS, int), *random.integers(1, 3, size=(2, TEXTS))], axis=1)
    return right, standardise(signal, Params()), predicted


def rightly(signal: Array, right: Array) -> float:
    return float((signal.argmax(axis=1) == right).mean())


@pytest.mark.parametrize("share", [0.2, 1 / 3, 0.6])
def test_texts_without_evidence_for_another_teacher_go_to_one_with_one_prediction(share: float) -> None:
    right, signal, predicted = three_teachers(share)
    before = by_range(
        signal, np.where(predicted == 0, np.arange(TEXTS)[:, None] % 2, predicted), Params()
    )  # two predictions
    after = by_range(with_absence({"answers": signal}, predicted, Params())["answers"], predicted, Params())
    assert rightly(after, right) > rightly(before, right) + 0.03
    own = (after.argmax(axis=1) == 0).mean()
    assert abs(own - share) < 0.25


def test_other_teachers_keep_their_evidence_and_their_range() -> None:
    _, signal, predicted = three_teachers(0.3)
    after = with_absence({"answers": signal}, predicted, Params())["answers"]
    assert (after[:, 1:] == signal[:, 1:]).all()
    scaled = by_range(after, predicted, Params())
    assert scaled[:, 0].mean() == pytest.approx(scaled[:, 1:].mean())
    assert scaled[:, 0].std() == pytest.approx(scaled[:, 1:].std(axis=0).mean())
    two = predicted.copy()
    two[: TEXTS // 10, 0] = 3
    assert (with_absence({"answers": signal}, two, Params())["answers"] == signal).all()
    assert (by_range(signal, predicted, Params())[:, 1:] == by_range(signal, two, Params())[:, 1:]).all()


def test_constant_evidence_is_the_mean_of_the_others() -> None:
    """A file with one label is always certain, and the others' evidence is on both sides of their mean."""
    _, signal, predicted = three_teachers(0.3)
    predicted[: TEXTS // 2, 0] = 3
    scaled = by_range(np.where([True, False, False], 0.0, signal), predicted, Params())
    assert scaled[:, 0] == pytest.approx(np.full(TEXTS, scaled[:, 1:].mean()))
    assert (scaled[:, 1:] == by_range(signal, predicted, Params())[:, 1:]).all()


def test_a_share_above_the_bound_of_enough_texts_counts() -> None:
    predicted = np.zeros((TEXTS, 2), int)
    predicted[: round((1 - ONE_LABEL) * TEXTS), 1] = 1
    assert one_label(predicted).tolist() == [True, False]
    assert not one_label(predicted[: FEW_TEXTS - 1]).any()
    assert not one_label(predicted[:0]).any()


def test_the_only_label_of_a_detector_leaves_it_its_own_evidence() -> None:
    _, signal, predicted = three_teachers(0.3)
    assert one_label(predicted).tolist() == [True, False, False]
    assert not one_label(predicted, detectors=[0]).any()
    assert (with_absence({"answers": signal}, predicted, Params(), [0])["answers"] == signal).all()
    scaled = by_range(signal, predicted, Params(), [0])
    assert (scaled[:, 0].min(), scaled[:, 0].max()) == pytest.approx((0, 1), abs=0.3)
    assert LabelSets.of(DETECTOR).detectors(DETECTOR) == [1]


def test_where_a_teacher_predicts_its_catch_all_its_evidence_falls_to_the_minimum() -> None:
    evidence, params = np.array([[2.0, 5.0], [4.0, 1.0], [3.0, 9.0]]), Params()
    shares = np.array([[0.0, 1.0], [0.5, 1.0], [1.0, 1.0]])
    assert lowered_evidence(evidence, shares, params).tolist() == [[2.0, 5.0], [3.0, 1.0], [3.0, 9.0]]
    later = lowered_evidence(np.array([[6.0, 6.0]]), np.array([[0.5, 0.0]]), Params(params.values, is_reused=True))
    assert later.tolist() == [[4.0, 1.0]]


def test_later_blocks_get_the_values_of_the_first() -> None:
    _, signal, predicted = three_teachers(0.3)
    params = Params()
    whole = with_absence({"answers": signal}, predicted, params)["answers"]
    reused = Params(params.values, is_reused=True)
    parts = [
        with_absence({"answers": signal[start : start + 50]}, predicted[start : start + 50], reused)["answers"]
        for start in range(0, TEXTS, 50)
    ]
    assert np.concatenate(parts) == pytest.approx(whole)


def test_a_label_with_a_line_end_makes_no_second_line_of_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    teachers = DistinctTeachers.of(union_of({"topics": ("law\nnote: all is well", "music")}), [0])
    monkeypatch.setattr(stage, "distinct_teachers", lambda _run: teachers)
    [note] = stage.notes_on_labels(None, np.zeros((FEW_TEXTS, 1), int))  # type: ignore[arg-type]
    assert note.startswith(r"teacher topics predicts law\nnote: all is well for 100.0 % of the texts")


def test_teachers_that_all_predict_one_label_stay_comparable() -> None:
    random = np.random.default_rng(0)
    right = random.integers(2, size=TEXTS)
    signal = standardise(random.normal(size=(TEXTS, 2)) + 2.0 * (right[:, None] == np.arange(2)), Params())
    predicted = np.tile([0, 1], (TEXTS, 1))
    after = by_range(with_absence({"answers": signal}, predicted, Params())["answers"], predicted, Params())
    assert np.isfinite(after).all()
    assert rightly(after, right) > 0.85
