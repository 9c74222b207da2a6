"""Compares the names of a teacher's labels with the texts that it predicts them for: a wrong order fits badly."""

from __future__ import annotations

from amalgam.data.arrays import Array, RowNumbers
from amalgam.data.lazy import np
from amalgam.stages.weigh_teachers.neighbours import Space, of_length_1, rows_of

FEWEST_LABELS, FEWEST_TEXTS = 6, 3
"""Labels of a teacher, and texts of each: with fewer, random orders of the names often fit as well as the right one."""

ORDERS = 2000
"""Random orders that are compared: their share has an error of 0.002 at UNCLEAR_ORDER."""

UNCLEAR_ORDER = 0.01
"""Share of random orders that fit as well, above which the names may be in the wrong order."""


def as_good_orders(states: Space, names: Array, predicted: RowNumbers) -> float | None:
    """Returns the share of random orders of the names that fit the texts as well; None with too few labels.

    `names` [width, labels] are states of the names, and `predicted` the place of each text's label among them.
    """
    counts = np.bincount(predicted, minlength=names.shape[1])
    labels = np.flatnonzero(counts >= FEWEST_TEXTS)
    if len(labels) < FEWEST_LABELS:
        return None
    sums = np.zeros((len(names), names.shape[1]))
    for rows in rows_of(states):
        np.add.at(sums.T, predicted[rows], of_length_1(states[rows].astype(np.float64)))
    texts, words = sums[:, labels] / counts[labels], names[:, labels].astype(np.float64)
    fit = (texts - texts.mean(axis=1, keepdims=True)).T @ (words - words.mean(axis=1, keepdims=True))
    draw, places = np.random.default_rng(0), np.arange(len(labels))
    others = np.array([fit[places, draw.permutation(places)].sum() for _ in range(ORDERS)])
    return float((others >= np.trace(fit)).mean())
