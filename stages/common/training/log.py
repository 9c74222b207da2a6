"""What a training says of itself while it goes on: a line of JSON every few steps, and trackers that were asked for.

Metrics alone: loss, learning rate, score, steps per second. No text, no name of a label, no setting leaves the machine.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from amalgam.data.keys import shown
from amalgam.pipeline.errors import ExperimentError
from amalgam.pipeline.execution.stage import Run
from amalgam.stages.common.training.loop import learning_rate
from amalgam.stages.common.training.settings import Training

ROOM = "journals"

EVERY_STEPS = 10

PROJECT = "amalgam"

NAMED_BY = {"mlflow": "run_name", "trackio": "name", "wandb": "name"}
"""What a tracker's library calls the name of a run within a project."""


@dataclass
class TrainingLog:
    """Of one training, by the process that leads."""

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
        """Of the model as it stands after the last step."""
        self._write_steps()
        self._write({"score": value})
        self._since = time.monotonic()  # an evaluation is no step

    def _write_steps(self) -> None:
        if not self._losses:
            return
        now = time.monotonic()
        numbers = [loss for loss in self._losses if math.isfinite(loss)]  # a step without one changed nothing
        mean = {"loss": sum(numbers) / len(numbers)} if numbers else {}
        rate = learning_rate(self.step - 1, self._total, self.training)
        speed = len(self._losses) / max(now - self._since, 1e-9)
        self._write({**mean, "learning_rate": rate, "steps_per_second": speed})
        self._losses, self._since = [], now

    def _start(self, step: int) -> None:
        """With the first step, when the loop has settled where and with whom it runs. One that goes on is appended."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._stack.enter_context(self.path.open("w" if step == 1 else "a", encoding="utf-8"))
        for name in self.trackers:
            tracker = _started(name, self.path)
            self._stack.callback(tracker.finish)
            self._started.append(tracker)

    def _write(self, values: dict[str, float]) -> None:
        if self._file is None:
            return
        self._file.write(json.dumps({"step": self.step, "of": self._total, **values}) + "\n")
        self._file.flush()
        for tracker in self._started:
            tracker.log(values, step=self.step)

    def close(self) -> None:
        self._stack.close()


@contextmanager
def journal(
    run: Run,
    checkpoint: Path,
    training: Training,
    show: Callable[[int, int, float], None],
    score: Callable[[Any], float],
) -> Iterator[tuple[Callable[[int, int, float], None], Callable[[Any], float]]]:
    """`on_step` and `score` for the loop, with what they say written down beside."""
    names = run.experiment.execution.trackers
    check_trackers(names)
    kept = TrainingLog(run.store.root / ROOM / f"{_name(run, checkpoint)}.jsonl", training, names)

    def on_step(step: int, total: int, loss: float) -> None:
        show(step, total, loss)
        kept.on_step(step, total, loss)

    def scored(model: Any) -> float:
        value = score(model)
        kept.on_score(value)  # where no step was told, which is on every process but one, nothing is written
        return value

    try:
        yield on_step, scored
    finally:
        kept.close()


def check_trackers(names: Sequence[str]) -> None:
    """Before anything is trained: a tracker that was asked for and is not there is an error, not silence."""
    if not names:
        return
    from accelerate.tracking import get_available_trackers

    there = {str(name) for name in get_available_trackers()}
    for name in names:
        if name not in there:
            fix = f"pip install {name.replace('_', '-')}, or leave it out"
            raise ExperimentError(f"the tracker {name} is not installed", where="execution.trackers", fix=fix)


def _started(name: str, journal: Path) -> Any:
    try:
        tracker = _tracker(name, journal)
        tracker.start()
    except Exception as error:  # another library's, whatever it may be: not installed whole, nobody logged in
        what = f"the tracker {name} does not start ({type(error).__name__}: {shown(str(error), 200)})"
        fix = f"see that {name} works by itself, or leave it out; what was made so far stays"
        raise ExperimentError(what, where="execution.trackers", fix=fix) from error
    return tracker


def _tracker(name: str, journal: Path) -> Any:
    """Each training is a run of its own by the journal's name, so that its curves stay apart from others'."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    kind = LOGGER_TYPE_TO_CLASS[name]
    if kind.requires_logging_directory:
        return kind(journal.stem, str(journal.parent))
    return kind(PROJECT, **({NAMED_BY[name]: journal.stem} if name in NAMED_BY else {}))


def _name(run: Run, checkpoint: Path) -> str:
    """The checkpoint's own place, as one name."""
    parts = checkpoint.relative_to(run.store.root).parts
    return "-".join(part for part in parts if part not in {"units", "checkpoint"})
