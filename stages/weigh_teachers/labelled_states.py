"""Learns from a few gold labels which hidden states go with which teacher, as further evidence for the correction.

One linear map leads from states to the right teachers; it learns the labelled texts alone. Others lead to the labels;
they learn the gold labels, and on other texts the labels that the corrected weights prefer. A teacher that the weights
without labels give no text has states too, so a few labels find more of its texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from amalgam.data.arrays import Array, RowNumbers
from amalgam.data.lazy import np
from amalgam.stages.weigh_teachers import few_labels
from amalgam.stages.weigh_teachers.few_labels import Weighed
from amalgam.stages.weigh_teachers.linear_map import CONSTANT, RIDGE, LinearMap, mean_predicted, preferred
from amalgam.stages.weigh_teachers.neighbours import Space

ROUNDS = 2
"""How often the maps learn the labels that the corrected weights prefer."""

LEAST_DEVIATION = 1e-9


@dataclass(frozen=True)
class WeighedBlock(Weighed):
    """Texts of one block."""

    spaces: Sequence[Space]
    """States of the encoder, and of each teacher; empty for a single kind of evidence."""


@dataclass(frozen=True)
class Labelled:
    """The gold labels of some texts of a block."""

    rows: RowNumbers
    """Positions of the labelled texts."""
    has_label: Array
    """Whether each teacher has the gold label: [labelled texts, teachers]."""
    gold: Array
    """Position of the gold label in the union: [labelled texts]."""


@dataclass(frozen=True)
class PartlyLabelled(Labelled, WeighedBlock):
    """Texts of which some have a gold label."""

    @classmethod
    def of(cls, block: WeighedBlock, labels: Labelled) -> PartlyLabelled:
        texts = block.weights, block.kinds, block.predicted, block.spaces
        return cls(*texts, labels.rows, labels.has_label, labels.gold)

    @property
    def is_right(self) -> Array:
        """Returns whether each teacher predicts the gold label; where none does, whether it has the label.

        Of teachers that share the label, all have it.
        """
        predicts = self.predicted[self.rows] == self.gold[:, None]
        return np.where(predicts.any(axis=1, keepdims=True), predicts, self.has_label)

    def only(self, is_used: Array) -> PartlyLabelled:
        """Returns the same texts with a part of their labels."""
        return replace(self, rows=self.rows[is_used], has_label=self.has_label[is_used], gold=self.gold[is_used])

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

    def __call__(self, spaces: Sequence[Space], predicted: Array) -> list[Array]:
        """Returns both kinds of evidence [texts, teachers] of texts that the maps did not learn."""
        maps = ((self.to_teachers, None), (self.to_labels, predicted)) if spaces else ()
        kinds = [mean_predicted(spaces, *pair) for pair in maps]
        return [_scaled(values, scale) for values, scale in zip(kinds, self.scales, strict=True)]


@dataclass(frozen=True)
class Fit:
    weights: Array
    """The corrected weights of the first block."""
    result: few_labels.Corrected
    """The correction, fitted on all labelled texts."""
    maps: StateMaps


def fit_labels(first: PartlyLabelled, others: Sequence[PartlyLabelled], labels: int) -> Fit:
    """Fits the correction by the labelled texts of all blocks; `labels` is the number of labels of all teachers.

    Maps are used if they predict the teachers of labelled texts better, by cross-validation of all steps.
    """
    blocks = _Blocks([first, *others], labels, [LinearMap.of(space) for space in first.spaces])
    result = blocks.corrected([])
    none = StateMaps([], [], np.empty((0, 2, first.weights.shape[1])))
    plain = Fit(blocks.after(result.correction, []), result, none)
    if not first.spaces:
        return plain
    evidence = _fit_maps(blocks, lambda more: blocks.corrected(more).correction)
    result = blocks.corrected(evidence.of_labelled)
    if result.strength is None:
        return plain
    cross_validated = _cross_validated(blocks, result.strength)
    weights, is_right = cross_validated[: few_labels.MOST_TRAINING], blocks.is_right[: few_labels.MOST_TRAINING]
    loss = few_labels.loss_of(weights, is_right)
    is_better = loss < plain.result.loss_after and (result.loss_before - loss) * len(weights) > few_labels.LEAST_GAIN
    if not is_better:
        return plain
    weights = blocks.after(result.correction, evidence.of_first)
    return Fit(weights, replace(result, cross_validated=cross_validated, loss_after=loss), evidence.maps)


@dataclass(frozen=True)
class _Blocks:
    parts: Sequence[PartlyLabelled]
    """The first block, and the labelled texts of others."""
    labels: int
    maps: Sequence[LinearMap]
    """Maps of the first block's spaces."""

    @property
    def is_right(self) -> Array:
        return np.concatenate([part.is_right for part in self.parts])

    def corrected(self, more: Sequence[Array]) -> few_labels.Corrected:
        """Returns the correction with further evidence of the labelled texts; cross-validation chooses its strength."""
        return few_labels.corrected(self._labelled().with_kinds(more), self.is_right)

    def correction(self, more: Sequence[Array], strength: float) -> few_labels.Correction:
        return few_labels.correction_of(self._labelled().with_kinds(more), self.is_right, strength)

    def after(self, correction: few_labels.Correction, more: Sequence[Array]) -> Array:
        """Returns the corrected weights of the first block."""
        return correction(self.parts[0].with_kinds(more))

    def only(self, is_used: Array) -> _Blocks:
        ends = np.cumsum([len(part.rows) for part in self.parts])[:-1]
        used = np.split(is_used, ends)
        return replace(self, parts=[part.only(flags) for part, flags in zip(self.parts, used, strict=True)])

    def _labelled(self) -> Weighed:
        parts = [part.at(part.rows) for part in self.parts]
        kinds = [np.concatenate(arrays) for arrays in zip(*(part.kinds for part in parts), strict=True)]
        weights = np.concatenate([part.weights for part in parts])
        return Weighed(weights, kinds, np.concatenate([part.predicted for part in parts]))


@dataclass(frozen=True)
class _MapEvidence:
    """The maps, and their predictions: both kinds of evidence, without the text's own label."""

    maps: StateMaps
    of_first: Sequence[Array]
    """[kinds][texts of the first block, teachers]."""
    of_labelled: Sequence[Array]
    """[kinds][labelled texts, teachers]."""


def _fit_maps(blocks: _Blocks, correct: Callable[[Sequence[Array]], few_labels.Correction]) -> _MapEvidence:
    first, *others = blocks.parts
    to_teachers, of_texts, leave_one_out = _maps_to_teachers(blocks)
    teacher_scale = _scale_of(of_texts)
    of_first, of_labelled = [_scaled(of_texts, teacher_scale)], [_scaled(leave_one_out, teacher_scale)]
    for _ in range(ROUNDS):
        labels = preferred(blocks.after(correct(of_labelled), of_first), first.predicted)
        labels[first.rows] = first.gold
        to_labels = [linear_map.coefficients(labels, blocks.labels) for linear_map in blocks.maps]
        pairs = zip(blocks.maps, to_labels, strict=True)
        by_space = [linear_map.leave_one_out(matrix, labels, first.predicted)[0] for linear_map, matrix in pairs]
        of_texts = np.mean(by_space, axis=0)
        elsewhere = [mean_predicted(part.states(), to_labels, part.predicted[part.rows]) for part in others]
        label_scale = _scale_of(of_texts)
        of_first[1:] = [_scaled(of_texts, label_scale)]
        of_labelled[1:] = [_scaled(np.concatenate([of_texts[first.rows], *elsewhere]), label_scale)]
    maps = StateMaps(to_teachers, to_labels, np.stack([teacher_scale, label_scale]))
    return _MapEvidence(maps, of_first, of_labelled)


def _cross_validated(blocks: _Blocks, strength: float) -> Array:
    """Returns the weights of the labelled texts without any label of their fold [labelled texts, teachers]."""
    weights, (first, *others) = np.empty(blocks.is_right.shape), blocks.parts
    for fold in few_labels.folds(len(weights)):
        used = blocks.only(~fold)
        evidence = _fit_maps(used, partial(used.correction, strength=strength))
        correction = used.correction(evidence.of_labelled, strength)
        of_first = used.after(correction, evidence.of_first)
        labelled = [(part.at(part.rows), part.states()) for part in others]
        of_others = [correction(texts.with_kinds(evidence.maps(states, texts.predicted))) for texts, states in labelled]
        weights[fold] = np.concatenate([of_first[first.rows], *of_others])[fold]
    return weights


def _maps_to_teachers(blocks: _Blocks) -> tuple[list[Array], Array, Array]:
    """Returns the coefficients, and the values of the first block's texts and of all labelled texts."""
    first, targets = blocks.parts[0], blocks.is_right.astype(np.float64)
    before = np.cumsum([0, *(len(part.rows) for part in blocks.parts)])
    parts = [part for part, texts in zip(blocks.parts, before, strict=False) if texts < few_labels.MOST_TRAINING]
    states = [np.concatenate(arrays) for arrays in zip(*(part.states() for part in parts), strict=True)]
    training = slice(0, few_labels.MOST_TRAINING)
    coefficients, leave_one_out = zip(*(ridge(space[training], targets[training]) for space in states), strict=True)
    of_labelled = np.concatenate([mean_predicted(part.states(), coefficients) for part in blocks.parts])
    of_labelled[training] = np.mean(leave_one_out, axis=0)
    of_first = mean_predicted(first.spaces, coefficients)
    of_first[first.rows] = of_labelled[: len(first.rows)]
    return list(coefficients), of_first, of_labelled


def ridge(states: Array, targets: Array) -> tuple[Array, Array]:
    """Returns the coefficients of a ridge regression, and its values without each text's own targets.

    It is solved by the products of the texts, which are usually fewer than the width.
    """
    inputs = np.concatenate([states, np.full((len(states), 1), CONSTANT)], axis=1).astype(np.float64)
    inverse = np.linalg.inv(inputs @ inputs.T + RIDGE * np.eye(len(inputs)))
    dual = inverse @ targets
    leave_one_out: Array = targets - dual / np.diag(inverse)[:, None]
    return (inputs.T @ dual).astype(np.float32), leave_one_out


def _scale_of(values: Array) -> Array:
    return np.stack([values.mean(axis=0), np.maximum(values.std(axis=0), LEAST_DEVIATION)])


def _scaled(values: Array, scale: Array) -> Array:
    return (values - scale[0]) / scale[1]
