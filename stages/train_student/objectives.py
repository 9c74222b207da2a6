"""OBJECTIVES: one class for each value of `objective.name` that learns from texts, with its loss and its phases.

A new objective is a class here, a line in OBJECTIVES, and its inputs in OBJECTIVE_INPUTS of target_methods.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.functional import normalize

from amalgam.pipeline.errors import ModelError
from amalgam.stages.common.inference.batches import RowNumbers
from amalgam.stages.train_student.state_learning import (
    Amalgamation,
    BlockMaps,
    ObjectiveContext,
    Phases,
    StateLearning,
    Strata,
    distance,
    in_fp32,
)

BANDWIDTHS = (0.001, 0.01, 0.05, 0.1, 0.2, 1.0, 2.0)
"""Widths of the Gaussian kernels of `cfl`."""
CFL_WEIGHT = 10.0
"""Weight of the terms on states in `cfl`, next to the targets (Luo et al. 2019)."""
GUARD = 1.0
"""Weight of the loss of StrataNet's heads."""


class DFAObjective(StateLearning):
    """DFA as in MUKA's baseline: the targets, and each block of the student close to the amalgamated states.

    loss = targets + sum_b MSE(FAM_b(student_b), amalgamated_b) + sum_b MSE(decoder_b, teachers_b); FAM_b is linear.
    """

    def __init__(self, context: ObjectiveContext) -> None:
        super().__init__(context)
        self.amalgamation = Amalgamation(context.widths, context.width, self.blocks, by_two=False)
        self.adapter = BlockMaps(context.width, context.width, self.blocks)

    def __call__(self, logits: torch.Tensor, batch: dict[str, Any], /) -> torch.Tensor:
        with in_fp32(logits):
            mask = self.token_mask(batch)
            amalgamated, reconstruction = self.amalgamation(self.teachers(batch), mask)
            error = distance(self.adapter(self.student(batch)), amalgamated, mask)
            loss: torch.Tensor = self.targets(logits, batch) + error + reconstruction
            return loss


class LayerwiseObjective(StateLearning):
    """Each layer of the student learns the step between two adapted states (Shen et al. 2019).

    With a_l the amalgamated states of block l, let g_l = FAM_l(a_l). Layer l reads g_(l-1) instead of the output of the
    layer below, and learns to return g_l. The first layer reads the student's embeddings. The head reads g_L and learns
    the targets. The student itself has no FAM.
    """

    def __init__(self, context: ObjectiveContext) -> None:
        super().__init__(context)
        config, width = context.config, context.width
        by_two = config.amalgamation == "ifa"
        self.amalgamation = Amalgamation(context.widths, width, self.blocks, by_two=by_two)
        self.adapter = BlockMaps(width, width, self.blocks) if config.adapter else nn.Identity()
        self.adapted = torch.empty(0)
        self.reconstruction = torch.empty(0)
        self.outputs: list[torch.Tensor] = []

    @contextmanager
    def model_context(self, model: nn.Module, batch: dict[str, Any]) -> Iterator[None]:
        """Records each layer's output and replaces it by the adapted state of its block."""
        with in_fp32(batch["attention_mask"]):
            amalgamated, self.reconstruction = self.amalgamation(self.teachers(batch), self.token_mask(batch))
            self.adapted, self.outputs = self.adapter(amalgamated), []
        hooks = [layer.register_forward_hook(self._replaced) for layer in layers_of(model, self.blocks)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _replaced(self, _layer: nn.Module, _inputs: Any, output: Any) -> Any:
        own = output[0] if isinstance(output, tuple) else output
        adapted = self.adapted[:, :, len(self.outputs)].to(own.dtype)
        self.outputs.append(own)
        return (adapted, *output[1:]) if isinstance(output, tuple) else adapted

    def __call__(self, logits: torch.Tensor, batch: dict[str, Any], /) -> torch.Tensor:
        with in_fp32(logits):
            outputs = torch.stack(self.outputs, dim=2).to(self.dtype)
            error = distance(outputs, self.adapted.detach(), self.token_mask(batch))
            return self.targets(logits, batch) + error + self.reconstruction

    @classmethod
    def phases(cls, context: ObjectiveContext) -> Phases:
        """Returns layer-wise learning, then end-to-end learning of the targets, as far as the schedule has them."""
        schedule = context.config.schedule
        first: Phases = [] if schedule == "joint" else [("layer-wise", cls(context))]
        return first if schedule == "layer-wise" else [*first, ("joint", context.targets)]


def layers_of(model: nn.Module, count: int) -> nn.ModuleList:
    """Returns the student's transformer layers; refuses models that repeat one layer."""
    for module in model.base_model.modules():  # type: ignore[union-attr]
        if isinstance(module, nn.ModuleList) and len(module) == count and len({type(layer) for layer in module}) == 1:
            return module
    raise ModelError(
        f"the student's encoder has no list of {count} layers",
        where="objective.name: layerwise",
        fix="set objective.schedule=joint, or use a BERT-like encoder",
    )


class MTBertObjective(StateLearning):
    """MT-BERT (Wu et al. 2021): targets + sum_i sum_b MSE(student_b, W_ib teacher_ib).

    A block is the mean of its share of the teacher's layers, where the paper takes the last of them.
    """

    def __init__(self, context: ObjectiveContext) -> None:
        super().__init__(context)
        maps = [BlockMaps(width, context.width, self.blocks, bias=False) for width in context.widths]
        self.maps = nn.ModuleList(maps)

    def __call__(self, logits: torch.Tensor, batch: dict[str, Any], /) -> torch.Tensor:
        with in_fp32(logits):
            mask, student = self.token_mask(batch), self.student(batch)
            error = logits.new_zeros(len(logits))
            for states, maps in zip(self.teachers(batch), self.maps, strict=True):
                error = error + distance(student, maps(states), mask)
            return self.targets(logits, batch) + error


class CFLObjective(StateLearning):
    """Common feature learning (Luo et al. 2019) on the pooled last block; MMD compares the texts of a step.

    loss = targets + 10 sum_i MMD(student, teacher_i) + 10 sum_i MSE(decoder_i, teacher_i)
    Each network has a linear map into the shared extractor, since their widths differ.
    """

    whole_batches: ClassVar[bool] = True
    last_block_only: ClassVar[bool] = True

    def __init__(self, context: ObjectiveContext) -> None:
        super().__init__(context)
        common = max(1, context.width // 4)
        self.student_map = nn.Linear(context.width, 2 * common)
        self.teacher_maps = nn.ModuleList(nn.Linear(width, 2 * common) for width in context.widths)
        self.extractor = nn.Sequential(nn.Linear(2 * common, common), nn.ReLU(), nn.Linear(common, common))
        self.decoders = nn.ModuleList(nn.Linear(common, width) for width in context.widths)

    def __call__(self, logits: torch.Tensor, batch: dict[str, Any], /) -> torch.Tensor:
        with in_fp32(logits):
            mask = self.token_mask(batch)
            student = self.extractor(self.student_map(self.student(batch)[:, 0, 0]))
            gap, reconstruction = logits.new_zeros(()), logits.new_zeros(len(logits))
            for states, linear, decoder in zip(self.teachers(batch), self.teacher_maps, self.decoders, strict=True):
                common = self.extractor(linear(states))
                gap = gap + discrepancy(normalize(student, dim=-1), normalize(common[:, 0, 0], dim=-1))
                reconstruction = reconstruction + distance(decoder(common), states, mask)
            return self.targets(logits, batch) + CFL_WEIGHT * gap + CFL_WEIGHT * reconstruction


def discrepancy(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns MMD^2 of two samples [n, W] under a sum of Gaussian kernels (the biased estimate, >= 0)."""

    def kernel(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        squared = (a[:, None] - b[None]).square().sum(-1)
        scales = squared.new_tensor([1 / (2 * width**2) for width in BANDWIDTHS])
        return torch.exp(-squared[..., None] * scales).sum(-1)

    return kernel(a, a).mean() + kernel(b, b).mean() - 2 * kernel(a, b).mean()


class StrataNetObjective(StateLearning):
    """StrataNet (Vijayaraghavan et al. 2024): amalgamates the teachers' states of each block by their confidences.

    loss = alpha sum_b |norm(P_b student_b) - norm(amalgamated_b)|^2 + (1 - alpha) targets + mean_b targets of head_b
    (amalgamated_b). Both sides of the first term learn and could become constant; the heads prevent it.
    """

    def __init__(self, context: ObjectiveContext, guard: float = GUARD) -> None:
        super().__init__(context)
        if context.confidence is None:
            raise AssertionError("no confidences")  # the stage reads them
        width, blocks, fusion = context.width, range(self.blocks), context.config.fusion
        self.alpha, self.guard, self.confidence = context.config.alpha, guard, context.confidence
        self.fusion = nn.ModuleList(Strata(context.widths, width, fusion) for _ in blocks)
        self.maps = nn.ModuleList(nn.Linear(width, width) for _ in blocks)
        self.heads = nn.ModuleList(nn.Linear(width, context.labels) for _ in blocks)

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


OBJECTIVES: Mapping[str, Callable[[ObjectiveContext], Phases]] = {
    "targets": lambda context: [("", context.targets)],
    "layerwise": LayerwiseObjective.phases,
    "dfa": DFAObjective.phases,
    "cfl": CFLObjective.phases,
    "mt-bert": MTBertObjective.phases,
    "stratanet": StrataNetObjective.phases,
}
