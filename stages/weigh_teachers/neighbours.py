"""A text's nearest others, by the cosine of their states: exactly, a block of texts at a time.

In a corpus of more than REFERENCES texts, neighbours are searched among a sample of that size. The sample is evenly
spaced in key order, and keys are digests, so it is random. Time then grows with the texts, not with their square.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, np.dtype[Any]]


BLOCK = 2048

REFERENCES = 131_072

CLOSEST = 5

AS_GOOD_AS_EQUAL = 1e-3
"""Distance below which texts are not distinguished."""


def nearest(features: Array, count: int, references: int = REFERENCES) -> Array:
    """[texts, count] places of the nearest other texts, the nearest first; fewer where there are not so many."""
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
    """One space of several: each around its own mean and made of length 1, so that all count alike."""
    parts = [_of_length_1(space - space.mean(axis=0)) for space in spaces]
    return _of_length_1(np.concatenate(parts, axis=1))


def _of_length_1(states: Array) -> Array:
    length = np.linalg.norm(states, axis=1, keepdims=True)
    unit_states: Array = states / np.where(length > 0, length, 1)
    return unit_states
