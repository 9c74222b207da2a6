"""What a student minimises, by the name that the targets carry; each is a few lines over fp32 logits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from amalgam.stages.common.training.learner import Objective, WeightedKL
from amalgam.stages.common.training.losses import RestrictedKL

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LogitMSE:
    """Shen et al. 2019: weight * the mean squared difference from all teachers' logits, which lie side by side.

    `places`: the label of the union that each of them is of; where teachers share a label, the student's is compared
    with every one of theirs.
    """

    places: tuple[int, ...]

    def __call__(self, logits: torch.Tensor, batch: dict[str, torch.Tensor], /) -> torch.Tensor:
        squared = (logits[:, list(self.places)] - batch["targets"]).square()
        return batch["weights"] * squared.mean(dim=-1)

    def parameters(self) -> Iterable[torch.nn.Parameter]:
        return ()


@dataclass(frozen=True)
class MTBertLoss:
    """MT-BERT: weight * (CE(teachers' weighted sum at t, softmax(logits / t)) + CE(gold, softmax(logits))).

    Targets are that sum and the gold label, side by side.
    """

    temperature: float = 1.0

    def __call__(self, logits: torch.Tensor, batch: dict[str, torch.Tensor], /) -> torch.Tensor:
        from torch.nn.functional import log_softmax

        taught, gold = batch["targets"].chunk(2, dim=-1)
        from_teachers = (taught * log_softmax(logits / self.temperature, dim=-1)).sum(dim=-1)
        return -batch["weights"] * (from_teachers + (gold * log_softmax(logits, dim=-1)).sum(dim=-1))

    def parameters(self) -> Iterable[torch.nn.Parameter]:
        return ()


def objective_of(taught: Mapping[str, Any]) -> Objective:
    """By what build-targets says of its targets."""
    temperature = float(taught["student_temperature"])
    if taught["objective"] == "restricted":
        return RestrictedKL(_tuples(taught["columns"]), temperature)
    if taught["objective"] == "scores":
        return LogitMSE(tuple(place for own in _tuples(taught["columns"]) for place in own))
    return MTBertLoss(temperature) if taught["objective"] == "mt-bert" else WeightedKL(temperature)


def _tuples(columns: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(column) for column in own) for own in columns)
