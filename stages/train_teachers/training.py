"""Fine-tunes one teacher on labelled texts with the same loop as the student's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from amalgam.data.tokens import TokenRows
from amalgam.pipeline.config.schema import TrainTeachers as Settings
from amalgam.stages.common.teachers import NewClassifier
from amalgam.stages.common.training.batches import labelled
from amalgam.stages.common.training.run import accuracy_on, learn
from amalgam.stages.common.training.settings import Training, TrainingServices

HELD_OUT = 0.05

EVALUATE_EVERY = 100


@dataclass(frozen=True)
class TeacherTraining:
    """Everything that a training of teachers reads; several encoders are trained jointly."""

    encoders: Mapping[str, tuple[NewClassifier, Iterable[tuple[pa.Table, TokenRows]]]]
    """By teacher: its encoder under a new head, and the labelled texts in its tokens."""
    labels: list[str]
    settings: Settings
    checkpoint_seconds: float

    @property
    def loop(self) -> Training:
        settings = self.settings
        return Training(
            epochs=settings.epochs,
            learning_rate=settings.learning_rate,
            batch_size=settings.batch_size,
            accumulate=1,
            warmup=settings.warmup,
            weight_decay=settings.weight_decay,
            clip=1.0,
            evaluate_every=EVALUATE_EVERY,
            seed=settings.seed,
            checkpoint_seconds=self.checkpoint_seconds,
        )


def train(
    training: TeacherTraining, services: TrainingServices, checkpoint: Path
) -> tuple[NewClassifier, dict[str, Any]]:
    """Returns the trained teacher and the facts of its training."""
    [(new, texts)] = training.encoders.values()
    data = labelled(texts, training.labels, held_out=HELD_OUT)
    score = accuracy_on(data.held_out or data.learn, new.pad_id)
    facts = learn(services, new, data.learn, training.loop, score, checkpoint)
    selected_by = "held out" if data.held_out else "on its training texts"
    return new, {**facts, "labels": training.labels, "texts": len(data.learn), "selected_by": selected_by}
