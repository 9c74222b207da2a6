"""Finds the nearest other texts in spaces of hidden states, which are read block by block.

Up to REFERENCES texts, each is compared with every other, and beyond with a sample of that size. Time is then linear in
the texts, and memory holds the sample, one block and the neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from amalgam.data.arrays import Array
from amalgam.data.lazy import np, torch

BLOCK = 2048
REFERENCES = 16_384
"""The sample is evenly spaced in key order, and keys are digests, so it is random."""

CLOSEST = 5, 20
"""Least and largest number of the nearest others whose mean distance gives a text's density."""

OF_A_LABEL = 10
"""Density is of one in so many of the texts that a label has on average."""

AS_GOOD_AS_EQUAL = 1e-3
"""Distance below which texts are not distinguished."""


class Space(Protocol):
    """States [texts, width] of one model: an array, or files that are read on demand."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Any, /) -> Array:
        """Returns the states of some texts: a slice or an array of their places."""
        ...


@dataclass(frozen=True)
class SideBySide:
    """Joins spaces with equal weight: each is centred and scaled to length 1."""

    spaces: Sequence[Space]
    means: Sequence[Array]

    @classmethod
    def of(cls, spaces: Sequence[Space]) -> SideBySide:
        return cls(spaces, [mean_of(space) for space in spaces])

    def __len__(self) -> int:
        return len(self.spaces[0])

    def __getitem__(self, rows: Any, /) -> Array:
        parts = [_of_length_1(space[rows] - mean) for space, mean in zip(self.spaces, self.means, strict=True)]
        return _of_length_1(np.concatenate(parts, axis=1))


def mean_of(space: Space) -> Array:
    sums = sum(np.asarray(space[rows]).sum(axis=0, dtype=np.float64) for rows in blocks_of(space))
    mean: Array = (sums / max(1, len(space))).astype(np.float32)
    return mean


def blocks_of(space: Space) -> Iterator[slice]:
    for start in range(0, len(space), BLOCK):
        yield slice(start, min(start + BLOCK, len(space)))


def _of_length_1(states: Array) -> Array:
    length = np.linalg.norm(states, axis=1, keepdims=True)
    unit_states: Array = states / np.where(length > 0, length, 1)
    return unit_states


def nearest(space: Space, count: int, references: int = REFERENCES) -> tuple[Array, Array]:
    """Returns places and similarities [texts, count] of the nearest other texts by exact cosine; fewer if absent.

    The states have length 1.
    """
    texts = len(space)
    among = np.arange(texts) if texts <= references else np.arange(references) * texts // references
    others = torch.from_numpy(np.ascontiguousarray(space[among], np.float32)).T
    count = min(count, len(among) - 1)
    places = np.empty((texts, max(0, count)), np.int32)
    alike = np.empty(places.shape, np.float32)
    for rows in blocks_of(space) if count > 0 else ():
        states = torch.from_numpy(np.ascontiguousarray(space[rows], np.float32))
        similarity = states @ others
        itself = np.flatnonzero((among >= rows.start) & (among < rows.stop))
        similarity[among[itself] - rows.start, itself] = -2.0
        closest = similarity.topk(count, dim=1)
        places[rows] = among[closest.indices.numpy()]
        alike[rows] = closest.values.numpy()
    return places, alike


def densities(states: Sequence[Space], labels: int) -> Array:
    """Returns the density of texts in each teacher's space: learned classes are dense, other texts are between them.

    `labels` is the number of labels of all teachers: small classes have few neighbours.
    """
    least, most = CLOSEST
    texts = min(len(states[0]), REFERENCES)
    closest = min(most, max(least, round(texts / (OF_A_LABEL * labels))))
    return np.stack([density(own, closest) for own in states], axis=1)


def density(states: Space, closest: int) -> Array:
    """Returns -log of each text's mean distance to the closest others: 1 - cosine around the mean of all states."""
    similarity = nearest(SideBySide.of([states]), closest)[1].astype(np.float64)
    distance = 1 - similarity.mean(axis=1) if similarity.shape[1] else np.ones(len(states))
    log_density: Array = -np.log(np.maximum(distance, 0) + AS_GOOD_AS_EQUAL)
    return log_density
