"""Trains a student from pseudo embeddings instead of texts (as-dfd): KL to the prediction of each embedding's teacher.

Targets are pad_i(T_i): the prediction of the embedding's teacher, padded to the union of labels. Special tokens are the
student's own. The student's word embeddings are not trained, since it reads no word.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from amalgam.pipeline.errors import ExperimentError
from amalgam.stages.common.inference.teacher import Teacher
from amalgam.stages.common.models.loading import aligned
from amalgam.stages.common.teachers import NewClassifier
from amalgam.stages.common.training.batches import Examples
from amalgam.stages.common.training.losses import WeightedKL
from amalgam.stages.common.training.run import Score, accuracy_on
from amalgam.stages.make_embeddings.search import SpecialTokens, fit_projection

SCORED = 64
"""Embeddings that are scored at once."""


TeacherEmbeddings = tuple[Teacher, Sequence[int], Sequence[Path]]
"""A teacher, its label columns in the union, and the files of its pseudo embeddings, one per class."""


def projected_embeddings(
    new: NewClassifier, teachers: Iterable[TeacherEmbeddings], *, labels: int, tokens: int, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the pseudo embeddings of every teacher and class in the student's space, and their targets."""
    special = SpecialTokens(new.model, new.tokenizer)
    if tokens + len(special) > new.limit:
        raise ExperimentError(
            f"the student reads {new.limit} tokens, special tokens included",
            where=f"pseudo_embeddings.tokens: {tokens}",
            fix=f"set pseudo_embeddings.tokens={new.limit - len(special)}",
        )
    embeddings, targets = [], []
    for teacher, columns, files in teachers:
        projection = fit_projection((teacher.model, teacher.tokenizer), (new.model, new.tokenizer), teacher.name)
        for file in files:
            tensors = load_file(file)
            padded = torch.zeros(len(tensors["logits"]), labels)
            padded[:, list(columns)] = torch.softmax(tensors["logits"] / temperature, dim=-1)
            embeddings.append(special(aligned(tensors["embeddings"]) @ projection))
            targets.append(padded)
    return torch.cat(embeddings), torch.cat(targets)


def split_embeddings(  # noqa: PLR0913 - the data and the ways to select
    embeddings: torch.Tensor,
    targets: torch.Tensor,
    validation: Examples | None,
    objective: WeightedKL,
    *,
    pad_id: int,
    held_out: float,
) -> tuple[Examples, str, Score]:
    """Returns the embeddings to learn from, and the name and the score by which checkpoints are selected."""
    is_held_out = np.random.default_rng(0).random(len(targets)) < (0.0 if validation else held_out)
    learned = torch.from_numpy(~is_held_out)
    ids = [np.zeros(embeddings.shape[1], np.int64)] * int(learned.sum())
    weights = np.ones(len(ids), np.float32)
    examples = Examples(ids, None, targets[learned].numpy(), weights, embeddings[learned])
    if validation:
        return examples, "accuracy on labelled validation", accuracy_on(validation, pad_id)
    source = "held-out pseudo embeddings" if is_held_out.any() else "the pseudo embeddings themselves"
    rows = torch.from_numpy(is_held_out) if is_held_out.any() else learned
    score = _negative_loss(embeddings[rows], targets[rows], objective)
    return examples, f"KL to the teachers on {source}, no labels used", score


def _negative_loss(embeddings: torch.Tensor, targets: torch.Tensor, objective: WeightedKL) -> Score:
    """Returns a score: minus the mean loss on the embeddings."""

    def score(model: Any) -> float:
        device, total = next(model.parameters()).device, 0.0
        with torch.no_grad():
            for inputs, wanted in zip(torch.split(embeddings, SCORED), torch.split(targets, SCORED), strict=True):
                logits = model(inputs_embeds=inputs.to(device)).logits.double().cpu()
                weights = torch.ones(len(logits), dtype=torch.float64)
                total += float(objective(logits, {"targets": wanted.double(), "weights": weights}).sum())
        return -total / len(targets)

    return score
