"""Class-conditional Gaussians with one shared covariance, fitted from sums: no matrix of all texts is ever made.

Texts n, width W, groups C; all in float64. Covariances are shrunk towards a multiple of the identity, so that fewer
texts than dimensions serve too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

Groups = NDArray[np.integer[Any]]


LEAST_VARIANCE = 1e-6
"""Variance of states that are all the same: about the resolution of fp16."""


@dataclass
class Moments:
    """Counts and sums by group, and the total sum of outer products, about an origin."""

    origin: Array
    """[W]: near the states, so that nothing cancels."""
    counts: Array
    sums: Array
    products: Array

    @classmethod
    def none(cls, origin: Array, groups: int) -> Moments:
        width = len(origin)
        return cls(origin, np.zeros(groups), np.zeros((groups, width)), np.zeros((width, width)))

    def add(self, states: Array, groups: Groups) -> None:
        """`states` [n, W]."""
        member, moved = np.eye(len(self.counts))[groups], states - self.origin
        self.counts += member.sum(axis=0)
        self.sums += member.T @ moved
        self.products += moved.T @ moved

    @classmethod
    def together(cls, parts: Sequence[Moments]) -> Moments:
        """Adds parts about the same origin."""
        total = cls.none(parts[0].origin, len(parts[0].counts))
        for part in parts:
            total.counts += part.counts
            total.sums += part.sums
            total.products += part.products
        return total


@dataclass(frozen=True)
class Gaussians:
    means: Array
    """[C, W], of the groups that had texts."""
    whiten: Array
    """[W, W]: of the shared covariance S, the lower triangular L with L S L' = 1."""
    shrinkage: Array
    """The share of the identity in S, a single number."""

    @classmethod
    def of(cls, moments: Moments) -> Gaussians:
        """Fits to at least one text."""
        present, texts = moments.counts > 0, float(moments.counts.sum())
        counts, sums = moments.counts[present], moments.sums[present]
        means = sums / counts[:, None]
        covariance, share = shrunk((moments.products - means.T @ sums) / texts, texts)
        whiten = np.linalg.inv(np.linalg.cholesky(covariance))
        return cls(means + moments.origin, whiten, np.array(share))

    def distance(self, states: Array) -> Array:
        """[n]: the squared Mahalanobis distance of each state [n, W] from the nearest mean."""
        white = states @ self.whiten.T
        each = [np.square(white - mean).sum(axis=1) for mean in self.means @ self.whiten.T]
        squared: Array = np.minimum.reduce(each)
        return squared


def shrunk(covariance: Array, texts: float) -> tuple[Array, float]:
    """The oracle-approximating shrinkage of Chen et al. 2010, and its share: it needs no more than the covariance."""
    width, trace = len(covariance), float(np.trace(covariance))
    squares = float(np.square(covariance).sum())
    uneven = squares - trace**2 / width
    share = 1.0
    if uneven > np.finfo(float).eps * squares:
        share = min(1.0, ((1 - 2 / width) * squares + trace**2) / ((texts + 1 - 2 / width) * uneven))
    level = max(trace / width, LEAST_VARIANCE)
    return (1 - share) * covariance + share * level * np.eye(width), share
