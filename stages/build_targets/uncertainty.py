"""How sure a teacher is, from its cached passes: confidence in [0, 1], one word in the experiment file.

Every measure is drawn from sums over passes, so a text's passes may lie in several files, and K may differ by text.
Confidence is 1 - u / (the largest u that C labels allow).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import polars as pl

from amalgam.stages.build_targets.probabilities import (
    entropy_nats,
    flat,
    log_sum_exp,
    shaped,
    side_by_side,
    softmax,
    total,
    width,
)

COUNT = "passes_counted"


def sums_over_passes(passes: list[pl.Series], name: str, *, squares: bool = False) -> dict[str, pl.Series]:
    """The additive facts of some passes that the measure `name` needs; those of several files are simply added.
    `squares`: also what the entropies of fewer passes than K are corrected by.
    """
    probabilities = [softmax(logits) for logits in passes]
    found = {
        COUNT: pl.Series([float(len(passes))]).new_from_index(0, len(passes[0])),
        "probability": total(probabilities),
    }
    if squares and name in ("entropy", "mutual-information"):
        found["squares"] = total(probability * probability for probability in probabilities)
    if name in ("expected-entropy", "mutual-information"):
        found["entropy"] = total(entropy_nats(probability) for probability in probabilities)
    if name == "variation-ratio":
        found["votes"] = _votes(probabilities)
    if name == "energy":
        found["energy"] = total(_bounded_energy(logits) for logits in passes)
    return found


def mean_probability(sums: pl.DataFrame) -> pl.Series:
    return sums["probability"] / sums[COUNT]


def confidence(sums: pl.DataFrame, name: str, full: int = 0) -> pl.Series:
    """`full`: K, to which the entropy of fewer passes is corrected where their squares are known."""
    classes = width(sums["probability"])
    largest = {"variation-ratio": 1 - 1 / classes, "max-probability": 1 - 1 / classes, "energy": 1.0}
    measured = MEASURES[name](sums)
    if "squares" in sums.columns:
        measured = measured + _bias(sums, full)
    return 1 - measured / largest.get(name, math.log(classes))


def _bias(sums: pl.DataFrame, full: int) -> pl.Series:
    """By how much the entropy of the mean of k passes is expected below that of K: (1/2k - 1/2K) sum of var / mean.

    The plug-in entropy is biased low by 1/2k of it (second order of the delta method), so texts that stopped early
    would look surer than those that ran all K. Zero where k = K.
    """
    count, mean = sums[COUNT], mean_probability(sums)
    variance = (sums["squares"] / count - mean * mean) * (count / (count - 1))
    relative = shaped(flat(variance / mean).fill_nan(0.0), width(mean)).arr.sum()
    return (0.5 / count - 0.5 / full) * relative


def _entropy(sums: pl.DataFrame) -> pl.Series:
    return entropy_nats(mean_probability(sums))


def _expected_entropy(sums: pl.DataFrame) -> pl.Series:
    return sums["entropy"] / sums[COUNT]


def _mutual_information(sums: pl.DataFrame) -> pl.Series:
    return _entropy(sums) - _expected_entropy(sums)


def _variation_ratio(sums: pl.DataFrame) -> pl.Series:
    return 1 - sums["votes"].arr.max() / sums[COUNT]


def _max_probability(sums: pl.DataFrame) -> pl.Series:
    return 1 - mean_probability(sums).arr.max()


def _energy(sums: pl.DataFrame) -> pl.Series:
    return sums["energy"] / sums[COUNT]


MEASURES: dict[str, Callable[[pl.DataFrame], pl.Series]] = {
    "entropy": _entropy,
    "expected-entropy": _expected_entropy,
    "mutual-information": _mutual_information,
    "variation-ratio": _variation_ratio,
    "max-probability": _max_probability,
    "energy": _energy,
}


def _bounded_energy(logits: pl.Series) -> pl.Series:
    """exp(free energy of the centred logits) x C, in (0, 1]: 1 when all logits are equal.

    Reading: the free energy -logsumexp(z) has no scale that two teachers share, since softmax does not fix the level of
    its logits; centring fixes it, and the exponential bounds it.
    """
    classes = width(logits)
    centred = logits - logits.arr.mean()
    return (math.log(classes) - log_sum_exp(centred)).exp()


def _votes(probabilities: list[pl.Series]) -> pl.Series:
    """For each label, how many passes put it first."""
    classes = width(probabilities[0])
    first = [probability.arr.arg_max() for probability in probabilities]
    return side_by_side([total((one == label).cast(pl.Float64) for one in first) for label in range(classes)], "votes")
