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

GROUP = 64
"""References whose largest cosine is computed before a sort; a sort of all takes two to three times as long."""

CLOSEST = 5, 20
"""Least and largest number of the nearest others whose mean distance gives a text's density."""

OF_A_LABEL = 10
"""Density is of one in so many of the texts that a label has on average."""

QUARTER = 4
"""A text has at most this part of the texts as neighbours: the mean of nearly all others is high where it is low."""

ITSELF = -2.0
"""Instead of the cosine of a text and itself: less than any cosine."""

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
class Centred:
    """A space around a mean, with states of length 1."""

    space: Space
    mean: Array

    @classmethod
    def of(cls, space: Space) -> Centred:
        return cls(space, mean_of(space))

    def __len__(self) -> int:
        return len(self.space)

    def __getitem__(self, rows: Any, /) -> Array:
        return of_length_1(self.space[rows] - self.mean)


@dataclass(frozen=True)
class BlockSpace:
    """One space of a block's texts, and of the corpus's first texts, with which they are compared."""

    texts: Space
    references: Space
    start: int = 0
    """The number of texts before the block."""

    def centred(self) -> BlockSpace:
        """Returns the space around the mean of the references."""
        references = Centred.of(self.references)
        return BlockSpace(Centred(self.texts, references.mean), references, self.start)


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


@dataclass(frozen=True)
class Compared:
    """A block's texts among the references."""

    density: Array
    """In each teacher's space: [texts, teachers]. Learned classes are dense, other texts are between them."""
    common: Array
    """In the encoder's space: [texts]. Common phrases are dense in every model."""
    near: Array
    """Places of the nearest references in all spaces together: [texts, neighbours]."""
    spaces: Sequence[Space]
    """States of the encoder and of each group of teachers, around their mean and of length 1."""

    @property
    def relative(self) -> Array:
        """Returns the density in each teacher's space relative to that in the encoder's: [texts, teachers]."""
        return self.density - self.common[:, None]


def compared(
    encoder: BlockSpace, teachers: Sequence[BlockSpace], groups: Sequence[BlockSpace], labels: int, neighbours: int
) -> Compared:
    """Compares a block's texts with the references in each space; most groups are a single teacher.

    `labels` is the number of labels of all teachers: for the density, small classes have few neighbours.
    The nearest references have the largest sum of cosines over the encoder and the groups.
    """
    spaces = {id(space): space.centred() for space in (encoder, *teachers, *groups)}
    comparisons = {space: _Comparison.of(centred) for space, centred in spaces.items()}
    joint, texts = dict.fromkeys(map(id, (encoder, *groups))), len(encoder.texts)
    density = {id(space): np.empty(texts) for space in (encoder, *teachers)}
    near = np.empty((texts, _most_neighbours(encoder, neighbours)), np.int32)
    memory, sums, closest = _memory(encoder), _memory(encoder), _closest(encoder, labels)
    for rows in rows_of(encoder.texts):
        total = sums[: rows.stop - rows.start].zero_()
        for space, comparison in comparisons.items():
            similarity = comparison.similarities(rows, memory)
            if space in density:
                density[space][rows] = _density(similarity, closest)
            if space in joint:
                total += similarity
        near[rows] = _nearest(total, near.shape[1])
    by_teacher = np.stack([density[id(teacher)] for teacher in teachers], axis=1) if teachers else np.empty((texts, 0))
    return Compared(by_teacher, density[id(encoder)], near, [spaces[space].texts for space in joint])


def similar(block: BlockSpace, count: int) -> Array:
    """Returns places [texts, count] of the nearest references, of which there are fewer in a small corpus.

    The states have length 1.
    """
    comparison, memory = _Comparison.of(block), _memory(block)
    near = np.empty((len(block.texts), _most_neighbours(block, count)), np.int32)
    for rows in rows_of(block.texts):
        near[rows] = _nearest(comparison.similarities(rows, memory), near.shape[1])
    return near


@dataclass(frozen=True)
class _Comparison:
    """Compares a block's texts with the references, which are in memory."""

    block: BlockSpace
    references: Any
    """[width, references]."""

    @classmethod
    def of(cls, block: BlockSpace) -> _Comparison:
        return cls(block, torch.from_numpy(references_of(block.references)).T)

    def similarities(self, rows: slice, memory: Any) -> Any:
        """Returns the cosines [texts, references] in `memory`; that of a text and itself is ITSELF."""
        states = torch.from_numpy(np.ascontiguousarray(self.block.texts[rows], np.float32))
        similarity, first = torch.mm(states, self.references, out=memory[: len(states)]), self.block.start + rows.start
        itself = np.arange(first, min(first + len(states), similarity.shape[1]))
        similarity[itself - first, itself] = ITSELF
        return similarity


def _memory(block: BlockSpace) -> Any:
    """Returns memory for cosines; new memory each time takes longer than the product."""
    return torch.empty(min(ROWS_AT_ONCE, len(block.texts)), _references(block))


def _references(block: BlockSpace) -> int:
    return min(len(block.references), REFERENCES)


def _most_neighbours(block: BlockSpace, count: int) -> int:
    references = _references(block)
    return max(0, min(count, max(1, references // QUARTER), references - 1))


def _nearest(similarity: Any, count: int) -> Array:
    places: Array = _largest(similarity, count)[1].numpy()
    return places


def _largest(similarity: Any, count: int) -> tuple[Any, Any]:
    """Returns values and places of the largest cosines of each text: they are in the groups with the largest maxima."""
    texts, references = similarity.shape
    if references % GROUP or 2 * count * GROUP > references:
        values, places = similarity.topk(count, dim=1)
        return values, places
    groups = similarity.view(texts, -1, GROUP)
    best = groups.amax(dim=2).topk(count, dim=1).indices
    values, places = groups.gather(1, best[:, :, None].expand(-1, -1, GROUP)).flatten(1).topk(count, dim=1)
    return values, best.gather(1, places // GROUP) * GROUP + places % GROUP


def _closest(block: BlockSpace, labels: int) -> int:
    """Returns the number of nearest others whose mean distance gives a text's density."""
    least, most = CLOSEST
    references = _references(block)
    return min(most, max(least, round(references / (OF_A_LABEL * labels))), references - 1)


def _density(similarity: Any, closest: int) -> Array:
    """Returns -log of each text's mean distance to the closest references: 1 - cosine."""
    if not closest:
        return np.zeros(len(similarity)) - np.log(1 + AS_GOOD_AS_EQUAL)
    distance = 1 - _largest(similarity, closest)[0].numpy().astype(np.float64).mean(axis=1)
    density: Array = -np.log(np.maximum(distance, 0) + AS_GOOD_AS_EQUAL)
    return density
