"""Sets the targets of texts whose gold label the experiment has."""

from __future__ import annotations

from dataclasses import replace

from amalgam.data.arrays import Array, RowNumbers
from amalgam.data.keys import LabelSpace
from amalgam.data.lazy import np, pa, pl
from amalgam.stages.common.given_labels import GivenLabels
from amalgam.stages.target_methods import TargetBatch


def with_labels(
    batch: TargetBatch, space: LabelSpace, given: GivenLabels, texts: pa.Table, *, by_teacher: bool
) -> TargetBatch:
    """Returns the targets with the label of each text that has one, with weight 1. Unknown texts get weight 0.

    `by_teacher`: a target is one distribution for each teacher, over its own labels.
    """
    keys = texts.column("key").to_pylist()
    unknown = [row for row, key in enumerate(keys) if key in given.unknown]
    if unknown:
        batch = replace(batch, weight=batch.weight.scatter(unknown, 0.0))
    rows = np.array([row for row, key in enumerate(keys) if key in given.by_key], np.int64)
    if not len(rows):
        return batch
    place = {name: index for index, name in enumerate(space.names)}
    gold = np.array([place[given.by_key[keys[row]]] for row in rows], np.int64)
    target = batch.target.to_numpy().copy()
    if by_teacher:
        _set_distributions(target, space, rows, gold)
    else:
        target[rows] = np.eye(len(space.names))[gold]
    batch = replace(batch, target=pl.Series(target), weight=batch.weight.scatter(rows, 1.0))
    if batch.teacher is None or batch.confidence is None or batch.margin is None:
        return batch
    has_label = np.array([[index in columns for columns in space.columns.values()] for index in gold.tolist()])
    best = np.where(has_label, batch.confidence.to_numpy()[rows], -np.inf).argmax(axis=1)
    names = pl.Series(np.array(list(space.columns))[best].tolist(), dtype=pl.String)
    return replace(batch, teacher=batch.teacher.scatter(rows, names), margin=batch.margin.scatter(rows, 1.0))


def _set_distributions(target: Array, space: LabelSpace, rows: RowNumbers, gold: RowNumbers) -> None:
    """Sets the distributions of the teachers that have the label; the others keep theirs."""
    start = 0
    for columns in space.columns.values():
        has_label = np.isin(gold, columns)
        target[rows[has_label], start : start + len(columns)] = gold[has_label, None] == np.array(columns)
        start += len(columns)
