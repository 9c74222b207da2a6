"""What the raw passes say: mean probability, its entropy, the confidence and the confidence's standard error.

Computed from the passes as they are stored (fp16 logits), so that whoever reads the cache gets the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from amalgam.data.arrays import entropy_nats, softmax

Array = np.ndarray[Any, np.dtype[Any]]


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
