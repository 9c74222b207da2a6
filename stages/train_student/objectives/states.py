"""What objectives share that lead the student by the teachers' states: how states reach a batch, and their distance.

Texts B, tokens T (1 where states are pooled), blocks, widths W. Everything is computed in the precision of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from numpy.typing import NDArray
from torch import nn

from amalgam.pipeline.config.schema import Objective as Said
from amalgam.stages.common.inference.batches import RowNumbers
from amalgam.stages.common.states.compute import in_blocks, mean_over_tokens
from amalgam.stages.common.states.read import States
from amalgam.stages.common.training.learner import Objective


@dataclass(frozen=True)
class ObjectiveContext:
    """What an objective is made for."""

    said: Said
    targets: Objective
    """What the targets alone would have the student minimise."""
    states: Sequence[States]
    """Of each teacher, for the texts that are learned from, in their order."""
    layers: int
    """The student's."""
    width: int
    labels: int = 0
    """Of the union."""
    confidence: NDArray[Any] | None = None
    """[texts, blocks, teachers], where the objective weighs the teachers; in the order of the texts."""

    def weights(self, *own: float) -> tuple[float, ...]:
        """Of the targets, the states and their reconstruction: the experiment's, or else the method's own."""
        return tuple(self.said.weights) if self.said.weights else own


class StateLearning(nn.Module):
    """The targets' own objective, and beside it the teachers' states of each batch, as [B, T, blocks, W] by teacher."""

    whole_batches: ClassVar[bool] = False
    last_block_alone: ClassVar[bool] = False

    def __init__(self, setting: ObjectiveContext) -> None:
        super().__init__()
        self.targets = setting.targets
        self.held = list(setting.states)
        self.by_token = setting.said.states == "tokens"
        self.blocks = 1 if self.last_block_alone else setting.states[0].blocks

    def beside(self, rows: RowNumbers) -> dict[str, torch.Tensor]:
        blocks = slice(-1, None) if self.last_block_alone else slice(None)
        taken = [torch.from_numpy(states.take(rows, blocks)) for states in self.held]
        return {f"teacher {place}": values for place, values in enumerate(taken)}

    @contextmanager
    def around(self, model: nn.Module, batch: dict[str, Any]) -> Iterator[None]:  # noqa: ARG002
        yield

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def teachers(self, batch: dict[str, Any]) -> list[torch.Tensor]:
        return [batch[f"teacher {place}"].to(self.dtype) for place in range(len(self.held))]

    def student(self, batch: dict[str, Any]) -> torch.Tensor:
        """[B, T, blocks, W] of the student, of the same grain as the teachers'."""
        states = batch["states"] if not self.last_block_alone else batch["states"][-1:]
        found = in_blocks(states, self.blocks).to(self.dtype)
        if self.by_token:
            return found
        means = mean_over_tokens(found.flatten(2), batch["attention_mask"])
        return means.reshape(len(found), 1, self.blocks, -1)

    def there(self, batch: dict[str, Any]) -> torch.Tensor:
        """[B, T]: 1 where a state is of a token, 0 where it is padding."""
        mask: torch.Tensor = batch["attention_mask"]
        return mask if self.by_token else mask[:, :1]


def distance(one: torch.Tensor, other: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """[B] of [B, T, blocks, W]: the squared difference, mean over a text's tokens and the width, summed over blocks."""
    squared = (one - other).square().mean(-1).flatten(2).sum(-1) * there
    return squared.sum(1) / there.sum(1)


def exactly(like: torch.Tensor) -> Any:
    """Outside the loop's bf16: what is learned from are small differences."""
    return torch.autocast(like.device.type, enabled=False)
