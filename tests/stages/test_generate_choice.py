"""The lazy rule chooses what scoring every candidate would, and that is a sample of the steered distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from amalgam.benchmarks.generate import ExhaustiveSampler
from amalgam.stages.generate.decoding import (
    LazySampler,
    SamplingParams,
    draw_option,
    find_candidates,
    gumbel,
    key64,
    uniform,
)

Numbers = NDArray[np.float64]
NOTHING_BANNED = torch.zeros(1, 5, dtype=torch.bool)


def decided(choice: LazySampler, log_teacher: Numbers) -> LazySampler:
    while len(wanted := choice.pending()):
        choice.take(wanted, log_teacher[wanted])
    return choice


def cases(count: int) -> list[tuple[Numbers, Numbers, Numbers]]:
    """What 30 candidates bring: log p_LM, noise, log p_T: flat and steep, a teacher sure and unsure, greedy and not."""
    random = np.random.default_rng(0)
    pairs = []
    for number in range(count):
        log_lm = np.sort(np.log(random.dirichlet(np.full(30, [0.05, 0.5, 5.0][number % 3])).clip(1e-12)))[::-1]
        noise = np.zeros(30) if number % 2 else random.gumbel(size=30)
        teacher = np.log(random.beta(*[(0.2, 0.2), (5.0, 1.0), (1.0, 20.0)][number // 3 % 3], size=30).clip(1e-30, 1))
        pairs.append((log_lm, noise, teacher))
    return pairs


@pytest.mark.parametrize("steer", [0.5, 1.0, 2.0, 5.0, 10.0])
def test_the_lazy_rule_chooses_what_scoring_all_does(steer: float) -> None:
    fewer = 0
    for log_lm, noise, teacher in cases(300):
        lazy = decided(LazySampler(log_lm, noise, steer), teacher)
        naive = decided(ExhaustiveSampler(log_lm, noise, steer), teacher)
        assert naive.scored == 30
        assert lazy.winner == naive.winner == int((log_lm + noise + steer * teacher).argmax())
        fewer += lazy.scored < naive.scored
    assert fewer > 30


def test_ties_go_to_the_likelier_candidate_in_both() -> None:
    log_lm, teacher = np.zeros(30), np.zeros(30)
    for sampler in (LazySampler, ExhaustiveSampler):
        assert decided(sampler(log_lm, np.zeros(30), 1.0), teacher).winner == 0
    later = np.where(np.arange(30) == 20, 0.0, -5.0)  # the only one without a loss
    for sampler in (LazySampler, ExhaustiveSampler):
        assert decided(sampler(log_lm, np.zeros(30), 1.0), later).winner == 20
    log_lm, noise = np.array([-1.0, -2, -3, -4, -5]), np.array([0.0, 2, 3, 4, 5])  # the first can only tie
    for sampler in (LazySampler, ExhaustiveSampler):
        assert decided(sampler(log_lm, noise, 1.0), np.array([0.0, -1, -5, -5, -5])).winner == 0


def test_choices_are_a_sample_of_the_steered_distribution() -> None:
    log_lm = np.log(np.array([0.4, 0.3, 0.2, 0.1]))
    teacher = np.log(np.array([0.1, 0.5, 0.9, 0.9]))
    weights = np.exp(log_lm + 2 * teacher)
    ids, draws = np.arange(4), 20_000
    counts = np.zeros(4)
    for index in range(draws):
        noise = gumbel(key64(0, index), 3, ids)
        counts[decided(LazySampler(log_lm, noise, 2.0), teacher).winner] += 1
    expected = weights / weights.sum()
    assert np.abs(counts / draws - expected).max() < 5 * np.sqrt(0.25 / draws)


def test_without_steering_nothing_is_scored() -> None:
    log_lm, noise, _ = cases(1)[0]
    choice = LazySampler(log_lm, noise, 0.0)
    assert len(choice.pending()) == 0
    assert choice.winner == int((log_lm + noise).argmax())


def test_max_scored_limits_the_scored_candidates_in_order() -> None:
    differ = 0
    for log_lm, noise, teacher in cases(200):
        exact = decided(LazySampler(log_lm, noise, 5.0), teacher)
        fast = decided(LazySampler(log_lm, noise, 5.0, max_scored=3), teacher)
        assert fast.scored <= 3
        assert (exact.winner in exact.order[:3]) == (fast.winner == exact.winner)
        differ += fast.winner != exact.winner
    assert 0 < differ < 200


def test_the_distribution_is_cut_by_top_k_and_nucleus_before_the_teacher_is_asked() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.4, 0.05, 0.3, 0.15]]))
    for how, ids in (
        (SamplingParams(), [1, 3, 4, 0, 2]),
        (SamplingParams(top_k=2), [1, 3]),
        (SamplingParams(candidates=3), [1, 3, 4]),
        (SamplingParams(top_p=0.7), [1, 3]),
        (SamplingParams(top_p=0.71), [1, 3, 4]),
        (SamplingParams(top_p=0.01), [1]),
        (SamplingParams(top_k=1, top_p=0.9), [1]),
    ):
        [offer] = find_candidates(logits, [how], NOTHING_BANNED)
        assert offer.ids.tolist() == ids
        assert np.allclose(np.exp(offer.log_lm), logits.exp()[0, ids])


def test_temperature_flattens_what_is_steered_and_greedy_leaves_it() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0]])
    for temperature, divisor in ((2.0, 2), (1.0, 1), (0.0, 1)):
        [offer] = find_candidates(logits, [SamplingParams(temperature=temperature)], NOTHING_BANNED)
        assert np.allclose(offer.log_lm, torch.log_softmax(logits / divisor, 1)[0].flip(0), atol=1e-6)


@pytest.mark.parametrize("temperature", [1e-310, 1e-30, 1e-6])
def test_a_temperature_near_zero_leaves_the_most_probable_token(temperature: float) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 30.0, 4.0]])
    [candidates] = find_candidates(logits, [SamplingParams(temperature=temperature, top_p=0.9)], NOTHING_BANNED)
    assert candidates.ids.tolist() == [3]
    assert candidates.log_lm.tolist() == [0]


def test_near_ties_at_a_cut_are_reported() -> None:
    def is_near_tie(values: list[float], **how: float) -> bool:
        return find_candidates(torch.tensor([values]).log(), [SamplingParams(**how)], NOTHING_BANNED)[0].is_near_tie  # type: ignore[arg-type]

    assert is_near_tie([0.4, 0.3, 0.1, 0.1, 0.1], top_p=0.7 + 1e-6)
    assert not is_near_tie([0.4, 0.3, 0.1, 0.1, 0.1], top_p=0.71)
    assert is_near_tie([0.4, 0.3, 0.15, 0.075, 0.075], candidates=4)
    assert not is_near_tie([0.4, 0.3, 0.15, 0.075, 0.075], candidates=3)
    assert not is_near_tie([0.4, 0.3, 0.15, 0.075, 0.075])


def test_those_that_rounding_could_choose_are_named() -> None:
    log_lm = np.array([-1.0, -1.0 - 1e-6, -1.0 - 1e-6, -3.0])
    teacher = np.array([-0.5, -0.5, -2.0, -0.1])
    for sampler in (LazySampler, ExhaustiveSampler):
        assert decided(sampler(log_lm, np.zeros(4), 1.0), teacher).near_ties().tolist() == [0, 1]
    assert LazySampler(log_lm, np.zeros(4), 0.0).near_ties().tolist() == [0, 1, 2]
    bounds, losses = np.array([0.0, -0.1, -0.2, -0.3, -1.0005]), np.array([-1.0, -5.0, -5.0, -5.0, -0.1])
    unscored = decided(LazySampler(bounds, np.zeros(5), 1.0), losses)
    assert (unscored.winner, unscored.scored) == (0, 4)
    assert unscored.near_ties().tolist() == [0, 4]


def test_banned_tokens_are_never_offered_and_take_no_share() -> None:
    logits = torch.tensor([[9.0, 1.0, 1.0, -9.0, 1.0]])
    banned = torch.tensor([[True, False, False, True, False]])
    [offer] = find_candidates(logits, [SamplingParams()], banned)
    assert offer.ids.tolist() == [1, 2, 4]  # equals in the order of their ids
    assert np.allclose(np.exp(offer.log_lm).sum(), 1)


def test_noise_is_the_text_s_own_the_place_s_and_the_token_s() -> None:
    ids = np.arange(2000)
    word = key64(0, "teacher", 1, 7)
    noise = gumbel(word, 4, ids)
    assert np.array_equal(noise[[3, 900]], gumbel(word, 4, np.array([3, 900])))
    for other in (gumbel(word, 5, ids), gumbel(key64(0, "teacher", 1, 8), 4, ids), gumbel(word + 1, 4, ids)):
        assert abs(np.corrcoef(noise, other)[0, 1]) < 0.1
    assert abs(noise.mean() - 0.5772) < 0.1
    assert abs(noise.var() - np.pi**2 / 6) < 0.25
    shares = uniform(word, 0, ids)
    assert 0 < shares.min() < 0.01
    assert 0.99 < shares.max() < 1


def test_a_text_draws_its_settings_evenly_and_always_the_same() -> None:
    words = [key64(0, index) for index in range(600)]
    drawn = [draw_option(word, 1, ["a", "b", "c"]) for word in words]
    assert drawn == [draw_option(word, 1, ["a", "b", "c"]) for word in words]
    assert min(drawn.count(one) for one in "abc") > 150
    assert drawn != [draw_option(word, 2, ["a", "b", "c"]) for word in words]
