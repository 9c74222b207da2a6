"""Keyed randomness: what is drawn for a text is a function of its key, the place in it and the token, of nothing else.

So a text does not depend on which others are written beside it, on processes, or on an interruption.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from amalgam.pipeline.storage.fingerprint import canonical
from amalgam.stages.common.inference.masks import GOLDEN, MIX_B, mixed

_Item = TypeVar("_Item")

FRACTION = 2.0**-53

QUESTIONS = 1 << 32  # places beyond any text's end


def text_word(*key: Any) -> int:
    """64 bits that stand for one text: its seed, teacher, class and index."""
    return int.from_bytes(hashlib.blake2b(canonical(list(key)).encode(), digest_size=8).digest(), "little")


def uniform(word: int, place: int, numbers: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number strictly between 0 and 1 for each of `numbers`, at one place of one text."""
    start = mixed(np.array([word], np.uint64) ^ mixed(np.array([place + 1], np.uint64) * np.uint64(GOLDEN)))
    words = mixed(start ^ mixed((numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(MIX_B)))
    found: NDArray[np.float64] = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * FRACTION
    return found


def gumbel(word: int, place: int, numbers: NDArray[np.int64]) -> NDArray[np.float64]:
    """Standard Gumbel noise: the argmax of log-weights plus it is a sample."""
    found: NDArray[np.float64] = -np.log(-np.log(uniform(word, place, numbers)))
    return found


def one_of(word: int, question: int, options: Sequence[_Item]) -> _Item:
    """The text's own choice; questions are numbered from 0."""
    share = uniform(word, QUESTIONS + question, np.zeros(1, np.int64))[0]
    return options[min(int(share * len(options)), len(options) - 1)]
