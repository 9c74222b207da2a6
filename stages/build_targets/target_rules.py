"""From evidence to targets over the union of labels: MUKA (Li et al. 2021) and its baselines; docs/methods.md.

soft: w = softmax(confidence / tau), target = sum of w_i pad_i(T_i).  hard: the most confident teacher's T_i, padded.
vanilla-kd: one softmax over all logits.  uhc: each teacher's own, side by side, for a loss on its own labels.
scores: the logits, side by side. mt-bert: see judged_by_gold. stratanet: as soft, confidences the weights, T tempered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from amalgam.data.labels import LabelSpace
from amalgam.pipeline.config.schema import Targets
from amalgam.stages.common.answers.evidence import Evidence
from amalgam.stages.common.answers.probabilities import column, first_label, side_by_side, softmax, total, width

LEAST_MARGIN = 1e-6


@dataclass(frozen=True)
class TargetBatch:
    target: pl.Series
    weight: pl.Series
    teacher: pl.Series
    margin: pl.Series
    confidence: pl.Series


def build_targets(
    evidence: Sequence[Evidence], space: LabelSpace, targets: Targets, given: pl.Series | None = None
) -> TargetBatch:
    """`given`: the teachers' weights on each text, where it is not their confidences that make them."""
    texts = len(evidence[0].logits)
    if targets.mode == "vanilla-kd":
        return _unchosen(_side_by_side_softmax(evidence, space, targets.kd_temperature), len(evidence))
    if targets.mode == "uhc":
        sides = [column(side, place) for side in _tempered(evidence, targets) for place in range(width(side))]
        return _unchosen(side_by_side(sides, "target"), len(evidence))
    if targets.mode == "scores":
        scores = [column(one.logits, place) for one in evidence for place in range(width(one.logits))]
        return _unchosen(side_by_side(scores, "target"), len(evidence))
    confidence = given if given is not None else side_by_side([one.confidence for one in evidence], "confidence")
    chosen = confidence.arr.arg_max()
    strata = targets.mode == "stratanet"
    shares = confidence if strata else _shares(confidence, targets, given) if targets.mode == "soft" else None
    weights = [
        column(shares, index) if shares is not None else (chosen == index).cast(pl.Float64)
        for index in range(len(evidence))
    ]
    margin = _margin(confidence)
    weight = pl.Series([1.0]).new_from_index(0, texts) if strata or targets.text_weights == "none" else margin
    distributions = _tempered(evidence, targets) if strata else _taught(evidence, targets)
    names = pl.Series([one.teacher for one in evidence], dtype=pl.String)
    return TargetBatch(
        _padded(distributions, weights, evidence, space),
        weight,
        names.gather(chosen),
        margin,
        confidence,
    )


def _tempered(evidence: Sequence[Evidence], targets: Targets) -> list[pl.Series]:
    return [
        softmax(one.logits.cast(pl.Array(pl.Float64, width(one.logits))) / targets.kd_temperature) for one in evidence
    ]


def _taught(evidence: Sequence[Evidence], targets: Targets) -> list[pl.Series]:
    said = [one.distribution for one in evidence]
    return [first_label(one) for one in said] if targets.distribution == "top-label" else said


def _shares(confidence: pl.Series, targets: Targets, given: pl.Series | None) -> pl.Series:
    return (
        softmax(confidence / targets.temperature) if given is None else given.cast(pl.Array(pl.Float64, width(given)))
    )


def one_hot(gold: pl.Series, space: LabelSpace) -> TargetBatch:
    columns = [(gold == name).cast(pl.Float64) for name in space.names]
    return _unchosen(side_by_side(columns, "target"), max(len(space.columns), 1))


def mt_bert_targets(evidence: Sequence[Evidence], gold: pl.Series, space: LabelSpace, targets: Targets) -> TargetBatch:
    """MT-BERT (Wu et al. 2021): sum of y_i(t) / (1 + CE(y, y_i)) over the teachers, and beside it the gold label.

    Cross-entropy is linear in what it is taken to, so that the sum over teachers of weighted cross-entropies is one
    with the weighted sum. CE(y, y_i) is at temperature 1; reweight: none weighs every teacher 1. A text whose label no
    teacher knows, which `on_bad_row: skip` lets pass, weighs nothing.
    """
    tempered, told = _tempered(evidence, targets), one_hot(gold.fill_null(""), space).target
    known = told.arr.sum()
    columns: list[list[pl.Series]] = [[] for _ in space.names]
    for side, one in zip(tempered, evidence, strict=True):
        places = space.columns[one.teacher]
        weight = None if targets.text_weights == "none" else 1 / (1 + known * _cross_entropy(one, told, places))
        for place, label in enumerate(places):
            share = column(side, place)
            columns[label].append(share if weight is None else share * weight)
    taught = [total(parts) for parts in columns]
    gold_parts = [column(told, label) * float(targets.task_loss) for label in range(len(space.names))]
    ruling = _unchosen(side_by_side([*taught, *gold_parts], "target"), len(evidence))
    return replace(ruling, weight=known) if targets.reads_gold else ruling


def _cross_entropy(one: Evidence, told: pl.Series, places: Sequence[int]) -> pl.Series:
    """-log of what the teacher gives the gold label: from logits, so that it is finite where a softmax would be 0."""
    logits = [column(one.logits, place).cast(pl.Float64) for place in range(len(places))]
    of_gold = total(column(told, label) * logit for label, logit in zip(places, logits, strict=True))
    wide = side_by_side(logits, "logits")
    top = wide.arr.max()
    return top + total((logit - top).exp() for logit in logits).log() - of_gold


def _padded(
    distributions: Sequence[pl.Series], weights: Sequence[pl.Series], evidence: Sequence[Evidence], space: LabelSpace
) -> pl.Series:
    """sum_i w_i pad_i(T_i): where labels of two teachers meet, what is padded is added."""
    columns: list[list[pl.Series]] = [[] for _ in space.names]
    for distribution, weight, one in zip(distributions, weights, evidence, strict=True):
        for place, label in enumerate(space.columns[one.teacher]):
            columns[label].append(column(distribution, place) * weight)
    return side_by_side([total(parts) for parts in columns], "target")


def _side_by_side_softmax(evidence: Sequence[Evidence], space: LabelSpace, temperature: float) -> pl.Series:
    """Entries of a shared label stay apart in the softmax and are summed after it."""
    logits = [column(one.logits, place) for one in evidence for place in range(width(one.logits))]
    owners = [label for one in evidence for label in space.columns[one.teacher]]
    share = softmax(side_by_side([series.cast(pl.Float64) for series in logits], "logits") / temperature)
    columns: list[list[pl.Series]] = [[] for _ in space.names]
    for place, label in enumerate(owners):
        columns[label].append(column(share, place))
    return side_by_side([total(parts) for parts in columns], "target")


def _margin(confidence: pl.Series) -> pl.Series:
    """c_max - c_second + 1e-6; a single teacher has nothing to be weighed against: 1."""
    if width(confidence) == 1:
        return pl.Series([1.0]).new_from_index(0, len(confidence))
    ordered = np.partition(confidence.to_numpy(), -2, axis=1)  # not arr.sort: that takes as long as all the rest
    return pl.Series("confidence", ordered[:, -1] - ordered[:, -2] + LEAST_MARGIN)


def _unchosen(target: pl.Series, teachers: int) -> TargetBatch:
    """A rule that asks no teacher's confidence: every text weighs 1."""
    texts = len(target)
    empty = pl.Series([None], dtype=pl.Float64).new_from_index(0, texts)
    return TargetBatch(
        target,
        pl.Series([1.0]).new_from_index(0, texts),
        pl.Series([None], dtype=pl.String).new_from_index(0, texts),
        empty,
        pl.Series([None], dtype=pl.Array(pl.Float64, teachers)).new_from_index(0, texts),
    )
