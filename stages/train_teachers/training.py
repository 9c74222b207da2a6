"""Fine-tuning of one teacher: cross-entropy on the texts of its own labels, the same loop as the student's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from amalgam.pipeline.execution.stage import Run
from amalgam.stages.common.corpus import Part
from amalgam.stages.common.encoders import NewClassifier
from amalgam.stages.common.load import load_new_classifier
from amalgam.stages.common.training.examples import labelled
from amalgam.stages.common.training.run import accuracy_on, learn
from amalgam.stages.common.training.settings import Training
from amalgam.stages.train_teachers.settings import settings_of

HELD_OUT = 0.05

EVALUATE_EVERY = 100


def train(run: Run, labels: Sequence[str], part: Part, checkpoint: Path) -> tuple[NewClassifier, dict[str, Any]]:
    """The teacher, no load_new_classifier any more, and the facts of its training."""
    settings = settings_of(run)
    new = load_new_classifier(run, settings, labels, "train_teachers.encoder")
    material = labelled(run, part, new, labels, held_out=HELD_OUT)
    training = training_settings(run)
    score = accuracy_on(material.held_out or material.learn, new.pad_id)
    facts = learn(run, new, material.learn, training, score, checkpoint)
    chosen_on = "held out" if material.held_out else "on its training texts"
    return new, {**facts, "labels": list(labels), "texts": len(material.learn), "selected_by": chosen_on}


def training_settings(run: Run) -> Training:
    settings = settings_of(run)
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
        checkpoint_seconds=run.experiment.execution.training_checkpoint_seconds,
    )
