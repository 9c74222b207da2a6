"""Layer-wise amalgamation (Shen et al. 2019): each layer of the student learns its own step between adapted states.

With a_l the teachers' amalgamated states of block l and g_l = FAM_l(a_l), layer l is given g_(l-1) in place of what the
layer below made of the text, and learns to give g_l; the first is given the student's own embeddings, and the head g_L,
from which it learns the targets. The student itself has no FAM: what its layers pass on are adapted states.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from amalgam.pipeline.errors import ModelError
from amalgam.stages.common.training.learner import Objective
from amalgam.stages.train_student.objectives.amalgamation import Adaption, Amalgamation
from amalgam.stages.train_student.objectives.states import ObjectiveContext, StateLearning, distance, exactly

WEIGHTS = (1.0, 1.0, 1.0)


class LayerwiseObjective(StateLearning):
    def __init__(self, setting: ObjectiveContext) -> None:
        super().__init__(setting)
        said, widths = setting.said, [states.width for states in setting.states]
        self.weights = setting.weights(*WEIGHTS)
        self.amalgamation = Amalgamation(widths, setting.width, self.blocks, by_two=said.amalgamation == "ifa")
        self.adapter = Adaption(setting.width, self.blocks, learns=said.adapter)
        self.given = torch.empty(0)
        self.reconstruction = torch.empty(0)
        self.heard: list[torch.Tensor] = []

    @contextmanager
    def around(self, model: nn.Module, batch: dict[str, Any]) -> Iterator[None]:
        """Each layer's output is kept, and the adapted state of its block passed on instead."""
        with exactly(batch["attention_mask"]):
            amalgamated, self.reconstruction = self.amalgamation(self.teachers(batch), self.there(batch))
            self.given, self.heard = self.adapter(amalgamated), []
        hooks = [layer.register_forward_hook(self._instead) for layer in layers_of(model, self.blocks)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _instead(self, _layer: nn.Module, _inputs: Any, output: Any) -> Any:
        own = output[0] if isinstance(output, tuple) else output
        given = self.given[:, :, len(self.heard)].to(own.dtype)
        self.heard.append(own)
        return (given, *output[1:]) if isinstance(output, tuple) else given

    def __call__(self, logits: torch.Tensor, batch: dict[str, Any], /) -> torch.Tensor:
        with exactly(logits):
            made = torch.stack(self.heard, dim=2).to(self.dtype)
            apart = distance(made, self.given.detach(), self.there(batch))
            own, states, back = self.weights
            return own * self.targets(logits, batch) + states * apart + back * self.reconstruction


def layers_of(model: nn.Module, count: int) -> nn.ModuleList:
    """The list of the student's transformer layers; that of a model that repeats one layer has other entries."""
    for module in model.base_model.modules():  # type: ignore[union-attr]
        if isinstance(module, nn.ModuleList) and len(module) == count and len({type(one) for one in module}) == 1:
            return module
    raise ModelError(
        f"the student's encoder has no list of {count} layers to lead one by one",
        where="objective.name: layerwise",
        fix="objective.schedule=joint, or another encoder: BERT-like ones have such a list",
    )


def phases(setting: ObjectiveContext) -> list[tuple[str, Objective]]:
    """Layer-wise learning, then the whole end to end from the targets."""
    schedule = setting.said.schedule
    first: list[tuple[str, Objective]] = [("layer-wise", LayerwiseObjective(setting))] if schedule != "joint" else []
    return [*first, *([("joint", setting.targets)] if schedule != "layer-wise" else [])]
