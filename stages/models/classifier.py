"""A finished classifier in a Hugging Face folder, ready to be asked: how report, oracle and predict read a student."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from amalgam.data.tokens import encode
from amalgam.pipeline.errors import ModelError
from amalgam.pipeline.stage import Run
from amalgam.stages.models import folder as model_folder
from amalgam.stages.models.encoder import takes_types
from amalgam.stages.models.files import ModelFiles, resolve

Array = np.ndarray[Any, np.dtype[Any]]
BATCH_TOKENS = 8192
LONGEST_TOKENS = 512
"""Of a text, for a folder that says nothing of it."""


class Classifier:
    """Dropout off, fp32; labels in the model's own order, or in the one that was asked for."""

    def __init__(self, files: ModelFiles, *, device: str, max_tokens: int | None) -> None:
        from amalgam.stages.cache_teachers.hardware import pick_device
        from amalgam.stages.models.loading import load_classifier, load_tokenizer, token_limit

        self.model: Any = load_classifier(files, dropout=None, dtype="fp32").to(pick_device(device))
        self.tokenizer = load_tokenizer(files)
        self.limit = token_limit(self.model.config, self.tokenizer, max_tokens or LONGEST_TOKENS)
        self.types = takes_types(self.model.config)
        self.pad_id = int(self.tokenizer.pad_token_id or 0)
        self.labels = [str(self.model.config.id2label[place]) for place in range(self.model.config.num_labels)]
        self._order = list(range(len(self.labels)))

    @classmethod
    def of_run(cls, run: Run, folder: Path, labels: Sequence[str], *, where: str) -> Self:
        """With exactly these labels, in this order."""
        files = resolve(
            str(folder.absolute()), revision=None, base=run.base, pins=run.store, digest_of=run.digest_of, where=where
        )
        experiment = run.experiment
        found = cls(files, device=experiment.execution.device, max_tokens=experiment.student.max_tokens)
        if set(found.labels) != set(labels):
            raise ModelError(
                f"{where} knows other labels than this experiment",
                where=f"{folder}: {', '.join(found.labels)}",
                fix=f"it must know exactly: {', '.join(labels)}",
            )
        found._order = [found.labels.index(name) for name in labels]
        found.labels = list(labels)
        return found

    @classmethod
    def in_folder(cls, folder: Path, *, device: str, max_tokens: int | None, where: str) -> Self:
        """With the labels that its own config names."""
        contents = model_folder.read_contents(folder, where=where, allow_pickle=False, trust_remote_code=False)
        files = ModelFiles(str(folder), folder, "", None, contents.weights, contents.config)
        return cls(files, device=device, max_tokens=max_tokens)

    def logits(self, texts: Sequence[tuple[str, ...]]) -> Array:
        from amalgam.stages.fine_tuning.prediction import predict

        tokens = encode(self.tokenizer, texts, self.limit, types=self.types)
        found = predict(self.model, tokens.ids, pad_id=self.pad_id, batch_tokens=BATCH_TOKENS, type_ids=tokens.type_ids)
        return found[:, self._order].astype(np.float64)


def log_softmax(logits: Array) -> Array:
    top = logits.max(axis=-1, keepdims=True)
    result: Array = logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))
    return result
