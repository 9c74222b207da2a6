"""Trains the student: joins texts and targets, builds the objective's phases, selects the best checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from amalgam.data.parquet import key_array, matrix
from amalgam.data.tokens import TokenRows
from amalgam.pipeline.config.schema import Objective as ObjectiveConfig
from amalgam.pipeline.errors import ModelError, WorkError
from amalgam.stages.common.cached.read import States
from amalgam.stages.common.teachers import NewClassifier
from amalgam.stages.common.training.batches import Bucket, Examples, TrainingData, split
from amalgam.stages.common.training.loop import Training
from amalgam.stages.common.training.losses import Objective
from amalgam.stages.common.training.run import Score, TrainingServices, accuracy_on, learn, negative_loss
from amalgam.stages.train_student.objectives import OBJECTIVES
from amalgam.stages.train_student.state_learning import ObjectiveContext, Phases

SCORE_NAMES = {"scores": "difference from", "mt-bert": "cross-entropy to"}


@dataclass(frozen=True)
class StudentTraining:
    """Everything that one training of the student reads."""

    new: NewClassifier
    examples: Examples
    phases: Phases
    score: Score
    settings: Training
    facts: Mapping[str, Any]
    """Further facts of the manifest."""


def train(training: StudentTraining, services: TrainingServices, checkpoint: Path) -> dict[str, Any]:
    """Trains the student in place, phase by phase, and returns the facts of the manifest."""
    results = {
        name: learn(
            services,
            training.new,
            training.examples,
            training.settings,
            training.score,
            checkpoint / name,
            objective,
            keep=bool(name),
            phase=name,
        ).facts
        for name, objective in training.phases
    }
    last = list(results.values())[-1]
    return {**last, **({"phases": results} if len(results) > 1 else {}), **training.facts}


def targeted(
    texts: Iterable[tuple[pa.Table, TokenRows]], targets: Iterable[pa.Table], *, held_out: float
) -> TrainingData:
    """Returns the training texts with their targets, joined bucket by bucket, and a held-out share."""

    def read(rows: pa.Table, tokens: TokenRows, own: pa.Table) -> Bucket:
        if not rows.column("key").equals(own.column("key")):
            fix = "run `amalgam verify`, then `amalgam build-targets --force`"
            raise WorkError("texts and targets do not have the same keys", fix=fix)
        keys, values = key_array(rows.column("key")), matrix(own.column("target"))
        return keys, tokens, values, own.column("weight").to_numpy()

    return split((read(*bucket, own) for bucket, own in zip(texts, targets, strict=True)), held_out)


def selection(
    data: TrainingData, validation: Examples | None, pad_id: int, objective: Objective, facts: Mapping[str, Any]
) -> tuple[str, Score]:
    """Returns the name and the score by which checkpoints are selected; `facts` are those of build-targets."""
    if validation:
        return "accuracy on labelled validation", accuracy_on(validation, pad_id)
    gold = "gold labels among them" if facts.get("gold") else "no labels used"
    source = f"held-out targets, {gold}" if data.held_out else "the targets themselves"
    name = f"{SCORE_NAMES.get(facts['objective'], 'KL to')} {source}"
    return name, negative_loss(data.held_out or data.learn, pad_id, objective)


def objective_phases(  # noqa: PLR0913 - the fields of the context, by name
    config: ObjectiveConfig,
    new: NewClassifier,
    states: Sequence[States],
    targets: Objective,
    *,
    seed: int,
    confidence: np.ndarray[Any, Any] | None = None,
) -> Phases:
    """Returns the phases of the training; the objective's own weights are drawn from the student's seed."""
    width, labels = int(new.model.config.get_text_config().hidden_size), int(new.model.config.num_labels)
    context = ObjectiveContext(config, targets, states, width, labels, confidence)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return OBJECTIVES[config.name](context)


def check_lengths(states: Iterable[States], examples: Examples) -> None:
    """Refuses states per token if a teacher reads other tokens of a text than the student."""
    lengths: Any = examples.lengths
    for teacher in states:
        if (teacher.lengths != lengths).any():
            raise ModelError(
                f"teacher {teacher.teacher} and the student do not read the same tokens of a text",
                where="objective.states: tokens",
                fix="set the same max_tokens for both, or set objective.states=pooled",
            )
