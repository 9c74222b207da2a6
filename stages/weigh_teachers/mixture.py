"""Weighs the teachers by one signal: by standardising it, or by a mixture of right teachers."""

from __future__ import annotations

from dataclasses import dataclass

from amalgam.data.arrays import Array, softmax
from amalgam.data.lazy import np
from amalgam.stages.weigh_teachers.signals import Params, standardise

SHARPNESS = 0.5
"""Temperature of the softmax over standardised signals, in deviations."""

ROUNDS, SETTLED = 500, 1e-6
"""Most rounds of EM, and the change of a probability below which it ends."""

LEAST_RATIO = 0.3
"""Least ratio of own to foreign noise, and of foreign to own: of few texts it can be near 0."""

LEAST_NOISE = 0.2
"""Least noise, in deviations of the signal: with none, every text would be certain."""

SHRINKAGE = 0.3
"""Weight of the mean separation in a teacher's own."""

PRIOR = 0.05
"""Weight of equal shares against the texts' own, as a part of the texts."""


def standardised_weights(signal: Array, params: Params) -> Array:
    """Returns the softmax over teachers of standardised signals: correct where teachers' shares are alike."""
    return softmax(standardise(signal, params) / SHARPNESS)


@dataclass(frozen=True)
class Mixture:
    """The parameters of the teachers."""

    shares: Array
    """Fraction of the texts."""
    separations: Array
    """Between own texts and others, in deviations of the noise."""
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


def mixture(signal: Array, shares: Array | None, params: Params) -> tuple[Array, Mixture]:
    """Returns the weights [texts, teachers] and the fitted mixture.

    A latent right teacher j with share pi_j; the signal of teacher i is normal, higher by d_i where j = i.

    EM fits it to standardised signals; `shares` fixes the shares. All teachers have one ratio of own to foreign noise:
    a smaller scatter of own texts would appear as a larger share. The separations d_i, in deviations of the noise,
    shrink towards their mean. Without both, EM loses a teacher if there are more than two.
    """
    scores = standardise(signal, params.scope("mixture"))

    def fit() -> Array:
        estimated = _estimated(scores, shares)
        ratio = np.full(signal.shape[1], estimated.ratio)
        return np.stack([estimated.shares, estimated.separations, estimated.noise, ratio])

    of_texts, separations, noise, ratios = params.value("mixture", fit)
    estimated = Mixture(of_texts, separations, noise, float(ratios[0]))
    return estimated.posterior(scores), estimated


def _estimated(scores: Array, shares: Array | None) -> Mixture:
    texts, teachers = scores.shape
    weights = softmax(scores / SHARPNESS)
    estimated = _fit(scores, weights, shares)
    for _ in range(ROUNDS if teachers > 1 and texts > 1 else 0):
        posterior = estimated.posterior(scores)
        change, weights = float(np.abs(posterior - weights).max()), posterior
        estimated = _fit(scores, weights, shares)
        if change < SETTLED:
            break
    return estimated


def _fit(scores: Array, weights: Array, known_shares: Array | None) -> Mixture:
    texts, teachers = scores.shape
    counts, means, spreads = [], [], []
    for probability in (weights, 1 - weights):
        counts.append(np.maximum(probability.sum(axis=0), 1e-9))
        means.append((probability * scores).sum(axis=0) / counts[-1])
        spreads.append(np.maximum((probability * (scores - means[-1]) ** 2).sum(axis=0) / counts[-1], 1e-6))
    ratio = float(np.clip(np.exp(np.log(spreads[0] / spreads[1]).mean() / 2), LEAST_RATIO, 1 / LEAST_RATIO))
    variance = (counts[0] * spreads[0] / ratio**2 + counts[1] * spreads[1]) / texts
    noise = np.sqrt(np.maximum(variance, LEAST_NOISE**2))
    separations = (means[0] - means[1]) / noise
    shrunk = (1 - SHRINKAGE) * separations + SHRINKAGE * separations.mean()
    estimated = (counts[0] + PRIOR * texts / teachers) / (texts * (1 + PRIOR))
    return Mixture(estimated if known_shares is None else known_shares, np.maximum(shrunk, 0.0), noise, ratio)
