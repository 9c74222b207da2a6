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
        drawn: Array = ((of_draws @ values) * of_texts).sum(axis=1)
        return drawn

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
