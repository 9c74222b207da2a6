"""Label names in the space of an encoder of sentences: what they say of texts, without any teacher."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from amalgam.stages.cache_features.pooling import Encoder

    Array = np.ndarray[Any, np.dtype[Any]]

SEAM = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[\s_-]+")
"""Between the words of a label name: camel case, and what stands for a space."""


def words_of(label: str) -> str:
    """sci_tech, sci-tech and sciTech are all two words."""
    return " ".join(word for word in SEAM.split(label) if word) or label


def name_states(encoder: Encoder, names: Sequence[str]) -> Array:
    """[names, width], each of length 1."""
    from amalgam.data.tokens import encode

    how = encoder.how
    return encoder.pooled(encode(how.tokenizer, [(words_of(name),) for name in names], how.limit, types=how.types))
