"""What is trained: the encoder and its objective as one module, where it runs, and its optimizer.

The objective is the seam for other methods: loop.py does not know what is minimised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from amalgam.pipeline.errors import WorkError
from amalgam.stages.common.training.settings import Training

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

    from amalgam.stages.common.inference.batches import RowNumbers


# Of a batch's tensors, those that are the encoder's; the others are the objective's.
INPUTS = ("input_ids", "inputs_embeds", "attention_mask", "token_type_ids")


class Objective(Protocol):
    """What is minimised, row by row; an nn.Module is one. Its parameters are trained and kept beside the model's.

    One that looks at more than logits is a StateObjective.
    """

    def __call__(self, logits: torch.Tensor, batch: dict[str, Any], /) -> torch.Tensor:
        """Loss per row [B] from fp32 logits [B, C]; `batch` holds the encoder's inputs, targets, weights and rows."""

    def parameters(self) -> Iterable[torch.nn.Parameter]: ...


class StateObjective(Objective, Protocol):
    """Looks at the student's states: batch["states"] is a tuple of [B, T, W], one after each layer (no embedding)."""

    whole_batches: bool
    """RowNumbers are compared with each other, so that a step can be neither accumulated nor shared by processes."""

    def beside(self, rows: RowNumbers, /) -> dict[str, torch.Tensor]:
        """Further tensors of these rows for the batch, such as the teachers' states; moved to the device with it."""

    def around(self, model: torch.nn.Module, batch: dict[str, Any], /) -> AbstractContextManager[None]:
        """What the student is called in."""


def looks_at_states(objective: Objective) -> bool:
    return hasattr(objective, "beside")


@dataclass(frozen=True)
class WeightedKL:
    """weight * T^2 * KL(target || softmax(logits / T)); for one-hot targets at T = 1, cross-entropy exactly."""

    temperature: float = 1.0

    def __call__(self, logits: torch.Tensor, batch: dict[str, torch.Tensor], /) -> torch.Tensor:
        from torch.nn.functional import kl_div, log_softmax

        log_student = log_softmax(logits / self.temperature, dim=-1)
        divergence = kl_div(log_student, batch["targets"], reduction="none").sum(dim=-1)
        return batch["weights"] * self.temperature**2 * divergence

    def parameters(self) -> Iterable[torch.nn.Parameter]:
        return ()


def as_learner(model: torch.nn.Module, objective: Objective) -> torch.nn.Module:
    """Model and objective as one module, so that both are moved, averaged over processes, clipped and kept alike."""
    from torch import nn

    class Learner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.objective = objective if isinstance(objective, nn.Module) else nn.ParameterList(objective.parameters())

        def forward(self, batch: dict[str, Any]) -> torch.Tensor:
            inputs = {name: batch[name] for name in INPUTS if name in batch}
            if "inputs_embeds" in inputs:  # these stand for the tokens, which only say how many there are
                del inputs["input_ids"]
            if not looks_at_states(objective):
                return objective(self.model(**inputs).logits.float(), batch).sum()
            with objective.around(self.model, batch):  # type: ignore[attr-defined]
                output = self.model(**inputs, output_hidden_states=True)
            return objective(output.logits.float(), {**batch, "states": output.hidden_states[1:]}).sum()

    return Learner()


def refuse_shared(objective: Objective, accumulate: int, world: int) -> None:
    """The loss must be the same however a step is shared out."""
    if getattr(objective, "whole_batches", False) and (world > 1 or accumulate > 1):
        raise WorkError(
            "this objective compares the texts of a step with each other",
            where=f"processes: {world}, parts of a batch: {accumulate}",
            fix="student.accumulate=1 and one process",
        )


def start_accelerator(learner: torch.nn.Module, batch: dict[str, torch.Tensor], *, cpu: bool) -> Accelerator:
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DistributedDataParallelKwargs, parse_flag_from_env

    cpu = cpu or parse_flag_from_env("ACCELERATE_USE_CPU")
    state = PartialState(cpu=cpu)
    unused = state.num_processes > 1 and _some_unused(learner.to(state.device), batch, state.device)
    parallel = DistributedDataParallelKwargs(find_unused_parameters=unused)
    # Half precision is the loop's own: Accelerate would keep one choice for the whole process.
    return Accelerator(mixed_precision="no", cpu=cpu, kwargs_handlers=[parallel])


def training_dtype(device: torch.device, computed: Callable[[torch.device], str] | None = None) -> str:
    """bf16 where the hardware computes it, and fp32 elsewhere: gradients in fp16 would have to be scaled."""
    from amalgam.stages.common.device import dtype_for

    return "bf16" if (computed or dtype_for)(device) == "bf16" else "fp32"


def _some_unused(learner: torch.nn.Module, batch: dict[str, torch.Tensor], device: torch.device) -> bool:
    """Whether some weights get no gradient: processes would wait for them for ever unless told."""
    learner({name: tensor.to(device) for name, tensor in batch.items()}).backward()
    unused = any(weight.grad is None for weight in learner.parameters() if weight.requires_grad)
    learner.zero_grad(set_to_none=True)
    return unused


def adamw(names: Mapping[torch.Tensor, str], device: torch.device, training: Training) -> torch.optim.AdamW:
    """By weight and name. `peak` of a group is its rate's largest value: what an objective adds has its own."""
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
