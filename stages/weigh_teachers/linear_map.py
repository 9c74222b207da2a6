"""Predicts labels of texts by linear maps of hidden states, trained on the labels that the weights prefer.

Each teacher gives a text one candidate label. A map is trained on the candidates of the heaviest teachers, and each
text is left out of its own prediction. Texts of one label share directions in the states of all models, so errors of
single texts are outvoted. The prediction for a candidate is evidence that is comparable between teachers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from amalgam.data.arrays import Array
from amalgam.data.lazy import np, torch
from amalgam.stages.weigh_teachers.neighbours import Space, rows_of

RIDGE = 0.05
"""Penalty of the squared coefficients; states have length 1."""

CONSTANT = 0.3
"""A further input that is the same for all texts."""

HALF_A_TEXT = 0.5
"""Added to each label's sum of weights."""


@dataclass(frozen=True)
class LinearMap:
    """Ridge regression from a space of states with length 1 to the labels."""

    space: Space
    factor: Any
    """Cholesky factor of the inputs' products: [width, width]."""
    leverages: Array
    """The part of each text's own target in its prediction."""

    @classmethod
    def of(cls, space: Space) -> LinearMap:
        products = RIDGE * torch.eye(1 + space[:1].shape[1], dtype=torch.float64)
        for rows in rows_of(space):
            inputs = _inputs(space, rows)
            products += (inputs.T @ inputs).double()
        factor = torch.linalg.cholesky(products)
        del products  # of wide spaces it is as large as all else
        single, leverages = factor.float(), []
        for rows in rows_of(space):
            solved = torch.linalg.solve_triangular(single, _inputs(space, rows).T, upper=False)
            leverages.append(solved.square().sum(dim=0).numpy())
        return cls(space, factor, np.concatenate(leverages).astype(np.float64))

    def coefficients(self, labels: Array, count: int) -> Array:
        """Returns the coefficients [width, labels] of the map to the label of each text."""
        sums = torch.zeros(count, len(self.factor), dtype=torch.float64)
        for rows in rows_of(self.space):
            columns = torch.from_numpy(labels[rows].astype(np.int64))
            sums.index_add_(0, columns, _inputs(self.space, rows).double())
        return torch.cholesky_solve(sums.T, self.factor).float().numpy()

    def leave_one_out(self, coefficients: Array, labels: Array, candidates: Array) -> tuple[Array, Array]:
        """Returns `candidate_predictions` without each text's own label."""
        return candidate_predictions(self.space, coefficients, candidates, (labels, self.leverages))


def predicted(space: Space, coefficients: Array) -> Array:
    """Returns the predictions of a map [texts, columns]."""
    predictions = np.empty((len(space), coefficients.shape[1]))
    for rows in rows_of(space):
        predictions[rows] = (_inputs(space, rows) @ torch.from_numpy(coefficients)).numpy()
    return predictions


def mean_predicted(spaces: Sequence[Space], maps: Sequence[Array], candidates: Array | None = None) -> Array:
    """Returns the mean prediction of the maps, whose coefficients these are, one for each space."""
    pairs = zip(spaces, maps, strict=True)
    if candidates is None:
        return np.mean([predicted(*pair) for pair in pairs], axis=0)
    return np.mean([candidate_predictions(*pair, candidates)[0] for pair in pairs], axis=0)


def candidate_predictions(
    space: Space, coefficients: Array, candidates: Array, own: tuple[Array, Array] | None = None
) -> tuple[Array, Array]:
    """Returns the predictions for candidate labels [texts, teachers], and the label with the largest one [texts].

    `own`: the label that each text was trained with, and its leverage; the predictions are then without it.
    """
    matrix = torch.from_numpy(coefficients)
    predictions, first = np.empty(candidates.shape), np.empty(len(candidates), np.int64)
    for rows in rows_of(space):
        values = (_inputs(space, rows) @ matrix).numpy().astype(np.float64)
        if own is not None:
            labels, leverages = (column[rows] for column in own)
            values[np.arange(len(values)), labels] -= leverages
            values /= (1 - leverages)[:, None]
        predictions[rows] = np.take_along_axis(values, candidates[rows], axis=1)
        first[rows] = values.argmax(axis=1)
    return predictions, first


def preferred(weights: Array, candidates: Array) -> Array:
    """Returns the candidate label [texts] with the largest weight; teachers with one candidate add theirs up."""
    is_same = candidates[:, :, None] == candidates[:, None, :]
    best = (is_same * weights[:, None, :]).sum(axis=2).argmax(axis=1)
    return np.take_along_axis(candidates, best[:, None], axis=1)[:, 0]


def label_biases(before: Array, after: Array, candidates: Array, count: int) -> Array:
    """Returns, for each teacher and label, the log of the label's part of the teacher's weight before over that after.

    If a teacher confuses most texts of another's label with one of its own, a map learns this confusion. It then gives
    the teacher all texts of the label, and the student never learns the label. The biases prevent this.
    """

    def logs_of_parts(weights: Array) -> Array:
        sums = np.stack([np.bincount(*column, count) for column in zip(candidates.T, weights.T, strict=True)])
        return np.log((sums + HALF_A_TEXT) / sums.sum(axis=1, keepdims=True))

    return logs_of_parts(before) - logs_of_parts(after)


def _inputs(space: Space, rows: slice) -> Any:
    states = np.ascontiguousarray(space[rows], np.float32)
    return torch.from_numpy(np.concatenate([states, np.full((len(states), 1), CONSTANT, np.float32)], axis=1))
