"""Computes the probability that each teacher is the right one from signals made comparable.

standardised: a teacher's signal in its own deviations from its own mean over the texts, softmax over teachers. It is
correct where teachers' shares of the texts are alike. mixture: the shares are estimated too, see `mixture`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from amalgam.data.arrays import softmax

Array = np.ndarray[Any, np.dtype[Any]]


SHARPNESS = 0.5
"""Temperature of the softmax over standardised signals, in deviations."""

ROUNDS = 500

SETTLED = 1e-6

LEAST_RATIO = 0.3

LEAST_NOISE = 0.2

SHRINKAGE = 0.3
"""Weight of the mean separation in a teacher's own."""

PRIOR = 0.05
"""Weight of equal shares against the texts' own, as a part of the texts."""


@dataclass(frozen=True)
class TeacherWeights:
    weights: Array
    """[texts, teachers], each row a distribution."""
    shares: Array
    """Fraction of the texts by teacher: estimated by the mixture, the mean weight otherwise."""
    separation: float | None
    """Between own texts and others, in deviations of the noise, the mean over teachers; the mixture's alone."""


def by_confidence(confidence: Array, temperature: float) -> TeacherWeights:
    """MUKA's own: each text by itself."""
    weights = softmax(confidence / temperature)
    return TeacherWeights(weights, weights.mean(axis=0), None)


def standardised(signal: Array) -> TeacherWeights:
    weights = softmax(standard(signal) / SHARPNESS)
    return TeacherWeights(weights, weights.mean(axis=0), None)


def mixture(signal: Array, shares: Array | None = None) -> TeacherWeights:
    """A latent right teacher j with share pi_j; the signal of teacher i is normal, higher by d_i where j = i.

    EM fits it to standardised signals; `shares` fixes the shares. All teachers have one ratio of own to foreign noise:
    a smaller scatter of own texts would appear as a larger share. The separations d_i, in deviations of the noise,
    shrink towards their mean. Without both, EM loses a teacher if there are more than two.
    """
    texts, teachers = signal.shape
    scores = standard(signal)
    weights = softmax(scores / SHARPNESS)
    fitted = _fitted(scores, weights, shares)
    for _ in range(ROUNDS if teachers > 1 and texts > 1 else 0):
        posterior = fitted.posterior(scores)
        change, weights = float(np.abs(posterior - weights).max()), posterior
        fitted = _fitted(scores, weights, shares)
        if change < SETTLED:
            break
    return TeacherWeights(weights, fitted.shares, float(fitted.separations.mean()))


@dataclass(frozen=True)
class _Fitted:
    shares: Array
    separations: Array
    noise: Array
    """On texts of others; on own texts `ratio` of it."""
    ratio: float

    def posterior(self, scores: Array) -> Array:
        """Returns the posterior; signals are clipped at the means, so a higher signal never lowers a probability."""
        outside = -self.shares * self.separations * self.noise
        inside = outside + self.separations * self.noise
        own = (np.minimum(scores, inside) if self.ratio < 1 else scores) - inside
        others = (np.maximum(scores, outside) if self.ratio > 1 else scores) - outside
        gain = others**2 / (2 * self.noise**2) - own**2 / (2 * (self.ratio * self.noise) ** 2) - np.log(self.ratio)
        return softmax(gain + np.log(self.shares))


def _fitted(scores: Array, weights: Array, known_shares: Array | None = None) -> _Fitted:
    texts, teachers = scores.shape
    counts, means, spreads = [], [], []
    for part in (weights, 1 - weights):
        counts.append(np.maximum(part.sum(axis=0), 1e-9))
        means.append((part * scores).sum(axis=0) / counts[-1])
        spreads.append(np.maximum((part * (scores - means[-1]) ** 2).sum(axis=0) / counts[-1], 1e-6))
    ratio = float(np.clip(np.exp(np.log(spreads[0] / spreads[1]).mean() / 2), LEAST_RATIO, 1 / LEAST_RATIO))
    variance = (counts[0] * spreads[0] / ratio**2 + counts[1] * spreads[1]) / texts
    noise = np.sqrt(np.maximum(variance, LEAST_NOISE**2))
    separations = (means[0] - means[1]) / noise
    together = (1 - SHRINKAGE) * separations + SHRINKAGE * separations.mean()
    estimated = (counts[0] + PRIOR * texts / teachers) / (texts * (1 + PRIOR))
    return _Fitted(estimated if known_shares is None else known_shares, np.maximum(together, 0.0), noise, ratio)


def standard(signal: Array) -> Array:
    deviation = signal.std(axis=0)
    scores: Array = (signal - signal.mean(axis=0)) / np.where(deviation > 0, deviation, 1.0)
    return scores
