"""Trains a student from pseudo embeddings instead of texts (as-dfd): KL to the prediction of each embedding's teacher.

Targets are pad_i(T_i): the prediction of the embedding's teacher, padded to the union of labels. Special tokens are the
student's own. The student's word embeddings are not trained, since it reads no word.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from amalgam.pipeline.errors import ExperimentError
from amalgam.stages.common.inference.batches import RowNumbers
from amalgam.stages.common.inference.teacher import Teacher
from amalgam.stages.common.models.loading import aligned
from amalgam.stages.common.teachers import NewClassifier
from amalgam.stages.common.training.batches import Examples
from amalgam.stages.common.training.losses import Objective, WeightedKL
from amalgam.stages.common.training.run import Score, accuracy_on
from amalgam.stages.make_embeddings.search import SpecialTokens, fit_projection

SCORED = 64
"""Embeddings that are scored at once."""


@dataclass(frozen=True)
class TeacherEmbeddings:
    """A teacher, its label columns in the union, and the files of its pseudo embeddings, one per class."""

    teacher: Teacher
    columns: Sequence[int]
    files: Sequence[Path]


@dataclass(frozen=True)
class EmbeddingData:
    embeddings: torch.Tensor
    """[B, T, W] in the student's space, special tokens included."""
    targets: torch.Tensor
    """[B, labels of the union]."""

    def take(self, rows: Any) -> EmbeddingData:
        return EmbeddingData(self.embeddings[rows], self.targets[rows])

    @property
    def examples(self) -> Examples:
        """Examples whose token ids only give the number of tokens."""
        count, tokens = self.embeddings.shape[:2]
        ids = [np.zeros(tokens, np.int64)] * count
        return Examples(ids, None, self.targets.numpy(), np.ones(count, np.float32))


@dataclass(frozen=True, eq=False)
class FromEmbeddings(Objective):
    """The loss on the targets for an encoder that reads embeddings."""

    data: EmbeddingData
    targets: WeightedKL

    def __call__(self, logits: torch.Tensor, batch: dict[str, Any], /) -> torch.Tensor:
        return self.targets(logits, batch)

    def extra_batch(self, rows: RowNumbers, /) -> dict[str, torch.Tensor]:
        return {"inputs_embeds": self.data.embeddings[torch.from_numpy(rows)]}


def projected_embeddings(
    new: NewClassifier, teachers: Iterable[TeacherEmbeddings], *, labels: int, tokens: int, temperature: float
) -> EmbeddingData:
    """Returns the pseudo embeddings of every teacher and class in the student's space."""
    special = SpecialTokens(new.model, new.tokenizer)
    if tokens + len(special) > new.limit:
        raise ExperimentError(
            f"the student reads {new.limit} tokens, special tokens included",
            where=f"pseudo_embeddings.tokens: {tokens}",
            fix=f"set pseudo_embeddings.tokens={new.limit - len(special)}",
        )
    embeddings, targets = [], []
    for own in teachers:
        teacher = own.teacher
        projection = fit_projection((teacher.model, teacher.tokenizer), (new.model, new.tokenizer), teacher.name)
        for file in own.files:
            tensors = load_file(file)
            padded = torch.zeros(len(tensors["logits"]), labels)
            padded[:, list(own.columns)] = torch.softmax(tensors["logits"] / temperature, dim=-1)
            embeddings.append(special(aligned(tensors["embeddings"]) @ projection))
            targets.append(padded)
    return EmbeddingData(torch.cat(embeddings), torch.cat(targets))


def split_embeddings(
    data: EmbeddingData, validation: Examples | None, objective: WeightedKL, *, pad_id: int, held_out: float
) -> tuple[EmbeddingData, str, Score]:
    """Returns the embeddings to learn from, and the name and the score by which checkpoints are selected."""
    is_held_out = np.random.default_rng(0).random(len(data.targets)) < (0.0 if validation else held_out)
    learned, rest = data.take(torch.from_numpy(~is_held_out)), data.take(torch.from_numpy(is_held_out))
    if validation:
        return learned, "accuracy on labelled validation", accuracy_on(validation, pad_id)
    source = "held-out pseudo embeddings" if is_held_out.any() else "the pseudo embeddings themselves"
    score = negative_embedding_loss(rest if is_held_out.any() else learned, objective)
    return learned, f"KL to the teachers on {source}, no labels used", score


def negative_embedding_loss(data: EmbeddingData, objective: WeightedKL) -> Score:
    """Returns a score: minus the mean loss on the embeddings."""

    def score(model: Any) -> float:
        device, total = next(model.parameters()).device, 0.0
        with torch.no_grad():
            for start in range(0, len(data.targets), SCORED):
                rows = data.take(slice(start, start + SCORED))
                logits = model(inputs_embeds=rows.embeddings.to(device)).logits.double().cpu()
                weights = torch.ones(len(logits), dtype=torch.float64)
                total += float(objective(logits, {"targets": rows.targets.double(), "weights": weights}).sum())
        return -total / len(data.targets)

    return score
