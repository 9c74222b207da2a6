"""The student's training: encoder and tokenizer loaded, lessons gathered, the best checkpoint chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from amalgam.pipeline.config.schema import Student
from amalgam.pipeline.execution.stage import Run
from amalgam.stages.common.encoders import NewClassifier
from amalgam.stages.common.load import load_new_classifier, part_of
from amalgam.stages.common.training.examples import labelled
from amalgam.stages.common.training.run import accuracy_on, learn, negative_loss
from amalgam.stages.common.training.settings import Training
from amalgam.stages.train_student.examples import lessons
from amalgam.stages.train_student.objectives.targets import objective_of
from amalgam.stages.train_student.schedule import phases_of


def train(run: Run, checkpoint: Path) -> tuple[NewClassifier, dict[str, Any]]:
    """The student, no load_new_classifier any more, and the facts of its training."""
    student, taught = run.experiment.student, run.result("build-targets").facts
    labels: list[str] = taught["labels"]
    new = load_new_classifier(run, student, labels, "student.encoder")
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
        score = negative_loss(material.held_out or material.learn, new.pad_id, objective)
    settings = training_of(run, student, temperature)
    done = [
        (name, learn(run, new, material.learn, settings, score, checkpoint / name, phase, keep=bool(name), what=name))
        for name, phase in phases_of(run, new, material, objective)
    ]
    facts = done[-1][1] | ({"phases": dict(done)} if len(done) > 1 else {})
    more = {"selected_by": selected_by, "labels": labels, "cut": material.cut, "texts": len(material.learn)}
    return new, {**facts, **more}


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
