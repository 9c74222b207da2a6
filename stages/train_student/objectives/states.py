"""Base of the objectives that read the teachers' states: states in a batch, and their distance.

Texts B, tokens T (1 for pooled states), blocks, widths W. Everything is computed in the precision of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from numpy.typing import NDArray
from torch import nn

from amalgam.pipeline.config.schema import Objective as ObjectiveConfig
from amalgam.stages.common.cached.read import States
from amalgam.stages.common.inference.batches import RowNumbers
from amalgam.stages.common.inference.states import in_blocks, mean_over_tokens
from amalgam.stages.common.training.learner import Objective


@dataclass(frozen=True)
class ObjectiveContext:
    """Everything that an objective is built from."""

    config: ObjectiveConfig
    targets: Objective
    """The loss on the targets alone."""
    states: Sequence[States]
    """Each teacher's states of the training texts, in their order."""
    layers: int
    """Layers of the student."""
    width: int
    labels: int = 0
    """Labels of the union."""
    confidence: NDArray[Any] | None = None
    """[texts, blocks, teachers] in the order of the texts, if the objective weighs the teachers."""

    def weights(self, *defaults: float) -> tuple[float, ...]:
        """Returns the weights of targets, states and reconstruction: the experiment's, else the method's defaults."""
        return tuple(self.config.weights) if self.config.weights else defaults


Phases = list[tuple[str, Objective]]
"""Phases of a training by name; a single phase has no name."""


class StateLearning(nn.Module):
    """Adds the teachers' states [B, T, blocks, W] to each batch; subclasses define the loss."""

    whole_batches: ClassVar[bool] = False
    last_block_only: ClassVar[bool] = False

    def __init__(self, context: ObjectiveContext) -> None:
        super().__init__()
        self.targets = context.targets
        self.states = list(context.states)
        self.by_token = context.config.states == "tokens"
        self.blocks = 1 if self.last_block_only else context.states[0].blocks

    def extra_batch(self, rows: RowNumbers) -> dict[str, torch.Tensor]:
        blocks = slice(-1, None) if self.last_block_only else slice(None)
        tensors = [torch.from_numpy(states.take(rows, blocks)) for states in self.states]
        return {f"teacher {number}": values for number, values in enumerate(tensors)}

    @contextmanager
    def model_context(self, model: nn.Module, batch: dict[str, Any]) -> Iterator[None]:  # noqa: ARG002
        yield

    @classmethod
    def phases(cls, context: ObjectiveContext) -> Phases:
        return [("", cls(context))]

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def teachers(self, batch: dict[str, Any]) -> list[torch.Tensor]:
        return [batch[f"teacher {number}"].to(self.dtype) for number in range(len(self.states))]

    def student(self, batch: dict[str, Any]) -> torch.Tensor:
        """Returns the student's states [B, T, blocks, W], pooled if the teachers' are."""
        states = batch["states"] if not self.last_block_only else batch["states"][-1:]
        own = in_blocks(states, self.blocks).to(self.dtype)
        if self.by_token:
            return own
        means = mean_over_tokens(own.flatten(2), batch["attention_mask"])
        return means.reshape(len(own), 1, self.blocks, -1)

    def token_mask(self, batch: dict[str, Any]) -> torch.Tensor:
        """Returns [B, T]: 1 for a token, 0 for padding."""
        mask: torch.Tensor = batch["attention_mask"]
        return mask if self.by_token else mask[:, :1]


def distance(a: torch.Tensor, b: torch.Tensor, token_mask: torch.Tensor) -> torch.Tensor:
    """Returns [B] of [B, T, blocks, W]: squared differences, averaged over tokens and width, summed over blocks."""
    squared = (a - b).square().mean(-1).flatten(2).sum(-1) * token_mask
    return squared.sum(1) / token_mask.sum(1)


def in_fp32(like: torch.Tensor) -> Any:
    """Returns a context without the loop's bf16: the loss consists of small differences."""
    return torch.autocast(like.device.type, enabled=False)
