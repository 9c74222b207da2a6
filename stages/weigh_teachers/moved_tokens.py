"""Compares teachers by the tokens of their training texts, which their models show.

Fine-tuning moves the vectors of the tokens in its texts, those of frequent tokens farther, and no others. So the
vectors of a teacher and of the encoder that it was fine-tuned from show how well a text fits its training texts.
"""

from __future__ import annotations

from collections.abc import Collection

from amalgam.data.arrays import Array
from amalgam.data.lazy import np
from amalgam.data.tokens import Ragged

ALIGNED = 0.9
"""Least median cosine of the vectors of a teacher and of the encoder that it was fine-tuned from."""

LEAST_MOVED = 1e-5
"""Least distance of a moved vector, by its length: a smaller one is an error of rounding."""

ROWS_AT_ONCE = 8192


def have_one_origin(own: Array, base: Array) -> bool:
    """Returns whether two models have vectors of the same tokens [tokens, width]."""
    if own.shape[1] != base.shape[1]:
        return False
    rows = min(len(own), len(base))
    cosines = [_cosines(own[part], base[part]) for part in _parts(rows)]
    return float(np.median(np.concatenate(cosines))) >= ALIGNED


def movement(own: Array, base: Array, special: Collection[int]) -> Array:
    """Returns how far each token was moved, by the mean of all moved ones: [tokens]; 0 for all if none was moved.

    Weight decay shortens every vector, so the distance is across its direction. Special tokens are in every text; they,
    and tokens that the encoder lacks, count as not moved.
    """
    moved = np.zeros(len(own), np.float32)
    for part in _parts(min(len(own), len(base))):
        moved[part] = _distances(own[part], base[part])
    moved[_within(special, len(own))] = 0.0
    return moved / moved[moved > 0].mean() if moved.any() else moved


def mean_movement(ids: Ragged, moved: Array, special: Collection[int]) -> Array:
    """Returns the mean over the tokens of each text, without special ones: [texts]; 0 for a text without others."""
    is_read = np.ones(len(moved), bool)
    is_read[_within(special, len(moved))] = False
    text_of = np.repeat(np.arange(len(ids)), ids.lengths)
    sums = np.bincount(text_of, moved[ids.values], len(ids))
    means: Array = sums / np.maximum(np.bincount(text_of, is_read[ids.values], len(ids)), 1)
    return means


def _within(special: Collection[int], tokens: int) -> list[int]:
    return [token for token in special if token < tokens]


def _parts(rows: int) -> list[slice]:
    return [slice(start, min(start + ROWS_AT_ONCE, rows)) for start in range(0, rows, ROWS_AT_ONCE)]


def _cosines(own: Array, base: Array) -> Array:
    lengths = np.linalg.norm(own, axis=1) * np.linalg.norm(base, axis=1)
    cosines: Array = (own * base).sum(axis=1) / np.where(lengths > 0, lengths, 1.0)
    return cosines


def _distances(own: Array, base: Array) -> Array:
    squares = (base * base).sum(axis=1, keepdims=True)
    across = own - base * ((own * base).sum(axis=1, keepdims=True) / np.where(squares > 0, squares, 1.0))
    distances: Array = np.linalg.norm(across, axis=1)
    return np.where(distances >= LEAST_MOVED * np.sqrt(squares[:, 0]), distances, 0.0)
