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

from amalgam.data.arrays import top_margin
from amalgam.data.keys import text_key
from amalgam.data.labels import LabelSpace
from amalgam.data.parquet import key_array, read_table
from amalgam.pipeline.config.schema import Targets
from amalgam.pipeline.storage.store import Store
from amalgam.stages.common.answers.read import AnswerReader
from amalgam.stages.common.corpus import Bucket, neighbouring_buckets, read_bucket
from amalgam.stages.common.states.read import States
from amalgam.stages.weigh_teachers.mixture import standard
from amalgam.stages.weigh_teachers.neighbours import density

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
