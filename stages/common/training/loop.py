"""The training loop: an encoder learns weighted distributions over labels, on any number of processes.

Loss, batches and dropout masks depend on (seed, step, rank) and the data alone. A resumed run ends with the same
weights as an uninterrupted one.
"""

from __future__ import annotations

import hashlib
import math
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict, get_type_hints

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin, parse_flag_from_env
from torch import nn
from torch.nn.utils import clip_grad_norm_

from amalgam.data.arrays import RowNumbers
from amalgam.data.tokens import by_count
from amalgam.pipeline.config.schema import Student, TrainTeachers
from amalgam.pipeline.console import counted
from amalgam.pipeline.errors import ModelError, WorkError, first_line
from amalgam.pipeline.execution.faults import is_out_of_memory
from amalgam.pipeline.storage.facts import fits
from amalgam.pipeline.storage.fingerprint import fingerprint
from amalgam.stages.common.device import avoid_plans, dtype_for, put_on, seed_generators
from amalgam.stages.common.inference.batches import token_batches
from amalgam.stages.common.models.model_folder import end_token, reads_padding
from amalgam.stages.common.training import checkpoint as checkpoints
from amalgam.stages.common.training.batches import Examples, collate, epoch_batches, share
from amalgam.stages.common.training.checkpoint import Checkpoint
from amalgam.stages.common.training.losses import Batch, Loss, WeightedKL
from amalgam.stages.common.training.schedule import FitFacts, Schedule, ScoredStep
from amalgam.stages.common.training.step_graphs import RECORDED_MODELS, StepGraphs, graph_width

INPUTS = ("input_ids", "inputs_embeds", "attention_mask", "token_type_ids")
"""The encoder's tensors in a batch; the objective reads the others."""
PATIENCE = 3
"""Consecutive non-finite losses that end the run; steps with single ones are skipped."""


@dataclass(frozen=True)
class TrainingSettings:
    epochs: int
    learning_rate: float
    batch_size: int
    """Rows per step, over all processes and accumulated parts."""
    warmup: float
    """Share of all steps."""
    weight_decay: float
    seed: int
    accumulate: int = 1
    clip: float = 1.0
    evaluate_every: int = 100
    checkpoint_seconds: float = 120
    objective_rate: float | None = None
    """Learning rate of the objective's own weights; None: the model's rate."""


def training_of(
    section: Student | TrainTeachers, schedule: Schedule, *, objective_rate: float | None = None
) -> TrainingSettings:
    names = {field.name for field in fields(TrainingSettings)}
    return TrainingSettings(**section.model_dump(include=names) | asdict(schedule), objective_rate=objective_rate)


@dataclass(eq=False)
class TrainingInterrupted(Exception):  # noqa: N818 - a requested stop, not an error
    """`stop` returned true; a checkpoint has the state after `step`."""

    step: int

    def __str__(self) -> str:
        return f"stopped after step {self.step:,}; a checkpoint is saved"


class TrainingResult(NamedTuple):
    facts: FitFacts
    notes: list[str]
    """Skipped checkpoints, skipped steps."""


@dataclass
class _Progress:
    """The run's state without tensors; plain JSON."""

    step: int = 0
    best_step: int = 0
    best_score: float | None = None
    history: list[ScoredStep] = field(default_factory=list)
    loss_sum: float = 0.0
    loss_count: int = 0
    non_finite: int = 0
    """Consecutive non-finite losses."""
    skipped: int = 0


class _State(TypedDict):
    identity: str
    world: int
    progress: dict[str, Any]
    """Of _Progress."""
    total: NotRequired[int]
    """Number of all steps, for `amalgam plan`."""


class _Learner(nn.Module):
    """Model and objective as one module, so both are moved, averaged, clipped and saved in the same way."""

    def __init__(self, model: nn.Module, objective: Loss) -> None:
        super().__init__()
        self.model, self.objective = model, objective

    def forward(self, batch: Batch) -> torch.Tensor:
        with_states = {"output_hidden_states": True} if self.objective.reads_states else {}
        with self.objective.model_context(self.model, batch):
            output = self.model(**_encoder_inputs(batch), **with_states)
        states = {"states": _states_of(output, batch)} if self.objective.reads_states else {}
        return self.objective(output.logits.float(), {**batch, **states}).sum()


def _encoder_inputs(batch: Batch) -> dict[str, torch.Tensor]:
    inputs = {name: batch[name] for name in INPUTS if name in batch}
    if "inputs_embeds" in inputs:  # input_ids only give the number of tokens
        del inputs["input_ids"]
    return inputs


def _states_of(output: Any, batch: Batch) -> Any:
    """Returns the states after each layer; refuses a model without a state of each token."""
    states = (getattr(output, "hidden_states", None) or ())[1:]
    if not states or any(layer.shape[:2] != batch["attention_mask"].shape for layer in states):
        what = "the student's encoder does not give a state of each token after each layer"
        fix = "use a BERT-like encoder, or a method that reads no states: `amalgam methods`"
        raise ModelError(what, where="student.encoder", fix=fix)
    return states


@dataclass
class TrainingRun:
    """Trains `model` in place; afterwards it is in eval mode and fp32.

    It has the weights of the best score, and of equal scores those of the latest; without `select`, of the last step.
    Every process calls `score` and rank 0 decides; rank 0 calls `on_step`. `keep` also saves the end as a checkpoint.
    """

    model: nn.Module
    examples: Examples
    training: TrainingSettings
    pad_id: int
    score: Callable[[nn.Module], float]
    checkpoint: Path
    stop: Callable[[], bool]
    on_step: Callable[[int, int, float], None]
    objective: Loss = field(default_factory=WeightedKL)
    cpu: bool = False
    dtype: str = "auto"
    keep: bool = False
    select: bool = True

    def __post_init__(self) -> None:
        if not len(self.examples):
            raise WorkError("there are no texts to train on", where="fine-tuning", fix="add texts to the corpus")
        training = self.training
        self.lengths = self.examples.lengths
        self.longest = int(self.lengths.max())
        self.per_epoch = -(-len(self.examples) // training.batch_size)
        self.total = self.per_epoch * training.epochs
        # Weights are always fp32: small updates vanish in bf16.
        self.learner = _Learner(self.model.float(), self.objective).train()
        self.accelerator = _start_accelerator(self.learner, self._collated(np.arange(1)), cpu=self.cpu)
        self.device: torch.device = self.accelerator.device
        avoid_plans(self.device)
        self.precision = training_dtype(self.device) if self.dtype == "auto" else self.dtype
        self.world: int = self.accelerator.num_processes
        self.main: bool = self.accelerator.is_main_process
        if self.objective.whole_batches and (self.world > 1 or training.accumulate > 1):
            what = "this objective compares the texts of a step with each other"
            fix = "set student.accumulate=1 and use one process"
            raise WorkError(what, where=f"processes: {self.world}, parts of a batch: {training.accumulate}", fix=fix)
        self.wrapped = self.accelerator.prepare_model(self.learner)
        self.notes = self._leave_bf16() if self.precision == "bf16" else []
        named = self.learner.named_parameters()
        self.names: dict[torch.Tensor, str] = {weight: name for name, weight in named if weight.requires_grad}
        self.optimizer = _adamw(self.names, self.device, training)
        self.graphs = self.step_graphs()
        self.progress = _Progress()
        self.best: dict[str, torch.Tensor] = {}
        self.epoch: tuple[int, list[RowNumbers]] = (-1, [])
        self.saved_at = time.monotonic()

    def fit(self) -> TrainingResult:
        """Runs or resumes the training.

        One step after `stop` returns true on any process, a checkpoint is saved and TrainingInterrupted is raised.
        """
        try:
            return self._fit()
        finally:  # graphs refer to this run, which would keep the memory of both
            if self.graphs is not None:
                self.graphs.clear()
            self.graphs, self.best = None, {}

    def _fit(self) -> TrainingResult:
        notes = [*self.notes, *self._resume()]
        progress, resumed = self.progress, self.progress.step
        self._evaluate_if_due()
        while progress.step < self.total:
            stopping, saving = self._advance()
            if stopping or saving:
                self._save()
            if stopping:
                raise TrainingInterrupted(progress.step)
            self._evaluate_if_due()
        if self.keep and resumed < self.total:
            self._save()
        if self.best:
            self.learner.load_state_dict(self.best)
        self.optimizer.zero_grad(set_to_none=True)
        self.model.eval()
        notes += [self.graphs.note] if self.graphs is not None and self.graphs.note else []
        assert progress.best_score is not None  # noqa: S101 - the last step was evaluated
        if progress.skipped:
            steps = counted(progress.skipped, "step", "was", "were")
            notes = [*notes, f"{steps} skipped because of a non-finite loss or gradient"]
        facts: FitFacts = {
            "steps": self.total,
            "best_step": progress.best_step,
            "best_score": progress.best_score,
            "history": progress.history,
            "dtype": self.precision,
            "resumed_from_step": resumed,
        }
        return TrainingResult(facts, notes)

    def _leave_bf16(self) -> list[str]:
        """Chooses fp32, and returns a note, if the model, such as DeBERTa v1, cannot run in bf16."""
        self.learner.eval()
        try:
            with torch.no_grad(), torch.autocast(self.device.type, torch.bfloat16):
                self.model(**_encoder_inputs(put_on(self.device, self._collated(np.arange(1)))))
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            self.precision = "fp32"
            return [f"the model is trained in fp32, since bf16 fails in it: {first_line(error)}"]
        finally:
            self.learner.train()
        return []

    def step_graphs(self) -> StepGraphs | None:
        """Returns None where a step cannot be recorded, or has another process to wait for."""
        kind = getattr(getattr(self.model, "config", None), "model_type", None)
        fixed = kind in RECORDED_MODELS and self.objective.recordable and self.examples.embeddings is None
        if self.device.type != "cuda" or self.world > 1 or not fixed:
            return None
        return StepGraphs(self.names, self.loss_of, self.device)

    # ---- one step

    def _advance(self) -> tuple[bool, bool]:
        """Runs one step; returns whether to stop and whether to save, equal on all processes."""
        step = self.progress.step
        batch = self._batch(step)
        seed_generators(self.device, dropout_seed(self.training.seed, step, self.accelerator.process_index))
        local_loss = self._backward(batch)
        is_due = self.main and time.monotonic() - self.saved_at >= self.training.checkpoint_seconds
        loss, stopping, saving, norm = self._measured(local_loss, [float(self.stop()), float(is_due)])
        self._update(loss, norm, batch)
        self.progress.step += 1
        if self.main:
            self.on_step(self.progress.step, self.total, loss)
        # After a non-finite loss the last good checkpoint is kept.
        return bool(stopping), bool(saving) and not self.progress.non_finite

    def _batch(self, step: int) -> RowNumbers:
        epoch, position = divmod(step, self.per_epoch)
        if self.epoch[0] != epoch:
            training = self.training
            batches = epoch_batches(self.lengths, training.batch_size, seed=training.seed, epoch=epoch)
            self.epoch = (epoch, batches)
        return self.epoch[1][position]

    def _collated(self, rows: RowNumbers, width: int = 0) -> dict[str, torch.Tensor]:
        return {**collate(self.examples, rows, self.pad_id, width), **self.objective.extra_batch(rows)}

    def loss_of(self, batch: Batch) -> torch.Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            loss: torch.Tensor = self.wrapped(batch)
        return loss

    def _backward(self, batch: RowNumbers) -> torch.Tensor:
        """Computes gradients of the batch's mean loss; returns this process's share, times the number of processes."""
        accelerator, world = self.accelerator, self.world
        parts = share(batch, rank=accelerator.process_index, world=world, accumulate=self.training.accumulate)
        # Processes are averaged, rows are summed; a process without rows takes part with a weight of zero.
        scale = world / len(batch) if parts else 0.0
        parts = parts or [batch[:1]]
        config = getattr(self.model, "config", None)
        if reads_padding(config) and not self.objective.whole_batches:
            lengths = self.lengths
            parts = [part[rows] for part in parts for rows in token_batches(lengths[part], sys.maxsize, equal=True)]
        parts = [rows for part in parts for rows in by_count(self.examples.tokens, part, end_token(config))]
        total = torch.zeros((), device=self.device)
        for part in parts:
            if self.graphs is not None:
                width = graph_width(int(self.lengths[part].max()), self.longest)
                total += self.graphs.backward(self._collated(part, width), scale)
                continue
            with nullcontext() if part is parts[-1] else accelerator.no_sync(self.wrapped):
                loss = self.loss_of(put_on(self.device, self._collated(part))) * scale
                accelerator.backward(loss)
            total += loss.detach()
        return total

    def _measured(self, total: torch.Tensor, requests: list[float]) -> list[float]:
        """Returns the loss, each request summed over the processes, and the gradient norm, in one synchronisation."""
        norm = clip_grad_norm_(self.names, self.training.clip)
        if self.world == 1:
            loss, length = torch.stack([total, norm]).tolist()
            return [loss, *requests, length]
        scalars = [torch.full((), value, dtype=torch.float64, device=self.device) for value in requests]
        summed = self.accelerator.reduce(torch.stack([total.double() / self.world, *scalars]), reduction="sum")
        return torch.cat([summed, norm.double()[None]]).tolist()

    def _update(self, loss: float, norm: float, batch: RowNumbers) -> None:
        progress = self.progress
        if math.isfinite(loss) and math.isfinite(norm):
            share_of_peak = _rate_share(progress.step, self.total, self.training)
            for group in self.optimizer.param_groups:
                group["lr"] = group["peak"] * share_of_peak
            self.optimizer.step()
            progress.non_finite = 0
            progress.loss_sum, progress.loss_count = progress.loss_sum + loss, progress.loss_count + 1
        else:
            progress.non_finite += 1
            progress.skipped += 1
            if progress.non_finite == PATIENCE:
                raise self._diverged(batch)
        self.optimizer.zero_grad(set_to_none=self.graphs is None)  # graphs add to gradients that stay

    def _diverged(self, batch: RowNumbers) -> WorkError:
        rows = ", ".join(map(str, sorted(batch.tolist())[:16])) + (", ..." if len(batch) > 16 else "")
        last = checkpoints.latest(self.checkpoint)[0]
        kept = f"last good checkpoint: step {last.step}" if last else "no checkpoint yet"
        what = f"the loss was not finite for {PATIENCE} steps in a row up to step {self.progress.step + 1}"
        fix = "check these rows' targets and weights, or lower the learning rate"
        return WorkError(what, where=f"training rows {rows}; {kept}", fix=fix)

    # ---- evaluation

    def _evaluate_if_due(self) -> None:
        progress, step = self.progress, self.progress.step
        is_due = step > 0 and (step % self.training.evaluate_every == 0 or step == self.total)
        if not is_due or (progress.history and progress.history[-1]["step"] == step):
            return
        self.learner.eval()
        local_score = float(self.score(self.model))
        (value,) = self._summed([local_score if self.main else 0.0])
        self.learner.train()
        if not math.isfinite(value):
            what = f"the score after step {step} is not finite: {value}"
            fix = "check the targets for non-finite values, or lower the learning rate"
            raise WorkError(what, where="evaluation of the model in training", fix=fix)
        entry: ScoredStep = {
            "step": step,
            "epoch": step / self.per_epoch,
            "score": value,
            "loss": progress.loss_sum / progress.loss_count if progress.loss_count else None,
            "learning_rate": learning_rate(step - 1, self.total, self.training),
        }
        progress.history.append(entry)
        progress.loss_sum, progress.loss_count = 0.0, 0
        if self.select and progress.best_score is not None and value < progress.best_score:
            return
        progress.best_step, progress.best_score = step, value
        if not self.select:
            return
        if step == self.total:  # the weights are the best ones
            self.best = {}
            return
        weights = self.learner.state_dict()
        if not self.best:
            place = self.device if _has_room(self.device, weights) else torch.device("cpu")
            self.best = {name: torch.empty_like(weight, device=place) for name, weight in weights.items()}
        for name, weight in weights.items():
            self.best[name].copy_(weight)

    def _summed(self, values: list[float]) -> list[float]:
        """Returns sums over the processes, equal on each."""
        if self.world == 1:
            return values
        local = torch.tensor(values, dtype=torch.float64, device=self.device)
        return self.accelerator.reduce(local, reduction="sum").tolist()

    # ---- checkpoints

    def _save(self) -> None:
        if self.main:
            moments = checkpoints.optimizer_tensors(self.optimizer, self.names)
            tensors = {"weights": self.learner.state_dict(), "optimizer": moments}
            progress = {"progress": asdict(self.progress), "total": self.total}
            state = {"identity": self._identity, "world": self.world, **progress}
            tensors |= {"best": self.best} if self.best else {}
            checkpoints.save(self.checkpoint, Checkpoint(self.progress.step, state, tensors))
        # All processes wait until the checkpoint is complete: the first one to exit ends the others.
        self._summed([0.0])
        self.saved_at = time.monotonic()

    def _resume(self) -> list[str]:
        """Restores the latest complete checkpoint, which rank 0 chooses; returns notes on skipped ones."""
        folder = self.checkpoint
        snapshot, notes = checkpoints.latest(folder) if self.main else (None, [])
        (step,) = self._summed([float(snapshot.step) if snapshot else 0.0])
        if not step:
            return notes
        snapshot = snapshot or checkpoints.read(folder, int(step))
        if not self._is_own(snapshot):
            return [*notes, f"checkpoint step-{snapshot.step:06d} is of another training and was skipped"]
        world = snapshot.state["world"]
        if world != self.world and snapshot.step % self.per_epoch:
            raise WorkError(
                f"the checkpoint at step {snapshot.step}, within an epoch, was saved by {world} processes, "
                f"and this run has {self.world}",
                where=str(folder),
                fix=f"use {world} processes, or delete the folder to train from the start",
            )
        self.learner.load_state_dict(snapshot.tensors["weights"])
        checkpoints.restore_optimizer(self.optimizer, self.names, snapshot.tensors["optimizer"])
        self.progress = _Progress(**snapshot.state["progress"])
        self.best = snapshot.tensors.get("best", {})
        return notes

    def _is_own(self, snapshot: Checkpoint) -> bool:
        """Returns whether a checkpoint can be resumed; its digests prove only that it has not changed."""
        if not fits(snapshot.state, _State) or snapshot.state["identity"] != self._identity:
            return False
        progress, kinds = snapshot.state["progress"], get_type_hints(_Progress)
        typed = progress.keys() == kinds.keys() and all(fits(progress[name], kind) for name, kind in kinds.items())
        if not typed or not progress["step"] == snapshot.step <= self.total:
            return False
        shapes, weights = _shapes(self.learner.state_dict()), snapshot.tensors.get("weights", {})
        best, moments = snapshot.tensors.get("best"), snapshot.tensors.get("optimizer", {})
        named = {f"{name}/{weight}": shape for weight, shape in shapes.items() for name in ("exp_avg", "exp_avg_sq")}
        return (
            _shapes(weights) == shapes
            and (best is None or _shapes(best) == shapes)
            and bool(progress["history"]) == (progress["best_score"] is not None)
            and all(named.get(name, ()) == shape for name, shape in _shapes(moments).items())
        )

    @cached_property
    def _identity(self) -> str:
        """Returns a fingerprint of everything that a checkpoint must share with the run that resumes it.

        More parts of a batch save memory, also from the middle of a training; only dropout masks and rounding differ.
        """
        parts = {
            "training": asdict(self.training) | {"checkpoint_seconds": None, "accumulate": 1},
            "select": self.select,
            "examples": self.examples.digest(),
            "objective": type(self.objective).__qualname__,
            "temperature": getattr(self.objective, "temperature", None),
            "weights": {name: list(weight.shape) for weight, name in self.names.items()},
        }
        return fingerprint(parts)


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _has_room(device: torch.device, weights: Mapping[str, torch.Tensor]) -> bool:
    """Returns whether a GPU can hold the weights again. A copy to the host takes as long as many steps."""
    if device.type != "cuda":
        return False
    free, _ = torch.cuda.mem_get_info(device)
    return free > 8 * sum(weight.numel() * weight.element_size() for weight in weights.values())


def training_dtype(device: torch.device) -> str:
    """Returns bf16 if the hardware supports it, else fp32: fp16 gradients would need scaling."""
    return "bf16" if dtype_for(device) == "bf16" else "fp32"


def learning_rate(step: int, total: int, training: TrainingSettings) -> float:
    """Returns the learning rate of the update with number `step`, from 0."""
    return training.learning_rate * _rate_share(step, total, training)


def dropout_seed(seed: int, step: int, rank: int) -> int:
    """Returns a seed per step and process, so a checkpoint needs no generator state."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {step} {rank}".encode(), digest_size=7).digest())


def _rate_share(step: int, total: int, training: TrainingSettings) -> float:
    """Returns the share of the largest rate: linear warm-up, then linear decay; never zero."""
    warm = math.ceil(training.warmup * total)
    return (step + 1) / (warm + 1) if step < warm else (total - step) / (total - warm)


def _start_accelerator(learner: nn.Module, batch: dict[str, torch.Tensor], *, cpu: bool) -> Accelerator:
    cpu = cpu or parse_flag_from_env("ACCELERATE_USE_CPU")
    state = PartialState(cpu=cpu)
    unused = state.num_processes > 1 and _some_unused(learner.to(state.device), batch, state.device)
    parallel = DistributedDataParallelKwargs(find_unused_parameters=unused)
    # The loop sets half precision and accumulates itself. Accelerate has one choice of each for the whole process, a
    # Trainer's for example, and no public way to another one.
    kinds = AcceleratorState, GradientState
    of_process = [kind._shared_state for kind in kinds]  # noqa: SLF001
    for kind in kinds:
        kind._shared_state = {}  # noqa: SLF001
    try:
        # Without the plugin an environment variable of `accelerate launch` would divide the gradients.
        whole = GradientAccumulationPlugin(num_steps=1)
        return Accelerator(
            mixed_precision="no", cpu=cpu, gradient_accumulation_plugin=whole, kwargs_handlers=[parallel]
        )
    finally:
        for kind, state_of_process in zip(kinds, of_process, strict=True):
            kind._shared_state = state_of_process  # noqa: SLF001


def _some_unused(learner: nn.Module, batch: dict[str, torch.Tensor], device: torch.device) -> bool:
    """Returns whether a weight gets no gradient; DistributedDataParallel has to know, or it waits forever."""
    learner({name: tensor.to(device) for name, tensor in batch.items()}).backward()
    unused = any(weight.grad is None for weight in learner.parameters() if weight.requires_grad)
    learner.zero_grad(set_to_none=True)
    return unused


def _adamw(names: Mapping[torch.Tensor, str], device: torch.device, training: TrainingSettings) -> torch.optim.AdamW:
    """Returns AdamW with separate groups for the objective's weights; a group's `peak` is its largest rate."""
    groups: list[dict[str, Any]] = []
    rates = {False: training.learning_rate, True: training.objective_rate or training.learning_rate}
    for in_objective, rate in rates.items():
        weights = [weight for weight, name in names.items() if name.startswith("objective.") is in_objective]
        matrices = [weight for weight in weights if weight.ndim > 1]
        others = [weight for weight in weights if weight.ndim <= 1]  # biases and LayerNorm
        if weights:
            groups.append({"params": matrices, "weight_decay": training.weight_decay, "peak": rate})
            groups.append({"params": others, "weight_decay": 0.0, "peak": rate})
    return torch.optim.AdamW(groups, lr=training.learning_rate, fused=device.type in {"cpu", "cuda", "mps"})
