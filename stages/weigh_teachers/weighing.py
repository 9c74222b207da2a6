"""How probably each teacher is the right one: signals made comparable, and what they say of the teachers' shares.

standardised: a teacher's signal in its own deviations from its own mean over the texts, softmax over teachers. Right
where teachers' shares of the texts are alike. mixture: the shares are estimated too, see `mixture`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

SHARPNESS = 0.5
"""Of the softmax over standardised signals, in deviations."""
ROUNDS = 500
SETTLED = 1e-6
LEAST_SEPARATION = 0.5
LEAST_VARIANCE = 0.05
PRIOR = 0.1
"""Weight of equal shares against the texts' own, as a part of the texts."""


@dataclass(frozen=True)
class Weighing:
    weights: Array
    """[texts, teachers], each row a distribution."""
    shares: Array
    """Of the texts, by teacher: estimated by the mixture, the mean weight otherwise."""
    separation: float | None
    """Between texts that are a teacher's and those that are not, in deviations; the mixture's alone."""


def standardised(signal: Array) -> Weighing:
    weights = _softmax(_standard(signal) / SHARPNESS)
    return Weighing(weights, weights.mean(axis=0), None)


def mixture(signal: Array) -> Weighing:
    """A latent right teacher j with share pi_j; the signal of teacher i is normal, higher by d where j = i.

    Each teacher's signal is standardised, so its mean is 0 and its variance 1: that fixes its two means, -pi_i d and
    (1 - pi_i) d, and its variance, 1 - pi_i (1 - pi_i) d^2, by the shares and the one separation d that all share. With
    means and variances of its own for every teacher, EM loses a teacher as soon as there are more than two.
    """
    texts, teachers = signal.shape
    standard = _standard(signal)
    weights = _softmax(standard / SHARPNESS)
    shares, separation = weights.mean(axis=0), 1.0
    for _ in range(ROUNDS if teachers > 1 else 0):
        shares = (weights.sum(axis=0) + PRIOR * texts / teachers) / (texts * (1 + PRIOR))
        separation = max(LEAST_SEPARATION, _separation(standard, weights))
        found = _posterior(standard, shares, separation)
        change, weights = float(np.abs(found - weights).max()), found
        if change < SETTLED:
            break
    return Weighing(weights, shares, separation)


def _separation(standard: Array, weights: Array) -> float:
    """Mean over teachers of: their signal on their own texts less that on the others."""
    own, others = weights.sum(axis=0), (1 - weights).sum(axis=0)
    inside = (weights * standard).sum(axis=0) / np.maximum(own, 1e-9)
    outside = ((1 - weights) * standard).sum(axis=0) / np.maximum(others, 1e-9)
    return float((inside - outside).mean())


def _posterior(standard: Array, shares: Array, separation: float) -> Array:
    outside, inside = -shares * separation, (1 - shares) * separation
    variance = np.maximum(1 - shares * (1 - shares) * separation**2, LEAST_VARIANCE)
    gain = ((standard - outside) ** 2 - (standard - inside) ** 2) / (2 * variance)
    return _softmax(gain + np.log(shares))


def _standard(signal: Array) -> Array:
    deviation = signal.std(axis=0)
    found: Array = (signal - signal.mean(axis=0)) / np.where(deviation > 0, deviation, 1.0)
    return found


def _softmax(scores: Array) -> Array:
    raised = np.exp(scores - scores.max(axis=1, keepdims=True))
    found: Array = raised / raised.sum(axis=1, keepdims=True)
    return found
