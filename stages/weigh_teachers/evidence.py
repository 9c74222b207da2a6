"""Evidence for a teacher on a text, computed from the cache alone: one number for each text and teacher.

There are three kinds of evidence with different failure modes. Predictions fail by overconfident errors, the density of
hidden states fails for classes that training did not separate, label names fail if they are uninformative. Texts
generated for a teacher have a fourth kind: their provenance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import torch

from amalgam.data.arrays import top_margin
from amalgam.data.keys import LabelSpace, text_key
from amalgam.data.parquet import key_array, read_table
from amalgam.pipeline.config.schema import Targets
from amalgam.pipeline.storage.store import Store
from amalgam.stages.common.cached.read import AnswerReader, States
from amalgam.stages.common.corpus import Bucket, neighbouring_buckets, read_bucket
from amalgam.stages.weigh_teachers.mixture import standard

Array = np.ndarray[Any, np.dtype[Any]]
AGREEING = 0.15
"""Least mean correlation of a kind with the others; a kind below it is dropped."""

OWN = ("answers", "states")
"""Kinds that a teacher itself computes."""

AGAINST = 0.1
"""A kind with a larger correlation with the evidence for the other teachers has half the weight for a teacher."""


@dataclass(frozen=True)
class WeighInputs:
    """The inputs of the weights on all training texts."""

    store: Store
    buckets: Sequence[Bucket]
    targets: Targets
    labels: LabelSpace
    answers: AnswerReader
    generated: Path | None
    """The table of generated texts, where each was generated for a teacher and a class."""
    read_features: Callable[[], Array]
    """Returns the encoder's states of the buckets' texts, each of length 1."""
    read_states: Callable[[Array], Sequence[States]]
    """Returns each teacher's last states of the texts with these keys."""
    name_states: Callable[[Sequence[str]], Array]
    """Returns the encoder's states of label names."""

    @property
    def teachers(self) -> list[str]:
        return list(self.labels.columns)

    def keys(self, buckets: Sequence[Bucket] | None = None) -> pa.Array:
        """Returns the keys of these buckets, by default of all."""
        chosen = self.buckets if buckets is None else buckets
        table = pa.concat_tables(read_bucket(self.store, bucket, ["key"]) for bucket in chosen)
        return table.column("key").combine_chunks()


def predictions(inputs: WeighInputs) -> Mapping[str, Array]:
    """Returns confidence, margin and highest logit: [texts, teachers] each."""
    parts = [
        np.stack([_predictions(inputs, name, group) for name in inputs.teachers], axis=2)
        for group in neighbouring_buckets(inputs.buckets)
    ]
    joined = np.concatenate(parts)
    return {name: joined[:, place] for place, name in enumerate(("confidence", "margin", "highest"))}


def _predictions(inputs: WeighInputs, teacher: str, buckets: Sequence[Bucket]) -> Array:
    keys = pl.Series("key", inputs.keys(buckets), pl.Binary)
    evidence = inputs.answers.evidence(teacher, [bucket.prefix for bucket in buckets], keys)
    logits = evidence.logits.to_numpy()
    margin = top_margin(logits.astype(np.float64))
    return np.stack([evidence.confidence.to_numpy(), margin, logits.max(axis=1)], axis=1)


def kinds(
    inputs: WeighInputs, answered: Mapping[str, Array], features: Array, states: Sequence[Array]
) -> dict[str, Array]:
    """[texts, teachers] by kind, each in its own deviations over the texts; `features`: the encoder's, of length 1."""
    return {
        "answers": together(list(answered.values())),
        "states": of_states(states),
        "names": standard(_names(inputs, features)),
    }


def together(signals: Sequence[Array]) -> Array:
    return standard(np.sum([standard(one) for one in signals], axis=0))


def read_states(inputs: WeighInputs) -> list[Array]:
    """[texts, width] of each teacher: the mean over the text's tokens of its last layer."""
    by_teacher = inputs.read_states(key_array(inputs.keys()))
    return [states.take(np.arange(len(states)))[:, 0, 0].astype(np.float32) for states in by_teacher]


def of_states(states: Sequence[Array]) -> Array:
    """Returns the density of texts in each teacher's space: learned classes are dense, other texts are between them."""
    return standard(np.stack([density(own) for own in states], axis=1))


def _names(inputs: WeighInputs, features: Array) -> Array:
    """Returns the similarity of each text to the nearest label name of each teacher."""
    space = inputs.labels
    similarity = features @ inputs.name_states(space.names).T
    return np.stack([similarity[:, list(own)].max(axis=1) for own in space.columns.values()], axis=1)


def provenance(inputs: WeighInputs) -> Array | None:
    """The class's probability at the teacher that the text was written for, 0 at others; None: written for no class."""
    names = inputs.teachers
    if inputs.generated is None or len(names) == 1:
        return None
    columns = ["text", "teacher", "class_probability"]
    table = read_table(inputs.generated, columns)
    rows = {key: row for row, key in enumerate(inputs.keys().to_pylist())}
    probabilities = np.zeros((len(rows), len(names)))
    for text, teacher, probability in zip(*(table.column(name).to_pylist() for name in columns), strict=True):
        row = rows.get(text_key((text,)))
        if row is not None:
            place = names.index(teacher)
            probabilities[row, place] = max(probabilities[row, place], probability)
    return probabilities


def agreement(evidence: Mapping[str, Array], others: Mapping[str, Array] | None = None) -> dict[str, float]:
    """Returns the mean correlation of each kind with the other kinds, relative to the mean over teachers."""
    relative = {name: _relative(signal) for name, signal in (others or evidence).items()}
    return {
        name: float(np.mean([correlation(_relative(one), other) for kind, other in relative.items() if kind != name]))
        for name, one in evidence.items()
    }


def contradicting(evidence: Mapping[str, Array]) -> dict[str, Array]:
    """Returns [teachers] by kind of OWN: the correlation with the evidence for the other teachers.

    It is high for a teacher that is most confident on texts outside its domain.
    """
    whole = together(list(evidence.values()))
    others = whole.sum(axis=1, keepdims=True) - whole
    return {
        kind: np.array([correlation(one, other) for one, other in zip(evidence[kind].T, others.T, strict=True)])
        for kind in OWN
        if kind in evidence
    }


def _relative(signal: Array) -> Array:
    relative: Array = (signal - signal.mean(axis=1, keepdims=True)).ravel()
    return relative


def correlation(one: Array, other: Array) -> float:
    if not len(one) or one.std() == 0 or other.std() == 0:
        return 0.0
    return float(np.corrcoef(one, other)[0, 1])


BLOCK = 2048

REFERENCES = 131_072
"""In a larger corpus neighbours are searched among a sample of this size, so time grows linearly with the texts.

The sample is evenly spaced in key order, and keys are digests, so it is random.
"""

CLOSEST = 5

AS_GOOD_AS_EQUAL = 1e-3
"""Distance below which texts are not distinguished."""


def nearest(features: Array, count: int, references: int = REFERENCES) -> Array:
    """Returns [texts, count] places of the nearest other texts by exact cosine, the nearest first; fewer if absent."""
    return _nearest(features, count, references)[0]


def density(states: Array, references: int = REFERENCES) -> Array:
    """Returns -log of each text's mean distance to the CLOSEST others: 1 - cosine around the mean of all states."""
    similarity = _nearest(side_by_side([states]), CLOSEST, references)[1].astype(np.float64)
    distance = 1 - similarity.mean(axis=1) if similarity.shape[1] else np.ones(len(states))
    log_density: Array = -np.log(np.maximum(distance, 0) + AS_GOOD_AS_EQUAL)
    return log_density


def _nearest(features: Array, count: int, references: int) -> tuple[Array, Array]:
    """Returns the neighbours' places and similarities."""
    states = torch.from_numpy(np.ascontiguousarray(features, dtype=np.float32))
    texts = len(states)
    among = torch.arange(texts) if texts <= references else torch.arange(references) * texts // references
    others = states[among].T
    count = min(count, len(among) - 1)
    places = np.empty((texts, max(0, count)), np.int64)
    alike = np.empty(places.shape, np.float32)
    for start in range(0, texts if count > 0 else 0, BLOCK):
        similarity = states[start : start + BLOCK] @ others
        itself = (among >= start) & (among < start + len(similarity))
        similarity[among[itself] - start, itself.nonzero().squeeze(1)] = -2.0
        closest = similarity.topk(count, dim=1)
        places[start : start + BLOCK] = among[closest.indices].numpy()
        alike[start : start + BLOCK] = closest.values.numpy()
    return places, alike


def smoothed(signal: Array, near: Array) -> Array:
    """Returns the signal's mean over each text's neighbours; a text without any keeps its own."""
    return signal[near].mean(axis=1) if near.shape[1] else signal


def side_by_side(spaces: Sequence[Array]) -> Array:
    """Joins spaces with equal weight: each is centred and scaled to length 1."""
    parts = [_of_length_1(space - space.mean(axis=0)) for space in spaces]
    return _of_length_1(np.concatenate(parts, axis=1))


def _of_length_1(states: Array) -> Array:
    length = np.linalg.norm(states, axis=1, keepdims=True)
    unit_states: Array = states / np.where(length > 0, length, 1)
    return unit_states
