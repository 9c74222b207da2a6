"""A finished classifier in a Hugging Face folder, ready to be asked: how report and oracle read a student."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from amalgam.data.tokens import encode
from amalgam.pipeline.errors import ModelError
from amalgam.pipeline.stage import Run
from amalgam.stages.models.encoder import takes_types
from amalgam.stages.models.files import resolve

Array = np.ndarray[Any, np.dtype[Any]]
BATCH_TOKENS = 8192


class Classifier:
    """Dropout off, fp32; labels in the order that was asked for."""

    def __init__(self, run: Run, folder: Path, labels: Sequence[str], *, where: str) -> None:
        from amalgam.stages.cache_teachers.hardware import pick_device
        from amalgam.stages.models.loading import load_classifier, load_tokenizer, token_limit

        files = resolve(
            str(folder.absolute()), revision=None, base=run.base, pins=run.store, digest_of=run.digest_of, where=where
        )
        self._model: Any = load_classifier(files, dropout=None, dtype="fp32").to(
            pick_device(run.experiment.execution.device)
        )
        self._tokenizer = load_tokenizer(files)
        self._limit = token_limit(self._model.config, self._tokenizer, run.experiment.student.max_tokens)
        known = {str(name): int(place) for name, place in self._model.config.label2id.items()}
        if set(known) != set(labels):
            raise ModelError(
                f"{where} knows other labels than this experiment",
                where=f"{folder}: {', '.join(known)}",
                fix=f"it must know exactly: {', '.join(labels)}",
            )
        self._order = [known[name] for name in labels]

    def logits(self, texts: Sequence[tuple[str, ...]]) -> Array:
        from amalgam.stages.fine_tuning.prediction import predict

        tokens = encode(self._tokenizer, texts, self._limit, types=takes_types(self._model.config))
        found = predict(
            self._model,
            tokens.ids,
            pad_id=int(self._tokenizer.pad_token_id or 0),
            batch_tokens=BATCH_TOKENS,
            type_ids=tokens.type_ids,
        )
        return found[:, self._order].astype(np.float64)


def log_softmax(logits: Array) -> Array:
    top = logits.max(axis=-1, keepdims=True)
    result: Array = logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))
    return result
