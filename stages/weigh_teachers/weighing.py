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
SEPARATIONS = (0.5, 8.0)
HALVINGS = 40
PRIOR = 0.05
"""Weight of equal shares against the texts' own, as a part of the texts."""


@dataclass(frozen=True)
class Weighing:
    weights: Array
    """[texts, teachers], each row a distribution."""
    shares: Array
    """Of the texts, by teacher: estimated by the mixture, the mean weight otherwise."""
    separation: float | None
    """Between texts that are a teacher's and those that are not, in deviations of the noise; the mixture's alone."""


def by_confidence(confidence: Array, temperature: float) -> Weighing:
    """MUKA's own: each text by itself."""
    weights = _softmax(confidence / temperature)
    return Weighing(weights, weights.mean(axis=0), None)


def standardised(signal: Array) -> Weighing:
    weights = _softmax(standard(signal) / SHARPNESS)
    return Weighing(weights, weights.mean(axis=0), None)


def mixture(signal: Array) -> Weighing:
    """A latent right teacher j with share pi_j; the signal of teacher i is normal, higher by d_i where j = i.

    Each teacher's signal is standardised, so its mean is 0 and its variance 1. With one separation for all teachers, in
    deviations of the signal's own noise, the shares then fix the rest: noise sigma_i^2 = 1 / (1 + pi_i (1 - pi_i) s^2),
    d_i = s sigma_i, and the means -pi_i d_i and (1 - pi_i) d_i. With means and variances of its own for every teacher,
    EM loses a teacher as soon as there are more than two.
    """
    texts, teachers = signal.shape
    scores = standard(signal)
    weights = _softmax(scores / SHARPNESS)
    shares, separation = weights.mean(axis=0), 1.0
    for _ in range(ROUNDS if teachers > 1 else 0):
        shares = (weights.sum(axis=0) + PRIOR * texts / teachers) / (texts * (1 + PRIOR))
        separation = _separation(_distance(scores, weights), shares)
        found = _posterior(scores, shares, separation)
        change, weights = float(np.abs(found - weights).max()), found
        if change < SETTLED:
            break
    return Weighing(weights, shares, separation)


def _distance(scores: Array, weights: Array) -> float:
    """Mean over teachers of: their signal on their own texts less that on the others."""
    own, others = weights.sum(axis=0), (1 - weights).sum(axis=0)
    inside = (weights * scores).sum(axis=0) / np.maximum(own, 1e-9)
    outside = ((1 - weights) * scores).sum(axis=0) / np.maximum(others, 1e-9)
    return float((inside - outside).mean())


def _separation(distance: float, shares: Array) -> float:
    """The separation, in deviations of the noise, that gives this mean distance: by halving, since it grows with it."""
    low, high = SEPARATIONS
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        smaller = float((middle * _noise(shares, middle)).mean()) < distance
        low, high = (middle, high) if smaller else (low, middle)
    return low


def _noise(shares: Array, separation: float) -> Array:
    found: Array = 1 / np.sqrt(1 + shares * (1 - shares) * separation**2)
    return found


def _posterior(scores: Array, shares: Array, separation: float) -> Array:
    noise = _noise(shares, separation)
    outside, inside = -shares * separation * noise, (1 - shares) * separation * noise
    gain = ((scores - outside) ** 2 - (scores - inside) ** 2) / (2 * noise**2)
    return _softmax(gain + np.log(shares))


def standard(signal: Array) -> Array:
    deviation = signal.std(axis=0)
    found: Array = (signal - signal.mean(axis=0)) / np.where(deviation > 0, deviation, 1.0)
    return found


def _softmax(scores: Array) -> Array:
    raised = np.exp(scores - scores.max(axis=1, keepdims=True))
    found: Array = raised / raised.sum(axis=1, keepdims=True)
    return found
