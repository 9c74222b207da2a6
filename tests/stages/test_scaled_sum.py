"""The sum of the evidence: its scale, the teachers' shares and the linear maps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from amalgam.data.arrays import softmax
from amalgam.stages.weigh_teachers import weigh
from amalgam.stages.weigh_teachers.linear_map import CONSTANT, RIDGE, LinearMap, label_biases, preferred
from amalgam.stages.weigh_teachers.neighbours import Centred, of_length_1
from amalgam.stages.weigh_teachers.signals import Params
from amalgam.stages.weigh_teachers.weigh import CLEAR, Evidence, by_leads, by_range, with_maps, with_shares
from amalgam.tests.stages.test_weighing import rightly

Array = np.ndarray[Any, np.dtype[Any]]


def evidence_of(predicted: Array) -> Evidence:
    return Evidence({}, predicted, int(predicted.max()) + 1, np.zeros((len(predicted), 0), np.int32))


def varied(texts: int, teachers: int) -> Array:
    """Return predictions of three labels for each teacher."""
    return np.arange(texts)[:, None] % 3 + 3 * np.arange(teachers)


def test_a_teachers_clearest_texts_have_one_value_and_those_of_others_zero() -> None:
    signal = np.zeros((90, 2))
    signal[:30, 0], signal[30:60, 1], signal[60:] = 3.0, 8.0, [1.0, 1.5]
    scaled = by_leads(signal, signal, evidence_of(varied(90, 2)), Params())
    assert scaled[:30] == pytest.approx(np.tile([CLEAR, 0.0], (30, 1)))
    assert scaled[30:60] == pytest.approx(np.tile([0.0, CLEAR], (30, 1)))
    assert scaled[60:] == pytest.approx(CLEAR * np.tile([1 / 3, 1.5 / 8], (30, 1)))


def test_each_label_of_a_teacher_counts_equally_in_its_scale_and_rare_ones_together() -> None:
    signal, predicted = np.zeros((200, 2)), np.tile([1, 9], (200, 1))
    signal[:80, 0], signal[80:100, 0], signal[100:130, 0], signal[130:, 1] = 6.0, 2.0, 1.0, 2.0
    predicted[:80, 0], predicted[100:130, 0] = 0, np.arange(30) % 3 + 2
    scaled = by_leads(signal, signal, evidence_of(predicted), Params())
    assert scaled[[0, 90, 110], 0] == pytest.approx([CLEAR * 2, CLEAR * 2 / 3, CLEAR / 3])


@pytest.mark.parametrize(("texts", "teachers"), [(8, 2), (20, 2), (25, 5)])
def test_in_few_texts_the_clearest_ones_of_each_teacher_differ(texts: int, teachers: int) -> None:
    random = np.random.default_rng(0)
    signal = random.normal(0, 0.1, (texts, teachers)) + np.eye(teachers)[np.arange(texts) % teachers]
    scaled = by_leads(signal, signal, evidence_of(varied(texts, teachers)), Params())
    assert (scaled.argmax(axis=1) == np.arange(texts) % teachers).all()
    assert np.abs(scaled).max() < 2


def test_a_few_very_low_values_change_no_scale() -> None:
    """A range begins at them, so all other values are near its upper end."""
    random = np.random.default_rng(0)
    right = random.choice(2, 4000)
    signal = np.eye(2)[right] + 0.2 * random.normal(size=(4000, 2))
    signal[:10, 0] -= 6.0
    scaled = by_leads(signal, signal, evidence_of(varied(4000, 2)), Params())
    assert rightly(scaled, right) > 0.99
    assert rightly(by_range(signal, np.zeros((4000, 2), int), Params()), right) < 0.9


@pytest.mark.parametrize("part", [0.5, 0.1])
def test_the_scale_does_not_depend_on_the_share_of_own_texts(part: float) -> None:
    random = np.random.default_rng(0)
    right = random.choice(2, 6000, p=[1 - part, part])
    signal = random.uniform(size=(6000, 2)) * 0.2 + np.eye(2)[right]
    scaled = by_leads(signal, signal, evidence_of(varied(6000, 2)), Params())
    assert rightly(scaled, right) > 0.99
    assert scaled[right == 0, 0].mean() == pytest.approx(scaled[right == 1, 1].mean(), abs=0.05)


def test_a_teacher_with_one_prediction_or_a_constant_value_has_the_scale_of_the_others() -> None:
    random = np.random.default_rng(0)
    right = random.choice(3, 3000)
    signal = np.eye(3)[right] + 0.2 * random.normal(size=(3000, 3))
    predicted = varied(3000, 3)
    predicted[:, 0] = 0
    scaled = by_leads(signal, signal, evidence_of(predicted), Params())
    own, *others = scaled.std(axis=0) / signal.std(axis=0)
    assert own == pytest.approx(np.mean(others), rel=0.01)
    signal[:, 0] = 0.5
    scaled = by_leads(signal, signal, evidence_of(varied(3000, 3)), Params())
    assert scaled[:, 0] == pytest.approx(np.full(3000, CLEAR / 2), abs=0.1)


@pytest.mark.parametrize("texts", [30, 2000])
def test_a_teacher_without_clear_texts_of_its_own_has_the_scale_of_the_others(texts: int) -> None:
    """The evidence of the first one is high where that of the second is higher."""
    random = np.random.default_rng(0)
    common = random.normal(size=texts)
    signal = np.stack([common, 2 * common], axis=1) + 0.1 * random.normal(size=(texts, 2))
    scaled = by_leads(signal, signal, evidence_of(varied(texts, 2)), Params())
    own, other = scaled.std(axis=0) / signal.std(axis=0)
    assert own == pytest.approx(other)
    assert np.abs(scaled).max() < 3


def test_equal_evidence_of_all_teachers_decides_nothing() -> None:
    signal = np.random.default_rng(0).normal(size=(200, 1)).repeat(3, axis=1)
    signal[:, 1] += 1e-9
    scaled = by_leads(signal, signal, evidence_of(varied(200, 3)), Params())
    assert np.ptp(scaled, axis=1).max() < 1e-6
    assert np.abs(scaled).max() < 10


def test_other_blocks_have_the_scale_of_the_first() -> None:
    signal, params = np.random.default_rng(0).normal(size=(400, 2)), Params()
    evidence = evidence_of(varied(400, 2))
    whole = by_leads(signal, signal, evidence, params)
    part = replace(evidence, predicted=evidence.predicted[:7])
    again = by_leads(signal[:7], signal[:7], part, Params(params.values, is_reused=True))
    assert again == pytest.approx(whole[:7])
    assert by_leads(signal[:0], signal[:0], evidence, Params()).shape == (0, 2)
    assert (by_leads(signal[:, :1], signal[:, :1], evidence, Params()) == signal[:, :1]).all()


def mapped(seed: int = 0, texts: int = 1200) -> tuple[Array, Array, Evidence]:
    """Returns noisy evidence, the right teachers, and states in which each of six labels has a direction."""
    random = np.random.default_rng(seed)
    gold = random.choice(6, texts, p=[0.3, 0.2, 0.2, 0.1, 0.1, 0.1])
    right = gold // 3
    others = np.stack([random.integers(3, size=texts) + 3 * teacher for teacher in range(2)], axis=1)
    candidates = np.where(right[:, None] == np.arange(2), gold[:, None], others)
    states = [(np.eye(6)[gold] @ random.normal(size=(6, 24)) + 2 * random.normal(size=(texts, 24))) for _ in range(2)]
    spaces = [Centred.of(own.astype(np.float32)) for own in states]
    signal = 0.25 * np.eye(2)[right] + 0.3 * random.normal(size=(texts, 2))
    near = np.zeros((texts, 0), np.int32)
    return signal, right, Evidence({}, candidates, 6, near, spaces=spaces)


def test_linear_maps_correct_errors_of_single_texts() -> None:
    signal, right, evidence = mapped()
    assert rightly(with_maps(signal, evidence, Params())[0], right) > rightly(signal, right) + 0.05


def test_linear_maps_give_no_whole_label_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first teacher predicts 0 for all texts of label 3, and the signal is right for half of them."""
    signal, right, evidence = mapped()
    own = np.take_along_axis(evidence.predicted, right[:, None], axis=1)[:, 0] == 3
    evidence = replace(evidence, predicted=np.where(own[:, None], [0, 3], evidence.predicted))
    signal[own, 1] -= 0.2
    kept = rightly(with_maps(signal, evidence, Params())[0][own], right[own])
    assert kept > 0.5
    monkeypatch.setattr(weigh, "label_biases", lambda *_: np.zeros((2, 6)))
    assert kept > rightly(with_maps(signal, evidence, Params())[0][own], right[own]) + 0.02


def test_a_prediction_of_a_map_leaves_the_text_out() -> None:
    _, _, evidence = mapped(texts=60)
    space, labels = evidence.spaces[0], evidence.predicted[:, 0].copy()
    own = LinearMap.of(space)
    leave_one_out, _ = own.leave_one_out(own.coefficients(labels, 6), labels, evidence.predicted)
    inputs = np.concatenate([space[:], np.full((60, 1), CONSTANT)], axis=1).astype(np.float64)
    for text in (0, 17, 59):
        others = np.arange(60) != text
        products = inputs[others].T @ inputs[others] + RIDGE * np.eye(25)
        coefficients = np.linalg.solve(products, inputs[others].T @ np.eye(6)[labels[others]])
        assert leave_one_out[text] == pytest.approx((inputs[text] @ coefficients)[evidence.predicted[text]], abs=1e-4)


def test_other_blocks_reuse_the_maps_of_the_fitted_block() -> None:
    signal, right, evidence = mapped(texts=2400)
    first, second = slice(0, 1200), slice(1200, 2400)

    def part(rows: slice) -> Evidence:
        spaces = [own[rows] for own in evidence.spaces]
        return replace(evidence, predicted=evidence.predicted[rows], near=evidence.near[rows], spaces=spaces)

    params = Params()
    _, confirmed = with_maps(signal[first], part(first), params)
    others, also_confirmed = with_maps(signal[second], part(second), Params(params.values, is_reused=True))
    assert rightly(others, right[second]) > rightly(signal[second], right[second]) + 0.05
    assert also_confirmed.mean() == pytest.approx(confirmed.mean(), abs=0.05)


def test_fewer_targets_with_errors_are_confirmed() -> None:
    """Left out of its own prediction, a text does not confirm itself."""
    shares = []
    for noise in (0.05, 0.4, 0.8):
        _, right, evidence = mapped()
        signal = 0.25 * np.eye(2)[right] + noise * np.random.default_rng(1).normal(size=(1200, 2))
        total, confirmed = with_maps(signal, evidence, Params())
        shares.append((confirmed.mean(), rightly(total, right)))
    (most, _), (middle, _), (least, right_of_few) = shares
    assert most > middle + 0.02 > least + 0.04
    assert least < right_of_few
    with_noise = replace(
        evidence, spaces=[*evidence.spaces, of_length_1(np.random.default_rng(2).normal(size=(1200, 8)))]
    )
    *shares, of_noise = with_maps(signal, with_noise, Params())[1].mean(axis=0).tolist()
    assert of_noise < 0.6 * max(shares)
    assert weigh.estimated_accuracy([*shares, of_noise], 1200) == weigh.estimated_accuracy(shares, 1200)
    one_teacher = with_maps(signal[:, :1], evidence, Params())[1]
    assert one_teacher.min() == 1


def test_teachers_with_the_same_candidate_add_their_weights_up() -> None:
    assert preferred(np.array([[0.4, 0.3, 0.3]]), np.array([[5, 7, 7]])).tolist() == [7]


def test_generated_texts_have_known_shares_if_each_teacher_has_some() -> None:
    right = np.random.default_rng(0).choice(2, 4000, p=[0.85, 0.15])
    signal = 0.3 * np.eye(2)[right] + 0.25 * np.random.default_rng(1).normal(size=(4000, 2))
    written = np.eye(2)[(np.arange(4000) % 4 == 0).astype(int)]
    means = softmax(with_shares(signal, written, Params()) / weigh.RANGE_TEMPERATURE).mean(axis=0)
    assert means == pytest.approx([0.75, 0.25], abs=1e-3)
    unknown = with_shares(signal, np.tile([0.9, 0.0], (4000, 1)), Params())
    assert np.array_equal(unknown, with_shares(signal, None, Params()))


def test_a_teacher_whose_range_is_too_short_gets_fewer_texts_of_others_and_clear_evidence_decides() -> None:
    random, right = np.random.default_rng(0), np.random.default_rng(1).choice(2, 4000, p=[0.6, 0.4])
    unclear = 0.2 * np.eye(2)[right] + 0.15 * random.normal(size=(4000, 2)) + np.array([0.2, 0.0])
    assert rightly(with_shares(unclear, None, Params()), right) > rightly(unclear, right) + 0.01
    clear = 0.6 * np.eye(2)[right] + 0.1 * random.normal(size=(4000, 2))
    biased = with_shares(clear, None, Params())
    assert (biased.argmax(axis=1) == clear.argmax(axis=1)).mean() > 0.999
    added = (biased - clear)[0]
    means = softmax(biased / weigh.RANGE_TEMPERATURE).mean(axis=0)
    assert added == pytest.approx(-weigh.SHARE_FACTOR * np.log(2 * means), abs=1e-6)
    lost = with_shares(np.tile([9.0, 0.0], (100, 1)), None, Params()) - np.tile([9.0, 0.0], (100, 1))
    assert lost.max() <= -weigh.SHARE_FACTOR * np.log(2 * weigh.LEAST_SHARE) + 1e-9


def test_biases_give_labels_their_parts_of_a_weight_back_and_a_label_without_texts_a_finite_one() -> None:
    before, after = np.array([[1.0], [1.0]]), np.array([[2.0], [0.0]])
    biases = label_biases(before, after, np.array([[0], [1]]), 2)
    assert biases == pytest.approx(np.log([[1.5 / 2.5, 1.5 / 0.5]]))
