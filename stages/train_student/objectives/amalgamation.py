"""Squeezing all teachers' states of a block into the student's width and back (Shen et al. 2019), and adapting them.

An auto-encoder takes the teachers' states side by side, all at once (DFA) or two at a time (IFA): there what came out
of two is merged with the next teacher's. It learns from its own reconstruction alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from amalgam.stages.train_student.objectives.states import distance


class Autoencoder(nn.Module):
    """One linear auto-encoder. It begins as the mean of what it takes (by these shares) and copies of that mean.

    From a random map the student would first have to learn the map's own offset, and forget what tells texts apart.
    """

    def __init__(self, widths: Sequence[int], shares: Sequence[float], width: int) -> None:
        super().__init__()
        self.encoder = nn.Linear(sum(widths), width)
        self.decoder = nn.Linear(width, sum(widths))
        same = [torch.eye(width, one) for one in widths]
        with torch.no_grad():
            self.encoder.weight.copy_(torch.cat([share * one for share, one in zip(shares, same, strict=True)], dim=1))
            self.decoder.weight.copy_(torch.cat(same, dim=1).T)
            self.encoder.bias.zero_()
            self.decoder.bias.zero_()

    def forward(self, states: torch.Tensor, there: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, T, W] and, for each text, the reconstruction's mean squared error."""
        code = self.encoder(states)
        error = distance(self.decoder(code)[:, :, None], states[:, :, None], there)
        return code.detach(), error


class Amalgamation(nn.Module):
    """Of every block."""

    def __init__(self, widths: Sequence[int], width: int, blocks: int, *, by_two: bool) -> None:
        super().__init__()
        self.by_two = by_two and len(widths) > 1
        steps = _by_two(widths, width) if self.by_two else [(widths, [1 / len(widths)] * len(widths))]
        self.steps = len(steps)
        self.squeezes = nn.ModuleList(Autoencoder(*step, width) for _ in range(blocks) for step in steps)

    def forward(self, teachers: Sequence[torch.Tensor], there: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of teachers [B, T, blocks, W_i] the amalgamated [B, T, blocks, W], cut off from what learns from it, and the
        error of reconstruction, summed over blocks [B].
        """
        codes, errors = [], []
        for place in range(teachers[0].shape[2]):
            states = [one[:, :, place] for one in teachers]
            squeezes = self.squeezes[place * self.steps : (place + 1) * self.steps]
            code, error = self._merged(squeezes, states, there)
            codes.append(code)
            errors.append(error)
        return torch.stack(codes, dim=2), torch.stack(errors).sum(0)

    def _merged(
        self, squeezes: nn.ModuleList, states: list[torch.Tensor], there: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first, rest = (states[:2], states[2:]) if self.by_two else (states, [])
        code, error = squeezes[0](torch.cat(first, dim=-1), there)
        for squeeze, further in zip(squeezes[1:], rest, strict=True):
            code, more = squeeze(torch.cat([code, further], dim=-1), there)
            error = error + more
        return code, error


def _by_two(widths: Sequence[int], width: int) -> list[tuple[Sequence[int], Sequence[float]]]:
    """What each step takes, and its shares: what came out of n teachers counts n times as much as the next."""
    first, *rest = [(widths[0], widths[1]), *((width, one) for one in widths[2:])]
    return [(first, (1 / 2, 1 / 2)), *((taken, (1 - 1 / n, 1 / n)) for n, taken in enumerate(rest, 3))]


class Adaption(nn.Module):
    """FAM: a linear map for each block, the identity at first; without it the identity for good."""

    def __init__(self, width: int, blocks: int, *, learns: bool) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks if learns else 0))
        for one in self.maps:
            nn.init.eye_(one.weight)  # type: ignore[arg-type]
            nn.init.zeros_(one.bias)  # type: ignore[arg-type]

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """[B, T, blocks, W] to the same."""
        if not len(self.maps):
            return states
        return torch.stack([one(states[:, :, place]) for place, one in enumerate(self.maps)], dim=2)
