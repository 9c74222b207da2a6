"""The trained module (encoder and objective), its device and its optimizer.

The objective is the interface of a method; loop.py is independent of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

from amalgam.pipeline.errors import WorkError
from amalgam.stages.common.training.settings import Training

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

    from amalgam.stages.common.inference.batches import RowNumbers


INPUTS = ("input_ids", "inputs_embeds", "attention_mask", "token_type_ids")
"""The encoder's tensors in a batch; the objective reads the others."""


class Objective(Protocol):
    """A loss per row, for example an nn.Module; its parameters are trained with the model's.

    An objective that reads more than logits is a StateObjective.
    """

    def __call__(self, logits: torch.Tensor, batch: dict[str, Any], /) -> torch.Tensor:
        """Returns the loss per row [B] from fp32 logits [B, C] and a batch of inputs, targets, weights and rows."""

    def parameters(self) -> Iterable[torch.nn.Parameter]: ...


class StateObjective(Objective, Protocol):
    """Reads the student's states: batch["states"] is a tuple of [B, T, W], one per layer without embeddings."""

    whole_batches: bool
    """The loss compares the rows of a step, so a step cannot be accumulated or divided among processes."""

    def extra_batch(self, rows: RowNumbers, /) -> dict[str, torch.Tensor]:
        """Returns further tensors of these rows, such as the teachers' states; the loop moves them to the device."""

    def model_context(self, model: torch.nn.Module, batch: dict[str, Any], /) -> AbstractContextManager[None]:
        """Returns the context in which the student runs."""


def reads_states(objective: Objective) -> TypeGuard[StateObjective]:
    return hasattr(objective, "extra_batch")


@dataclass(frozen=True)
class WeightedKL:
    """weight * T^2 * KL(target || softmax(logits / T)); equals cross-entropy for one-hot targets at T = 1."""

    temperature: float = 1.0

    def __call__(self, logits: torch.Tensor, batch: dict[str, torch.Tensor], /) -> torch.Tensor:
        from torch.nn.functional import kl_div, log_softmax

        log_student = log_softmax(logits / self.temperature, dim=-1)
        divergence = kl_div(log_student, batch["targets"], reduction="none").sum(dim=-1)
        return batch["weights"] * self.temperature**2 * divergence

    def parameters(self) -> Iterable[torch.nn.Parameter]:
        return ()


@dataclass(frozen=True)
class RestrictedKL:
    """UHC: T^2 times the sum over teachers of KL(teacher || student restricted to that teacher's labels).

    Targets are the concatenated distributions of the teachers; `columns` has each teacher's labels in the union.
    """

    columns: tuple[tuple[int, ...], ...]
    temperature: float = 1.0

    def __call__(self, logits: torch.Tensor, batch: dict[str, torch.Tensor], /) -> torch.Tensor:
        import torch
        from torch.nn.functional import kl_div, log_softmax

        parts, start = [], 0
        for columns in self.columns:
            target = batch["targets"][:, start : start + len(columns)]
            student = log_softmax(logits[:, list(columns)] / self.temperature, dim=-1)
            parts.append(kl_div(student, target, reduction="none").sum(dim=-1))
            start += len(columns)
        return batch["weights"] * self.temperature**2 * torch.stack(parts).sum(dim=0)

    def parameters(self) -> Iterable[torch.nn.Parameter]:
        return ()


def as_learner(model: torch.nn.Module, objective: Objective) -> torch.nn.Module:
    """Returns model and objective as one module, so both are moved, averaged, clipped and saved in the same way."""
    from torch import nn

    class Learner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.objective = objective if isinstance(objective, nn.Module) else nn.ParameterList(objective.parameters())

        def forward(self, batch: dict[str, Any]) -> torch.Tensor:
            inputs = {name: batch[name] for name in INPUTS if name in batch}
            if "inputs_embeds" in inputs:  # input_ids only give the number of tokens
                del inputs["input_ids"]
            if not reads_states(objective):
                return objective(self.model(**inputs).logits.float(), batch).sum()
            with objective.model_context(self.model, batch):
                output = self.model(**inputs, output_hidden_states=True)
            return objective(output.logits.float(), {**batch, "states": output.hidden_states[1:]}).sum()

    return Learner()


def refuse_shared(objective: Objective, accumulate: int, world: int) -> None:
    """Refuses to divide a step if the objective compares its rows."""
    if getattr(objective, "whole_batches", False) and (world > 1 or accumulate > 1):
        raise WorkError(
            "this objective compares the texts of a step with each other",
            where=f"processes: {world}, parts of a batch: {accumulate}",
            fix="set student.accumulate=1 and use one process",
        )


def start_accelerator(learner: torch.nn.Module, batch: dict[str, torch.Tensor], *, cpu: bool) -> Accelerator:
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DistributedDataParallelKwargs, parse_flag_from_env

    cpu = cpu or parse_flag_from_env("ACCELERATE_USE_CPU")
    state = PartialState(cpu=cpu)
    unused = state.num_processes > 1 and _some_unused(learner.to(state.device), batch, state.device)
    parallel = DistributedDataParallelKwargs(find_unused_parameters=unused)
    # The loop sets half precision itself: Accelerate would fix one choice for the whole process.
    return Accelerator(mixed_precision="no", cpu=cpu, kwargs_handlers=[parallel])


def training_dtype(device: torch.device, computed: Callable[[torch.device], str] | None = None) -> str:
    """Returns bf16 if the hardware supports it, else fp32: fp16 gradients would need scaling."""
    from amalgam.stages.common.device import dtype_for

    return "bf16" if (computed or dtype_for)(device) == "bf16" else "fp32"


def _some_unused(learner: torch.nn.Module, batch: dict[str, torch.Tensor], device: torch.device) -> bool:
    """Returns whether a weight gets no gradient; DistributedDataParallel has to know, or it waits forever."""
    learner({name: tensor.to(device) for name, tensor in batch.items()}).backward()
    unused = any(weight.grad is None for weight in learner.parameters() if weight.requires_grad)
    learner.zero_grad(set_to_none=True)
    return unused


def adamw(names: Mapping[torch.Tensor, str], device: torch.device, training: Training) -> torch.optim.AdamW:
    """Returns AdamW with separate groups for the objective's weights; a group's `peak` is its largest rate."""
    from torch.optim import AdamW

    own = [weight for weight, name in names.items() if name.startswith("objective.")]
    rates = [(training.learning_rate, [weight for weight, name in names.items() if not name.startswith("objective.")])]
    rates += [(training.objective_rate or training.learning_rate, own)] if own else []
    groups = [group for rate, weights in rates for group in _decayed(weights, rate, training.weight_decay)]
    return AdamW(groups, lr=training.learning_rate, fused=device.type in {"cpu", "cuda", "mps"})


def _decayed(weights: Sequence[torch.Tensor], rate: float, decay: float) -> list[dict[str, Any]]:
    return [
        {"params": [weight for weight in weights if weight.ndim > 1], "weight_decay": decay, "peak": rate},
        # Biases and LayerNorm.
        {"params": [weight for weight in weights if weight.ndim <= 1], "weight_decay": 0.0, "peak": rate},
    ]
