"""Predicts with a classifier in a Hugging Face folder, for report, oracle and predict."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from amalgam.data.tokens import encode
from amalgam.pipeline.errors import ModelError
from amalgam.stages.common.device import pick_device
from amalgam.stages.common.inference.batches import predict
from amalgam.stages.common.models.loading import load_classifier, load_tokenizer, token_limit
from amalgam.stages.common.models.resolve import ModelFiles, read_model, takes_types

Array = np.ndarray[Any, np.dtype[Any]]

LONGEST_TOKENS = 512
"""Longest text of a student whose folder names no limit."""


class Classifier:
    """Predicts logits in fp32 without dropout, in the model's own order of labels unless reordered."""

    def __init__(self, files: ModelFiles, *, device: str, max_tokens: int | None) -> None:
        self.folder = files.folder
        self.model: Any = load_classifier(files, dropout=None, dtype="fp32").to(pick_device(device))
        self.tokenizer = load_tokenizer(files)
        self.limit = token_limit(self.model.config, self.tokenizer, max_tokens or LONGEST_TOKENS)
        self.types = takes_types(self.model.config)
        self.pad_id = int(self.tokenizer.pad_token_id or 0)
        self.labels = [str(self.model.config.id2label[place]) for place in range(self.model.config.num_labels)]
        self._order = list(range(len(self.labels)))

    def reorder(self, labels: Sequence[str], *, where: str) -> None:
        """Orders the logits by these labels; refuses a model with other labels."""
        if set(self.labels) != set(labels):
            raise ModelError(
                f"{where} has other labels than this experiment",
                where=f"{self.folder}: {', '.join(self.labels)}",
                fix=f"use a model with exactly the labels {', '.join(labels)}",
            )
        self._order = [self.labels.index(name) for name in labels]
        self.labels = list(labels)

    @classmethod
    def in_folder(cls, folder: Path, *, device: str, max_tokens: int | None, where: str) -> Self:
        """Loads a classifier with the labels of its own config."""
        return cls(read_model(folder, where), device=device, max_tokens=max_tokens)

    def logits(self, texts: Sequence[tuple[str, ...]]) -> Array:
        """Returns the logits [texts, labels]."""
        tokens = encode(self.tokenizer, texts, self.limit, types=self.types)
        logits = predict(self.model, tokens.ids, pad_id=self.pad_id, type_ids=tokens.type_ids)
        return logits[:, self._order].astype(np.float64)


def log_softmax(logits: Array) -> Array:
    top = logits.max(axis=-1, keepdims=True)
    result: Array = logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))
    return result
