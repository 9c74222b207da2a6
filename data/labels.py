"""Teachers' label names -> the union: first-seen order, teacher by teacher; a shared name is one label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class LabelSpace:
    names: tuple[str, ...]
    columns: dict[str, tuple[int, ...]]
    """For each teacher, the indices of its labels in the union."""

    @property
    def owners(self) -> list[list[str]]:
        """For each label, the teachers that know it."""
        return [
            [teacher for teacher, columns in self.columns.items() if index in columns]
            for index in range(len(self.names))
        ]


def union_of(labels: Mapping[str, Sequence[str]]) -> LabelSpace:
    names = list(dict.fromkeys(name for own in labels.values() for name in own))
    place = {name: index for index, name in enumerate(names)}
    return LabelSpace(tuple(names), {teacher: tuple(place[name] for name in own) for teacher, own in labels.items()})


def cut_in_groups(labels: Sequence[str], groups: int) -> list[list[str]]:
    """Labels sorted by name, cut into contiguous groups of equal size, the remainder in the last."""
    ordered = sorted(labels)
    size = len(ordered) // groups
    cuts = [index * size for index in range(groups)] + [len(ordered)]
    return [ordered[start:end] for start, end in pairwise(cuts)]
