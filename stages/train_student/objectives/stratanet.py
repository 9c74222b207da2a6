"""StrataNet (Vijayaraghavan et al. 2024): amalgamates the teachers' states of each block by their confidences.

loss = alpha sum_b |norm(P_b student_b) - norm(amalgamated_b)|^2 + (1 - alpha) targets + mean_b targets of head_b
(amalgamated_b). Both sides of the first term learn and could become constant; the heads prevent it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import normalize

from amalgam.stages.common.inference.batches import RowNumbers
from amalgam.stages.train_student.objectives.states import ObjectiveContext, StateLearning, in_fp32

GUARD = 1.0
"""Weight of the heads' loss."""

HEADS = 8
"""Attention heads; fewer if they do not divide the width."""

WIDER = 4
"""Ratio of the feed-forward width to the width of the Transformer layer."""


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


class StrataNetObjective(StateLearning):
    def __init__(self, context: ObjectiveContext, guard: float = GUARD) -> None:
        super().__init__(context)
        if context.confidence is None:
            raise AssertionError("no confidences")  # the stage reads them
        widths = [states.width for states in context.states]
        self.alpha, self.guard = context.config.alpha, guard
        self.confidence = context.confidence
        self.fusion = nn.ModuleList(Strata(widths, context.width, context.config.fusion) for _ in range(self.blocks))
        self.maps = nn.ModuleList(nn.Linear(context.width, context.width) for _ in range(self.blocks))
        self.heads = nn.ModuleList(nn.Linear(context.width, context.labels) for _ in range(self.blocks))

    def extra_batch(self, rows: RowNumbers) -> dict[str, torch.Tensor]:
        return {**super().extra_batch(rows), "confidence": torch.from_numpy(self.confidence[rows])}

    def amalgamated(self, batch: dict[str, Any]) -> list[torch.Tensor]:
        """Returns [B, W] of each block."""
        teachers = [states[:, 0] for states in self.teachers(batch)]
        confidence = batch["confidence"].to(self.dtype)
        return [
            fusion([states[:, block] for states in teachers], confidence[:, block])
            for block, fusion in enumerate(self.fusion)
        ]

    def __call__(self, logits: torch.Tensor, batch: dict[str, Any], /) -> torch.Tensor:
        with in_fp32(logits):
            student = self.student(batch)[:, 0]
            error, guard = student.new_zeros(len(student)), student.new_zeros(len(student))
            for block, state in enumerate(self.amalgamated(batch)):
                own = normalize(self.maps[block](student[:, block]), dim=-1)
                error = error + (own - normalize(state, dim=-1)).square().sum(dim=-1)
                guard = guard + self.targets(self.heads[block](state), batch)
            loss: torch.Tensor = self.alpha * error + (1 - self.alpha) * self.targets(logits, batch)
            return loss + self.guard * guard / self.blocks
