"""Amalgamates the teachers' states of each block by auto-encoders (Shen et al. 2019): `dfa` and `layerwise`.

An auto-encoder compresses the concatenated states of all teachers (DFA) or of two at a time (IFA) to the student's
width. In IFA the code of two teachers is merged with the next one. It learns from its own reconstruction alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from amalgam.pipeline.errors import ModelError
from amalgam.stages.train_student.objectives.states import ObjectiveContext, Phases, StateLearning, distance, in_fp32


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
    """The auto-encoders of every block."""

    def __init__(self, widths: Sequence[int], width: int, blocks: int, *, by_two: bool) -> None:
        super().__init__()
        self.by_two = by_two and len(widths) > 1
        steps = _by_two(widths, width) if self.by_two else [(widths, [1 / len(widths)] * len(widths))]
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
        first, rest = (states[:2], states[2:]) if self.by_two else (states, [])
        code, error = autoencoders[0](torch.cat(first, dim=-1), token_mask)
        for autoencoder, states_of_next in zip(autoencoders[1:], rest, strict=True):
            code, next_error = autoencoder(torch.cat([code, states_of_next], dim=-1), token_mask)
            error = error + next_error
        return code, error


def _by_two(widths: Sequence[int], width: int) -> list[tuple[Sequence[int], Sequence[float]]]:
    """Returns each step's input widths and shares: the code of n teachers counts n times as much as the next one."""
    first, *rest = [(widths[0], widths[1]), *((width, teacher_width) for teacher_width in widths[2:])]
    return [(first, (1 / 2, 1 / 2)), *((pair, (1 - 1 / n, 1 / n)) for n, pair in enumerate(rest, 3))]


class Adapter(nn.Module):
    """FAM: a linear map per block that starts as the identity; if it does not learn, it stays the identity."""

    def __init__(self, width: int, blocks: int, *, learns: bool) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks if learns else 0))
        for linear in self.maps:
            nn.init.eye_(linear.weight)  # type: ignore[arg-type]
            nn.init.zeros_(linear.bias)  # type: ignore[arg-type]

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Maps [B, T, blocks, W] to the same shape."""
        if not len(self.maps):
            return states
        return torch.stack([linear(states[:, :, block]) for block, linear in enumerate(self.maps)], dim=2)


class DFAObjective(StateLearning):
    """DFA as in MUKA's baseline: the targets, and each block of the student close to the amalgamated states.

    loss = targets + sum_b MSE(FAM_b(student_b), amalgamated_b) + sum_b MSE(decoder_b, teachers_b)
    """

    def __init__(self, context: ObjectiveContext) -> None:
        super().__init__(context)
        widths = [states.width for states in context.states]
        self.weights = context.weights(1.0, 1.0, 1.0)
        self.amalgamation = Amalgamation(widths, context.width, self.blocks, by_two=False)
        self.adapter = Adapter(context.width, self.blocks, learns=True)

    def __call__(self, logits: torch.Tensor, batch: dict[str, Any], /) -> torch.Tensor:
        with in_fp32(logits):
            mask = self.token_mask(batch)
            amalgamated, reconstruction = self.amalgamation(self.teachers(batch), mask)
            error = distance(self.adapter(self.student(batch)), amalgamated, mask)
            of_targets, of_states, of_decoder = self.weights
            terms = of_targets * self.targets(logits, batch), of_states * error, of_decoder * reconstruction
            loss: torch.Tensor = terms[0] + terms[1] + terms[2]
            return loss


class LayerwiseObjective(StateLearning):
    """Each layer of the student learns the step between two adapted states (Shen et al. 2019).

    With a_l the amalgamated states of block l, let g_l = FAM_l(a_l). Layer l reads g_(l-1) instead of the output of the
    layer below, and learns to return g_l. The first layer reads the student's embeddings. The head reads g_L and learns
    the targets. The student itself has no FAM.
    """

    def __init__(self, context: ObjectiveContext) -> None:
        super().__init__(context)
        config, widths = context.config, [states.width for states in context.states]
        self.weights = context.weights(1.0, 1.0, 1.0)
        self.amalgamation = Amalgamation(widths, context.width, self.blocks, by_two=config.amalgamation == "ifa")
        self.adapter = Adapter(context.width, self.blocks, learns=config.adapter)
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
            of_targets, of_states, of_decoder = self.weights
            return of_targets * self.targets(logits, batch) + of_states * error + of_decoder * self.reconstruction

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
