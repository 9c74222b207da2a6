"""Arithmetic on rows of numbers (Polars Array columns): softmax, entropy, columns.

A series of n arrays of C numbers is worked on flat, which is one vectorised operation whatever n and C are.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import add

import polars as pl


def width(arrays: pl.Series) -> int:
    dtype = arrays.dtype
    if not isinstance(dtype, pl.Array):
        raise TypeError(f"{arrays.name} holds {dtype}, not arrays")
    return int(dtype.size)


def flat(arrays: pl.Series) -> pl.Series:
    return arrays.explode(empty_as_null=False).cast(pl.Float64)


def shaped(numbers: pl.Series, classes: int) -> pl.Series:
    return (
        numbers.reshape((-1, classes)) if len(numbers) else pl.Series(numbers.name, [], pl.Array(pl.Float64, classes))
    )


def softmax(logits: pl.Series) -> pl.Series:
    classes = width(logits)
    raised = shaped(flat(logits - logits.arr.max()).exp(), classes)
    return raised / raised.arr.sum()


def entropy_nats(probability: pl.Series) -> pl.Series:
    """Natural log; 0 * log 0 = 0."""
    numbers = flat(probability)
    return -shaped((numbers * numbers.log()).fill_nan(0.0), width(probability)).arr.sum()


def first_label(probability: pl.Series) -> pl.Series:
    """1 where the largest is, and first of those that are equal; 0 elsewhere."""
    first = probability.arr.arg_max()
    return side_by_side([(first == place).cast(pl.Float64) for place in range(width(probability))], probability.name)


def total(series: Iterable[pl.Series]) -> pl.Series:
    return reduce(add, series)


def column(arrays: pl.Series, index: int) -> pl.Series:
    return arrays.arr.get(index)


def side_by_side(columns: list[pl.Series], name: str) -> pl.Series:
    """One array per row from one series per class."""
    frame = pl.DataFrame({str(index): series for index, series in enumerate(columns)})
    return frame.select(pl.concat_arr(pl.all()).alias(name)).to_series()
