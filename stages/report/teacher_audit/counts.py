"""What is counted of the teachers, texts after texts: every number is a sum, so that memory does not grow with them.

Shapes: N texts, T teachers, L labels of the union, C a teacher's own. `committee` is the union's label where some of
the teachers speak: argmax of sum w_i pad_i(T_i) with the weights of those alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from amalgam.data.labels import LabelSpace

Array = np.ndarray[Any, np.dtype[Any]]


CONFIDENT = 0.5
"""Confidence from which a teacher counts as confident in the matrix of conflicts."""


@dataclass(frozen=True)
class Block:
    """Of some texts."""

    distributions: Sequence[Array]
    """A teacher's own [N, C], dropout off."""
    confidence_NT: Array  # noqa: N815
    weights_NT: Array | None  # noqa: N815
    """What weigh-teachers made of them, where it ran."""
    gold_N: Array  # noqa: N815
    """Places in the union; -1 where there is none."""


@dataclass(frozen=True)
class WeightRule:
    """How teachers are weighed against each other, whichever of them speak."""

    temperature: float
    hard: bool

    def weights(self, block: Block, speaking: Sequence[int]) -> Array:
        given = block.weights_NT is not None
        scores = (block.confidence_NT if block.weights_NT is None else block.weights_NT)[:, list(speaking)]
        if self.hard:
            found: Array = np.eye(len(speaking))[scores.argmax(axis=1)]
        elif given:
            sums = scores.sum(axis=1, keepdims=True)
            found = np.where(sums > 0, scores / np.where(sums > 0, sums, 1.0), 1 / len(speaking))
        else:
            raised = np.exp((scores - scores.max(axis=1, keepdims=True)) / self.temperature)
            found = raised / raised.sum(axis=1, keepdims=True)
        return found


class AuditCounts:
    """All that is counted; by teacher where nothing else is said."""

    def __init__(self, space: LabelSpace, rule: WeightRule) -> None:
        self.columns = [np.array(places) for places in space.columns.values()]
        self.rule, self.width = rule, len(space.names)
        teachers = len(self.columns)
        self.shared = {
            (one, other): frozenset(self.columns[one].tolist()) & frozenset(self.columns[other].tolist())
            for one, other in combinations(range(teachers), 2)
        }
        self.texts = self.labelled = self.right = 0
        self.confidence = np.zeros(teachers)
        self.wins, self.heaviest, self.changed, self.gained, self.lost = np.zeros((5, teachers), np.int64)
        self.conflicts = np.zeros((teachers, teachers), np.int64)
        self.said = [np.zeros(len(own), np.int64) for own in self.columns]
        self.said_and_won = [np.zeros(len(own), np.int64) for own in self.columns]
        self.gold_texts, self.gold_right = np.zeros((2, self.width), np.int64)
        self.gold_won = np.zeros((self.width, teachers), np.int64)
        # By pair: texts on which both say a label that both know, on which these differ; the distance of what they say.
        self.met, self.differed = (dict.fromkeys(self.shared, 0) for _ in range(2))
        self.distance = dict.fromkeys(self.shared, 0.0)
        # By the teacher left out: texts on which a held-out other teacher agrees with the rest, only with it, only
        # without it; counted where both of the rest's labels are ones that the other knows.
        self.judged, self.agreed_with, self.agreed_without = np.zeros((3, teachers), np.int64)
        self.only_with, self.only_without = np.zeros((2, teachers), np.int64)

    def add(self, block: Block) -> None:
        says_NT = np.stack(  # noqa: N806
            [own[one.argmax(axis=1)] for own, one in zip(self.columns, block.distributions, strict=True)], axis=1
        )
        self.texts += len(says_NT)
        self.confidence += block.confidence_NT.sum(axis=0)
        won_N = self._count_wins(block, says_NT)  # noqa: N806
        confident_NT = (block.confidence_NT >= CONFIDENT).astype(np.int64)  # noqa: N806
        for one, other in self.shared:
            self._count_pair(block, says_NT, confident_NT, one, other)
        self._count_absences(block, says_NT, won_N)

    def _count_wins(self, block: Block, says_NT: Array) -> Array:  # noqa: N803
        """Returns each text's winner: by the weights where there are some, by confidence else; ties to the first."""
        teachers = len(self.columns)
        won_N: Array = block.confidence_NT.argmax(axis=1)  # noqa: N806
        self.wins += np.bincount(won_N, minlength=teachers)
        if block.weights_NT is not None:
            won_N = block.weights_NT.argmax(axis=1)  # noqa: N806
            self.heaviest += np.bincount(won_N, minlength=teachers)
        for teacher, own in enumerate(self.columns):
            place = np.zeros(self.width, np.int64)
            place[own] = np.arange(len(own))
            said = place[says_NT[:, teacher]]
            self.said[teacher] += np.bincount(said, minlength=len(own))
            self.said_and_won[teacher] += np.bincount(said[won_N == teacher], minlength=len(own))
        return won_N

    def _count_pair(self, block: Block, says_NT: Array, confident_NT: Array, one: int, other: int) -> None:  # noqa: N803
        differ = says_NT[:, one] != says_NT[:, other]
        both = int((differ & (confident_NT[:, one] * confident_NT[:, other] == 1)).sum())
        self.conflicts[one, other] += both
        self.conflicts[other, one] += both
        shared = self.shared[one, other]
        meet = np.isin(says_NT[:, [one, other]], list(shared)).all(axis=1)
        self.met[one, other] += int(meet.sum())
        self.differed[one, other] += int((meet & differ).sum())
        if len(shared) == len(self.columns[one]) == len(self.columns[other]):
            apart = self._padded(block, one) - self._padded(block, other)
            self.distance[one, other] += float(np.abs(apart).sum() / 2)

    def _count_absences(self, block: Block, says_NT: Array, won_N: Array) -> None:  # noqa: N803
        teachers = range(len(self.columns))
        padded = [self._padded(block, teacher) for teacher in teachers]
        rest: dict[frozenset[int], Array] = {}

        def committee(*absent: int) -> Array:
            key = frozenset(absent)
            if key not in rest:
                speaking = [teacher for teacher in teachers if teacher not in key]
                weights = self.rule.weights(block, speaking)
                total = sum(weights[:, [place]] * padded[teacher] for place, teacher in enumerate(speaking))
                rest[key] = np.asarray(total).argmax(axis=1)
            return rest[key]

        whole = committee()
        self._count_gold(block, whole, won_N)
        if len(self.columns) == 1:
            return
        known = block.gold_N >= 0
        right = known & (whole == block.gold_N)
        for absent in teachers:
            without = committee(absent)
            self.changed[absent] += int((without != whole).sum())
            right_without = known & (without == block.gold_N)
            self.gained[absent] += int((right_without & ~right).sum())
            self.lost[absent] += int((right & ~right_without).sum())
        for one, other in self.shared if len(self.columns) > 2 else ():
            self._count_agreement(says_NT[:, other], committee(other), committee(one, other), one, other)
            self._count_agreement(says_NT[:, one], committee(one), committee(one, other), other, one)

    def _count_agreement(self, says_N: Array, with_it: Array, without_it: Array, absent: int, judge: int) -> None:  # noqa: N803
        """`judge` spoke in neither: what it says is held out."""
        own = self.columns[judge]
        fair = np.isin(with_it, own) & np.isin(without_it, own)
        agrees, agrees_without = fair & (with_it == says_N), fair & (without_it == says_N)
        self.judged[absent] += int(fair.sum())
        self.agreed_with[absent] += int(agrees.sum())
        self.agreed_without[absent] += int(agrees_without.sum())
        self.only_with[absent] += int((agrees & ~agrees_without).sum())
        self.only_without[absent] += int((agrees_without & ~agrees).sum())

    def _count_gold(self, block: Block, whole: Array, won_N: Array) -> None:  # noqa: N803
        known = np.flatnonzero(block.gold_N >= 0)
        gold = block.gold_N[known]
        right = whole[known] == gold
        self.labelled += len(known)
        self.right += int(right.sum())
        self.gold_texts += np.bincount(gold, minlength=self.width)
        self.gold_right += np.bincount(gold[right], minlength=self.width)
        np.add.at(self.gold_won, (gold, won_N[known]), 1)

    def _padded(self, block: Block, teacher: int) -> Array:
        found = np.zeros((len(block.confidence_NT), self.width))
        found[:, self.columns[teacher]] = block.distributions[teacher]
        return found
