"""Which teacher is the right one: on synthetic scores whose right answer is known, and by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from amalgam.data.arrays import top_margin
from amalgam.pipeline.config.schema import Targets
from amalgam.stages.common.inference.fast_encoder import mean_over_tokens
from amalgam.stages.common.intervals import interval
from amalgam.stages.methods import AMALGAM
from amalgam.stages.weigh_teachers import weigh
from amalgam.stages.weigh_teachers.mixture import mixture, standardised_weights
from amalgam.stages.weigh_teachers.neighbours import (
    BlockSpace,
    Centred,
    compared,
    similar,
)
from amalgam.stages.weigh_teachers.signals import Params, correlation, standardise, standardised_sum
from amalgam.stages.weigh_teachers.weigh import (
    COHERENT,
    EXCLUSIVE,
    Evidence,
    agreement,
    by_leads,
    by_range,
    coherent,
    exclusion,
    joint_signal,
    leading_shares,
    smoothed,
    weights_of_kinds,
)

Array = np.ndarray[Any, np.dtype[Any]]


def scores(shares: list[float], *, separation: float = 3.0, texts: int = 8000, seed: int = 0) -> tuple[Array, Array]:
    """Signals whose scale and level differ by teacher, and the right teacher of each text."""
    random = np.random.default_rng(seed)
    right = random.choice(len(shares), texts, p=shares)
    signal = random.normal(size=(texts, len(shares))) + separation * np.eye(len(shares))[right]
    return signal * np.arange(1, len(shares) + 1) + 10 * np.arange(len(shares)), right


def rightly(weights: Array, right: Array) -> float:
    return float((weights.argmax(axis=1) == right).mean())


def of_softmax(signal: Array) -> Array:
    return standardised_weights(signal, Params())


def of_mixture(signal: Array) -> Array:
    return mixture(signal, None, Params())[0]


@pytest.mark.parametrize(
    "shares", [[0.5, 0.5], [0.8, 0.2], [0.2, 0.8], [0.25, 0.45, 0.1, 0.2], [0.2] * 5, [0.6, 0.1, 0.1, 0.1, 0.1]]
)
def test_the_mixture_finds_the_shares_and_the_right_teachers(shares: list[float]) -> None:
    signal, right = scores(shares)
    weights, fitted = mixture(signal, None, Params())
    assert np.abs(fitted.shares - np.bincount(right) / len(right)).max() < 0.04
    assert rightly(weights, right) > 0.9
    assert weights.sum(axis=1) == pytest.approx(1)


def test_standardised_signals_are_right_where_shares_are_alike_and_the_mixture_where_they_are_not() -> None:
    signal, right = scores([0.5, 0.5])
    assert rightly(of_softmax(signal), right) > 0.97
    signal, right = scores([0.85, 0.15])
    assert rightly(of_mixture(signal), right) > rightly(of_softmax(signal), right) + 0.02


def test_the_mixtures_weights_are_probabilities_of_being_right() -> None:
    signal, right = scores([0.7, 0.3], separation=2.0, texts=20000)
    weights, _ = mixture(signal, None, Params())
    sure = weights.max(axis=1)
    for low, high in ((0.5, 0.7), (0.7, 0.9), (0.9, 0.99)):
        inside = (sure >= low) & (sure < high)
        assert (weights.argmax(axis=1) == right)[inside].mean() == pytest.approx(sure[inside].mean(), abs=0.05)


def test_given_shares_are_kept() -> None:
    """Signals that scatter with the text's length, for example, would give the mixture other shares."""
    signal, right = scores([0.5, 0.5], separation=1.5, texts=4000)
    signal[:, 0] = np.exp(signal[:, 0] / 2)
    estimated, free = mixture(signal, None, Params())
    labels, fixed = mixture(signal, np.array([0.5, 0.5]), Params())
    assert fixed.shares.tolist() == [0.5, 0.5]
    assert abs(free.shares[0] - 0.5) > 0.1
    assert rightly(labels, right) > rightly(estimated, right)


@pytest.mark.parametrize("weights_of", [of_softmax, of_mixture])
def test_one_teacher_weighs_everything_and_signals_that_do_not_differ_weigh_alike(weights_of: Any) -> None:
    assert weights_of(np.arange(5.0)[:, None]).tolist() == [[1.0]] * 5
    assert weights_of(np.ones((4, 2))) == pytest.approx(np.full((4, 2), 0.5))
    assert np.isfinite(weights_of(np.array([[1.0, 2.0]]))).all()


def test_the_margin_is_the_first_logit_less_the_second() -> None:
    assert top_margin(np.array([[1.0, 5.0, 3.5], [-1.0, -1.0, -2.0]], np.float32)).tolist() == [1.5, 0.0]


def test_exclusivity_separates_signals_of_teachers_from_signals_of_difficulty() -> None:
    signal, _ = scores([0.5, 0.3, 0.2], separation=3.0)
    easy = np.random.default_rng(1).normal(size=(8000, 1))
    assert exclusion(signal) > EXCLUSIVE
    assert abs(exclusion(np.random.default_rng(2).normal(size=(8000, 3)))) < 0.05
    assert exclusion(easy + 0.1 * np.random.default_rng(3).normal(size=(8000, 3))) < -0.9 * 2
    assert exclusion(np.array([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])) == pytest.approx(1.0)
    assert exclusion(signal[:, :1]) == 0.0


def test_weights_by_confidence_are_mukas() -> None:
    targets = Targets(temperature=0.2)
    weights = weigh.by_confidence(np.array([[0.8, 0.4]]), np.array([[0, 1]]), targets)
    assert weights[0, 0] == pytest.approx(1 / (1 + np.exp(-2.0)))
    same = weigh.by_confidence(np.array([[0.8, 0.8, 0.4]]), np.array([[0, 0, 1]]), targets)
    assert same[0] == pytest.approx([weights[0, 0] / 2, weights[0, 0] / 2, weights[0, 1]])


def test_confidences_of_unlike_level_are_compared_by_their_range() -> None:
    """MUKA follows the teacher that is more confident of other texts than the second of its own."""
    random = np.random.default_rng(0)
    right = random.choice(2, 2000)
    confidence = np.where(np.eye(2)[right] > 0, [0.8, 0.55], [0.6, 0.35]) + 0.03 * random.normal(size=(2000, 2))
    predicted, targets = np.zeros(confidence.shape, int), Targets(teacher_weights="range")
    by_text = weigh.by_confidence(confidence, np.tile([0, 1], (2000, 1)), targets)
    scaled, _ = weigh.weigh(by_range(confidence, predicted, Params()), targets, None, Params())
    assert rightly(by_text, right) < 0.7
    assert rightly(scaled, right) > 0.95


# ---- neighbours


@pytest.mark.parametrize(("texts", "neighbours"), [(1, 0), (2, 1), (9, 2)])
def test_few_texts_have_at_most_a_quarter_of_the_texts_as_neighbours_and_not_themselves(
    texts: int, neighbours: int
) -> None:
    space = np.eye(texts, dtype=np.float32)
    near = similar(BlockSpace(space, space), 50)
    assert near.shape == (texts, neighbours)
    assert smoothed(np.ones((texts, 2)), near, Params()).shape == (texts, 2)


def test_a_smoothed_signal_is_the_mean_over_the_neighbours() -> None:
    signal = np.array([[1.0, 0.0], [3.0, 4.0], [5.0, 8.0]])
    near = np.array([[1, 2], [0, 2], [0, 1]])
    assert smoothed(signal, near, Params()).tolist() == [[4.0, 6.0], [3.0, 4.0], [2.0, 2.0]]


def test_coherence_is_higher_for_useful_neighbours() -> None:
    signal, right = scores([0.5, 0.5], texts=1000, separation=1.5)
    random = np.random.default_rng(1)
    telling = np.stack([np.flatnonzero(right == one)[random.integers(0, 400, 20)] for one in right])
    params, useless = Params(), Params()
    smooth = coherent(signal, telling, params)
    assert params.facts["coherence"] > COHERENT
    assert rightly(of_softmax(smooth), right) > rightly(of_softmax(signal), right) + 0.05
    assert coherent(signal, random.integers(0, 1000, (1000, 20)), useless) is signal
    assert abs(useless.facts["coherence"]) < COHERENT
    assert len(useless.facts["notes"]) == 1


def test_the_state_of_a_text_is_the_mean_of_its_own_tokens() -> None:
    states = torch.tensor([[[1.0, 2.0], [3.0, 6.0], [100.0, 100.0]], [[1.0, 1.0], [1.0, 1.0], [4.0, 1.0]]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    assert mean_over_tokens(states, mask).tolist() == [[2.0, 4.0], [2.0, 1.0]]


# ---- kinds of signals


def views(right: Array, *, noise: list[float], seed: int = 5) -> dict[str, Array]:
    """Signals of several kinds, each with noise of its own, on texts whose right teacher is known."""
    random = np.random.default_rng(seed)
    own = np.eye(int(right.max()) + 1)[right]
    return {str(place): own + random.normal(size=own.shape) * much for place, much in enumerate(noise)}


def test_unlike_kinds_are_more_often_right_together_than_the_best_of_them() -> None:
    right = np.random.default_rng(0).choice(3, 4000, p=[0.4, 0.35, 0.25])
    evidence = views(right, noise=[0.7, 0.8, 0.9])
    signal = standardised_sum(list(evidence.values()), Params())
    best = max(rightly(standardised_weights(one, Params()), right) for one in evidence.values())
    assert rightly(standardised_weights(signal, Params()), right) > best + 0.03


@pytest.mark.parametrize("is_meaningless", [False, True])
def test_provenance_counts_if_it_agrees_with_the_evidence(is_meaningless: bool) -> None:
    random = np.random.default_rng(2)
    right = np.random.default_rng(0).choice(3, 4000)
    written = np.where(random.random(4000) < 0.7, right, (right + 1) % 3)
    written = random.permutation(written) if is_meaningless else written
    evidence, params = evidence_of(right, views(right, noise=[0.8, 0.8]), 0), Params()
    alone, _ = joint_signal(evidence, Params())
    beside, _ = joint_signal(replace(evidence, provenance=np.eye(3)[written]), params)
    assert alone is not None
    assert beside is not None
    assert ("provenance" in params.facts["kinds"]) is not is_meaningless
    assert any("not used as evidence" in note for note in params.facts["notes"]) is is_meaningless
    gain = rightly(beside, right) - rightly(alone, right)
    assert gain == 0 if is_meaningless else gain > 0.01


def test_evidence_of_which_no_two_kinds_agree_is_not_used() -> None:
    random, params = np.random.default_rng(1), Params()
    noise = {kind: random.normal(size=(600, 2)) for kind in "abc"}
    right = np.arange(600) % 2
    assert joint_signal(evidence_of(right, noise), params)[0] is None
    assert params.facts["notes"][0].startswith("no two kinds of evidence agree on the teachers (correlations: a and b ")
    two = noise | {"a": views(right, noise=[0.8])["0"], "b": views(right, noise=[0.8], seed=6)["0"]}
    assert joint_signal(evidence_of(right, two), Params())[0] is not None


def test_teachers_tie_where_other_labels_have_an_equal_sum_of_weights() -> None:
    weights = np.array([[0.5, 0.5, 0.0], [0.4, 0.3, 0.3], [0.4, 0.2, 0.4], [0.6, 0.4, 0.0]])
    predicted = np.array([[0, 1, 2], [0, 1, 1], [0, 1, 0], [0, 1, 1]])
    assert weigh.ties(weights, predicted).tolist() == [True, False, False, False]


def test_how_easy_a_text_is_to_all_teachers_is_no_agreement() -> None:
    random = np.random.default_rng(1)
    easy = 5 * random.normal(size=(2000, 1))
    first, *others = (easy + random.normal(size=(2000, 2)) for _ in range(3))
    assert all(abs(agreement(first, other)) < 0.1 for other in others)


def company(right: Array, seed: int = 5) -> tuple[dict[str, Array], Array]:
    """Three noisy kinds, and states in which texts of one teacher form a cluster."""
    random = np.random.default_rng(seed)
    states = np.eye(8, dtype=np.float32)[right] + 0.3 * random.normal(size=(len(right), 8)).astype(np.float32)
    return views(right, noise=[1.0, 1.0, 1.2], seed=seed), states / np.linalg.norm(states, axis=1, keepdims=True)


def test_each_label_has_an_upper_end_of_its_own_and_a_teacher_one_lower_end() -> None:
    signal = np.array([[0.0], [2.0], [4.0], [0.0], [5.0], [10.0]] * 5)
    predicted = np.array([[0], [0], [0], [1], [1], [1]] * 5)
    assert by_range(signal, predicted, Params())[:6, 0] == pytest.approx([0.0, 0.5, 1.0, 0.0, 0.5, 1.0])
    assert by_range(signal, np.zeros_like(predicted), Params())[:6, 0] == pytest.approx([0.0, 0.2, 0.4, 0.0, 0.5, 1.0])


@pytest.mark.parametrize("values", [[-2.0], [-2.0, 0.0], [1.0, -1.5]])
def test_a_label_with_few_low_values_has_a_range_of_a_tenth_of_its_teachers(values: list[float]) -> None:
    """The lower end is 0. A range that ends at the mean of the few values would be about 0, and its values infinite."""
    others = 5 - len(values)
    signal = np.array([*values, *[-sum(values) / others] * others, *np.linspace(3.0, 8.0, 200), *[8.0] * 20])
    predicted = np.array([1] * len(values) + [0] * (len(signal) - len(values)))
    scaled = by_range(signal[:, None], predicted[:, None], Params())[:, 0]
    mean_end = (8.0 + np.mean(values)) / 2
    assert scaled[: len(values)] == pytest.approx(np.array(values) / (0.1 * mean_end))


@pytest.mark.parametrize("teachers", [1, 2])
def test_a_range_whose_ends_do_not_differ_in_a_few_texts_scales_no_value_beyond_bounds(teachers: int) -> None:
    """The mean of the highest values of both labels is below the mean of the five lowest values."""
    signal = np.array([[4.0], [4.1], [4.2], [4.3], [0.0]]).repeat(2, axis=1)
    signal[:, teachers:] = np.arange(5.0)[:, None]
    predicted = np.array([[0], [0], [0], [0], [1]]).repeat(2, axis=1)
    predicted[:, teachers:] = 0
    scaled = by_range(signal, predicted, Params())
    assert np.abs(scaled).max() < 5
    assert (np.argsort(scaled, axis=0) == np.argsort(signal, axis=0)).all()


def test_the_ends_of_a_range_do_not_depend_on_the_share_of_own_texts() -> None:
    random = np.random.default_rng(0)
    right = random.choice(2, 6000, p=[0.9, 0.1])
    signal = random.uniform(size=(6000, 2)) * 0.2 + np.eye(2)[right]
    predicted = np.zeros(signal.shape, int)
    assert rightly(by_range(signal, predicted, Params()), right) > 0.99
    assert by_range(signal, predicted, Params())[right == 0, 0].mean() == pytest.approx(
        by_range(signal, predicted, Params())[right == 1, 1].mean(), abs=0.05
    )
    assert standardise(signal, Params())[right == 0, 0].mean() < standardise(signal, Params())[right == 1, 1].mean() - 1


def test_labels_of_unlike_confidence_are_compared_after_scaling() -> None:
    """Own texts of one label reach 3, of the other 1; foreign texts are predicted as the first label, and reach 2."""
    random = np.random.default_rng(0)
    right, label = random.choice(2, 4000), random.choice(2, 4000)
    own = np.where(label == 0, 3.0, 1.0) + 0.1 * random.normal(size=4000)
    foreign = random.uniform(0, 2, size=4000)
    first = np.where(right == 0, own, foreign)
    second = np.where(right == 1, own, foreign)
    predicted = np.stack([np.where(right == place, label, 0) for place in (0, 1)], axis=1)
    signal = np.stack([first, second], axis=1)
    assert rightly(by_range(signal, predicted, Params()), right) > rightly(of_softmax(signal), right) + 0.05


def test_kinds_that_separate_teachers_weigh_more_and_provenance_no_more_than_the_best() -> None:
    own = np.eye(2)[np.arange(100) % 2]
    typical = np.linspace(0, 2, 100)[:, None]  # how easy a text is to both teachers
    kinds = {"states": own + typical / 9, "names": own + typical, "provenance": own}
    assert exclusion(own) > exclusion(kinds["states"]) > weigh.LEAST_EXCLUSION > exclusion(kinds["names"])
    weights = weights_of_kinds(kinds, dict.fromkeys(kinds, own))
    assert sum(weights.values()) == pytest.approx(1)
    assert weights["provenance"] == weights["states"]
    less = weights_of_kinds(kinds, dict.fromkeys(kinds, own), agreeing=0.5)
    assert less["provenance"] / less["states"] == pytest.approx(0.25)
    ratio = np.sqrt(exclusion(kinds["states"]) / weigh.LEAST_EXCLUSION)
    assert weights["states"] / weights["names"] == pytest.approx(ratio)
    leads = weights_of_kinds({"states": own, "names": own}, {"states": own, "names": own / 3})
    assert leads["states"] / leads["names"] == pytest.approx(3)
    assert weights_of_kinds(*({"states": np.ones((3, 1)), "names": np.ones((3, 1))},) * 2)["names"] == 0.5


def test_kinds_that_agree_weigh_little_if_they_are_high_for_all_teachers_at_once() -> None:
    """Predictions and states of the same network can be wrong together."""
    random = np.random.default_rng(0)
    right = random.choice(2, 2000)
    typical = random.normal(size=(2000, 1)) + 0.1 * random.normal(size=(2000, 2))
    noise = 0.5 * random.normal(size=(2000, 2))
    kinds = {"answers": typical, "states": typical, "names": np.eye(2)[right] + noise}
    params = Params()
    signal, _ = joint_signal(evidence_of(right, kinds, 0), params)
    assert signal is not None
    assert params.facts["kinds"]["names"] > 0.8
    assert rightly(signal, right) == pytest.approx(rightly(kinds["names"], right), abs=0.02)


def test_counted_shares_are_of_the_highest_signals_and_never_zero() -> None:
    assert leading_shares(np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])) == pytest.approx([0.75, 0.25])
    assert leading_shares(np.array([[1.0, 0.0]] * 3)).min() > 0.009


def evidence_of(right: Array, kinds: dict[str, Array], count: int = 10) -> Evidence:
    space = Centred.of(company(right)[1])
    near = similar(BlockSpace(space, space), count)
    return Evidence(kinds, np.zeros((len(right), int(right.max()) + 1), int), 1, near)


def test_a_single_text_is_too_few_to_compare_teachers() -> None:
    params = Params()
    evidence = Evidence({"answers": np.zeros((1, 2))}, np.zeros((1, 2), int), 4, np.zeros((1, 0), int))
    assert joint_signal(evidence, params)[0] is None
    assert params.facts["notes"][0].startswith("1 text is too few to compare teachers on 4 labels: ")


def test_evidence_on_few_texts_does_not_cancel_out() -> None:
    """Of 11 texts, the mean over the 10 nearest is that over all others: it is high where a text's own value is low."""
    signals = []
    for seed in range(40):
        right = np.random.default_rng(seed).permutation(11) % 2
        signal, _ = joint_signal(evidence_of(right, company(right, seed)[0]), Params())
        signals += [] if signal is None else [rightly(signal, right)]
    assert len(signals) > 20
    assert np.mean(signals) > 0.8


def test_the_signal_of_all_kinds_is_better_than_the_best_kind() -> None:
    right = np.random.default_rng(0).choice(2, 1500, p=[0.7, 0.3])
    kept, params = company(right)[0], Params()
    signal, shares = joint_signal(evidence_of(right, kept), params)
    assert signal is not None
    assert shares is not None
    assert shares == pytest.approx([0.7, 0.3], abs=0.05)
    assert sum(params.facts["kinds"].values()) == pytest.approx(1, abs=1e-3)
    best = max(rightly(by_range(own, np.zeros(own.shape, int), Params()), right) for own in kept.values())
    assert rightly(signal, right) > best + 0.05
    assert rightly(mixture(signal, shares, Params())[0], right) > 0.95


@pytest.mark.parametrize(("labels", "teachers", "are_used"), [(5, 2, True), (6, 2, False), (6, 1, True)])
def test_evidence_is_used_from_two_texts_a_label_on(labels: int, teachers: int, are_used: bool) -> None:
    right, params = np.arange(10) % 2, Params()
    kinds = {kind: own[:, :teachers] for kind, own in company(right)[0].items()}
    evidence = replace(evidence_of(right, kinds, 3), labels=labels, predicted=np.zeros((10, teachers), int))
    assert (joint_signal(evidence, params)[0] is not None) is are_used
    assert any("10 texts are too few" in note for note in params.facts["notes"]) is not are_used


@pytest.mark.parametrize("settings", [{}, {"teacher_weights": "mixture"}, {"teacher_weights": "standardised"}])
def test_other_blocks_get_the_weights_that_the_fitted_block_gives_the_same_texts(settings: dict[str, Any]) -> None:
    right = np.random.default_rng(0).choice(2, 900, p=[0.7, 0.3])
    kept, space = company(right)
    near = similar(BlockSpace(space, space), 10)
    predicted = np.random.default_rng(1).integers(3, size=(900, 2))
    targets = Targets.model_validate({**AMALGAM, **settings})

    def weights(rows: slice, params: Params) -> Array:
        answers = [kept["0"][rows], kept["1"][rows]]
        kinds = weigh.kinds_of(answers, kept["2"][rows], kept["1"][rows], kept["0"][rows], params)
        evidence = Evidence(kinds, predicted[rows], 3, near[rows], np.eye(2)[right][rows])
        signal, shares = joint_signal(evidence, params)
        assert signal is not None
        return weigh.weigh(signal, targets, shares, params)[0]

    params = Params()
    whole = weights(slice(0, 900), params)
    reused = Params(params.values, is_reused=True)
    parts = [weights(slice(start, start + 300), reused) for start in (0, 300, 600)]
    assert np.concatenate(parts) == pytest.approx(whole, abs=1e-9)


def test_a_label_that_the_fitted_block_lacks_has_the_mean_upper_end_of_its_teacher() -> None:
    params = Params()
    by_range(np.array([[0.0], [2.0], [0.0], [4.0]] * 5), np.array([[0], [0], [1], [1]] * 5), params)
    reused = Params(params.values, is_reused=True)
    assert by_range(np.array([[3.0]] * 3), np.array([[0], [1], [9]]), reused)[:, 0] == pytest.approx([1.5, 0.75, 1.0])


def test_clearer_weights_have_a_higher_estimate_of_the_accuracy_with_an_interval() -> None:
    estimates = [weigh.estimated_accuracy([confirmed], 10_000) for confirmed in (0.6, 0.8, 0.95, 1.0)]
    values = [estimate["value"] for estimate in estimates]
    assert values == sorted(values)
    assert len(set(values)) == 4
    assert all(0 < one["low"] < one["value"] < one["high"] <= 1 for one in estimates)
    odds = [estimate["value"] / (1 - estimate["value"]) for estimate in estimates]
    assert odds[1] / odds[0] == pytest.approx((0.8 / 0.2) / (0.6 / 0.4), rel=1e-2)


def test_an_estimate_on_ten_texts_has_a_wide_interval() -> None:
    few, many, certain = (weigh.estimated_accuracy(*given) for given in (([0.8], 10), ([0.8], 10_000), ([0.999], 100)))
    assert few["high"] - few["low"] > np.ptp(interval(few["value"], 10)) > many["high"] - many["low"]
    assert 0.9 < certain["low"] < certain["value"] < certain["high"] <= 1


def test_no_neighbours_leave_each_text_its_own_evidence() -> None:
    right = np.random.default_rng(0).choice(2, 600)
    kept, one_label = company(right)[0], np.zeros((600, 2), int)
    evidence = evidence_of(right, kept, 0)
    smooth = {kind: standardised_sum([own, own], Params()) for kind, own in kept.items()}
    scaled = {kind: by_range(own, one_label, Params()) for kind, own in smooth.items()}
    weights = weights_of_kinds(smooth, scaled)
    total = np.sum([weights[kind] * own for kind, own in scaled.items()], axis=0)
    assert joint_signal(evidence, Params())[0] == pytest.approx(by_leads(total, total, evidence, Params()), abs=1e-3)


def test_a_teacher_with_a_weak_signal_gets_its_share_from_the_others() -> None:
    random = np.random.default_rng(3)
    right = random.choice(3, 6000)
    signal = random.normal(size=(6000, 3)) + np.array([0.3, 3.0, 3.0]) * np.eye(3)[right]
    weights, fitted = mixture(signal, None, Params())
    assert rightly(weights, right) > rightly(of_softmax(signal), right) + 0.05
    assert np.abs(fitted.shares - 1 / 3).max() < 0.1


@pytest.mark.parametrize("shares", [[0.5, 0.5], [0.8, 0.2], [0.2, 0.8], [0.4, 0.3, 0.3]])
def test_own_texts_that_scatter_less_are_not_taken_for_a_larger_share(shares: list[float]) -> None:
    random = np.random.default_rng(3)
    right = random.choice(len(shares), 8000, p=shares)
    own = np.eye(len(shares))[right]
    signal = random.normal(size=own.shape) * np.where(own > 0, 0.5, 1.0) + 2.0 * own
    weights, fitted = mixture(signal, None, Params())
    assert np.abs(fitted.shares - np.bincount(right) / len(right)).max() < 0.05
    assert rightly(weights, right) > 0.87


def test_a_higher_signal_never_lowers_its_teachers_weight() -> None:
    random = np.random.default_rng(3)
    own = np.eye(2)[random.choice(2, 4000)]
    signal = random.normal(size=own.shape) * np.where(own > 0, 0.4, 1.0) + 2.0 * own
    signal[:50, 0], signal[:50, 1] = np.linspace(-6, 12, 50), 0.5
    assert (np.diff(mixture(signal, None, Params())[0][:50, 0]) >= -1e-12).all()


def test_texts_that_fall_into_a_teachers_classes_are_its_own_though_it_is_as_sure_of_others() -> None:
    """Other texts are between its classes, as far from the mean of all as its own texts do."""
    random = np.random.default_rng(0)
    right = random.choice(2, 2000, p=[0.7, 0.3])
    classes = np.eye(16)[random.choice(3, 2000)]
    between = random.normal(size=(2000, 16)) / 4
    own = [np.where(right[:, None] == teacher, classes + 0.2 * between, between) for teacher in range(2)]
    states = [space.astype(np.float32) for space in (random.normal(size=(2000, 16)), *own)]
    encoder, *teachers = (BlockSpace(space, space) for space in states)
    statistics = standardise(compared(encoder, teachers, teachers, 6, 10).relative, Params())
    assert rightly(of_mixture(statistics), right) > 0.95
    lengths = standardise(np.stack([np.linalg.norm(states, axis=1) for states in own], axis=1), Params())
    assert rightly(of_mixture(statistics), right) > rightly(of_mixture(lengths), right) + 0.02


def test_an_end_of_a_range_is_the_mean_of_five_values_or_of_3_percent_of_a_labels_texts() -> None:
    for texts, highest in ((100, 97.0), (1000, 984.5)):
        scaled = by_range(np.arange(float(texts))[:, None], np.zeros((texts, 1), int), Params())[:, 0]
        assert np.interp([2.0, highest], np.arange(texts), scaled) == pytest.approx([0, 1])


def test_a_signal_without_differences_correlates_with_none() -> None:
    assert correlation(np.ones(4), np.arange(4.0)) == correlation(np.empty(0), np.empty(0)) == 0.0


def test_separations_of_the_mixture_shrink_towards_their_mean() -> None:
    right = np.random.default_rng(3).choice(3, 6000)
    signal = np.random.default_rng(4).normal(size=(6000, 3)) + np.array([1.5, 3.0, 3.0]) * np.eye(3)[right]
    _, fitted = mixture(signal, np.full(3, 1 / 3), Params())
    assert 0.7 < np.ptp(fitted.separations) < 1.2
