"""Parts of the objectives that read the teachers' states: states in a batch, their distance, and layers over them.

Texts B, tokens T (1 for pooled states), blocks, widths W. Everything is computed in the precision of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from numpy.typing import NDArray
from torch import nn

from amalgam.pipeline.config.schema import Objective as ObjectiveConfig
from amalgam.stages.common.cached.read import States
from amalgam.stages.common.inference.batches import RowNumbers
from amalgam.stages.common.inference.states import in_blocks, mean_over_tokens
from amalgam.stages.common.training.losses import Objective

HEADS = 8
"""Attention heads of a Strata; fewer if they do not divide the width."""
WIDER = 4
"""Ratio of the feed-forward width to the width of its Transformer layer."""


@dataclass(frozen=True)
class ObjectiveContext:
    """Everything that an objective is built from."""

    config: ObjectiveConfig
    targets: Objective
    """The loss on the targets alone."""
    states: Sequence[States]
    """Each teacher's states of the training texts, in their order."""
    width: int
    """Width of the student."""
    labels: int = 0
    """Labels of the union."""
    confidence: NDArray[Any] | None = None
    """[texts, blocks, teachers] in the order of the texts, if the objective weighs the teachers."""

    @property
    def widths(self) -> list[int]:
        return [states.width for states in self.states]


Phases = list[tuple[str, Objective]]
"""Phases of a training by name; a single phase has no name."""


class StateLearning(Objective, nn.Module):
    """Adds the teachers' states [B, T, blocks, W] to each batch; subclasses define the loss."""

    reads_states: ClassVar[bool] = True
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


class BlockMaps(nn.ModuleList):
    """Linear maps, one per block, that start as the identity."""

    def __init__(self, from_width: int, width: int, blocks: int, *, bias: bool = True) -> None:
        linears = [nn.Linear(from_width, width, bias=bias) for _ in range(blocks)]
        super().__init__(linears)
        for linear in linears:
            nn.init.eye_(linear.weight)
            if bias:
                nn.init.zeros_(linear.bias)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Maps [B, T, blocks, from_width] to [B, T, blocks, width]."""
        return torch.stack([linear(states[:, :, block]) for block, linear in enumerate(self)], dim=2)


class Autoencoder(nn.Module):
    """A linear auto-encoder. Its code starts as the weighted mean of its inputs, and its decoder copies the code.

    A random start would force the student to learn the offset of a random map first.
    """

    def __init__(self, widths: Sequence[int], shares: Sequence[float], width: int) -> None:
        super().__init__()
        self.encoder = nn.Linear(sum(widths), width)
        self.decoder = nn.Linear(width, sum(widths))
        identities = [torch.eye(width, input_width) for input_width in widths]
        with torch.no_grad():
            weighted = [share * identity for share, identity in zip(shares, identities, strict=True)]
            self.encoder.weight.copy_(torch.cat(weighted, dim=1))
            self.decoder.weight.copy_(torch.cat(identities, dim=1).T)
            self.encoder.bias.zero_()
            self.decoder.bias.zero_()

    def forward(self, states: torch.Tensor, token_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the code [B, T, W] without gradient, and each text's mean squared reconstruction error."""
        code = self.encoder(states)
        error = distance(self.decoder(code)[:, :, None], states[:, :, None], token_mask)
        return code.detach(), error


class Amalgamation(nn.Module):
    """Amalgamates the teachers' states of each block by auto-encoders (Shen et al. 2019).

    An auto-encoder compresses the states of all teachers (DFA) or of two at a time (IFA) to the student's width. In IFA
    the code of two teachers is merged with the next one. It learns from its own reconstruction alone.
    """

    def __init__(self, widths: Sequence[int], width: int, blocks: int, *, by_two: bool) -> None:
        super().__init__()
        first = self.first = min(2, len(widths)) if by_two else len(widths)
        steps: list[tuple[Sequence[int], Sequence[float]]] = [(widths[:first], [1 / first] * first)]
        # The code of n teachers counts n times as much as the next one.
        nexts = enumerate(widths[first:], first + 1)
        steps += [((width, teacher_width), (1 - 1 / n, 1 / n)) for n, teacher_width in nexts]
        self.steps = len(steps)
        self.autoencoders = nn.ModuleList(Autoencoder(*step, width) for _ in range(blocks) for step in steps)

    def forward(self, teachers: Sequence[torch.Tensor], token_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Maps teachers [B, T, blocks, W_i] to amalgamated states [B, T, blocks, W] without gradient.

        Also returns the reconstruction error [B], summed over blocks.
        """
        codes, errors = [], []
        for block in range(teachers[0].shape[2]):
            states = [teacher[:, :, block] for teacher in teachers]
            autoencoders = self.autoencoders[block * self.steps : (block + 1) * self.steps]
            code, error = self._merged(autoencoders, states, token_mask)
            codes.append(code)
            errors.append(error)
        return torch.stack(codes, dim=2), torch.stack(errors).sum(0)

    def _merged(
        self, autoencoders: nn.ModuleList, states: list[torch.Tensor], token_mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        code, error = autoencoders[0](torch.cat(states[: self.first], dim=-1), token_mask)
        for autoencoder, states_of_next in zip(autoencoders[1:], states[self.first :], strict=True):
            code, next_error = autoencoder(torch.cat([code, states_of_next], dim=-1), token_mask)
            error = error + next_error
        return code, error


class Strata(nn.Module):
    """Maps one block's teacher states [B, W_i] and confidences [B, teachers] to one state [B, W].

    st: attention over [AMALG] and one token per teacher, Linear(state) + Linear(confidence); the output at [AMALG].
    multiply: tokens are confidence * Linear(state). no-st: Linear(sum_i confidence_i Linear(state_i)).
    """

    def __init__(self, widths: Sequence[int], width: int, fusion: str) -> None:
        super().__init__()
        self.fusion = fusion
        self.into = nn.ModuleList(nn.Linear(teacher_width, width) for teacher_width in widths)
        if fusion == "no-st":
            self.merge = nn.Linear(width, width)
            return
        if fusion == "st":
            self.enrich = nn.Linear(1, width)
        self.amalg = nn.Parameter(0.02 * torch.randn(width))
        heads = next(heads for heads in range(HEADS, 0, -1) if width % heads == 0)
        # No dropout: the student learns from the output.
        self.layer = nn.TransformerEncoderLayer(width, heads, WIDER * width, 0.0, "gelu", batch_first=True)

    def forward(self, states: Sequence[torch.Tensor], confidence: torch.Tensor) -> torch.Tensor:
        tokens = torch.stack([linear(state) for linear, state in zip(self.into, states, strict=True)], dim=1)
        shares = confidence[:, :, None]
        state: torch.Tensor
        if self.fusion == "no-st":
            state = self.merge((shares * tokens).sum(dim=1))
            return state
        tokens = tokens + self.enrich(shares) if self.fusion == "st" else shares * tokens
        state = self.layer(torch.cat([self.amalg.expand(len(tokens), 1, -1), tokens], dim=1))[:, 0]
        return state
