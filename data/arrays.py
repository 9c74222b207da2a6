"""Arithmetic on rows of numbers: softmax, entropy, Gaussians, columns; for NumPy arrays and for Polars Array columns.

The two softmaxes round differently, so each caller keeps its own. A Polars column of n arrays of C numbers is computed
flat, in one vectorised operation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from numbers import Integral
from operator import add
from typing import Any, TypeAlias

from amalgam.data.lazy import np, pl

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

Keys: TypeAlias = "np.ndarray[Any, np.dtype[np.bytes_]]"
"""Keys of texts, 16 bytes each."""

RowNumbers: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


# ---- NumPy


def is_whole(value: Any, least: int) -> bool:
    """Returns whether the value is a whole number from `least` on, of Python or NumPy."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def held_out_keys(keys: Keys, share: float) -> Array:
    """Returns which texts are held out: by the half of the key that buckets do not use, so alike in any corpus."""
    halves = np.frombuffer(keys.tobytes(), ">u8").reshape(-1, 2)
    return halves[:, 1] < np.uint64(math.ceil(share * 2**64))


def softmax(logits: Array) -> Array:
    """Returns the softmax over the last axis."""
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


def entropy_nats(probability: Array, axis: int = -1) -> Array:
    """Returns the entropy over one axis in nats, with 0 * log 0 = 0."""
    safe = np.where(probability > 0, probability, 1.0)
    return -(probability * np.log(safe)).sum(axis=axis)


def unknown_score(logits: Array) -> Array:
    """Returns minus the logarithm of the sum of exp(logits): the higher, the less a text is like the training texts."""
    highest = logits.max(axis=-1)
    return -highest - np.log(np.exp(logits - highest[..., None]).sum(axis=-1))


def top_margin(scores: Array) -> Array:
    """Returns, for each row, the largest number less the second largest."""
    ordered = np.partition(scores, -2, axis=1)  # pl.Series.arr.sort takes as long as everything else together
    return ordered[:, -1] - ordered[:, -2]


# ---- Gaussians


LEAST_VARIANCE = 1e-6
"""Variance of states that are all the same: about the resolution of fp16."""


class Moments:
    """Counts and sums by group, and the total sum of outer products: no matrix of all texts is ever made."""

    def __init__(self, origin: Array, groups: int) -> None:
        self.origin, width = origin, len(origin)  # near the states, so that nothing cancels
        self.counts, self.sums, self.products = np.zeros(groups), np.zeros((groups, width)), np.zeros((width, width))

    def add(self, states: Array, groups: RowNumbers) -> None:
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


# ---- Polars columns of arrays


def width(arrays: pl.Series) -> int:
    """Returns C of a column of arrays of C numbers."""
    dtype = arrays.dtype
    if not isinstance(dtype, pl.Array):
        raise TypeError(f"{arrays.name} holds {dtype}, not arrays")
    return int(dtype.size)


def flat(arrays: pl.Series) -> pl.Series:
    """Returns the numbers of all arrays in one column, in float64."""
    return arrays.reshape((-1,)).cast(pl.Float64)


def shaped(numbers: pl.Series, classes: int) -> pl.Series:
    """Returns the numbers as arrays of `classes` each; reverses `flat`."""
    return (
        numbers.reshape((-1, classes)) if len(numbers) else pl.Series(numbers.name, [], pl.Array(pl.Float64, classes))
    )


def softmax_column(logits: pl.Series) -> pl.Series:
    classes = width(logits)
    raised = shaped(flat(logits - logits.arr.max()).exp(), classes)
    return raised / raised.arr.sum()


def entropy_column(probability: pl.Series) -> pl.Series:
    """Returns the entropy of each array in nats, with 0 * log 0 = 0."""
    numbers = flat(probability)
    return -shaped((numbers * numbers.log()).fill_nan(0.0), width(probability)).arr.sum()


def first_label(probability: pl.Series) -> pl.Series:
    """Returns 1 at the largest number of each array, the first of equals, and 0 elsewhere."""
    first = probability.arr.arg_max()
    return side_by_side([(first == index).cast(pl.Float64) for index in range(width(probability))])


def total(columns: Iterable[pl.Series]) -> pl.Series:
    """Returns the sum of the columns, added from left to right."""
    return reduce(add, columns)


def columns_of(arrays: pl.Series) -> list[pl.Series]:
    return [arrays.arr.get(index) for index in range(width(arrays))]


def side_by_side(columns: list[pl.Series]) -> pl.Series:
    """Returns a column of arrays from one column per position."""
    frame = pl.DataFrame({str(index): series for index, series in enumerate(columns)})
    return frame.select(pl.concat_arr(pl.all())).to_series()
