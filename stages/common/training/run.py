"""Trains a model on examples with progress, a log and trackers, and scores its checkpoints.

The log has metrics alone: loss, learning rate, score, steps per second. It contains no text, no label and no setting.
Accelerate starts the trackers' libraries; it has no names for runs and no log that a resumed training appends to.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

from amalgam.data.keys import shown
from amalgam.pipeline.console import Console, counted
from amalgam.pipeline.errors import ExperimentError
from amalgam.pipeline.signals import InterruptHandler
from amalgam.pipeline.storage.local import replacing
from amalgam.pipeline.storage.paths import inside, is_regular
from amalgam.stages.common.inference.batches import predict
from amalgam.stages.common.models.resolve import NewClassifier
from amalgam.stages.common.training.batches import Examples
from amalgam.stages.common.training.checkpoint_files import LOGS, STATE, log_digest, write_log_digest
from amalgam.stages.common.training.loop import TrainingInterrupted, TrainingRun, TrainingSettings, learning_rate
from amalgam.stages.common.training.losses import Loss, WeightedKL
from amalgam.stages.common.training.schedule import TrainingFacts

EVERY_STEPS = 10
PROJECT = "amalgam"
RUN_NAME_ARGUMENTS = {"mlflow": "run_name", "trackio": "name", "wandb": "name"}
"""Each tracker's argument for the name of a run."""

Score = Callable[[Any], float]

FEWEST_TO_SELECT = 200
"""Held-out texts below which the last step is kept. Two good checkpoints differ on one text in twenty. By
chance, their accuracies then differ by 1.6 points on 200 texts, and by 7 on 10."""


@dataclass(frozen=True)
class Selection:
    """How the checkpoint is selected: by the best score, or the last step if too few texts are held out."""

    name: str
    score: Score
    held_out: int | None = None
    """Number of held-out texts that are scored; None: labelled validation texts, which always select."""

    @property
    def selects(self) -> bool:
        return self.held_out is None or self.held_out >= FEWEST_TO_SELECT

    @property
    def selected_by(self) -> str:
        if self.selects:
            return self.name
        are = "is" if self.held_out == 1 else "are"
        few = f"{counted(self.held_out, 'held-out text')} {are} too few" if self.held_out else "no text is held out"
        return f"the last step: {few} to select by {self.name}"


@dataclass(frozen=True)
class TrainingServices:
    """Console, interrupts and files of the run that a training belongs to."""

    console: Console
    interrupts: InterruptHandler
    workspace: Path
    """Root of the store: logs are written below it, and checkpoints are inside."""
    checkpoint_seconds: float
    trackers: Sequence[str]
    cpu: bool


def learn(  # noqa: PLR0913 - the loop's inputs, by name
    services: TrainingServices,
    new: NewClassifier,
    examples: Examples,
    training: TrainingSettings,
    selection: Selection,
    checkpoint: Path,
    objective: Loss | None = None,
    *,
    keep: bool = False,
    phase: str = "",
) -> TrainingFacts:
    """Trains with progress, log and interrupts; `keep` saves the final state for a phase that follows."""
    place = checkpoint.relative_to(services.workspace)
    inside(services.workspace, f"{place.as_posix()}/{STATE}")  # that of a phase may be a link out of the workspace
    name = "-".join(part for part in place.parts if part not in {"units", "checkpoint"})
    log = TrainingLog(inside(services.workspace, f"{LOGS}/{name}.jsonl"), training, services.trackers)
    steps = training.epochs * -(-len(examples) // training.batch_size)
    with services.console.steps(phase, steps) as show, closing(log):

        def on_step(step: int, total: int, loss: float) -> None:
            if log.step == 0 and step > 1:  # the first step of a resumed training
                services.console.say(f"  resumed from step {step - 1:,} of {total:,}")
            show(step, f"loss {loss:.4f}")
            log.on_step(step, total, loss)

        def scored(model: Any) -> float:
            value = selection.score(model)
            log.on_score(value)
            return value

        run = TrainingRun(
            new.model,
            examples,
            replace(training, checkpoint_seconds=services.checkpoint_seconds),
            pad_id=new.pad_id,
            score=scored,
            checkpoint=checkpoint,
            stop=services.interrupts.requested,
            on_step=on_step,
            objective=objective or WeightedKL(),
            cpu=services.cpu,
            keep=keep,
            select=selection.selects,
        )
        try:
            result = run.fit()
        except TrainingInterrupted as interrupted:
            services.console.say(f"  {interrupted}")
            services.interrupts.check()
            raise
    for note in result.notes:
        services.console.note(note)
    return {
        **result.facts,
        "epochs": training.epochs,
        "learning_rate": training.learning_rate,
        "selected_by": selection.selected_by,
    }


# ---- scores


def accuracy_on(examples: Examples, pad_id: int) -> Score:
    gold = examples.targets.argmax(axis=1)
    return lambda model: float((_logits(model, examples, pad_id).argmax(axis=1) == gold).mean())


def negative_loss(examples: Examples, pad_id: int, loss: Loss) -> Score:
    """Returns a score: minus the mean loss on the targets, without the terms on hidden states."""

    def score(model: Any) -> float:
        arrays = _logits(model, examples, pad_id), examples.targets, examples.weights
        logits, targets, weights = (torch.from_numpy(array.astype(np.float64)) for array in arrays)
        with torch.no_grad():
            return -float(loss(logits, {"targets": targets, "weights": weights}).mean())

    return score


def _logits(model: Any, examples: Examples, pad_id: int) -> Any:
    return predict(model, examples.tokens, pad_id=pad_id, type_ids=examples.type_ids)


# ---- log and trackers


def check_available(trackers: Sequence[str]) -> None:
    available = {str(name) for name in get_available_trackers()}
    for name in [name for name in trackers if name not in available]:
        fix = f"run `pip install {name.replace('_', '-')}`, or remove it from execution.trackers"
        raise ExperimentError(f"the tracker {name} is not installed", where="execution.trackers", fix=fix)


@dataclass
class TrainingLog:
    """Log of one training, written by the leading process."""

    path: Path
    training: TrainingSettings
    trackers: Sequence[str]
    step: int = 0
    _stack: ExitStack = field(default_factory=ExitStack)
    _file: TextIO | None = None
    _started: list[Any] = field(default_factory=list)
    _losses: list[float] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)
    _since: float = field(default_factory=time.monotonic)
    _total: int = 0

    def __post_init__(self) -> None:
        check_available(self.trackers)

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
        with suppress(FileNotFoundError):  # the log may have been deleted meanwhile
            with self._stack:
                is_own = self._file is not None and os.path.samestat(os.fstat(self._file.fileno()), self.path.stat())
            if is_own:  # else another run of the same training has begun a new file
                write_log_digest(self.path)

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
        if os.path.lexists(self.path) and not is_regular(self.path):
            what = f"{self.path.parent.name}/{self.path.name} is no regular file"
            raise ExperimentError(what, where=str(self.path), fix="move it away")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        log_digest(self.path).unlink(missing_ok=True)
        if step == 1:
            with replacing(self.path) as empty:  # another run of the same training still writes to the old file
                empty.touch()
        self._file = self._stack.enter_context(self.path.open("a", encoding="utf-8"))
        for name in self.trackers:
            tracker = _started_tracker(name, self.path)
            self._stack.callback(tracker.finish)
            self._started.append(tracker)

    def _write(self, values: dict[str, float]) -> None:
        if self._file is None:
            return
        seconds = round(time.monotonic() - self._began, 3)
        self._file.write(json.dumps({"step": self.step, "of": self._total, "seconds": seconds, **values}) + "\n")
        self._file.flush()
        for tracker in self._started:
            tracker.log(values, step=self.step)


def _started_tracker(name: str, log: Path) -> Any:
    """Starts a tracker whose run has the log's name, so each training has separate curves."""
    kind, arguments = LOGGER_TYPE_TO_CLASS[name], {}
    project, folder = (log.stem, [str(log.parent)]) if kind.requires_logging_directory else (PROJECT, [])
    if not folder and name in RUN_NAME_ARGUMENTS:
        arguments = {RUN_NAME_ARGUMENTS[name]: log.stem}
    try:
        tracker = kind(project, *folder, **arguments)
        tracker.start()
    except Exception as error:  # any error of the tracker's library: an incomplete installation, a missing login
        what = f"the tracker {name} does not start ({type(error).__name__}: {shown(str(error), 200)})"
        fix = f"check {name} in a separate script, or remove it from execution.trackers; finished work is kept"
        raise ExperimentError(what, where="execution.trackers", fix=fix) from error
    return tracker
