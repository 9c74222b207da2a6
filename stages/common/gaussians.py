"""Fits Gaussians with a shared, shrunk covariance to hidden states. Texts n, width W, groups C; all in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Groups = NDArray[np.int64]

LEAST_VARIANCE = 1e-6
"""Variance of states that are all the same: about the resolution of fp16."""


class Moments:
    """Counts and sums by group, and the total sum of outer products: no matrix of all texts is ever made."""

    def __init__(self, origin: Array, groups: int) -> None:
        self.origin, width = origin, len(origin)  # near the states, so that nothing cancels
        self.counts, self.sums, self.products = np.zeros(groups), np.zeros((groups, width)), np.zeros((width, width))

    def add(self, states: Array, groups: Groups) -> None:
        """Adds states [n, W] of these groups."""
        moved = states - self.origin
        self.counts += np.bincount(groups, minlength=len(self.counts))
        np.add.at(self.sums, groups, moved)
        self.products += moved.T @ moved


@dataclass(frozen=True)
class Gaussians:
    """Gaussians by class with one shared covariance, shrunk so that fewer texts than dimensions suffice."""

    means: Array
    """[C, W], of the groups that had texts."""
    whiten: Array
    """[W, W]: of the shared covariance S, the lower triangular L with L S L' = 1."""
    shrinkage: Array
    """The share of the identity in S, a single number."""

    @classmethod
    def of(cls, parts: Sequence[Moments]) -> Gaussians:
        """Fits to the sum of moments about one origin, of at least one text."""
        total = Moments(parts[0].origin, len(parts[0].counts))
        for part in parts:
            total.counts += part.counts
            total.sums += part.sums
            total.products += part.products
        present, texts = total.counts > 0, float(total.counts.sum())
        counts, sums = total.counts[present], total.sums[present]
        means = sums / counts[:, None]
        covariance, share = shrunk((total.products - means.T @ sums) / texts, texts)
        whiten = np.linalg.inv(np.linalg.cholesky(covariance))
        return cls(means + total.origin, whiten, np.array(share))

    def distance(self, states: Array) -> Array:
        """Returns [n]: the squared Mahalanobis distance of each state [n, W] from the nearest mean."""
        white, squared = states @ self.whiten.T, np.full(len(states), np.inf)
        for mean in self.means @ self.whiten.T:
            np.minimum(squared, np.square(white - mean).sum(axis=1), out=squared)
        return squared


def shrunk(covariance: Array, texts: float) -> tuple[Array, float]:
    """Returns the oracle-approximating shrinkage towards the identity (Chen et al. 2010), and its share."""
    width, trace = len(covariance), float(np.trace(covariance))
    squares = float(np.square(covariance).sum())
    uneven = squares - trace**2 / width
    share = 1.0
    if uneven > np.finfo(float).eps * squares:
        share = min(1.0, ((1 - 2 / width) * squares + trace**2) / ((texts + 1 - 2 / width) * uneven))
    level = max(trace / width, LEAST_VARIANCE)
    return (1 - share) * covariance + share * level * np.eye(width), share
