"""MT-BERT (Wu et al. 2021): the targets, and each block of the student led to every teacher's by a map of its own.

loss = targets + sum_i sum_j MSE(student_j, W_ij teacher_ij)
A block is the mean of its share of the teacher's layers, where the paper takes the last of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from amalgam.stages.common.training.learner import Objective
from amalgam.stages.train_student.objectives.states import ObjectiveContext, StateLearning, distance, exactly

WEIGHTS = (1.0, 1.0, 0.0)
"""Nothing is reconstructed."""


class MTBertObjective(StateLearning):
    def __init__(self, setting: ObjectiveContext) -> None:
        super().__init__(setting)
        self.weights = setting.weights(*WEIGHTS)
        widths = [states.width for states in setting.states]
        maps = [nn.Linear(width, setting.width, bias=False) for width in widths for _ in range(self.blocks)]
        for one in maps:
            nn.init.eye_(one.weight)
        self.maps = nn.ModuleList(maps)

    def __call__(self, logits: torch.Tensor, batch: dict[str, Any], /) -> torch.Tensor:
        with exactly(logits):
            there, student = self.there(batch), self.student(batch)
            apart = logits.new_zeros(len(logits))
            for place, states in enumerate(self.teachers(batch)):
                maps = self.maps[place * self.blocks : (place + 1) * self.blocks]
                led = torch.stack([one(states[:, :, block]) for block, one in enumerate(maps)], dim=2)
                apart = apart + distance(student, led, there)
            own, alike, _ = self.weights
            loss: torch.Tensor = own * self.targets(logits, batch) + alike * apart
            return loss


def phases(setting: ObjectiveContext) -> list[tuple[str, Objective]]:
    return [("", MTBertObjective(setting))]
