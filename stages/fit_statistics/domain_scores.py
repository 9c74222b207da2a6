"""Out-of-domain scores: Gaussians of a teacher's own texts and of all texts, and the scores of its own texts.

High scores are foreign texts. md is the distance from the nearest class; rmd subtracts the distance from the
background (Ren et al. 2021). msp is minus the largest probability, the same for all blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amalgam.stages.common.cached.read import States
from amalgam.stages.fit_statistics.gaussians import Array, Gaussians, Moments
from amalgam.stages.target_methods import COMPARATIVE

Pair = tuple[Gaussians, Gaussians]
"""The Gaussians of a block: by class for a teacher's own texts, and for the background."""


ROWS = 1024
"""Texts whose states are in memory at once."""

FOLDS = 5

SAME = 1e-9
"""Scores that differ by less than this share of their size do not differ: the teacher is as certain of all."""

PARTS = ("means", "whiten", "shrinkage")


@dataclass(frozen=True)
class Statistics:
    pairs: list[Pair]
    mean: Array
    """[measures, blocks], in the order of COMPARATIVE: of the teacher's own texts."""
    deviation: Array
    """0 where they do not differ."""

    @classmethod
    def of(cls, states: States, logits: NDArray[Any], groups: NDArray[np.int64]) -> Statistics:
        """`groups`: of each text its class of the teacher, -1 where the text is not its own."""
        folds = folds_of(groups)
        fitted = [_of_block(states, block, groups, folds, logits.shape[1]) for block in range(states.blocks)]
        by_measure = [np.stack([scores[place] for _, scores in fitted]) for place in (0, 1)]
        own = largest(logits[groups >= 0])
        own_scores = np.stack([*by_measure, np.tile(-own, (states.blocks, 1))])
        mean, deviation = own_scores.mean(axis=-1), own_scores.std(axis=-1)
        differs = deviation > SAME * np.abs(mean)
        return cls([pair for pair, _ in fitted], mean, np.where(differs, deviation, 0.0))

    def standardised(self, states: Array, logits: NDArray[Any] | None, measure: str) -> Array:
        """[n, blocks] of states [n, blocks, W]: how foreign, in deviations of the teacher's own texts.

        It is 0 where those do not differ.
        """
        place = COMPARATIVE.index(measure)
        if logits is not None and measure == "msp":
            score = np.repeat(-largest(logits)[:, None], states.shape[1], axis=1)
        else:
            scores = [scores_of(pair, states[:, block])[place] for block, pair in enumerate(self.pairs)]
            score = np.stack(scores, axis=1)
        deviation = self.deviation[place]
        return np.where(deviation > 0, (score - self.mean[place]) / np.where(deviation > 0, deviation, 1.0), 0.0)

    def save(self, path: Path) -> None:
        from safetensors.numpy import save_file

        tensors = {
            f"{who}.{part}": np.stack([getattr(pair[place], part) for pair in self.pairs])
            for (place, who), part in product(enumerate(WHOSE), PARTS)
        }
        save_file({**tensors, "mean": self.mean, "deviation": self.deviation}, path)

    @classmethod
    def load(cls, path: Path) -> Statistics:
        from safetensors.numpy import load_file

        tensors = load_file(path)
        own, background = (
            [Gaussians(*one) for one in zip(*(tensors[f"{who}.{part}"] for part in PARTS), strict=True)]
            for who in WHOSE
        )
        return cls(list(zip(own, background, strict=True)), tensors["mean"], tensors["deviation"])


WHOSE = ("own", "background")


def folds_of(groups: NDArray[np.int64]) -> NDArray[np.int64]:
    """Assigns folds in turn, separately to own and other texts; a teacher with fewer own texts has fewer folds."""
    own = groups >= 0
    turns = np.where(own, np.cumsum(own), np.cumsum(~own)) - 1
    folds: NDArray[np.int64] = turns % max(1, min(FOLDS, int(own.sum())))
    return folds


def _of_block(
    states: States, block: int, groups: NDArray[np.int64], folds: NDArray[np.int64], classes: int
) -> tuple[Pair, tuple[Array, Array]]:
    """Returns the Gaussians, and rmd and md of the teacher's own texts, each under those of the other folds.

    A text is nearer to Gaussians fitted on it than new texts are, and the effect grows with fewer texts. Without folds,
    teachers of few and of many texts could not be compared.
    """
    first = next(_in_parts(states, block))[1][0]
    count = int(folds.max()) + 1
    own = [Moments.none(first, classes) for _ in range(count)]
    background = [Moments.none(first, 1) for _ in range(count)]
    for rows, batch in _in_parts(states, block):
        for fold in range(count):
            mine = folds[rows] == fold
            background[fold].add(batch[mine], np.zeros(mine.sum(), np.int64))
            mine &= groups[rows] >= 0
            own[fold].add(batch[mine], groups[rows][mine])
    others = [
        _pair([one for place, one in enumerate(of) if place != fold or count == 1] for of in (own, background))
        for fold in range(count)
    ]
    scores = np.empty((2, len(groups)))
    for rows, batch in _in_parts(states, block):
        for fold, pair in enumerate(others):
            mine = (folds[rows] == fold) & (groups[rows] >= 0)
            scores[:, rows[mine]] = scores_of(pair, batch[mine])
    kept = scores[:, groups >= 0]
    return _pair((own, background)), (kept[0], kept[1])


def _pair(parts: Any) -> Pair:
    own, background = (Gaussians.of(Moments.together(list(one))) for one in parts)
    return own, background


def scores_of(pair: Pair, states: Array) -> tuple[Array, Array]:
    """[n] of states [n, W] of one block: rmd and md."""
    own, background = (one.distance(states) for one in pair)
    return own - background, own


def largest(logits: NDArray[Any]) -> Array:
    """Returns the largest softmax probability of each row."""
    wide = logits.astype(np.float64)
    probability: Array = 1 / np.exp(wide - wide.max(axis=1, keepdims=True)).sum(axis=1)
    return probability


def in_parts(states: States, blocks: slice = slice(None)) -> Iterator[tuple[NDArray[np.int64], Array]]:
    """Some rows at a time, and their states [n, blocks, W] in float64; of pooled states."""
    for start in range(0, len(states), ROWS):
        rows = np.arange(start, min(start + ROWS, len(states)))
        yield rows, states.take(rows, blocks)[:, 0].astype(np.float64)


def _in_parts(states: States, block: int) -> Iterator[tuple[NDArray[np.int64], Array]]:
    return ((rows, batch[:, 0]) for rows, batch in in_parts(states, slice(block, block + 1)))
