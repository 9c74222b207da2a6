"""Texts to token ids, with one tokenizer and one limit: the same call for a teacher and for the student."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Tokens:
    ids: NDArray[np.int32]
    type_ids: NDArray[np.int32] | None
    cut: bool
    """The text was longer than the limit."""

    def __len__(self) -> int:
        return len(self.ids)


def encode(tokenizer: Any, texts: Sequence[tuple[str, ...]], limit: int, *, types: bool) -> list[Tokens]:
    """Special tokens included, cut to `limit` (of a pair the longer text first), whatever the tokenizer's own limit."""
    if not texts:
        return []
    fields = [list(field) for field in zip(*texts, strict=True)]
    options: dict[str, Any] = {"add_special_tokens": True, "return_attention_mask": False, "verbose": False}
    types = types and "token_type_ids" in tokenizer.model_input_names
    if types:
        options["return_token_type_ids"] = True
    cutting = {"truncation": "longest_first" if len(fields) > 1 else "only_first", "max_length": limit}
    encoded = tokenizer(*fields, **options, **cutting)
    if encoded.encodings is not None:
        cut = [bool(one.overflowing) for one in encoded.encodings]
    else:  # a tokenizer in Python does not say what it cut
        cut = [len(whole) > limit for whole in tokenizer(*fields, **options)["input_ids"]]
    type_ids = encoded.get("token_type_ids") if types else None
    return [
        Tokens(np.array(ids, np.int32), None if type_ids is None else np.array(type_ids[row], np.int32), cut[row])
        for row, ids in enumerate(encoded["input_ids"])
    ]
