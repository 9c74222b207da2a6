"""Small language models and teachers for the tests of generate, and texts to order of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from amalgam.stages.common.inference.teacher import Teacher
from amalgam.stages.generate.decoding import (
    GeneratedText,
    LazySampler,
    SamplingParams,
    Scorer,
    SteeringParams,
    TextRequest,
    Writer,
    key64,
)
from amalgam.stages.generate.language_model import LanguageModel
from amalgam.tests.stages.tiny_models import tiny, tiny_language_model

LONGEST = 40
LABELS = 3


def language_model(kind: str = "gpt2", *, slots: int = 8, longest: int = LONGEST, **settings: Any) -> LanguageModel:
    return LanguageModel(*tiny_language_model(kind, **settings), slots=slots, longest=longest, device="cpu")


def teacher_of(kind: str = "bert", *, sure: float = 40.0, limit: int = 24) -> Teacher:
    """`sure` scales the head: how far its probabilities are from even."""
    model, tokenizer = tiny(kind, spread=6.0, num_hidden_layers=1) if kind == "bert" else tiny(kind, spread=6.0)
    head = model.classifier if kind == "bert" else model.score
    head.weight.data.mul_(sure)
    return Teacher(model, tokenizer, digest="77" * 32, seed=0, limit=limit, name="tiny")


def orders(texts: int, how: SamplingParams | None = None, prompt: Sequence[str] = ("",)) -> list[TextRequest]:
    """So many of each class."""
    cut = how or SamplingParams(1.0, None, 0.95, 24)
    return [
        TextRequest((label, index), key64(0, label, index), label, prompt[index % len(prompt)], cut)
        for index in range(texts)
        for label in range(LABELS)
    ]


def written(
    model: LanguageModel,
    teacher: Teacher | None,
    requests: Sequence[TextRequest],
    steering: SteeringParams,
    sampler: type[LazySampler] = LazySampler,
) -> dict[tuple[int, int], GeneratedText]:
    """Generates texts with a new scorer, which has no cached scores."""
    return dict(Writer(model, Scorer(teacher or teacher_of()), steering, sampler=sampler).write(requests))


def whole(model: LanguageModel, row: list[int], *, first: bool) -> torch.Tensor:
    """Return the model's logits after each row, computed without a cache; no text begins with its end."""
    with torch.no_grad():
        logits: torch.Tensor = model.model(input_ids=torch.tensor([row])).logits[0, -1]
    logits = logits.masked_fill(model.banned, -math.inf)
    if first:
        logits[sorted(model.ends)] = -math.inf
    return logits
