"""Computes a teacher's confidence in [0, 1] from its cached passes, by the measure in `targets.uncertainty`.

Every measure is computed from sums over passes, so a text's passes may be in several files, and K may differ by text.
Confidence is 1 - u / (the largest u that C labels allow).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import polars as pl

from amalgam.data.arrays import entropy_column, flat, shaped, width
from amalgam.stages.common.cached.pass_statistics import sums_over_raw

COUNT = "passes_counted"


def sums_over_passes(passes: list[pl.Series], name: str, *, squares: bool = False) -> dict[str, pl.Series]:
    """Returns the sums that the measure `name` needs; the sums of several files are added."""
    raw = np.concatenate([logits.to_numpy() for logits in passes], axis=1)
    return {**counted(len(passes), len(raw)), **sums_over_raw(raw, width(passes[0]), name, squares=squares)}


def counted(passes: int, texts: int) -> dict[str, pl.Series]:
    return {COUNT: pl.Series([float(passes)]).new_from_index(0, texts)}


def mean_probability(sums: pl.DataFrame) -> pl.Series:
    return sums["probability"] / sums[COUNT]


def confidence(sums: pl.DataFrame, name: str, full: int = 0) -> pl.Series:
    """Computes the confidence; with squares, the entropy of fewer passes is corrected to `full` = K."""
    classes = width(sums["probability"])
    largest = {"variation-ratio": 1 - 1 / classes, "max-probability": 1 - 1 / classes, "energy": 1.0}
    measured = MEASURES[name](sums)
    if "squares" in sums.columns:
        measured = measured + _bias(sums, full)
    return 1 - measured / largest.get(name, math.log(classes))


def _bias(sums: pl.DataFrame, full: int) -> pl.Series:
    """Returns the expected entropy deficit of the mean of k passes against K: (1/2k - 1/2K) sum of var / mean.

    The plug-in entropy is biased low by 1/2k of it (second order of the delta method). Without the correction, texts
    that stopped early would get more confidence than those with all K passes. Zero where k = K.
    """
    count, mean = sums[COUNT], mean_probability(sums)
    variance = (sums["squares"] / count - mean * mean) * (count / (count - 1))
    relative = shaped(flat(variance / mean).fill_nan(0.0), width(mean)).arr.sum()
    return (0.5 / count - 0.5 / full) * relative


def _entropy(sums: pl.DataFrame) -> pl.Series:
    return entropy_column(mean_probability(sums))


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
