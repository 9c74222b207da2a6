"""DFA as MUKA's baseline has it: the targets, and each block of the student led to the teachers' amalgamated states.

loss = targets + sum_b MSE(FAM_b(student_b), amalgamated_b) + sum_b MSE(decoder_b, teachers_b)
"""

from __future__ import annotations

from typing import Any

import torch

from amalgam.stages.common.training.learner import Objective
from amalgam.stages.train_student.objectives.amalgamation import Adaption, Amalgamation
from amalgam.stages.train_student.objectives.states import ObjectiveContext, StateLearning, distance, exactly

WEIGHTS = (1.0, 1.0, 1.0)


class DFAObjective(StateLearning):
    def __init__(self, setting: ObjectiveContext) -> None:
        super().__init__(setting)
        widths = [states.width for states in setting.states]
        self.weights = setting.weights(*WEIGHTS)
        self.amalgamation = Amalgamation(widths, setting.width, self.blocks, by_two=False)
        self.adapter = Adaption(setting.width, self.blocks, learns=True)

    def __call__(self, logits: torch.Tensor, batch: dict[str, Any], /) -> torch.Tensor:
        with exactly(logits):
            there = self.there(batch)
            amalgamated, reconstruction = self.amalgamation(self.teachers(batch), there)
            apart = distance(self.adapter(self.student(batch)), amalgamated, there)
            own, states, back = self.weights
            loss: torch.Tensor = own * self.targets(logits, batch) + states * apart + back * reconstruction
            return loss


def phases(setting: ObjectiveContext) -> list[tuple[str, Objective]]:
    return [("", DFAObjective(setting))]
