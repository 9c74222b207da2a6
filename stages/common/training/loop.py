"""The training loop: an encoder learns weighted distributions over labels, on any number of processes.

Loss, batches and dropout masks depend on (seed, step, rank) and the data alone. A resumed run ends with the same
weights as an uninterrupted one.
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
    latest,
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
    reads_states,
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


PATIENCE = 3
"""Consecutive non-finite losses that end the run; steps with single ones are skipped."""


class TrainingInterrupted(Exception):  # noqa: N818 - a requested stop, not an error
    """`stop` returned true; the folder `checkpoint` has the state after `step`."""

    def __init__(self, step: int, checkpoint: Path) -> None:
        super().__init__(f"stopped after step {step}, saved in {checkpoint}")
        self.step = step
        self.checkpoint = checkpoint


@dataclass(frozen=True)
class TrainingResult:
    steps: int
    best_step: int
    best_score: float
    history: list[dict[str, Any]]
    """One entry per evaluation: step, epoch, score, mean loss since the last evaluation, learning rate."""
    reused_from_step: int
    dtype: str
    """Precision of the products; weights and updates are always fp32."""
    notes: list[str]
    """Messages for the user: skipped checkpoints, skipped steps."""


@dataclass
class _Progress:
    """The run's state without tensors; plain JSON."""

    step: int = 0
    best_step: int = 0
    best_score: float | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    loss_sum: float = 0.0
    loss_count: int = 0
    non_finite: int = 0
    """Consecutive non-finite losses."""
    skipped: int = 0


def fit(  # noqa: PLR0913 - independent arguments, by name
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
    """Trains `model` in place and returns it in eval mode and fp32 with the weights of the best score.

    Every process calls `score` and rank 0 decides; rank 0 calls `on_step`. `keep` also saves the end as a checkpoint.
    One step after `stop` returns true on any process, a checkpoint is saved and TrainingInterrupted is raised.
    """
    if not len(examples):
        raise WorkError(
            "there are no texts to train on", where="fine-tuning", fix="check the corpus: run `amalgam status`"
        )
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
    """One training run of one process: the model with its objective, the optimizer and their progress."""

    def __init__(  # noqa: PLR0913 - the arguments of fit
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
        # Weights are always fp32: small updates vanish in bf16.
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
        """Runs one step; returns its loss, and whether to stop and to save, equal on all processes."""
        step = self.progress.step
        batch = self._batch(step)
        torch.manual_seed(dropout_seed(self.training.seed, step, self.accelerator.process_index))
        local_loss = self._backward(batch)
        loss, stopping, saving, norm = self._measured(local_loss, [float(stop()), float(self._checkpoint_is_due())])
        self._update(loss, norm, batch, checkpoint)
        self.progress.step += 1
        # After a non-finite loss the last good checkpoint is kept.
        return loss, bool(stopping), bool(saving) and not self.progress.non_finite

    def evaluation_is_due(self) -> bool:
        step, history = self.progress.step, self.progress.history
        due = step > 0 and (step % self.training.evaluate_every == 0 or step == self.total)
        return due and (not history or history[-1]["step"] < step)

    def evaluate(self, model: torch.nn.Module, score: Callable[[torch.nn.Module], float]) -> None:
        self.learner.eval()
        local_score = float(score(model))
        (value,) = self._summed([local_score if self.main else 0.0])
        self.learner.train()
        progress = self.progress
        if not math.isfinite(value):
            raise WorkError(
                f"the score after step {progress.step} is not finite: {value}",
                where="evaluation of the model in training",
                fix="check the targets for non-finite values, or lower the learning rate",
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
            self.best = {
                name: weight.detach().to("cpu", copy=True) for name, weight in self.learner.state_dict().items()
            }

    def finish(self, model: torch.nn.Module, reused: int, notes: list[str]) -> TrainingResult:
        self.learner.load_state_dict(self.best)
        self.optimizer.zero_grad(set_to_none=True)
        model.eval()
        progress = self.progress
        assert progress.best_score is not None  # noqa: S101 - the last step was evaluated
        if progress.skipped:
            notes = [*notes, f"{progress.skipped} steps had a non-finite loss and were skipped"]
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
        # All processes wait until the checkpoint is complete: the first one to exit ends the others.
        self._summed([0.0])
        self.saved_at = time.monotonic()

    def resume(self, folder: Path) -> list[str]:
        """Restores the latest complete checkpoint, which rank 0 chooses; returns notes on skipped ones."""
        snapshot, notes = latest(folder) if self.main else (None, [])
        (step,) = self._summed([float(snapshot.step) if snapshot else 0.0])
        if not step:
            return notes
        snapshot = snapshot or read(folder, int(step))
        if snapshot.state["identity"] != self.identity:
            return [*notes, f"checkpoint step-{snapshot.step:06d} is of another training and was skipped"]
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
                f"the checkpoint at step {snapshot.step}, within an epoch, was saved by {world} processes, "
                f"and this run has {self.world}",
                where=str(folder),
                fix=f"use {world} processes, or delete the folder to train from the start",
            )

    def _batch(self, step: int) -> RowNumbers:
        epoch, position = divmod(step, self.per_epoch)
        if self.epoch[0] != epoch:
            training = self.training
            batches = epoch_batches(self.examples.lengths, training.batch_size, seed=training.seed, epoch=epoch)
            self.epoch = (epoch, batches)
        return self.epoch[1][position]

    def _collated(self, rows: RowNumbers) -> dict[str, torch.Tensor]:
        extra = self.objective.extra_batch(rows) if reads_states(self.objective) else {}
        return {**collate(self.examples, rows, self.pad_id), **extra}

    def _backward(self, batch: RowNumbers) -> torch.Tensor:
        """Computes gradients of the batch's mean loss; returns this process's share, times the number of processes."""
        accelerator, world = self.accelerator, self.world
        parts = share(batch, rank=accelerator.process_index, world=world, accumulate=self.training.accumulate)
        # Processes are averaged, rows are summed; a process without rows takes part with a weight of zero.
        scale = world / len(batch) if parts else 0.0
        parts = parts or [batch[:1]]
        total = torch.zeros((), device=self.device)
        for part in parts:
            with ExitStack() as stack:
                if part is not parts[-1]:
                    stack.enter_context(accelerator.no_sync(self.wrapped))
                with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == "bf16"):
                    loss = self.wrapped(put_on(self.device, self._collated(part))) * scale
                accelerator.backward(loss)
            total += loss.detach()
        return total

    def _measured(self, total: torch.Tensor, requests: list[float]) -> list[float]:
        """Returns the loss, each request summed over the processes, and the gradient norm, in one synchronisation."""
        norm = clip_grad_norm_(self.names, self.training.clip)
        if self.world == 1:
            loss, length = torch.stack([total, norm]).tolist()
            return [loss, *requests, length]
        own = [torch.full((), value, dtype=torch.float64, device=self.device) for value in requests]
        summed = self.accelerator.reduce(torch.stack([total.double() / self.world, *own]), reduction="sum")
        values: list[float] = torch.cat([summed, norm.double()[None]]).tolist()
        return values

    def _update(self, loss: float, norm: float, batch: RowNumbers, checkpoint: Path) -> None:
        progress = self.progress
        if math.isfinite(loss) and math.isfinite(norm):
            share_of_peak = rate_share(progress.step, self.total, self.training)
            for group in self.optimizer.param_groups:
                group["lr"] = group["peak"] * share_of_peak
            self.optimizer.step()
            progress.non_finite = 0
            progress.loss_sum, progress.loss_count = progress.loss_sum + loss, progress.loss_count + 1
        else:
            progress.non_finite += 1
            progress.skipped += 1
            if progress.non_finite == PATIENCE:
                raise _diverged(progress.step + 1, batch, checkpoint)
        self.optimizer.zero_grad(set_to_none=True)

    def _checkpoint_is_due(self) -> bool:
        return self.main and time.monotonic() - self.saved_at >= self.training.checkpoint_seconds

    def _summed(self, values: list[float]) -> list[float]:
        """Returns sums over the processes, equal on each."""
        if self.world == 1:
            return values
        local = torch.tensor(values, dtype=torch.float64, device=self.device)
        summed: list[float] = self.accelerator.reduce(local, reduction="sum").tolist()
        return summed


def learning_rate(step: int, total: int, training: Training) -> float:
    """Returns the learning rate of the update with number `step`, from 0."""
    return training.learning_rate * rate_share(step, total, training)


def rate_share(step: int, total: int, training: Training) -> float:
    """Returns the share of the largest rate: linear warm-up, then linear decay; never zero."""
    warm = math.ceil(training.warmup * total)
    return (step + 1) / (warm + 1) if step < warm else (total - step) / (total - warm)


def _identity(examples: Examples, training: Training, objective: Objective, names: dict[torch.Tensor, str]) -> str:
    """Returns a fingerprint of everything that a checkpoint must share with the run that resumes it."""
    parts = {
        "training": asdict(training) | {"checkpoint_seconds": None},
        "examples": examples.digest(),
        "objective": type(objective).__qualname__,
        "weights": {name: list(weight.shape) for weight, name in names.items()},
    }
    return fingerprint(parts)


def dropout_seed(seed: int, step: int, rank: int) -> int:
    """Returns a seed per step and process, so a checkpoint needs no generator state."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {step} {rank}".encode(), digest_size=7).digest())


def _diverged(step: int, batch: RowNumbers, checkpoint: Path) -> WorkError:
    rows = ", ".join(map(str, sorted(batch.tolist())[:16])) + (", ..." if len(batch) > 16 else "")
    last = latest(checkpoint)[0]
    return WorkError(
        f"the loss was not finite for {PATIENCE} steps in a row up to step {step}",
        where=f"training rows {rows}; " + (f"last good checkpoint: step {last.step}" if last else "no checkpoint yet"),
        fix="check these rows' targets and weights, or lower the learning rate",
    )
