"""Loads an encoder under a new classification head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from amalgam.pipeline.config.schema import Student, TrainTeachers
from amalgam.stages.common.models.resolve import ModelFiles

LAST_LAYER = 0
"""A number of blocks of hidden states that means the last layer alone."""


@dataclass(frozen=True)
class NewClassifier:
    """Holds a model with an untrained head, its tokenizer and how texts are tokenised for it."""

    model: Any
    tokenizer: Any
    tokenizer_digest: str
    limit: int
    types: bool
    pad_id: int


def new_classifier(
    files: ModelFiles,
    settings: Student | TrainTeachers,
    labels: Sequence[str],
    *,
    where: str,
    note: Callable[[str], None],
) -> NewClassifier:
    """Loads the encoder under a new head for these labels; `note` receives remarks for the console."""
    from amalgam.stages.common.models.loading import check_tokens, load_student, load_tokenizer, token_limit
    from amalgam.stages.common.token_cache import tokenizer_digest

    layers, dropout = (settings.layers, settings.dropout) if isinstance(settings, Student) else (None, None)
    model = load_student(files, labels=list(labels), layers=layers, seed=settings.seed, dropout=dropout)
    tokenizer = load_tokenizer(files)
    for remark in check_tokens(model, tokenizer, name=where):
        note(remark)
    digest = tokenizer_digest(tokenizer, files)
    limit = token_limit(model.config, tokenizer, settings.max_tokens)
    return NewClassifier(model, tokenizer, digest, limit, takes_types(model.config), int(tokenizer.pad_token_id))


def takes_types(config: Any) -> bool:
    """Whether the model distinguishes the two texts of a pair by token types."""
    return int(getattr(config.get_text_config(), "type_vocab_size", 0) or 0) > 1
