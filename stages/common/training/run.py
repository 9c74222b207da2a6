"""Trains a model on examples and scores its checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from amalgam.pipeline.execution.stage import Run
from amalgam.stages.common.encoders import NewClassifier
from amalgam.stages.common.inference.classifier import BATCH_TOKENS, predict
from amalgam.stages.common.training.batches import Examples
from amalgam.stages.common.training.learner import Objective
from amalgam.stages.common.training.log import journal
from amalgam.stages.common.training.loop import TrainingInterrupted, fit
from amalgam.stages.common.training.settings import Training

Score = Callable[[Any], float]


def learn(  # noqa: PLR0913 - the loop's own needs, each by name
    run: Run,
    new: NewClassifier,
    examples: Examples,
    training: Training,
    score: Score,
    checkpoint: Path,
    objective: Objective | None = None,
    *,
    keep: bool = False,
    what: str = "",
) -> dict[str, Any]:
    """`fit` with this run's progress, signals and device; `keep`: its end is kept for a phase that follows."""
    steps = training.epochs * -(-len(examples) // training.batch_size)
    with (
        run.console.steps(what, steps) as show,
        journal(run, checkpoint, training, show, score) as (on_step, scored),
    ):
        try:
            fitted = fit(
                new.model,
                examples,
                training,
                pad_id=new.pad_id,
                score=scored,
                checkpoint=checkpoint,
                stop=run.signals.requested,
                on_step=on_step,
                objective=objective,
                cpu=run.experiment.execution.device == "cpu",
                keep=keep,
            )
        except TrainingInterrupted:
            run.signals.check()
            raise
    for note in fitted.notes:
        run.console.note(note)
    return {
        "steps": fitted.steps,
        "best_step": fitted.best_step,
        "best_score": fitted.best_score,
        "history": fitted.history,
        "dtype": fitted.dtype,
        "resumed_from_step": fitted.reused_from_step,
    }


def accuracy_on(examples: Examples, pad_id: int) -> Score:
    gold = examples.targets.argmax(axis=1)

    def score(model: Any) -> float:
        logits = predict(model, examples.tokens, pad_id=pad_id, batch_tokens=BATCH_TOKENS, type_ids=examples.type_ids)
        return float((logits.argmax(axis=1) == gold).mean())

    return score


def negative_loss(examples: Examples, pad_id: int, objective: Objective) -> Score:
    """Minus the mean of what the targets have the student minimise, whatever else it learns: higher is better."""

    def score(model: Any) -> float:

        logits = predict(model, examples.tokens, pad_id=pad_id, batch_tokens=BATCH_TOKENS, type_ids=examples.type_ids)
        batch = {
            "targets": torch.from_numpy(examples.targets.astype(np.float64)),
            "weights": torch.from_numpy(examples.weights.astype(np.float64)),
        }
        with torch.no_grad():
            return -float(objective(torch.from_numpy(logits.astype(np.float64)), batch).mean())

    return score
