"""Fits Gaussians to a teacher's own texts and to all texts, and computes the out-of-domain score of a text.

md is the distance from the nearest class; rmd subtracts the distance from the background (Ren et al. 2021). msp is
minus the largest probability. Texts n, width W, groups C; all in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from amalgam.data.arrays import Array, Gaussians, Moments, RowNumbers, softmax
from amalgam.stages.common.cached.read import States
from amalgam.stages.target_methods import COMPARATIVE

ROUNDING = 1e-9
"""Tolerance of a fraction times a number of texts, so that an integer is not rounded up."""

ROWS = 1024
"""Texts whose states are in memory at once."""

FOLDS = 5

SAME = 1e-9
"""Scores that differ by less than this share of their size do not differ: the teacher is as certain of all."""

PAIR = ("own", "background")
PARTS = ("means", "whiten", "shrinkage")


def most_confident(logits: Array, is_own: Array, share: float, catch_all: Array | None = None) -> RowNumbers:
    """Returns the class of the most confident share of each predicted class of own texts, and -1 for other texts.

    The share is rounded up. Other texts are left out because generated texts drift. `catch_all` are the logits of
    outputs that are no classes: a text is less confident the higher they are.
    """
    predicted = logits.argmax(axis=1)
    rivals = np.concatenate([logits, logits[:, :0] if catch_all is None else catch_all], axis=1, dtype=np.float64)
    highest = np.take_along_axis(rivals, predicted[:, None], axis=1)
    np.put_along_axis(rivals, predicted[:, None], -np.inf, axis=1)
    order = np.argsort(rivals.max(axis=1) - highest[:, 0], kind="stable")
    predicted = np.where(is_own, predicted, -1)
    groups = np.full(len(logits), -1, np.int64)
    for label in np.unique(predicted[is_own]):
        texts = order[predicted[order] == label]
        groups[texts[: max(1, math.ceil(share * len(texts) - ROUNDING))]] = label
    return groups


Pair = tuple[Gaussians, Gaussians]
"""The Gaussians of a block: by class for a teacher's own texts, and for the background."""


def scores_of(pair: Pair, states: Array) -> tuple[Array, Array]:
    """Returns rmd and md [n] of states [n, W] of one block."""
    own, background = (gaussians.distance(states) for gaussians in pair)
    return own - background, own


# ---- the statistics of a teacher


@dataclass(frozen=True)
class Statistics:
    pairs: list[Pair]
    """By block."""
    mean: Array
    """[measures, blocks], in the order of COMPARATIVE: of the scores of the teacher's own texts."""
    deviation: Array
    """0 where they do not differ."""

    @classmethod
    def of(cls, states: States, logits: Array, groups: RowNumbers) -> Statistics:
        """Fits all blocks; `groups` has the class of each own text, and -1 for other texts."""
        folds = folds_of(groups)
        fitted = [_fit_block(states, block, groups, folds, logits.shape[1]) for block in range(states.blocks)]
        by_measure = [np.stack([scores[place] for _, scores in fitted]) for place in (0, 1)]
        largest = softmax(logits[groups >= 0].astype(np.float64)).max(axis=1)
        own_scores = np.stack([*by_measure, np.tile(-largest, (states.blocks, 1))])
        mean, deviation = own_scores.mean(axis=-1), own_scores.std(axis=-1)
        differs = deviation > SAME * np.abs(mean)
        return cls([pair for pair, _ in fitted], mean, np.where(differs, deviation, 0.0))

    def standardised(self, states: Array, logits: Array | None, measure: str) -> Array:
        """Returns scores [n, blocks] of states [n, blocks, W] in deviations of the own texts; 0 if those are equal."""
        place = COMPARATIVE.index(measure)
        if logits is not None and measure == "msp":
            score = np.repeat(-softmax(logits.astype(np.float64)).max(axis=1)[:, None], states.shape[1], axis=1)
        else:
            scores = [scores_of(pair, states[:, block])[place] for block, pair in enumerate(self.pairs)]
            score = np.stack(scores, axis=1)
        deviation = self.deviation[place]
        return np.where(deviation > 0, (score - self.mean[place]) / np.where(deviation > 0, deviation, 1.0), 0.0)

    def save(self, path: Path) -> None:
        tensors = {
            f"{name}.{part}": np.stack([getattr(pair[index], part) for pair in self.pairs])
            for index, name in enumerate(PAIR)
            for part in PARTS
        }
        save_file({**tensors, "mean": self.mean, "deviation": self.deviation}, path)

    @classmethod
    def load(cls, path: Path) -> Statistics:
        tensors = load_file(path)
        own, background = (
            [Gaussians(*parts) for parts in zip(*(tensors[f"{name}.{part}"] for part in PARTS), strict=True)]
            for name in PAIR
        )
        return cls(list(zip(own, background, strict=True)), tensors["mean"], tensors["deviation"])


def folds_of(groups: RowNumbers) -> RowNumbers:
    """Assigns folds in turn, separately to own and other texts; a teacher with fewer own texts has fewer folds."""
    is_own = groups >= 0
    turns = np.where(is_own, np.cumsum(is_own), np.cumsum(~is_own)) - 1
    return turns % max(1, min(FOLDS, int(is_own.sum())))


def _fit_block(
    states: States, block: int, groups: RowNumbers, folds: RowNumbers, classes: int
) -> tuple[Pair, tuple[Array, Array]]:
    """Returns the Gaussians, and rmd and md of the teacher's own texts, each under those of the other folds.

    A text is nearer to Gaussians fitted on it than new texts are, and the effect grows with fewer texts. Without folds,
    teachers of few and of many texts could not be compared.
    """
    blocks, count = slice(block, block + 1), int(folds.max()) + 1
    origin = states.take(np.arange(1), blocks)[0, 0, 0].astype(np.float64)
    own, background = ([Moments(origin, size) for _ in range(count)] for size in (classes, 1))
    for rows, batch in in_parts(states, blocks):
        for fold in range(count):
            mask = folds[rows] == fold
            background[fold].add(batch[mask, 0], np.zeros(mask.sum(), np.int64))
            mask &= groups[rows] >= 0
            own[fold].add(batch[mask, 0], groups[rows][mask])

    def pair_of(chosen: Sequence[int]) -> Pair:
        return Gaussians.of([own[fold] for fold in chosen]), Gaussians.of([background[fold] for fold in chosen])

    pairs = [pair_of([other for other in range(count) if other != fold] or [fold]) for fold in range(count)]
    scores = np.empty((2, len(groups)))
    for rows, batch in in_parts(states, blocks):
        for fold, pair in enumerate(pairs):
            mask = (folds[rows] == fold) & (groups[rows] >= 0)
            scores[:, rows[mask]] = scores_of(pair, batch[mask, 0])
    rmd, md = scores[:, groups >= 0]
    return pair_of(range(count)), (rmd, md)


def in_parts(states: States, blocks: slice = slice(None)) -> Iterator[tuple[RowNumbers, Array]]:
    """Yields some rows at a time, and their pooled states [n, blocks, W] in float64."""
    for start in range(0, len(states), ROWS):
        rows = np.arange(start, min(start + ROWS, len(states)))
        yield rows, states.take(rows, blocks)[:, 0].astype(np.float64)


def confidences(
    fitted: Sequence[Statistics], states: Sequence[States], logits: Sequence[Array] | None, measure: str
) -> Array:
    """Returns [n, blocks, teachers]: the softmax over teachers of minus the distance from each teacher's domain.

    `logits` are those of each teacher, which msp reads.
    """
    scores = []
    for index, (statistics, teacher_states) in enumerate(zip(fitted, states, strict=True)):
        parts = [
            statistics.standardised(block, None if logits is None else logits[index][rows], measure)
            for rows, block in in_parts(teacher_states)
        ]
        scores.append(np.concatenate(parts))
    return softmax(-np.stack(scores, axis=-1))
