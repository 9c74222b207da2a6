"""Sums over the raw passes of many texts: a block of texts at a time, each number beside the same one of other texts.

Shapes: K passes, C classes, N texts. A block stays in the processor's cache through all its steps. Passes are fp16, so
exp is taken in fp32, several numbers at once, of differences that fp32 holds exactly; what is made of it is fp64: the
entropy of a teacher that is sure to nine digits must not drown in the rounding of a 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from amalgam.data.arrays import entropy_nats, softmax

Array = np.ndarray[Any, np.dtype[Any]]


BLOCK_TEXTS = 4096


def sums_over_raw(raw: Array, classes: int, name: str, *, squares: bool = False) -> dict[str, pl.Series]:
    """`raw`: a row per text, pass after pass. See uncertainty.sums_over_passes for what is summed."""
    blocks = [
        _sums(_by_pass(raw[start : start + BLOCK_TEXTS], classes), name, squares=squares)
        for start in range(0, max(len(raw), 1), BLOCK_TEXTS)
    ]
    return {column: _series(column, [block[column] for block in blocks]) for column in blocks[0]}


def _by_pass(raw: Array, classes: int) -> Array:
    return np.ascontiguousarray(raw.T).astype(np.float32, copy=False).reshape(-1, classes, len(raw))


def _sums(logits_KCN: Array, name: str, *, squares: bool) -> dict[str, Array]:  # noqa: N803
    found: dict[str, Array] = {}
    probability_KCN = _softmax(logits_KCN)  # noqa: N806
    found["probability"] = probability_KCN.sum(axis=0)
    if squares and name in ("entropy", "mutual-information"):
        found["squares"] = (probability_KCN * probability_KCN).sum(axis=0)
    if name in ("expected-entropy", "mutual-information"):
        found["entropy"] = entropy_nats(probability_KCN, axis=1).sum(axis=0)
    if name == "variation-ratio":
        first_KN = probability_KCN.argmax(axis=1)  # noqa: N806
        found["votes"] = np.stack([(first_KN == label).sum(axis=0) for label in range(logits_KCN.shape[1])]).astype(
            np.float64
        )
    if name == "energy":
        found["energy"] = _bounded_energy(logits_KCN).sum(axis=0)
    return found


def _softmax(logits_KCN: Array) -> Array:  # noqa: N803
    with np.errstate(invalid="ignore"):  # what is not a number is found, and refused, when the targets are there
        raised = np.exp(logits_KCN - logits_KCN.max(axis=1, keepdims=True)).astype(np.float64)
        found: Array = raised / raised.sum(axis=1, keepdims=True)
    return found


def _bounded_energy(logits_KCN: Array) -> Array:  # noqa: N803
    """exp(free energy of the centred logits) x C, in (0, 1]: 1 when all logits are equal.

    Reading: the free energy -logsumexp(z) has no scale that two teachers share, since softmax does not fix the level of
    its logits; centring fixes it, and the exponential bounds it.
    """
    with np.errstate(invalid="ignore"):
        top = logits_KCN.max(axis=1)
        raised = np.exp(logits_KCN - top[:, None]).astype(np.float64)
        log_sum = np.log(raised.sum(axis=1)) + top - logits_KCN.mean(axis=1, dtype=np.float64)
        found: Array = np.exp(math.log(logits_KCN.shape[1]) - log_sum)
    return found


def _series(name: str, blocks: list[Array]) -> pl.Series:
    numbers = np.concatenate(blocks, axis=-1)
    if numbers.ndim == 1:
        return pl.Series(name, numbers)
    return pl.Series(name, np.ascontiguousarray(numbers.T).reshape(-1)).reshape((-1, len(numbers)))


@dataclass(frozen=True)
class Statistics:
    mean_probability: Array
    entropy_nats: Array
    confidence: Array
    confidence_se: Array
    """NaN for a single pass."""


def statistics(passes_NKC: Array) -> Statistics:  # noqa: N803 - texts, passes, classes
    probability_NKC = softmax(passes_NKC.astype(np.float32))  # noqa: N806
    mean_NC = probability_NKC.mean(axis=1)  # noqa: N806
    entropy = entropy_nats(mean_NC)
    ceiling = np.log(passes_NKC.shape[2])
    return Statistics(mean_NC, entropy, 1 - entropy / ceiling, _standard_error(probability_NKC) / ceiling)


def _standard_error(probability_NKC: Array) -> Array:  # noqa: N803
    """Of the entropy of the mean, by the jackknife over passes: no assumption on how passes are distributed."""
    count = probability_NKC.shape[1]
    if count < 2:
        return np.full(len(probability_NKC), np.nan)
    total = probability_NKC.sum(axis=1, keepdims=True)
    left_out = entropy_nats((total - probability_NKC) / (count - 1))
    spread = ((left_out - left_out.mean(axis=1, keepdims=True)) ** 2).sum(axis=1)
    error: Array = np.sqrt((count - 1) / count * spread)
    return error
