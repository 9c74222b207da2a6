"""Finds the nearest other texts in spaces of hidden states, which are read some rows at a time.

Each text is compared with the first texts of the corpus, the references. Time is then linear in the texts, and memory
holds the references, these rows and the neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from amalgam.data.arrays import Array
from amalgam.data.lazy import np, torch
from amalgam.stages.common.cached.read import States

ROWS_AT_ONCE = 2048
"""Texts of a matrix product."""
REFERENCES = 16_384
"""The first texts in key order are a random sample, because keys are digests."""

CLOSEST = 5, 20
"""Least and largest number of the nearest others whose mean distance gives a text's density."""

OF_A_LABEL = 10
"""Density is of one in so many of the texts that a label has on average."""

QUARTER = 4
"""A text has at most this part of the texts as neighbours: the mean of nearly all others is high where it is low."""

AS_GOOD_AS_EQUAL = 1e-3
"""Distance below which texts are not distinguished."""


class Space(Protocol):
    """States [texts, width] of one model: an array, or files that are read on demand."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Any, /) -> Array:
        """Returns the states of some texts: a slice or an array of their places."""
        ...


@dataclass(frozen=True)
class Pooled:
    """A teacher's pooled states as a space."""

    states: States

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, rows: Any, /) -> Array:
        places = np.arange(len(self.states))[rows]
        states: Array = self.states.take(places)[:, :1, 0].astype(np.float32)
        return states.reshape(len(places), self.states.width)


@dataclass(frozen=True)
class SideBySide:
    """Joins spaces with equal weight: each is centred and scaled to length 1."""

    spaces: Sequence[Space]
    means: Sequence[Array]

    @classmethod
    def of(cls, spaces: Sequence[Space]) -> SideBySide:
        return cls(spaces, [mean_of(space) for space in spaces])

    def apart(self) -> list[Space]:
        """Returns each space by itself, centred and scaled to length 1."""
        return [SideBySide([space], [mean]) for space, mean in zip(self.spaces, self.means, strict=True)]

    def __len__(self) -> int:
        return len(self.spaces[0])

    def __getitem__(self, rows: Any, /) -> Array:
        parts = [of_length_1(space[rows] - mean) for space, mean in zip(self.spaces, self.means, strict=True)]
        return of_length_1(np.concatenate(parts, axis=1))


@dataclass(frozen=True)
class BlockSpace:
    """One space of a block's texts, and of the corpus's first texts, with which they are compared."""

    texts: Space
    references: Space
    start: int = 0
    """The number of texts before the block."""


@dataclass(frozen=True)
class JointSpace(BlockSpace):
    """Several spaces of a block side by side, around the means of the references."""

    texts: SideBySide
    references: SideBySide

    @classmethod
    def of(cls, spaces: Sequence[BlockSpace]) -> JointSpace:
        references = SideBySide.of([space.references for space in spaces])
        texts = SideBySide([space.texts for space in spaces], references.means)
        return cls(texts, references, spaces[0].start)


def mean_of(space: Space) -> Array:
    """Returns the mean of the references."""
    return references_of(space).mean(axis=0, dtype=np.float64).astype(np.float32)


def references_of(space: Space) -> Array:
    return np.ascontiguousarray(space[: min(len(space), REFERENCES)], np.float32)


def rows_of(space: Space) -> Iterator[slice]:
    for start in range(0, len(space), ROWS_AT_ONCE):
        yield slice(start, min(start + ROWS_AT_ONCE, len(space)))


def of_length_1(states: Array) -> Array:
    length = np.linalg.norm(states, axis=1, keepdims=True)
    return states / np.where(length > 0, length, 1)


def nearest_texts(block: BlockSpace, count: int) -> tuple[Array, Array]:
    """Returns places and similarities [texts, count] of the nearest references by exact cosine; fewer if absent.

    The states have length 1.
    """
    space, start = block.texts, block.start
    others = torch.from_numpy(references_of(block.references)).T
    total = others.shape[1]
    count = max(0, min(count, total - 1))
    places = np.empty((len(space), count), np.int32)
    alike = np.empty(places.shape, np.float32)
    memory = torch.empty(min(ROWS_AT_ONCE, len(space)), total)  # new memory each time takes longer than the product
    for rows in rows_of(space) if count else ():
        states = torch.from_numpy(np.ascontiguousarray(space[rows], np.float32))
        similarity = torch.mm(states, others, out=memory[: len(states)])
        itself = np.arange(start + rows.start, min(start + rows.stop, total))
        similarity[itself - start - rows.start, itself] = -2.0
        closest = similarity.topk(count, dim=1)
        places[rows] = closest.indices.numpy()
        alike[rows] = closest.values.numpy()
    return places, alike


def similar(block: BlockSpace, count: int) -> Array:
    """Returns places [texts, count] of the nearest references, of which there are fewer in a small corpus."""
    total = min(len(block.references), REFERENCES)
    return nearest_texts(block, min(count, max(1, total // QUARTER)))[0]


def densities(encoder: BlockSpace, teachers: Sequence[BlockSpace], labels: int, *, is_relative: bool) -> Array:
    """Returns the density of texts in each teacher's space, relative to that in the encoder's.

    Learned classes are dense, other texts are between them. Common phrases are dense in every model. An encoder that is
    a teacher has dense classes too, so its density is not subtracted: `is_relative` is False.
    `labels` is the number of labels of all teachers: small classes have few neighbours.
    """
    least, most = CLOSEST
    closest = min(most, max(least, round(min(len(encoder.references), REFERENCES) / (OF_A_LABEL * labels))))
    if not teachers:
        return np.empty((len(encoder.texts), 0))
    of_teachers = np.stack([density(teacher, closest) for teacher in teachers], axis=1)
    return of_teachers - density(encoder, closest)[:, None] if is_relative else of_teachers


def density(block: BlockSpace, closest: int) -> Array:
    """Returns -log of each text's mean distance to the closest references: 1 - cosine around their mean."""
    similarity = nearest_texts(JointSpace.of([block]), closest)[1].astype(np.float64)
    distance = 1 - similarity.mean(axis=1) if similarity.shape[1] else np.ones(len(block.texts))
    return -np.log(np.maximum(distance, 0) + AS_GOOD_AS_EQUAL)
