"""A text's nearest others, by the cosine of their states: exactly, a block of texts at a time.

Of a corpus of more than REFERENCES texts, neighbours are looked for among so many of them, evenly taken in the order of
their keys, which are digests: a sample at random. Time then grows with the texts, not with their square.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, np.dtype[Any]]

BLOCK = 2048
REFERENCES = 131_072


def nearest(features: Array, count: int, references: int = REFERENCES) -> Array:
    """[texts, count] places of the nearest other texts, the nearest first; fewer where there are not so many."""
    states = torch.from_numpy(np.ascontiguousarray(features, dtype=np.float32))
    texts = len(states)
    among = torch.arange(texts) if texts <= references else torch.arange(references) * texts // references
    others = states[among].T
    count = min(count, len(among) - 1)
    found = np.empty((texts, max(0, count)), np.int64)
    for start in range(0, texts if count > 0 else 0, BLOCK):
        similarity = states[start : start + BLOCK] @ others
        itself = (among >= start) & (among < start + len(similarity))
        similarity[among[itself] - start, itself.nonzero().squeeze(1)] = -2.0
        found[start : start + BLOCK] = among[similarity.topk(count, dim=1).indices].numpy()
    return found


def smoothed(signal: Array, near: Array) -> Array:
    """Of each text and teacher, the mean over the text's neighbours; a text without any keeps its own."""
    return signal[near].mean(axis=1) if near.shape[1] else signal


def side_by_side(spaces: Sequence[Array]) -> Array:
    """One space of several: each around its own mean and made of length 1, so that all count alike."""
    parts = [_of_length_1(space - space.mean(axis=0)) for space in spaces]
    return _of_length_1(np.concatenate(parts, axis=1))


def _of_length_1(states: Array) -> Array:
    length = np.linalg.norm(states, axis=1, keepdims=True)
    found: Array = states / np.where(length > 0, length, 1)
    return found
