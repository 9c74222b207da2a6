"""The training loop: an encoder learns weighted distributions over labels, on any number of processes.

The loss, the batches and the dropout streams are functions of (seed, step, rank) and the data alone, so that a run
that was stopped and went on ends with the very weights of one that was not.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils import clip_grad_norm_

from amalgam.pipeline.errors import WorkError
from amalgam.pipeline.storage.fingerprint import fingerprint
from amalgam.stages.common.device import put_on
from amalgam.stages.common.inference.batches import RowNumbers
from amalgam.stages.common.training.batches import Examples, collate, epoch_batches, share
from amalgam.stages.common.training.checkpoint import (
    Checkpoint,
    newest,
    optimizer_tensors,
    read,
    restore_optimizer,
    save,
)
from amalgam.stages.common.training.learner import (
    Objective,
    WeightedKL,
    adamw,
    as_learner,
    refuse_shared,
    start_accelerator,
    training_dtype,
)
from amalgam.stages.common.training.settings import Training

__all__ = [
    "Objective",
    "Training",
    "TrainingInterrupted",
    "TrainingResult",
    "WeightedKL",
    "dropout_seed",
    "fit",
    "learning_rate",
]


# So many losses in a row that are no numbers end the run; single ones are skipped.
PATIENCE = 3


class TrainingInterrupted(Exception):  # noqa: N818 - a wish that was granted, not an error
    """`stop` asked for an end: everything up to `step` is in the folder `checkpoint`."""

    def __init__(self, step: int, checkpoint: Path) -> None:
        super().__init__(f"stopped after step {step}, kept in {checkpoint}")
        self.step = step
        self.checkpoint = checkpoint


@dataclass(frozen=True)
class TrainingResult:
    steps: int
    best_step: int
    best_score: float
    history: list[dict[str, Any]]
    """One entry an evaluation: step, epoch, score, mean loss since the one before, learning rate."""
    reused_from_step: int
    dtype: str
    """Of the products; weights and their updates are fp32 always."""
    notes: list[str]
    """What a person should be told: checkpoints that were passed over, steps that changed nothing."""


@dataclass
class _Progress:
    """All of a run's state that is not a tensor; plain JSON."""

    step: int = 0
    best_step: int = 0
    best_score: float | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    loss_sum: float = 0.0
    loss_count: int = 0
    not_numbers: int = 0
    """Losses in a row that were no numbers."""
    skipped: int = 0


def fit(  # noqa: PLR0913 - every argument is named by the caller, and none belongs to another
    model: torch.nn.Module,
    examples: Examples,
    training: Training,
    *,
    pad_id: int,
    score: Callable[[torch.nn.Module], float],
    checkpoint: Path,
    stop: Callable[[], bool],
    on_step: Callable[[int, int, float], None],
    objective: Objective | None = None,
    cpu: bool = False,
    dtype: str = "auto",
    keep: bool = False,
) -> TrainingResult:
    """Train `model` in place; on return it is in eval mode, in fp32, and holds the weights of the best score.

    Every process calls `score`, and that of rank 0 counts; `on_step` is called on rank 0 alone. With `keep` the end is
    a checkpoint too: called again, all is done.
    Raises Stopped, with a checkpoint written, one step after `stop` is true on any process.
    """
    if not len(examples):
        raise WorkError("there are no texts to train on", where="fine-tuning", fix="look at the corpus: amalgam status")
    objective = objective or WeightedKL(training.temperature)
    run = _Run(model, examples, training, pad_id=pad_id, objective=objective, cpu=cpu, dtype=dtype)
    notes = run.resume(checkpoint)
    reused = run.progress.step
    while True:
        if run.evaluation_is_due():
            run.evaluate(model, score)
        if run.progress.step == run.total:
            if keep and reused < run.total:
                run.save(checkpoint)
            return run.finish(model, reused, notes)
        loss, stopping, saving = run.advance(stop, checkpoint)
        if run.main:
            on_step(run.progress.step, run.total, loss)
        if stopping or saving:
            run.save(checkpoint)
        if stopping:
            raise TrainingInterrupted(run.progress.step, checkpoint)


class _Run:
    """One training run of one process: the model with its objective, the optimizer, and where they stand."""

    def __init__(  # noqa: PLR0913 - fit's own
        self,
        model: torch.nn.Module,
        examples: Examples,
        training: Training,
        *,
        pad_id: int,
        objective: Objective,
        cpu: bool,
        dtype: str,
    ) -> None:
        self.examples, self.training, self.pad_id, self.objective = examples, training, pad_id, objective
        self.per_epoch = -(-len(examples) // training.batch_size)
        self.total = self.per_epoch * training.epochs
        # Weights are kept in fp32 whatever they were loaded as: small updates vanish in bf16.
        self.learner = as_learner(model.float(), objective).train()
        self.accelerator = start_accelerator(self.learner, self._collated(np.arange(1)), cpu=cpu)
        self.device: torch.device = self.accelerator.device
        self.dtype = training_dtype(self.device) if dtype == "auto" else dtype
        self.world: int = self.accelerator.num_processes
        self.main: bool = self.accelerator.is_main_process
        refuse_shared(objective, training.accumulate, self.world)
        self.wrapped = self.accelerator.prepare_model(self.learner)
        self.names: dict[torch.Tensor, str] = {
            weight: name for name, weight in self.learner.named_parameters() if weight.requires_grad
        }
        self.optimizer = adamw(self.names, self.device, training)
        self.identity = _identity(examples, training, objective, self.names)
        self.progress = _Progress()
        self.best: dict[str, torch.Tensor] = {}
        self.epoch: tuple[int, list[RowNumbers]] = (-1, [])
        self.saved_at = time.monotonic()

    def advance(self, stop: Callable[[], bool], checkpoint: Path) -> tuple[float, bool, bool]:
        """One step; returns its loss, and whether to stop and to save, which all processes answer alike."""
        step = self.progress.step
        batch = self._batch(step)
        torch.manual_seed(dropout_seed(self.training.seed, step, self.accelerator.process_index))
        here = self._backward(batch)
        loss, stopping, saving, norm = self._measured(here, [float(stop()), float(self._checkpoint_is_due())])
        self._update(loss, norm, batch, checkpoint)
        self.progress.step += 1
        # While losses are no numbers, the last good checkpoint stays.
        return loss, bool(stopping), bool(saving) and not self.progress.not_numbers

    def evaluation_is_due(self) -> bool:
        step, history = self.progress.step, self.progress.history
        due = step > 0 and (step % self.training.evaluate_every == 0 or step == self.total)
        return due and (not history or history[-1]["step"] < step)

    def evaluate(self, model: torch.nn.Module, score: Callable[[torch.nn.Module], float]) -> None:
        self.learner.eval()
        here = float(score(model))
        (value,) = self._agreed([here if self.main else 0.0])
        self.learner.train()
        progress = self.progress
        if not math.isfinite(value):
            raise WorkError(
                f"the score after step {progress.step} is not a number: {value}",
                where="evaluation of the model in training",
                fix="look for texts or targets that are not numbers, or lower the learning rate",
            )
        entry = {
            "step": progress.step,
            "epoch": progress.step / self.per_epoch,
            "score": value,
            "loss": progress.loss_sum / progress.loss_count if progress.loss_count else None,
            "learning_rate": learning_rate(progress.step - 1, self.total, self.training),
        }
        progress.history.append(entry)
        progress.loss_sum, progress.loss_count = 0.0, 0
        if progress.best_score is None or value > progress.best_score:
            progress.best_step, progress.best_score = progress.step, value
            self.best = {name: held.detach().to("cpu", copy=True) for name, held in self.learner.state_dict().items()}

    def finish(self, model: torch.nn.Module, reused: int, notes: list[str]) -> TrainingResult:
        self.learner.load_state_dict(self.best)
        self.optimizer.zero_grad(set_to_none=True)
        model.eval()
        progress = self.progress
        assert progress.best_score is not None  # noqa: S101 - the last step was evaluated
        if progress.skipped:
            notes = [*notes, f"{progress.skipped} steps had a loss that was not a number, and changed nothing"]
        best = progress.best_step, progress.best_score
        return TrainingResult(self.total, *best, progress.history, reused, self.dtype, notes)

    def save(self, folder: Path) -> None:
        if self.main:
            tensors = {
                "weights": self.learner.state_dict(),
                "optimizer": optimizer_tensors(self.optimizer, self.names),
            }
            state = {"identity": self.identity, "world": self.world, "progress": asdict(self.progress)}
            save(folder, Checkpoint(self.progress.step, state, tensors | ({"best": self.best} if self.best else {})))
        # Nobody leaves before the checkpoint is whole: the first process to end takes the others with it.
        self._agreed([0.0])
        self.saved_at = time.monotonic()

    def resume(self, folder: Path) -> list[str]:
        """Go on from the newest whole checkpoint, which rank 0 chooses; returns what was passed over."""
        snapshot, notes = newest(folder) if self.main else (None, [])
        (step,) = self._agreed([float(snapshot.step) if snapshot else 0.0])
        if not step:
            return notes
        snapshot = snapshot or read(folder, int(step))
        if snapshot.state["identity"] != self.identity:
            return [*notes, f"checkpoint step-{snapshot.step:06d} is of another training and was passed over"]
        self._same_world(snapshot, folder)
        self.learner.load_state_dict(snapshot.tensors["weights"])
        restore_optimizer(self.optimizer, self.names, snapshot.tensors["optimizer"])
        self.progress = _Progress(**snapshot.state["progress"])
        self.best = snapshot.tensors.get("best", {})
        return notes

    def _same_world(self, snapshot: Checkpoint, folder: Path) -> None:
        world = snapshot.state["world"]
        if world != self.world and snapshot.step % self.per_epoch:
            raise WorkError(
                f"the checkpoint at step {snapshot.step}, within an epoch, is of another number of processes: {world}, "
                f"and this run has {self.world}",
                where=str(folder),
                fix=f"go on with as many processes ({world}), or delete the folder to train from the start",
            )

    def _batch(self, step: int) -> RowNumbers:
        epoch, position = divmod(step, self.per_epoch)
        if self.epoch[0] != epoch:
            training = self.training
            batches = epoch_batches(self.examples.lengths, training.batch_size, seed=training.seed, epoch=epoch)
            self.epoch = (epoch, batches)
        return self.epoch[1][position]

    def _collated(self, rows: RowNumbers) -> dict[str, torch.Tensor]:
        beside = getattr(self.objective, "beside", None)
        return {**collate(self.examples, rows, self.pad_id), **(beside(rows) if beside else {})}

    def _backward(self, batch: RowNumbers) -> torch.Tensor:
        """Gradients of the mean loss over the whole batch; returns this process's share of it, times processes."""
        accelerator, world = self.accelerator, self.world
        parts = share(batch, rank=accelerator.process_index, world=world, accumulate=self.training.accumulate)
        # Processes are averaged, rows are to be summed. One without a row still has to take part, with nothing.
        scale = world / len(batch) if parts else 0.0
        parts = parts or [batch[:1]]
        total = torch.zeros((), device=self.device)
        for part in parts:
            with ExitStack() as around:
                if part is not parts[-1]:
                    around.enter_context(accelerator.no_sync(self.wrapped))
                with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == "bf16"):
                    loss = self.wrapped(put_on(self.device, self._collated(part))) * scale
                accelerator.backward(loss)
            total += loss.detach()
        return total

    def _measured(self, total: torch.Tensor, wishes: list[float]) -> list[float]:
        """Loss, the sum of each wish over the processes, gradient norm: the one wait for the device in a step."""
        norm = clip_grad_norm_(self.names, self.training.clip)
        if self.world == 1:
            loss, length = torch.stack([total, norm]).tolist()
            return [loss, *wishes, length]
        wished = [torch.full((), wish, dtype=torch.float64, device=self.device) for wish in wishes]
        summed = self.accelerator.reduce(torch.stack([total.double() / self.world, *wished]), reduction="sum")
        found: list[float] = torch.cat([summed, norm.double()[None]]).tolist()
        return found

    def _update(self, loss: float, norm: float, batch: RowNumbers, checkpoint: Path) -> None:
        progress = self.progress
        if math.isfinite(loss) and math.isfinite(norm):
            share_of_peak = rate_share(progress.step, self.total, self.training)
            for group in self.optimizer.param_groups:
                group["lr"] = group["peak"] * share_of_peak
            self.optimizer.step()
            progress.not_numbers = 0
            progress.loss_sum, progress.loss_count = progress.loss_sum + loss, progress.loss_count + 1
        else:
            progress.not_numbers += 1
            progress.skipped += 1
            if progress.not_numbers == PATIENCE:
                raise _not_a_number(progress.step + 1, batch, checkpoint)
        self.optimizer.zero_grad(set_to_none=True)

    def _checkpoint_is_due(self) -> bool:
        return self.main and time.monotonic() - self.saved_at >= self.training.checkpoint_seconds

    def _agreed(self, values: list[float]) -> list[float]:
        """Sums over the processes, the same on each."""
        if self.world == 1:
            return values
        mine = torch.tensor(values, dtype=torch.float64, device=self.device)
        summed: list[float] = self.accelerator.reduce(mine, reduction="sum").tolist()
        return summed


def learning_rate(step: int, total: int, training: Training) -> float:
    """Rate of the update after `step` others."""
    return training.learning_rate * rate_share(step, total, training)


def rate_share(step: int, total: int, training: Training) -> float:
    """Of the largest rate: linear up over the warm-up, then linear down; never zero."""
    warm = math.ceil(training.warmup * total)
    return (step + 1) / (warm + 1) if step < warm else (total - step) / (total - warm)


def _identity(examples: Examples, training: Training, objective: Objective, names: dict[torch.Tensor, str]) -> str:
    """What a checkpoint must have been made of to be gone on from."""
    parts = {
        "training": asdict(training) | {"checkpoint_seconds": None},
        "examples": examples.digest(),
        "objective": type(objective).__qualname__,
        "weights": {name: list(weight.shape) for weight, name in names.items()},
    }
    return fingerprint(parts)


def dropout_seed(seed: int, step: int, rank: int) -> int:
    """Masks of their own for every step and process, so that a checkpoint need hold no generator."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {step} {rank}".encode(), digest_size=7).digest())


def _not_a_number(step: int, batch: RowNumbers, checkpoint: Path) -> WorkError:
    rows = ", ".join(map(str, sorted(batch.tolist())[:16])) + (", ..." if len(batch) > 16 else "")
    kept = newest(checkpoint)[0]
    return WorkError(
        f"the loss was not a number for {PATIENCE} steps in a row, the last of them step {step}",
        where=f"training rows {rows}; " + (f"last good checkpoint: step {kept.step}" if kept else "no checkpoint yet"),
        fix="look at these rows' targets and weights, or lower the learning rate",
    )
