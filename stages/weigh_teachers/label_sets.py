"""Combines teachers that have the same labels, because they are right on the same texts.

The weights assume that exactly one teacher is right. Two copies of a teacher would contradict that on all their texts.
Copies, of equal predictions too, count as one in every step.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from amalgam.data.arrays import Array, RowNumbers
from amalgam.data.keys import LabelSpace
from amalgam.data.lazy import np
from amalgam.stages.weigh_teachers.mixture import standardised_weights
from amalgam.stages.weigh_teachers.neighbours import BlockSpace, Space, mean_of, references_of
from amalgam.stages.weigh_teachers.signals import Params


@dataclass(frozen=True)
class DistinctTeachers:
    """The teachers without copies of earlier ones."""

    space: LabelSpace
    places: RowNumbers
    """For each teacher, the position in `space` of the teacher that it is or copies."""

    @classmethod
    def of(cls, space: LabelSpace, contents: Sequence[Hashable]) -> DistinctTeachers:
        """Combines teachers of equal contents."""
        distinct = list(dict.fromkeys(contents))
        firsts = [list(space.columns)[contents.index(content)] for content in distinct]
        columns = {name: space.columns[name] for name in firsts}
        return cls(replace(space, columns=columns), np.array([distinct.index(content) for content in contents]))

    def divided(self, weights: Array) -> Array:
        """Divides weights [texts, distinct teachers] equally among copies: [texts, teachers]."""
        return (weights / np.bincount(self.places))[:, self.places]


@dataclass(frozen=True)
class LabelSets:
    """The teachers in groups of equal label sets, in the order of each group's first teacher."""

    groups: list[list[int]]
    """Positions of the teachers."""

    @classmethod
    def of(cls, space: LabelSpace) -> LabelSets:
        groups: dict[frozenset[int], list[int]] = {}
        for position, labels in enumerate(space.columns.values()):
            groups.setdefault(frozenset(labels), []).append(position)
        return cls(list(groups.values()))

    def detectors(self, space: LabelSpace) -> list[int]:
        """Returns the groups of teachers with a single label, which have a catch_all next to it."""
        counts = list(map(len, space.columns.values()))
        return [number for number, group in enumerate(self.groups) if counts[group[0]] == 1]

    @property
    def all_differ(self) -> bool:
        return all(len(group) == 1 for group in self.groups)

    def mean(self, evidence: Array) -> Array:
        """Returns the mean evidence of each group [texts, groups] from that of the teachers."""
        return np.stack([evidence[:, group].mean(axis=1) for group in self.groups], axis=1)

    def by_teacher(self, evidence: Array) -> Array:
        """Returns the evidence of each teacher's group [texts, teachers]; reverses `mean` for groups of one."""
        group_of = {place: number for number, group in enumerate(self.groups) for place in group}
        return evidence[:, [group_of[place] for place in range(len(group_of))]]

    def predicted(self, labels: Array, evidence: Array) -> Array:
        """Returns the label [texts, groups] that the most confident teacher of each group predicts."""
        best = [np.array(group)[evidence[:, group].argmax(axis=1)] for group in self.groups]
        return np.take_along_axis(labels, np.stack(best, axis=1), axis=1)

    def joined(self, spaces: Sequence[BlockSpace | None]) -> list[BlockSpace]:
        """Returns one space for each group of teachers with states, which have equal scale over the references."""
        of_groups = ([spaces[place] for place in group] for group in self.groups)
        with_states = ([space for space in of_group if space is not None] for of_group in of_groups)
        return [own[0] if len(own) == 1 else _joined(own) for own in with_states if own]

    def divided(self, weights: Array, evidence: Array, params: Params) -> Array:
        """Divides the weight of each group [texts, groups] among its teachers, by the evidence of their predictions."""
        divided = np.empty(evidence.shape)
        for group, weight in zip(self.groups, weights.T, strict=True):
            within_group = standardised_weights(evidence[:, group], params.scope(f"group {group[0]}"))
            divided[:, group] = weight[:, None] * within_group
        return divided

    def divided_shares(self, shares: Array, weights: Array) -> Array:
        """Divides the share of each group in proportion to the mean weights of its teachers [texts, teachers]."""
        divided, means = np.empty(weights.shape[1]), weights.mean(axis=0)
        for group, share in zip(self.groups, shares, strict=True):
            total = means[group].sum()
            divided[group] = share * means[group] / total if total > 0 else share / len(group)
        return divided


@dataclass(frozen=True)
class Joined:
    """Several spaces as one; the references of each are scaled to a mean squared distance of 1 from their mean."""

    spaces: Sequence[Space]
    deviations: Sequence[float]

    def __len__(self) -> int:
        return len(self.spaces[0])

    def __getitem__(self, rows: Any, /) -> Array:
        parts = [space[rows] / deviation for space, deviation in zip(self.spaces, self.deviations, strict=True)]
        return np.concatenate(parts, axis=1)


def _joined(spaces: Sequence[BlockSpace]) -> BlockSpace:
    deviations = [_deviation(space.references) for space in spaces]
    texts, references = [space.texts for space in spaces], [space.references for space in spaces]
    return BlockSpace(Joined(texts, deviations), Joined(references, deviations), spaces[0].start)


def _deviation(space: Space) -> float:
    squares = (references_of(space) - mean_of(space)) ** 2
    return float(np.sqrt(squares.sum(axis=1, dtype=np.float64).mean())) or 1.0
