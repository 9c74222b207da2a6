"""Fits Gaussians to the states of each teacher's own texts, and reads the logits and states that they need.

A teacher's own texts are those generated for it, else all texts. From each predicted class it uses the fraction
`targets.reference_fraction` with the largest logit margin, because generated texts drift.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from amalgam.data.arrays import softmax, top_margin
from amalgam.stages.common.cached.read import States
from amalgam.stages.fit_statistics.domain_scores import Statistics, in_parts
from amalgam.stages.fit_statistics.gaussians import Array

ROUNDING = 1e-9
"""Tolerance of a fraction times a number of texts, so that an integer is not rounded up."""


class FitFacts(TypedDict):
    """Facts about the statistics of one teacher."""

    texts: int
    which: str
    background: int
    absent: list[str]
    width: int
    shrinkage: list[float]
    same: list[bool]


@dataclass(frozen=True)
class FitInputs:
    """One teacher's predictions and states of the reference texts."""

    labels: Sequence[str]
    logits: NDArray[Any]
    """[n, labels], with dropout off."""
    states: States
    generated_for: NDArray[np.bool_]
    """Whether each text was generated for this teacher; all False where this is unknown."""
    teachers: int
    fraction: float
    """`targets.reference_fraction`."""


def fit(inputs: FitInputs) -> tuple[Statistics, FitFacts]:
    """Fits the statistics of one teacher."""
    own, share, which = inputs.generated_for, inputs.fraction, "the most confident"
    if own.any():
        which += " of those generated for it"
    else:
        own, share = ~own, share / inputs.teachers
    groups = most_confident(inputs.logits, own, share)
    statistics = Statistics.of(inputs.states, inputs.logits, groups)
    present = np.unique(groups[groups >= 0])
    return statistics, {
        "texts": int((groups >= 0).sum()),
        "which": which,
        "background": len(inputs.logits),
        "absent": [label for place, label in enumerate(inputs.labels) if place not in present],
        "width": inputs.states.width,
        "shrinkage": [round(max(float(pair[place].shrinkage) for pair in statistics.pairs), 4) for place in (0, 1)],
        "same": [bool((statistics.deviation[place] == 0).all()) for place in range(len(statistics.deviation))],
    }


def most_confident(logits: NDArray[Any], mine: NDArray[np.bool_], share: float) -> NDArray[np.int64]:
    """Returns the class of the most confident share of each predicted class of `mine`, and -1 for other texts.

    The share is rounded up.
    """
    order = np.argsort(-top_margin(logits.astype(np.float64)), kind="stable")
    predicted = np.where(mine, logits.argmax(axis=1), -1)
    groups = np.full(len(logits), -1, np.int64)
    for label in np.unique(predicted[mine]):
        texts = order[predicted[order] == label]
        groups[texts[: math.ceil(share * len(texts) - ROUNDING)]] = label
    return groups


def confidences(
    fitted: Sequence[Statistics], states: Sequence[States], logits: Sequence[NDArray[Any]] | None, measure: str
) -> Array:
    """Returns [n, blocks, teachers]: the softmax over teachers of minus the distance from each teacher's domain.

    `logits` are those of each teacher, which msp reads.
    """
    scores = []
    for index, (statistics, own) in enumerate(zip(fitted, states, strict=True)):
        parts = [
            statistics.standardised(block, None if logits is None else logits[index][rows], measure)
            for rows, block in in_parts(own)
        ]
        scores.append(np.concatenate(parts) if parts else np.empty((0, own.blocks)))
    return softmax(-np.stack(scores, axis=-1))
