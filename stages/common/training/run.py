"""Trains a model on examples with progress, a log and trackers, and scores its checkpoints.

The log has metrics alone: loss, learning rate, score, steps per second. It contains no text, no label and no setting.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, TypedDict

import numpy as np
import torch

from amalgam.data.keys import shown
from amalgam.pipeline.errors import ExperimentError
from amalgam.stages.common.inference.classifier import BATCH_TOKENS, predict
from amalgam.stages.common.teachers import NewClassifier
from amalgam.stages.common.training.batches import Examples
from amalgam.stages.common.training.learner import Objective
from amalgam.stages.common.training.loop import TrainingInterrupted, fit, learning_rate
from amalgam.stages.common.training.settings import Training, TrainingServices

FOLDER = "training-logs"

EVERY_STEPS = 10

PROJECT = "amalgam"

RUN_NAME_ARGUMENTS = {"mlflow": "run_name", "trackio": "name", "wandb": "name"}
"""Each tracker's argument for the name of a run."""

Score = Callable[[Any], float]

OnStep = Callable[[int, int, float], None]


class TrainingFacts(TypedDict):
    """Result of a training, as the manifest stores it."""

    steps: int
    best_step: int
    best_score: float
    history: list[dict[str, Any]]
    dtype: str
    resumed_from_step: int


def learn(  # noqa: PLR0913 - the loop's inputs, by name
    services: TrainingServices,
    new: NewClassifier,
    examples: Examples,
    training: Training,
    score: Score,
    checkpoint: Path,
    objective: Objective | None = None,
    *,
    keep: bool = False,
    phase: str = "",
) -> TrainingFacts:
    """Calls `fit` with progress, log and interrupts; `keep` saves the final state for a phase that follows."""
    steps = training.epochs * -(-len(examples) // training.batch_size)
    with (
        services.console.steps(phase, steps) as show,
        training_log(services, checkpoint, training, show, score) as (on_step, scored),
    ):
        try:
            result = fit(
                new.model,
                examples,
                training,
                pad_id=new.pad_id,
                score=scored,
                checkpoint=checkpoint,
                stop=services.interrupts.requested,
                on_step=on_step,
                objective=objective,
                cpu=services.cpu,
                keep=keep,
            )
        except TrainingInterrupted:
            services.interrupts.check()
            raise
    for note in result.notes:
        services.console.note(note)
    return {
        "steps": result.steps,
        "best_step": result.best_step,
        "best_score": result.best_score,
        "history": result.history,
        "dtype": result.dtype,
        "resumed_from_step": result.reused_from_step,
    }


# ---- scores


def accuracy_on(examples: Examples, pad_id: int) -> Score:
    gold = examples.targets.argmax(axis=1)

    def score(model: Any) -> float:
        logits = predict(model, examples.tokens, pad_id=pad_id, batch_tokens=BATCH_TOKENS, type_ids=examples.type_ids)
        return float((logits.argmax(axis=1) == gold).mean())

    return score


def negative_loss(examples: Examples, pad_id: int, objective: Objective) -> Score:
    """Returns a score: minus the mean loss on the targets, without the terms on hidden states."""

    def score(model: Any) -> float:
        logits = predict(model, examples.tokens, pad_id=pad_id, batch_tokens=BATCH_TOKENS, type_ids=examples.type_ids)
        batch = {
            "targets": torch.from_numpy(examples.targets.astype(np.float64)),
            "weights": torch.from_numpy(examples.weights.astype(np.float64)),
        }
        with torch.no_grad():
            return -float(objective(torch.from_numpy(logits.astype(np.float64)), batch).mean())

    return score


# ---- log and trackers


@dataclass
class TrainingLog:
    """Log of one training, written by the leading process."""

    path: Path
    training: Training
    trackers: Sequence[str]
    step: int = 0
    _stack: ExitStack = field(default_factory=ExitStack)
    _file: TextIO | None = None
    _started: list[Any] = field(default_factory=list)
    _losses: list[float] = field(default_factory=list)
    _since: float = field(default_factory=time.monotonic)
    _total: int = 0

    def on_step(self, step: int, total: int, loss: float) -> None:
        if self._file is None:
            self._start(step)
        self.step, self._total = step, total
        self._losses.append(loss)
        if step % EVERY_STEPS == 0 or step == total:
            self._write_steps()

    def on_score(self, value: float) -> None:
        """Logs the score of the model after the last step; processes without steps write nothing."""
        self._write_steps()
        self._write({"score": value})
        self._since = time.monotonic()  # excludes the time of the evaluation

    def close(self) -> None:
        self._stack.close()

    def _write_steps(self) -> None:
        if not self._losses:
            return
        now = time.monotonic()
        finite = [loss for loss in self._losses if math.isfinite(loss)]  # other steps were skipped
        mean = {"loss": sum(finite) / len(finite)} if finite else {}
        rate = learning_rate(self.step - 1, self._total, self.training)
        speed = len(self._losses) / max(now - self._since, 1e-9)
        self._write({**mean, "learning_rate": rate, "steps_per_second": speed})
        self._losses, self._since = [], now

    def _start(self, step: int) -> None:
        """Opens the log at the first step, when device and processes are known; a resumed log is appended."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._stack.enter_context(self.path.open("w" if step == 1 else "a", encoding="utf-8"))
        for name in self.trackers:
            tracker = _started_tracker(name, self.path)
            self._stack.callback(tracker.finish)
            self._started.append(tracker)

    def _write(self, values: dict[str, float]) -> None:
        if self._file is None:
            return
        self._file.write(json.dumps({"step": self.step, "of": self._total, **values}) + "\n")
        self._file.flush()
        for tracker in self._started:
            tracker.log(values, step=self.step)


@contextmanager
def training_log(
    services: TrainingServices, checkpoint: Path, training: Training, show: OnStep, score: Score
) -> Iterator[tuple[OnStep, Score]]:
    """Yields `on_step` and `score` for the loop, which also write the log."""
    check_trackers(services.trackers)
    parts = checkpoint.relative_to(services.workspace).parts
    name = "-".join(part for part in parts if part not in {"units", "checkpoint"})
    log = TrainingLog(services.workspace / FOLDER / f"{name}.jsonl", training, services.trackers)

    def on_step(step: int, total: int, loss: float) -> None:
        show(step, total, loss)
        log.on_step(step, total, loss)

    def scored(model: Any) -> float:
        value = score(model)
        log.on_score(value)
        return value

    try:
        yield on_step, scored
    finally:
        log.close()


def check_trackers(names: Sequence[str]) -> None:
    """Refuses a missing tracker before the training starts."""
    if not names:
        return
    from accelerate.tracking import get_available_trackers

    available = {str(name) for name in get_available_trackers()}
    for name in names:
        if name not in available:
            fix = f"run `pip install {name.replace('_', '-')}`, or remove it from execution.trackers"
            raise ExperimentError(f"the tracker {name} is not installed", where="execution.trackers", fix=fix)


def _started_tracker(name: str, log: Path) -> Any:
    try:
        tracker = _tracker(name, log)
        tracker.start()
    except Exception as error:  # any error of the tracker's library: an incomplete installation, a missing login
        what = f"the tracker {name} does not start ({type(error).__name__}: {shown(str(error), 200)})"
        fix = f"check {name} in a separate script, or remove it from execution.trackers; finished work is kept"
        raise ExperimentError(what, where="execution.trackers", fix=fix) from error
    return tracker


def _tracker(name: str, log: Path) -> Any:
    """Creates a tracker whose run has the log's name, so each training has separate curves."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    kind = LOGGER_TYPE_TO_CLASS[name]
    if kind.requires_logging_directory:
        return kind(log.stem, str(log.parent))
    return kind(PROJECT, **({RUN_NAME_ARGUMENTS[name]: log.stem} if name in RUN_NAME_ARGUMENTS else {}))
