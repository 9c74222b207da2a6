"""The student's training: encoder and tokenizer loaded, lessons gathered, the best checkpoint chosen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from amalgam.pipeline.experiment import Student
from amalgam.pipeline.stage import Run
from amalgam.stages.fine_tuning.batches import Examples
from amalgam.stages.fine_tuning.journal import journal
from amalgam.stages.fine_tuning.learner import Objective
from amalgam.stages.fine_tuning.loop import Stopped, Training, fit
from amalgam.stages.fine_tuning.prediction import predict
from amalgam.stages.models.classifier import BATCH_TOKENS
from amalgam.stages.models.encoder import Beginner, beginner
from amalgam.stages.read_corpus.parts import part_of
from amalgam.stages.train_student.lessons import labelled, lessons
from amalgam.stages.train_student.objectives.targets import objective_of
from amalgam.stages.train_student.phases import phases_of

Score = Callable[[Any], float]


def train(run: Run, checkpoint: Path) -> tuple[Beginner, dict[str, Any]]:
    """The student, no beginner any more, and the facts of its training."""
    student, taught = run.experiment.student, run.result("build-targets").facts
    labels: list[str] = taught["labels"]
    new = beginner(run, student, labels, "student.encoder")
    validation = part_of(run, "validation") if student.select != "held-out" else None
    material = lessons(run, new, held_out=0.0 if validation else student.held_out)
    temperature, objective = float(taught["student_temperature"]), objective_of(taught)
    if validation:
        selected_by = "accuracy on labelled validation"
        score = accuracy_on(labelled(run, validation, new, labels).learn, new.pad_id)
    else:
        measure = {"scores": "difference from", "mt-bert": "cross-entropy to"}.get(taught["objective"], "KL to")
        held_out = f"held-out targets, {'gold labels among them' if taught.get('gold') else 'no labels used'}"
        whose = held_out if material.held_out else "the targets themselves"
        selected_by = f"{measure} {whose}"
        score = closeness_to(material.held_out or material.learn, new.pad_id, objective)
    settings = training_of(run, student, temperature)
    done = [
        (name, learn(run, new, material.learn, settings, score, checkpoint / name, phase, keep=bool(name), what=name))
        for name, phase in phases_of(run, new, material, objective)
    ]
    facts = done[-1][1] | ({"phases": dict(done)} if len(done) > 1 else {})
    more = {"selected_by": selected_by, "labels": labels, "cut": material.cut, "texts": len(material.learn)}
    return new, {**facts, **more}


def learn(  # noqa: PLR0913 - the loop's own needs, each by name
    run: Run,
    new: Beginner,
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
        except Stopped:
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


def training_of(run: Run, student: Student, temperature: float) -> Training:
    return Training(
        epochs=student.epochs,
        learning_rate=student.learning_rate,
        batch_size=student.batch_size,
        accumulate=student.accumulate,
        warmup=student.warmup,
        weight_decay=student.weight_decay,
        clip=student.clip,
        evaluate_every=student.evaluate_every,
        seed=student.seed,
        temperature=temperature,
        checkpoint_seconds=run.experiment.execution.training_checkpoint_seconds,
        objective_rate=run.experiment.objective.learning_rate,
    )


def accuracy_on(examples: Examples, pad_id: int) -> Score:
    gold = examples.targets.argmax(axis=1)

    def score(model: Any) -> float:
        logits = predict(model, examples.tokens, pad_id=pad_id, batch_tokens=BATCH_TOKENS, type_ids=examples.type_ids)
        return float((logits.argmax(axis=1) == gold).mean())

    return score


def closeness_to(examples: Examples, pad_id: int, objective: Objective) -> Score:
    """Minus the mean of what the targets have the student minimise, whatever else it learns: higher is better."""

    def score(model: Any) -> float:
        import torch

        logits = predict(model, examples.tokens, pad_id=pad_id, batch_tokens=BATCH_TOKENS, type_ids=examples.type_ids)
        batch = {
            "targets": torch.from_numpy(examples.targets.astype(np.float64)),
            "weights": torch.from_numpy(examples.weights.astype(np.float64)),
        }
        with torch.no_grad():
            return -float(objective(torch.from_numpy(logits.astype(np.float64)), batch).mean())

    return score
