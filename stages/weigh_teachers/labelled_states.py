"""Learns from a few gold labels which hidden states go with which teacher, as further evidence for the correction.

One linear map leads from states to the teachers that have the gold label; it learns the labelled texts alone. Others
lead to the labels; they learn the gold labels, and on other texts the labels that the corrected weights prefer. A
teacher that the weights without labels give no text has states too, so a few labels find more of its texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from amalgam.data.arrays import Array, RowNumbers
from amalgam.data.lazy import np
from amalgam.stages.weigh_teachers.few_labels import Corrected, Labelled, corrected
from amalgam.stages.weigh_teachers.linear_map import LinearMap, predicted, preferred, values_of
from amalgam.stages.weigh_teachers.neighbours import Space

ROUNDS = 2
"""How often the maps learn the labels that the corrected weights prefer."""

LEAST_DEVIATION = 1e-9


@dataclass(frozen=True)
class PartlyLabelled:
    """Texts of one block, of which some have a gold label."""

    weights: Array
    """[texts, teachers], before labels correct them."""
    kinds: Sequence[Array]
    """Each kind of evidence: [texts, teachers]."""
    predicted: Array
    """Position of the predicted label in the union: [texts, teachers]."""
    spaces: Sequence[Space]
    """Empty: the weights use no states."""
    rows: RowNumbers
    """Positions of the labelled texts."""
    has_label: Array
    """Whether each teacher has the gold label: [labelled texts, teachers]."""
    gold: Array
    """Position of the gold label in the union: [labelled texts]."""

    def states(self) -> list[Array]:
        """Returns the states of the labelled texts in each space."""
        return [space[self.rows] for space in self.spaces]


@dataclass(frozen=True)
class StateMaps:
    """Coefficients of the maps in each space, and the scales of both kinds; without states all are empty."""

    to_teachers: Sequence[Array]
    to_labels: Sequence[Array]
    scales: Array
    """Mean and deviation: [kinds, 2, teachers]."""

    def __call__(self, spaces: Sequence[Space], answers: Array) -> list[Array]:
        """Returns both kinds of evidence [texts, teachers] of texts that the maps did not learn."""
        kinds = [_of_teachers(spaces, self.to_teachers), _of_labels(spaces, self.to_labels, answers)] if spaces else []
        return [_scaled(values, scale) for values, scale in zip(kinds, self.scales, strict=True)]


@dataclass(frozen=True)
class Fit:
    weights: Array
    """The corrected weights of the first block."""
    result: Corrected
    """The correction, fitted on all labelled texts."""
    maps: StateMaps


def fit_labels(first: PartlyLabelled, others: Sequence[PartlyLabelled], labels: int) -> Fit:
    """Fits the correction by the labelled texts of all blocks; `labels` is the number of labels of all teachers.

    The evidence of a text is always that of maps that did not learn its own label.
    """
    parts = [first, *others]
    has_label = np.concatenate([part.has_label for part in parts])
    weights = np.concatenate([part.weights[part.rows] for part in parts])
    answers = np.concatenate([part.predicted[part.rows] for part in parts])
    kinds = [np.concatenate([part.kinds[at][part.rows] for part in parts]) for at in range(len(first.kinds))]

    def fit(more: Sequence[Array]) -> Corrected:
        return corrected(weights, [*kinds, *more], answers, Labelled(np.arange(len(has_label)), has_label))

    def after(result: Corrected, more: Sequence[Array]) -> Array:
        return result.correction(first.weights, [*first.kinds, *more], first.predicted)

    if not first.spaces:
        result = fit([])
        return Fit(after(result, []), result, StateMaps([], [], np.empty((0, 2, first.weights.shape[1]))))
    to_teachers, own, left_out = _maps_to_teachers(first, parts, has_label)
    teacher_scale = _scale_of(own)
    of_first, of_labelled = [_scaled(own, teacher_scale)], [_scaled(left_out, teacher_scale)]
    result, maps = fit(of_labelled), [LinearMap.of(space) for space in first.spaces]
    for _ in range(ROUNDS):
        learned = preferred(after(result, of_first), first.predicted)
        learned[first.rows] = first.gold
        to_labels = [one.coefficients(learned, labels) for one in maps]
        pairs = zip(maps, to_labels, strict=True)
        own = np.mean([one.left_out(its, learned, first.predicted) for one, its in pairs], axis=0)
        elsewhere = [_of_labels(part.states(), to_labels, part.predicted[part.rows]) for part in others]
        label_scale = _scale_of(own)
        of_first[1:] = [_scaled(own, label_scale)]
        of_labelled[1:] = [_scaled(np.concatenate([own[first.rows], *elsewhere]), label_scale)]
        result = fit(of_labelled)
    return Fit(
        after(result, of_first), result, StateMaps(to_teachers, to_labels, np.stack([teacher_scale, label_scale]))
    )


def _maps_to_teachers(
    first: PartlyLabelled, parts: Sequence[PartlyLabelled], has_label: Array
) -> tuple[list[Array], Array, Array]:
    """Returns the coefficients, and the values of the first block's texts and of all labelled texts."""
    states, targets = zip(*(part.states() for part in parts), strict=True), has_label.astype(np.float64)
    maps = [LinearMap.of(np.concatenate(own)) for own in states]
    coefficients = [one.coefficients_for(targets) for one in maps]
    pairs = zip(maps, coefficients, strict=True)
    left_out: Array = np.mean([one.left_out_of(its, targets) for one, its in pairs], axis=0)
    own = _of_teachers(first.spaces, coefficients)
    own[first.rows] = left_out[: len(first.rows)]
    return coefficients, own, left_out


def _of_teachers(spaces: Sequence[Space], coefficients: Sequence[Array]) -> Array:
    pairs = zip(spaces, coefficients, strict=True)
    values: Array = np.mean([values_of(space, its) for space, its in pairs], axis=0)
    return values


def _of_labels(spaces: Sequence[Space], coefficients: Sequence[Array], answers: Array) -> Array:
    pairs = zip(spaces, coefficients, strict=True)
    values: Array = np.mean([predicted(space, its, answers) for space, its in pairs], axis=0)
    return values


def _scale_of(values: Array) -> Array:
    scale: Array = np.stack([values.mean(axis=0), np.maximum(values.std(axis=0), LEAST_DEVIATION)])
    return scale


def _scaled(values: Array, scale: Array) -> Array:
    scaled: Array = (values - scale[0]) / scale[1]
    return scaled
