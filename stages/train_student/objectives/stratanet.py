"""StrataNet (Vijayaraghavan et al. 2024): block by block, the teachers' states are made one by their confidences.

loss = alpha sum_b |norm(P_b student_b) - norm(amalgamated_b)|^2 + (1 - alpha) targets + mean_b targets of head_b
(amalgamated_b). Both sides of the first term learn, and could agree on a constant: the heads keep them from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import normalize

from amalgam.stages.common.inference.batches import RowNumbers
from amalgam.stages.common.training.learner import Objective
from amalgam.stages.train_student.objectives.states import ObjectiveContext, StateLearning, exactly

GUARD = 1.0

HEADS = 8
"""Of attention; fewer where they do not divide the width."""

WIDER = 4
"""How much wider the Transformer layer is inside."""


class Strata(nn.Module):
    """One block's: the teachers' states [B, W_i] and their confidences [B, teachers] to one state [B, W].

    st: attention over [AMALG] and a token of each teacher, Linear(state) + Linear(confidence); what comes out at
    [AMALG]. multiply: tokens are confidence * Linear(state). no-st: Linear(sum_i confidence_i Linear(state_i)).
    """

    def __init__(self, widths: Sequence[int], width: int, how: str) -> None:
        super().__init__()
        self.how = how
        self.into = nn.ModuleList(nn.Linear(one, width) for one in widths)
        if how == "no-st":
            self.merge = nn.Linear(width, width)
            return
        if how == "st":
            self.enrich = nn.Linear(1, width)
        self.amalg = nn.Parameter(0.02 * torch.randn(width))
        heads = next(heads for heads in range(HEADS, 0, -1) if width % heads == 0)
        # What it gives is learned from, so nothing is dropped at random.
        self.layer = nn.TransformerEncoderLayer(width, heads, WIDER * width, 0.0, "gelu", batch_first=True)

    def forward(self, states: Sequence[torch.Tensor], confidence: torch.Tensor) -> torch.Tensor:
        tokens = torch.stack([into(one) for into, one in zip(self.into, states, strict=True)], dim=1)
        shares = confidence[:, :, None]
        found: torch.Tensor
        if self.how == "no-st":
            found = self.merge((shares * tokens).sum(dim=1))
            return found
        tokens = tokens + self.enrich(shares) if self.how == "st" else shares * tokens
        found = self.layer(torch.cat([self.amalg.expand(len(tokens), 1, -1), tokens], dim=1))[:, 0]
        return found


class StrataNetObjective(StateLearning):
    def __init__(self, setting: ObjectiveContext, guard: float = GUARD) -> None:
        super().__init__(setting)
        if setting.confidence is None:
            raise AssertionError("no confidences")  # phases_of reads them
        widths = [states.width for states in setting.states]
        self.alpha, self.guard = setting.said.alpha, guard
        self.confidence = setting.confidence
        self.fusion = nn.ModuleList(Strata(widths, setting.width, setting.said.fusion) for _ in range(self.blocks))
        self.maps = nn.ModuleList(nn.Linear(setting.width, setting.width) for _ in range(self.blocks))
        self.heads = nn.ModuleList(nn.Linear(setting.width, setting.labels) for _ in range(self.blocks))

    def beside(self, rows: RowNumbers) -> dict[str, torch.Tensor]:
        return {**super().beside(rows), "confidence": torch.from_numpy(self.confidence[rows])}

    def amalgamated(self, batch: dict[str, Any]) -> list[torch.Tensor]:
        """[B, W] of each block."""
        teachers = [states[:, 0] for states in self.teachers(batch)]
        confidence = batch["confidence"].to(self.dtype)
        return [
            one([states[:, block] for states in teachers], confidence[:, block])
            for block, one in enumerate(self.fusion)
        ]

    def __call__(self, logits: torch.Tensor, batch: dict[str, Any], /) -> torch.Tensor:
        with exactly(logits):
            student = self.student(batch)[:, 0]
            apart, guard = student.new_zeros(len(student)), student.new_zeros(len(student))
            for block, state in enumerate(self.amalgamated(batch)):
                own = normalize(self.maps[block](student[:, block]), dim=-1)
                apart = apart + (own - normalize(state, dim=-1)).square().sum(dim=-1)
                guard = guard + self.targets(self.heads[block](state), batch)
            loss: torch.Tensor = self.alpha * apart + (1 - self.alpha) * self.targets(logits, batch)
            return loss + self.guard * guard / self.blocks


def phases(setting: ObjectiveContext) -> list[tuple[str, Objective]]:
    return [("", StrataNetObjective(setting))]
