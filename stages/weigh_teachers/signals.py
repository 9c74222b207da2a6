"""Standardises the teachers' signals [texts, teachers], and keeps what the first block determines."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Required, TypedDict

from amalgam.data.arrays import Array
from amalgam.data.lazy import np


class LabelledFacts(TypedDict):
    """The effect of gold labels in `labels` of the experiment."""

    texts: int
    """Labelled texts."""
    moved: int
    """Texts with another teacher of the largest weight."""
    strength: float | None
    """Precision of the prior that cross-validation chose; None: the labels change the labelled texts alone."""
    loss_before: float
    loss_after: float


class AccuracyEstimate(TypedDict):
    """An estimate without labels; low and high are the ends of its 95 % interval."""

    low: float
    value: float
    high: float


class WeightFacts(TypedDict, total=False):
    """Results of the checks, for the manifest; the fields depend on the kinds of evidence."""

    notes: Required[list[str]]
    fallback: bool
    """Whether the evidence was dropped, and each text's own confidences were used."""
    fitted: int
    """The number of texts on which means, ranges and shares were fitted."""
    shares: dict[str, float]
    """The teachers' shares of the texts."""
    separation: float
    kinds: dict[str, float]
    """The weights of the kinds of evidence."""
    exclusion: float
    """How clearly the signal separates the teachers; at most 1."""
    coherence: float
    names: dict[str, float]
    """By teacher, the share of random orders of its label names that fit its predictions as well."""
    labelled: LabelledFacts
    accuracy: AccuracyEstimate
    """The share of training texts whose target has the right label first."""


@dataclass(frozen=True)
class Params:
    """The results of the first block of texts: numbers that the other blocks reuse, and facts for the manifest."""

    values: dict[str, Array] = field(default_factory=dict)
    is_reused: bool = False
    prefix: str = ""
    facts: WeightFacts = field(default_factory=lambda: WeightFacts(notes=[]))
    """Of another block than the first, nothing reads them."""

    def reused(self) -> Params:
        """Returns the same numbers for another block."""
        return Params(self.values, is_reused=True)

    def scope(self, name: str) -> Params:
        """Returns the same numbers, with the name of a step before each of their names."""
        return replace(self, prefix=f"{self.prefix}{name}/")

    def value(self, name: str, fit: Callable[[], Any]) -> Array:
        """Returns the value of this name; on the first block `fit` computes it."""
        if self.is_reused:
            return self.stored(name)
        value = np.ascontiguousarray(fit())
        self.store({name: value})
        return value

    def store(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if f"{self.prefix}{name}" in self.values:
                raise AssertionError(f"{self.prefix}{name} is fitted twice")
            self.values[f"{self.prefix}{name}"] = np.ascontiguousarray(value)

    def stored(self, name: str) -> Array:
        return self.values[f"{self.prefix}{name}"]

    def save(self, path: Path) -> None:
        from safetensors.numpy import save_file

        save_file(self.values, path)

    @classmethod
    def load(cls, path: Path) -> Params:
        from safetensors.numpy import load_file

        return cls(load_file(path), is_reused=True)


def standardise(signal: Array, params: Params) -> Array:
    """Returns each teacher's signal in its own deviations from its own mean over the texts."""
    mean, deviation = params.value("scale", lambda: np.stack([signal.mean(axis=0), signal.std(axis=0)]))
    return (signal - mean) / np.where(deviation > 0, deviation, 1.0)


def standardised_sum(signals: Sequence[Array], params: Params) -> Array:
    """Returns the standardised sum of standardised signals."""
    scores = [standardise(signal, params.scope(str(index))) for index, signal in enumerate(signals)]
    return standardise(np.sum(scores, axis=0), params.scope("sum"))


def correlation(a: Array, b: Array) -> float:
    if not len(a) or a.std() == 0 or b.std() == 0:
        return 0.0
    return float(np.corrcoef(a, b)[0, 1])


# ---- teachers with one prediction

ONE_LABEL, FEW_TEXTS = 0.95, 100
"""A teacher has one prediction if a label has a larger share of its predictions on at least so many texts."""


def one_label(predicted: Array, detectors: Collection[int] = ()) -> Array:
    """Returns whether each teacher predicts one label for nearly all texts, which is then no evidence: [teachers].

    `detectors` have a single label next to their catch_all, whose probability is their evidence.
    """
    texts = len(predicted)
    counts = [np.unique(labels, return_counts=True)[1].max(initial=0) for labels in predicted.T]
    is_most = [texts >= FEW_TEXTS and count > ONE_LABEL * texts for count in counts]
    return np.array([most and teacher not in detectors for teacher, most in enumerate(is_most)], bool)


def with_absence(
    kinds: Mapping[str, Array], predicted: Array, params: Params, detectors: Collection[int] = ()
) -> dict[str, Array]:
    """Adds to each kind of evidence, for teachers with one prediction, that the evidence for all others is low."""
    teachers = np.flatnonzero(params.value("one label", lambda: one_label(predicted, detectors).astype(np.uint8)))
    if predicted.shape[1] == 1 or not len(teachers):
        return dict(kinds)
    result = {name: signal.copy() for name, signal in kinds.items()}
    for name, signal in kinds.items():
        for teacher in teachers.tolist():
            others = np.delete(signal, teacher, axis=1).max(axis=1, keepdims=True)
            scope = params.scope(f"absence of {name}").scope(str(teacher))
            result[name][:, teacher] = standardised_sum([signal[:, [teacher]], -others], scope)[:, 0]
    return result
