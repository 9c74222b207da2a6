"""Guides the student by each teacher's states: `mt-bert` through linear maps, `cfl` in a common feature space."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.functional import normalize

from amalgam.stages.train_student.objectives.states import ObjectiveContext, StateLearning, distance, in_fp32

BANDWIDTHS = (0.001, 0.01, 0.05, 0.1, 0.2, 1.0, 2.0)


class MTBertObjective(StateLearning):
    """MT-BERT (Wu et al. 2021): targets + sum_i sum_b MSE(student_b, W_ib teacher_ib).

    A block is the mean of its share of the teacher's layers, where the paper takes the last of them.
    """

    def __init__(self, context: ObjectiveContext) -> None:
        super().__init__(context)
        self.weights = context.weights(1.0, 1.0, 0.0)
        widths = [states.width for states in context.states]
        maps = [nn.Linear(width, context.width, bias=False) for width in widths for _ in range(self.blocks)]
        for linear in maps:
            nn.init.eye_(linear.weight)
        self.maps = nn.ModuleList(maps)

    def __call__(self, logits: torch.Tensor, batch: dict[str, Any], /) -> torch.Tensor:
        with in_fp32(logits):
            mask, student = self.token_mask(batch), self.student(batch)
            error = logits.new_zeros(len(logits))
            for number, states in enumerate(self.teachers(batch)):
                maps = self.maps[number * self.blocks : (number + 1) * self.blocks]
                mapped = torch.stack([linear(states[:, :, block]) for block, linear in enumerate(maps)], dim=2)
                error = error + distance(student, mapped, mask)
            of_targets, of_states, _ = self.weights
            loss: torch.Tensor = of_targets * self.targets(logits, batch) + of_states * error
            return loss


class CFLObjective(StateLearning):
    """Common feature learning (Luo et al. 2019) on the pooled last block; MMD compares the texts of a step.

    loss = targets + 10 sum_i MMD(student, teacher_i) + 10 sum_i MSE(decoder_i, teacher_i)
    Each network has a linear map into the shared extractor, since their widths differ.
    """

    whole_batches: ClassVar[bool] = True
    last_block_only: ClassVar[bool] = True

    def __init__(self, context: ObjectiveContext) -> None:
        super().__init__(context)
        widths, common = [states.width for states in context.states], max(1, context.width // 4)
        self.weights = context.weights(1.0, 10.0, 10.0)
        self.student_map = nn.Linear(context.width, 2 * common)
        self.teacher_maps = nn.ModuleList(nn.Linear(width, 2 * common) for width in widths)
        self.extractor = nn.Sequential(nn.Linear(2 * common, common), nn.ReLU(), nn.Linear(common, common))
        self.decoders = nn.ModuleList(nn.Linear(common, width) for width in widths)

    def __call__(self, logits: torch.Tensor, batch: dict[str, Any], /) -> torch.Tensor:
        with in_fp32(logits):
            mask = self.token_mask(batch)
            student = self.extractor(self.student_map(self.student(batch)[:, 0, 0]))
            gap, reconstruction = logits.new_zeros(()), logits.new_zeros(len(logits))
            for states, linear, decoder in zip(self.teachers(batch), self.teacher_maps, self.decoders, strict=True):
                common = self.extractor(linear(states))
                gap = gap + discrepancy(normalize(student, dim=-1), normalize(common[:, 0, 0], dim=-1))
                reconstruction = reconstruction + distance(decoder(common), states, mask)
            of_targets, of_states, of_decoder = self.weights
            return of_targets * self.targets(logits, batch) + of_states * gap + of_decoder * reconstruction


def discrepancy(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns MMD^2 of two samples [n, W] under a sum of Gaussian kernels (the biased estimate, >= 0)."""
    return _kernel(a, a).mean() + _kernel(b, b).mean() - 2 * _kernel(a, b).mean()


def _kernel(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    squared = (a[:, None] - b[None]).square().sum(-1)
    scales = squared.new_tensor([1 / (2 * width**2) for width in BANDWIDTHS])
    return torch.exp(-squared[..., None] * scales).sum(-1)
