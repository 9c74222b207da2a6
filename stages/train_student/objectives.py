"""OBJECTIVES: one class for each value of `objective.name` that learns from texts, with its loss and its phases.

A new objective is a class here, a line in OBJECTIVES, and its inputs in OBJECTIVE_INPUTS of objective_inputs.py.
Texts B, tokens T (1 for pooled states), blocks, widths W. Everything is computed in the precision of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.functional import normalize

from amalgam.data.arrays import RowNumbers
from amalgam.pipeline.config.schema import Objective
from amalgam.stages.common.cached.read import States
from amalgam.stages.common.inference.fast_encoder import mean_over_tokens
from amalgam.stages.common.inference.states import in_blocks
from amalgam.stages.common.training.losses import Batch, Loss
from amalgam.stages.objective_inputs import no_layers

HEADS = 8
"""Attention heads of a Strata; fewer if they do not divide the width."""
WIDER = 4
"""Ratio of the feed-forward width to the width of its Transformer layer."""
BANDWIDTHS = (0.001, 0.01, 0.05, 0.1, 0.2, 1.0, 2.0)
"""Widths of the Gaussian kernels of `cfl`."""
CFL_WEIGHT = 10.0
"""Weight of the terms on states in `cfl`, next to the targets (Luo et al. 2019)."""
GUARD = 1.0
"""Weight of the loss of StrataNet's heads."""


@dataclass(frozen=True)
class ObjectiveContext:
    config: Objective
    targets: Loss
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


Phases = Sequence[tuple[str, Loss]]
"""Phases of a training by name; a single phase has no name."""


class StateLearning(Loss, nn.Module):
    """Adds the teachers' states [B, T, blocks, W] to each batch; subclasses define the loss."""

    reads_states: ClassVar[bool] = True
    last_block_only: ClassVar[bool] = False

    def __init__(self, context: ObjectiveContext) -> None:
        super().__init__()
        self.targets = context.targets
        self.states = list(context.states)
        self.by_token = context.config.states == "tokens"
        self.blocks = 1 if self.last_block_only else context.states[0].blocks

    def extra_batch(self, rows: RowNumbers) -> Batch:
        blocks = slice(-1, None) if self.last_block_only else slice(None)
        tensors = [torch.from_numpy(states.take(rows, blocks)) for states in self.states]
        return {f"teacher {number}": values for number, values in enumerate(tensors)}

    @classmethod
    def phases(cls, context: ObjectiveContext) -> Phases:
        return [("", cls(context))]

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def teachers(self, batch: Batch) -> list[torch.Tensor]:
        return [batch[f"teacher {number}"].to(self.dtype) for number in range(len(self.states))]

    def student(self, batch: Batch) -> torch.Tensor:
        """Returns the student's states [B, T, blocks, W], pooled if the teachers' are."""
        states: Any = batch["states"]  # a tuple: the loop adds it
        states = states[-1:] if self.last_block_only else states
        blocks = in_blocks(states, self.blocks).to(self.dtype)
        if self.by_token:
            return blocks
        means = mean_over_tokens(blocks.flatten(2), batch["attention_mask"])
        return means.reshape(len(blocks), 1, self.blocks, -1)

    def token_mask(self, batch: Batch) -> torch.Tensor:
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


# ---- objectives


class DFAObjective(StateLearning):
    """DFA as in MUKA's baseline: the targets, and each block of the student close to the amalgamated states.

    loss = targets + sum_b MSE(FAM_b(student_b), amalgamated_b) + sum_b MSE(decoder_b, teachers_b); FAM_b is linear.
    """

    def __init__(self, context: ObjectiveContext) -> None:
        super().__init__(context)
        self.amalgamation = Amalgamation(context.widths, context.width, self.blocks, by_two=False)
        self.adapter = BlockMaps(context.width, context.width, self.blocks)

    def __call__(self, logits: torch.Tensor, batch: Batch, /) -> torch.Tensor:
        with in_fp32(logits):
            mask = self.token_mask(batch)
            amalgamated, reconstruction = self.amalgamation(self.teachers(batch), mask)
            error = distance(self.adapter(self.student(batch)), amalgamated, mask)
            return self.targets(logits, batch) + error + reconstruction


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
    def model_context(self, model: nn.Module, batch: Batch) -> Iterator[None]:
        """Records each layer's output and replaces it by the adapted state of its block."""
        with in_fp32(batch["attention_mask"]):
            amalgamated, self.reconstruction = self.amalgamation(self.teachers(batch), self.token_mask(batch))
            self.adapted, self.outputs = self.adapter(amalgamated), []
        with ExitStack() as hooks:
            for layer in layers_of(model, self.blocks):
                hooks.enter_context(layer.register_forward_hook(self._replaced))
            yield
        if len(self.outputs) != self.blocks:
            raise no_layers(self.blocks)

    def _replaced(self, _layer: nn.Module, _inputs: Any, output: Any) -> Any:
        state = output[0] if isinstance(output, tuple) else output
        if len(self.outputs) == self.blocks or getattr(state, "shape", None) != self.adapted[:, :, 0].shape:
            raise no_layers(self.blocks)
        adapted = self.adapted[:, :, len(self.outputs)].to(state.dtype)
        self.outputs.append(state)
        return (adapted, *output[1:]) if isinstance(output, tuple) else adapted

    def __call__(self, logits: torch.Tensor, batch: Batch, /) -> torch.Tensor:
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
    raise no_layers(count)


class MTBertObjective(StateLearning):
    """MT-BERT (Wu et al. 2021): targets + sum_i sum_b MSE(student_b, W_ib teacher_ib).

    A block is the mean of its share of the teacher's layers, where the paper takes the last of them.
    """

    def __init__(self, context: ObjectiveContext) -> None:
        super().__init__(context)
        maps = [BlockMaps(width, context.width, self.blocks, bias=False) for width in context.widths]
        self.maps = nn.ModuleList(maps)

    def __call__(self, logits: torch.Tensor, batch: Batch, /) -> torch.Tensor:
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

    def __call__(self, logits: torch.Tensor, batch: Batch, /) -> torch.Tensor:
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

    def extra_batch(self, rows: RowNumbers) -> Batch:
        return {**super().extra_batch(rows), "confidence": torch.from_numpy(self.confidence[rows])}

    def amalgamated(self, batch: Batch) -> list[torch.Tensor]:
        """Returns [B, W] of each block."""
        teachers = [states[:, 0] for states in self.teachers(batch)]
        confidence = batch["confidence"].to(self.dtype)
        return [
            fusion([states[:, block] for states in teachers], confidence[:, block])
            for block, fusion in enumerate(self.fusion)
        ]

    def __call__(self, logits: torch.Tensor, batch: Batch, /) -> torch.Tensor:
        with in_fp32(logits):
            student = self.student(batch)[:, 0]
            error, guard = student.new_zeros(len(student)), student.new_zeros(len(student))
            for block, state in enumerate(self.amalgamated(batch)):
                mapped = normalize(self.maps[block](student[:, block]), dim=-1)
                error = error + (mapped - normalize(state, dim=-1)).square().sum(dim=-1)
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
