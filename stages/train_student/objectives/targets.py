"""Losses on the targets, by the name in the manifest of build-targets; each reads fp32 logits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from amalgam.stages.common.training.learner import Objective, RestrictedKL, WeightedKL

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LogitMSE:
    """Shen et al. 2019: weight * the mean squared difference from the concatenated logits of all teachers.

    A label that several teachers share is compared with each of them.
    """

    columns: tuple[int, ...]
    """Each logit's label in the union."""

    def __call__(self, logits: torch.Tensor, batch: dict[str, torch.Tensor], /) -> torch.Tensor:
        squared = (logits[:, list(self.columns)] - batch["targets"]).square()
        return batch["weights"] * squared.mean(dim=-1)

    def parameters(self) -> Iterable[torch.nn.Parameter]:
        return ()


@dataclass(frozen=True)
class MTBertLoss:
    """MT-BERT: weight * (CE(teachers' weighted sum at t, softmax(logits / t)) + CE(gold, softmax(logits))).

    Targets are the concatenation of that sum and the one-hot gold label.
    """

    temperature: float = 1.0

    def __call__(self, logits: torch.Tensor, batch: dict[str, torch.Tensor], /) -> torch.Tensor:
        from torch.nn.functional import log_softmax

        teachers, gold = batch["targets"].chunk(2, dim=-1)
        from_teachers = (teachers * log_softmax(logits / self.temperature, dim=-1)).sum(dim=-1)
        return -batch["weights"] * (from_teachers + (gold * log_softmax(logits, dim=-1)).sum(dim=-1))

    def parameters(self) -> Iterable[torch.nn.Parameter]:
        return ()


def targets_objective(facts: Mapping[str, Any]) -> Objective:
    """Returns the loss that the facts of build-targets name."""
    temperature = float(facts["student_temperature"])
    if facts["objective"] == "restricted":
        return RestrictedKL(_tuples(facts["columns"]), temperature)
    if facts["objective"] == "scores":
        return LogitMSE(tuple(column for columns in _tuples(facts["columns"]) for column in columns))
    return MTBertLoss(temperature) if facts["objective"] == "mt-bert" else WeightedKL(temperature)


def _tuples(columns: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(column) for column in row) for row in columns)
