"""Labelled or targeted texts as training examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from amalgam.data.parquet import key_array, key_list
from amalgam.data.tokens import TokenRows, join
from amalgam.pipeline.execution.stage import Run
from amalgam.stages.common.corpus import Bucket, Part, read_bucket
from amalgam.stages.common.encoders import NewClassifier
from amalgam.stages.common.token_cache import tokens_of
from amalgam.stages.common.training.batches import Examples

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class TrainingData:
    learn: Examples
    held_out: Examples | None
    cut: int
    keys: Array
    """Of the texts in `learn`, in their order."""


def labelled(run: Run, part: Part, new: NewClassifier, labels: Sequence[str], *, held_out: float = 0.0) -> TrainingData:
    """A labelled part as one-hot targets; texts with other labels are left out."""
    tokens, keys, gold = [], [], []
    place = {name: index for index, name in enumerate(labels)}
    for bucket in part.buckets:
        rows = read_bucket(run.store, bucket, ["key", "label"])
        found = np.array([place.get(label, -1) for label in rows.column("label").to_pylist()], np.int64)
        kept = np.flatnonzero(found >= 0)
        tokens.append(_tokens(run, bucket, new).take(kept))
        keys.append(key_array(rows.column("key"))[kept])
        gold.append(found[kept])
    one_hot = np.eye(len(labels), dtype=np.float32)
    targets = one_hot[np.concatenate(gold)] if gold else one_hot[:0]
    return _split(keys, join(tokens), targets, np.ones(len(targets), dtype=np.float32), held_out)


def _tokens(run: Run, bucket: Bucket, new: NewClassifier) -> TokenRows:
    return tokens_of(
        run.store, run.console, bucket, new.tokenizer, digest=new.tokenizer_digest, limit=new.limit, types=new.types
    )


def _split(keys: list[Array], tokens: TokenRows, targets: Array, weights: Array, held_out: float) -> TrainingData:
    aside = np.array([_is_aside(key, held_out) for part in keys for key in key_list(part)], dtype=bool)
    if aside.all():
        aside[:] = False
    learn = _examples(tokens, targets, weights, np.flatnonzero(~aside))
    kept = _examples(tokens, targets, weights, np.flatnonzero(aside)) if aside.any() else None
    return TrainingData(
        learn, kept, int(tokens.cut.sum()), (np.concatenate(keys) if keys else np.empty(0, "S16"))[~aside]
    )


def _examples(tokens: TokenRows, targets: Array, weights: Array, rows: Array) -> Examples:
    taken = tokens.take(rows)
    return Examples(taken.ids, taken.type_ids, targets[rows], weights[rows])


def _is_aside(key: bytes, share: float) -> bool:
    """By content, from the half of the key that buckets do not use: the same texts whatever the rest of the corpus."""
    return int.from_bytes(key[8:], "big") < share * 2**64
