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
LEAST_RATIO = 0.3
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

    Each teacher's signal is standardised, so its mean is 0 and its variance 1. With one separation s for all teachers,
    in deviations of the signal's own noise, and one ratio r of the noise on own texts to that on others, the shares
    fix the rest: sigma_i^2 = 1 / (1 - pi_i + pi_i r^2 + pi_i (1 - pi_i) s^2), d_i = s sigma_i, means -pi_i d_i and
    (1 - pi_i) d_i. Own texts scatter less; without r that looks like a larger share. With parameters of its own for
    every teacher, EM loses a teacher as soon as there are more than two.
    """
    texts, teachers = signal.shape
    scores = standard(signal)
    weights = _softmax(scores / SHARPNESS)
    tied = _Tied(weights.mean(axis=0), 1.0, 1.0)
    for _ in range(ROUNDS if teachers > 1 else 0):
        shares = (weights.sum(axis=0) + PRIOR * texts / teachers) / (texts * (1 + PRIOR))
        distance, ratio = _apart(scores, weights)
        tied = _Tied(shares, _separation(distance, shares, ratio), ratio)
        found = tied.posterior(scores)
        change, weights = float(np.abs(found - weights).max()), found
        if change < SETTLED:
            break
    return Weighing(weights, tied.shares, tied.separation)


@dataclass(frozen=True)
class _Tied:
    shares: Array
    separation: float
    ratio: float

    @property
    def noise(self) -> Array:
        spread = 1 - self.shares + self.shares * self.ratio**2
        found: Array = 1 / np.sqrt(spread + self.shares * (1 - self.shares) * self.separation**2)
        return found

    def posterior(self, scores: Array) -> Array:
        """More of a signal never speaks against its teacher: beyond the mean on own texts it counts as that mean."""
        noise = self.noise
        outside = -self.shares * self.separation * noise
        inside = outside + self.separation * noise
        own = (np.minimum(scores, inside) if self.ratio < 1 else scores) - inside
        others = (np.maximum(scores, outside) if self.ratio > 1 else scores) - outside
        gain = others**2 / (2 * noise**2) - own**2 / (2 * (self.ratio * noise) ** 2) - np.log(self.ratio)
        return _softmax(gain + np.log(self.shares))


def _apart(scores: Array, weights: Array) -> tuple[float, float]:
    """Mean over teachers of their signal on own texts less that on others; of their deviations there, the ratio."""
    means, spreads = [], []
    for part in (weights, 1 - weights):
        texts = np.maximum(part.sum(axis=0), 1e-9)
        means.append((part * scores).sum(axis=0) / texts)
        spreads.append((part * (scores - means[-1]) ** 2).sum(axis=0) / texts)
    ratios = np.log(np.maximum(spreads[0], 1e-6) / np.maximum(spreads[1], 1e-6)) / 2
    return float((means[0] - means[1]).mean()), float(np.clip(np.exp(ratios.mean()), LEAST_RATIO, 1 / LEAST_RATIO))


def _separation(distance: float, shares: Array, ratio: float) -> float:
    """The separation, in deviations of the noise, that gives this mean distance: by halving, since it grows with it."""
    low, high = SEPARATIONS
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        smaller = float((middle * _Tied(shares, middle, ratio).noise).mean()) < distance
        low, high = (middle, high) if smaller else (low, middle)
    return low


def standard(signal: Array) -> Array:
    deviation = signal.std(axis=0)
    found: Array = (signal - signal.mean(axis=0)) / np.where(deviation > 0, deviation, 1.0)
    return found


def _softmax(scores: Array) -> Array:
    raised = np.exp(scores - scores.max(axis=1, keepdims=True))
    found: Array = raised / raised.sum(axis=1, keepdims=True)
    return found
