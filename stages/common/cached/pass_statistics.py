"""Sums over the raw passes of many texts, one block of texts at a time, with texts on the last axis.

Shapes: K passes, C classes, N texts. A block stays in the processor's cache through all its steps. Passes are fp16, and
fp32 represents their differences exactly, so exp is vectorised in fp32. All later steps use fp64, so that the entropy
of a teacher with a probability of 1 - 1e-9 is not lost in rounding.
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
    """Returns the sums of uncertainty.sums_over_passes; `raw` has a row per text, pass after pass."""
    blocks = [
        _sums(_by_pass(raw[start : start + BLOCK_TEXTS], classes), name, squares=squares)
        for start in range(0, max(len(raw), 1), BLOCK_TEXTS)
    ]
    return {column: _series(column, [block[column] for block in blocks]) for column in blocks[0]}


def _by_pass(raw: Array, classes: int) -> Array:
    return np.ascontiguousarray(raw.T).astype(np.float32, copy=False).reshape(-1, classes, len(raw))


def _sums(logits_KCN: Array, name: str, *, squares: bool) -> dict[str, Array]:  # noqa: N803
    sums: dict[str, Array] = {}
    probability_KCN = _softmax(logits_KCN)  # noqa: N806
    sums["probability"] = probability_KCN.sum(axis=0)
    if squares and name in ("entropy", "mutual-information"):
        sums["squares"] = (probability_KCN * probability_KCN).sum(axis=0)
    if name in ("expected-entropy", "mutual-information"):
        sums["entropy"] = entropy_nats(probability_KCN, axis=1).sum(axis=0)
    if name == "variation-ratio":
        first_KN = probability_KCN.argmax(axis=1)  # noqa: N806
        sums["votes"] = np.stack([(first_KN == label).sum(axis=0) for label in range(logits_KCN.shape[1])]).astype(
            np.float64
        )
    if name == "energy":
        sums["energy"] = _bounded_energy(logits_KCN).sum(axis=0)
    return sums


def _softmax(logits_KCN: Array) -> Array:  # noqa: N803
    with np.errstate(invalid="ignore"):  # build_targets refuses NaN
        raised = np.exp(logits_KCN - logits_KCN.max(axis=1, keepdims=True)).astype(np.float64)
        probability: Array = raised / raised.sum(axis=1, keepdims=True)
    return probability


def _bounded_energy(logits_KCN: Array) -> Array:  # noqa: N803
    """exp(free energy of the centred logits) x C, in (0, 1]: 1 when all logits are equal.

    Reading: two teachers share no scale of the free energy -logsumexp(z), since softmax does not fix the level of its
    logits. Centring fixes the level, and the exponential bounds the result.
    """
    with np.errstate(invalid="ignore"):
        top = logits_KCN.max(axis=1)
        raised = np.exp(logits_KCN - top[:, None]).astype(np.float64)
        log_sum = np.log(raised.sum(axis=1)) + top - logits_KCN.mean(axis=1, dtype=np.float64)
        energy: Array = np.exp(math.log(logits_KCN.shape[1]) - log_sum)
    return energy


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
    """Returns the standard error of the mean's entropy by the jackknife, which assumes no distribution of passes."""
    count = probability_NKC.shape[1]
    if count < 2:
        return np.full(len(probability_NKC), np.nan)
    total = probability_NKC.sum(axis=1, keepdims=True)
    left_out = entropy_nats((total - probability_NKC) / (count - 1))
    spread = ((left_out - left_out.mean(axis=1, keepdims=True)) ** 2).sum(axis=1)
    error: Array = np.sqrt((count - 1) / count * spread)
    return error
