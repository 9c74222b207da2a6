"""A student that learns from pseudo embeddings in the place of texts (as-dfd): KL to their own teacher's answer.

Targets are pad_i(T_i): the teacher that an embedding was made for is the one that answers. Special tokens are the
student's own; its word embeddings are not trained, since no word is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from safetensors.torch import load_file

from amalgam.pipeline.errors import ExperimentError
from amalgam.pipeline.execution.stage import Run
from amalgam.stages.common.encoders import NewClassifier
from amalgam.stages.common.inference.batches import RowNumbers
from amalgam.stages.common.inference.load import load_teacher
from amalgam.stages.common.load import label_space, load_new_classifier, part_of, teachers_of
from amalgam.stages.common.models.loading import aligned
from amalgam.stages.common.training.batches import Examples
from amalgam.stages.common.training.examples import labelled
from amalgam.stages.common.training.learner import WeightedKL
from amalgam.stages.common.training.run import Score, accuracy_on, learn
from amalgam.stages.make_embeddings.projection import fitted
from amalgam.stages.make_embeddings.search import Frame
from amalgam.stages.train_student.training import training_of

SCORED = 64
"""Embeddings that are scored at once."""


@dataclass(frozen=True)
class EmbeddingData:
    embeddings: torch.Tensor
    """[B, T, W] as the student reads them, special tokens included."""
    targets: torch.Tensor
    """[B, labels of the union]."""

    def take(self, rows: Any) -> EmbeddingData:
        return EmbeddingData(self.embeddings[rows], self.targets[rows])


@dataclass(frozen=True)
class FromEmbeddings:
    """The targets' own objective, where the encoder is given embeddings."""

    whole_batches: ClassVar[bool] = False
    material: EmbeddingData
    targets: WeightedKL

    def __call__(self, logits: torch.Tensor, batch: dict[str, Any], /) -> torch.Tensor:
        return self.targets(logits, batch)

    def parameters(self) -> Iterable[torch.nn.Parameter]:
        return ()

    def beside(self, rows: RowNumbers, /) -> dict[str, torch.Tensor]:
        return {"inputs_embeds": self.material.embeddings[torch.from_numpy(rows)]}

    @contextmanager
    def around(self, model: torch.nn.Module, batch: dict[str, Any], /) -> Iterator[None]:  # noqa: ARG002
        yield


def train_without_texts(run: Run, checkpoint: Path) -> tuple[NewClassifier, dict[str, Any]]:
    """As training.train does it from texts."""
    student, labels = run.experiment.student, list(label_space(run).names)
    new = load_new_classifier(run, student, labels, "student.encoder")
    objective = WeightedKL(run.experiment.targets.kd_temperature)
    whole = gathered(run, new, objective.temperature)
    validation = part_of(run, "validation") if student.select != "held-out" else None
    kept_aside = np.random.default_rng(0).random(len(whole.targets)) < (0.0 if validation else student.held_out)
    mine, held_out = whole.take(torch.from_numpy(~kept_aside)), whole.take(torch.from_numpy(kept_aside))
    if validation:
        selected_by = "accuracy on labelled validation"
        score = accuracy_on(labelled(run, validation, new, labels).learn, new.pad_id)
    else:
        whose = "held-out pseudo embeddings" if kept_aside.any() else "the pseudo embeddings themselves"
        selected_by = f"KL to the teachers on {whose}, no labels used"
        score = closeness(held_out if kept_aside.any() else mine, objective)
    settings = training_of(run, student, objective.temperature)
    facts = learn(run, new, as_examples(mine), settings, score, checkpoint, FromEmbeddings(mine, objective))
    return new, {**facts, "selected_by": selected_by, "labels": labels, "cut": 0, "texts": 0}


def gathered(run: Run, new: NewClassifier, temperature: float) -> EmbeddingData:
    """Of every teacher and class, in the student's own space."""
    space, made = label_space(run), run.result("make-embeddings")
    files = {file.path: file for file in made.files}
    frame = Frame(new.model, new.tokenizer)
    if run.experiment.pseudo_embeddings.tokens + len(frame) > new.limit:
        raise ExperimentError(
            f"the student reads {new.limit} tokens, special ones included",
            where=f"embeddings.tokens: {run.experiment.pseudo_embeddings.tokens}",
            fix=f"pseudo_embeddings.tokens={new.limit - len(frame)}",
        )
    embeddings, targets = [], []
    for known in teachers_of(run):
        teacher = load_teacher(run, known, "fp32", passes=0)
        matrix = fitted((teacher.model, teacher.tokenizer), (new.model, new.tokenizer), known.name)
        for one in made.facts["teachers"][known.name].values():
            found = load_file(run.store.verified_path(files[one["file"]]))
            padded = torch.zeros(len(found["logits"]), len(space.names))
            padded[:, list(space.columns[known.name])] = torch.softmax(found["logits"] / temperature, dim=-1)
            embeddings.append(frame(aligned(found["embeddings"]) @ matrix))
            targets.append(padded)
    return EmbeddingData(torch.cat(embeddings), torch.cat(targets))


def as_examples(material: EmbeddingData) -> Examples:
    """Token ids that only say how long each is."""
    count, tokens = material.embeddings.shape[:2]
    ids = [np.zeros(tokens, np.int64)] * count
    return Examples(ids, None, material.targets.numpy(), np.ones(count, np.float32))


def closeness(material: EmbeddingData, objective: WeightedKL) -> Score:
    """Minus the mean of what is minimised."""

    def score(model: Any) -> float:
        device, total = next(model.parameters()).device, 0.0
        with torch.no_grad():
            for start in range(0, len(material.targets), SCORED):
                some = material.take(slice(start, start + SCORED))
                logits = model(inputs_embeds=some.embeddings.to(device)).logits.double().cpu()
                weights = torch.ones(len(logits), dtype=torch.float64)
                total += float(objective(logits, {"targets": some.targets.double(), "weights": weights}).sum())
        return -total / len(material.targets)

    return score
