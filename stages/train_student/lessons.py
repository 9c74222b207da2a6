"""What the student learns from: texts and targets joined by key, and a part kept aside to select on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from amalgam.data.shards import matrix
from amalgam.data.tokens import Tokens, encode
from amalgam.pipeline.errors import WorkError
from amalgam.pipeline.stage import Run
from amalgam.stages.build_targets.stage import read_targets
from amalgam.stages.fine_tuning.batches import Examples
from amalgam.stages.models.encoder import Beginner
from amalgam.stages.read_corpus.parts import Part, fields, tables, train_part

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Lessons:
    learn: Examples
    held_out: Examples | None
    cut: int


def lessons(run: Run, new: Beginner, *, held_out: float) -> Lessons:
    """The training texts with the targets that build-targets made of them."""
    tokens: list[Tokens] = []
    keys, targets, weights = [], [], []
    for rows, taught in zip(tables(run, train_part(run)), read_targets(run), strict=True):
        if not rows.column("key").equals(taught.column("key")):
            raise WorkError(
                "texts and targets do not have the same keys", fix="`amalgam verify`, then build-targets --force"
            )
        tokens += encode(new.tokenizer, fields(rows), new.limit, types=new.types)
        keys += rows.column("key").to_pylist()
        targets.append(matrix(taught.column("target")))
        weights.append(taught.column("weight").to_numpy())
    scale = np.float32(run.result("build-targets").facts["weight_scale"])
    return _split(keys, tokens, np.concatenate(targets), np.concatenate(weights) * scale, held_out)


def labelled(run: Run, part: Part, new: Beginner, labels: Sequence[str], *, held_out: float = 0.0) -> Lessons:
    """A labelled part as one-hot targets; texts with other labels are left out."""
    tokens: list[Tokens] = []
    keys, gold = [], []
    place = {name: index for index, name in enumerate(labels)}
    for table in tables(run, part):
        rows = table.filter([label in place for label in table.column("label").to_pylist()])
        tokens += encode(new.tokenizer, fields(rows), new.limit, types=new.types)
        keys += rows.column("key").to_pylist()
        gold += [place[label] for label in rows.column("label").to_pylist()]
    targets = np.zeros((len(gold), len(labels)), dtype=np.float32)
    targets[np.arange(len(gold)), gold] = 1.0
    return _split(keys, tokens, targets, np.ones(len(gold), dtype=np.float32), held_out)


def _split(keys: list[bytes], tokens: list[Tokens], targets: Array, weights: Array, held_out: float) -> Lessons:
    aside = np.array([_is_aside(key, held_out) for key in keys], dtype=bool)
    if aside.all():
        aside[:] = False
    cut = sum(token.cut for token in tokens)
    learn = _examples(tokens, targets, weights, np.flatnonzero(~aside))
    return Lessons(learn, _examples(tokens, targets, weights, np.flatnonzero(aside)) if aside.any() else None, cut)


def _examples(tokens: list[Tokens], targets: Array, weights: Array, rows: Array) -> Examples:
    types = [types for row in rows if (types := tokens[row].type_ids) is not None]
    return Examples([tokens[row].ids for row in rows], types or None, targets[rows], weights[rows])


def _is_aside(key: bytes, share: float) -> bool:
    """By content, from the half of the key that buckets do not use: the same texts whatever the rest of the corpus."""
    return int.from_bytes(key[8:], "big") < share * 2**64
