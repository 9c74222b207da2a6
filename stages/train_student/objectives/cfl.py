"""Common feature learning (Luo et al. 2019): student and teachers meet in one narrow space, compared as distributions.

loss = targets + 10 sum_i MMD(student, teacher_i) + 10 sum_i MSE(decoder_i, teacher_i), of the last block, pooled.
Widths differ, so each network has a linear map into the shared extractor. MMD is over the texts of a step.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.functional import normalize

from amalgam.stages.common.training.learner import Objective
from amalgam.stages.train_student.objectives.states import ObjectiveContext, StateLearning, distance, exactly

WEIGHTS = (1.0, 10.0, 10.0)

BANDWIDTHS = (0.001, 0.01, 0.05, 0.1, 0.2, 1.0, 2.0)


class CFLObjective(StateLearning):
    whole_batches: ClassVar[bool] = True
    last_block_alone: ClassVar[bool] = True

    def __init__(self, setting: ObjectiveContext) -> None:
        super().__init__(setting)
        widths, common = [states.width for states in setting.states], max(1, setting.width // 4)
        self.weights = setting.weights(*WEIGHTS)
        self.student_map = nn.Linear(setting.width, 2 * common)
        self.teacher_maps = nn.ModuleList(nn.Linear(width, 2 * common) for width in widths)
        self.extractor = nn.Sequential(nn.Linear(2 * common, common), nn.ReLU(), nn.Linear(common, common))
        self.decoders = nn.ModuleList(nn.Linear(common, width) for width in widths)

    def __call__(self, logits: torch.Tensor, batch: dict[str, Any], /) -> torch.Tensor:
        with exactly(logits):
            there = self.there(batch)
            student = self.extractor(self.student_map(self.student(batch)[:, 0, 0]))
            apart, reconstruction = logits.new_zeros(()), logits.new_zeros(len(logits))
            for states, into, back in zip(self.teachers(batch), self.teacher_maps, self.decoders, strict=True):
                common = self.extractor(into(states))
                apart = apart + discrepancy(normalize(student, dim=-1), normalize(common[:, 0, 0], dim=-1))
                reconstruction = reconstruction + distance(back(common), states, there)
            own, alike, again = self.weights
            return own * self.targets(logits, batch) + alike * apart + again * reconstruction


def discrepancy(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """MMD^2 of two samples [n, W] under the sum of Gaussian kernels of all bandwidths (the biased estimate, >= 0)."""
    return _kernel(one, one).mean() + _kernel(other, other).mean() - 2 * _kernel(one, other).mean()


def _kernel(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    squared = (one[:, None] - other[None]).square().sum(-1)
    scales = squared.new_tensor([1 / (2 * width**2) for width in BANDWIDTHS])
    return torch.exp(-squared[..., None] * scales).sum(-1)


def phases(setting: ObjectiveContext) -> list[tuple[str, Objective]]:
    return [("", CFLObjective(setting))]
