"""Fine-tuning of one teacher: cross-entropy on the texts of its own labels, the same loop as the student's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from amalgam.pipeline.stage import Run
from amalgam.stages.fine_tuning.loop import Training
from amalgam.stages.models.classifier import takes_types
from amalgam.stages.models.files import ModelFiles
from amalgam.stages.read_corpus.parts import Part
from amalgam.stages.train_student.lessons import labelled
from amalgam.stages.train_student.training import accuracy_on, learn
from amalgam.stages.train_teachers.stage import settings_of

HELD_OUT = 0.05


def train(
    run: Run, files: ModelFiles, labels: Sequence[str], part: Part, checkpoint: Path
) -> tuple[Any, Any, dict[str, Any]]:
    """(model, tokenizer, facts)."""
    from amalgam.stages.models.loading import check_tokens, load_student, load_tokenizer, token_limit

    settings = settings_of(run)
    model = load_student(files, labels=list(labels), layers=None, seed=settings.seed)
    tokenizer = load_tokenizer(files)
    check_tokens(model, tokenizer, name="train_teachers.encoder")
    limit = token_limit(model.config, tokenizer, settings.max_tokens)
    types = takes_types(model.config)
    material = labelled(run, part, tokenizer, limit, labels, types=types, held_out=HELD_OUT)
    training = Training(
        epochs=settings.epochs,
        learning_rate=settings.learning_rate,
        batch_size=settings.batch_size,
        accumulate=1,
        warmup=settings.warmup,
        weight_decay=settings.weight_decay,
        clip=1.0,
        evaluate_every=100,
        seed=settings.seed,
        checkpoint_seconds=run.experiment.execution.training_checkpoint_seconds,
    )
    pad_id = int(tokenizer.pad_token_id)
    score = accuracy_on(material.held_out or material.learn, pad_id)
    facts = learn(run, model, material.learn, training, score, pad_id, checkpoint)
    chosen_on = "held out" if material.held_out else "on its training texts"
    return model, tokenizer, {**facts, "labels": list(labels), "texts": len(material.learn), "selected_by": chosen_on}
