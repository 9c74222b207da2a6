"""Estimates with intervals for benchmarks that draw teachers: means over draws, and gaps closed over test texts."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

Array = np.ndarray[Any, np.dtype[Any]]

BOOTSTRAPS = 2000
ERRORS = 1.96
T = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
"""Student's t of a 95 % interval by the number of draws; more draws use the last one, which is too wide."""


def within(draws: Sequence[float]) -> float | None:
    """Returns half of the 95 % interval of the mean over draws; None for one draw."""
    if len(draws) < 2:
        return None
    return T[min(len(draws), max(T))] * statistics.stdev(draws) / math.sqrt(len(draws))


@dataclass(frozen=True)
class Gap:
    """A gap closed, with its 95 % interval."""

    closed: float
    low: float
    high: float


def gap_over(student: Array, ensemble: Array, supervised: Array) -> Gap | None:
    """Returns the gap closed, from the share of correct students: [draws of teachers, test texts] each.

    The interval is a bootstrap over draws and texts. None: the denominator is smaller than its error.
    """
    random, (draws, texts) = np.random.default_rng(0), student.shape
    of_draws = random.multinomial(draws, np.full(draws, 1 / draws), BOOTSTRAPS) / draws
    of_texts = random.multinomial(texts, np.full(texts, 1 / texts), BOOTSTRAPS) / texts

    def means(values: Array) -> Array:
        return ((of_draws @ values) * of_texts).sum(axis=1)

    above, below = student - ensemble, supervised - ensemble
    denominators = means(below)
    if below.mean() <= ERRORS * denominators.std():
        return None
    low, high = np.quantile(means(above) / denominators, [0.025, 0.975])
    return Gap(float(above.mean() / below.mean()), float(low), float(high))


def dawid_skene(answers: Array, labels: int, rounds: int = 100, prior: float = 0.01) -> Array:
    """Returns the probability of each label [texts, labels] from each teacher's answers [texts, teachers].

    Dawid and Skene 1979: a latent label of each text, and a confusion matrix of each teacher, by EM from the shares of
    the answers. Only the answers are read, no confidence.
    """
    hot = [np.eye(labels)[own] for own in answers.T]  # of each teacher: [texts, labels]
    label: Array = np.mean(hot, axis=0)
    for _ in range(rounds):
        logs = np.log(label.mean(axis=0) + prior / labels)
        for own in hot:
            confusion = label.T @ own + prior
            logs = logs + own @ np.log(confusion / confusion.sum(axis=1, keepdims=True)).T
        raised = np.exp(logs - logs.max(axis=1, keepdims=True))
        before, label = label, raised / raised.sum(axis=1, keepdims=True)
        if np.abs(label - before).max() < 1e-6:
            break
    return label


ABSTAINS = -1
"""The vote of a labelling function that abstains."""


@dataclass(frozen=True)
class LabelModel:
    """A label model fitted to the votes of labelling functions."""

    label: Array
    """Probability of each label: [texts, labels]."""
    accuracies: Array
    """Share of right votes by function, on texts of its labels."""
    propensities: Array
    """Probability of a vote by function and label of the text: [functions, labels]."""


def label_model(votes: Array, sets: Sequence[Sequence[int]], labels: int, rounds: int = 200) -> LabelModel:
    """Fits a label model to votes [texts, functions], by EM from accuracies of 0.7; `sets` has the labels of each one.

    Data programming (Ratner et al. 2016; Snorkel, 2017): functions are independent given the label. On texts of its
    labels a function has one accuracy and uniform errors; on others its votes are uniform.
    """
    hot = [np.eye(labels + 1)[own][:, :labels] for own in votes.T]  # of each function: [texts, labels]
    has = [np.isin(np.arange(labels), own) for own in sets]
    accuracies, shares = np.full(len(sets), 0.7), np.full(labels, 1 / labels)
    coverage = (votes != ABSTAINS).mean(axis=0)
    propensities, label = np.repeat(coverage[:, None], labels, axis=1), np.zeros((len(votes), labels))
    for _ in range(rounds):
        logs = np.tile(np.log(shares), (len(votes), 1))
        for own, vote, inside, right, votes_at in zip(hot, votes.T, has, accuracies, propensities, strict=True):
            wrong = (1 - right) / max(1, inside.sum() - 1)
            chance = np.where(inside, np.where(own > 0, right, wrong), 1 / inside.sum())
            logs += np.log(np.where(vote[:, None] == ABSTAINS, 1 - votes_at, votes_at * chance))
        raised = np.exp(logs - logs.max(axis=1, keepdims=True))
        before, label = label, raised / raised.sum(axis=1, keepdims=True)
        if np.abs(label - before).max() < 1e-6:
            break
        counts = label.sum(axis=0)
        shares = (counts + 1) / (len(votes) + labels)  # each share of votes has one more text, as at the start
        sums = np.array([label.T @ own.any(axis=1) for own in hot])
        propensities = (sums + coverage[:, None].clip(0.01, 0.99)) / (counts + 1)
        agreed = np.array([(label * own).sum() for own in hot])
        accuracies = (agreed + 0.7) / ((sums * has).sum(axis=1) + 1)
    return LabelModel(label, accuracies, propensities)


def ridge(states: Array, gold: Array, others: Array, penalty: float = 1.0) -> Array:
    """Returns the scores [texts, labels] of other states by ridge regression on gold [texts, labels], without means.

    Labels with few texts then lose nothing by their number.
    """
    mean = states.mean(axis=0)
    own = states - mean
    return (others - mean) @ own.T @ np.linalg.solve(own @ own.T + penalty * np.eye(len(own)), gold - gold.mean(axis=0))
