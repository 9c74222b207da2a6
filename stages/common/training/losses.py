"""Losses that a training minimises: the interface, and the losses on the targets, which read logits alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import kl_div, log_softmax

from amalgam.data.arrays import RowNumbers
from amalgam.stages.target_methods import LossFacts

Columns = Sequence[Sequence[int]]

Batch = dict[str, torch.Tensor]
"""The encoder's inputs, targets, weights, rows and the tensors of `extra_batch`."""


class Loss:
    """A loss per row. The parameters of a loss that is also an nn.Module are trained with the model's."""

    reads_states: ClassVar[bool] = False
    """The loss reads batch["states"], a tuple of the student's states [B, T, W], one per layer without embeddings."""
    whole_batches: ClassVar[bool] = False
    """The loss compares the rows of a step, so a step cannot be accumulated or divided among processes."""
    recordable: ClassVar[bool] = False
    """The loss always runs the same kernels, and waits for none, so that a CUDA graph can hold them."""

    def __call__(self, logits: torch.Tensor, batch: Batch, /) -> torch.Tensor:
        """Returns the loss per row [B] from fp32 logits [B, C] and a batch of inputs, targets, weights and rows."""
        raise NotImplementedError

    def extra_batch(self, rows: RowNumbers, /) -> Batch:  # noqa: ARG002
        """Returns further tensors of these rows, such as the teachers' states; the loop moves them to the device."""
        return {}

    def model_context(self, model: torch.nn.Module, batch: Batch, /) -> AbstractContextManager[None]:  # noqa: ARG002
        """Returns the context in which the student runs."""
        return nullcontext()


@dataclass(frozen=True)
class WeightedKL(Loss):
    """weight * T^2 * KL(target || softmax(logits / T)); equals cross-entropy for one-hot targets at T = 1."""

    recordable = True
    temperature: float = 1.0

    def __call__(self, logits: torch.Tensor, batch: Batch, /) -> torch.Tensor:
        log_student = log_softmax(logits / self.temperature, dim=-1)
        divergence = kl_div(log_student, batch["targets"], reduction="none").sum(dim=-1)
        return batch["weights"] * self.temperature**2 * divergence


@dataclass(frozen=True)
class RestrictedKL(Loss):
    """UHC: T^2 times the sum over teachers of KL(teacher || student restricted to that teacher's labels).

    Targets are the concatenated distributions of the teachers; `columns` has each teacher's labels in the union.
    """

    columns: Columns
    temperature: float = 1.0

    def __call__(self, logits: torch.Tensor, batch: Batch, /) -> torch.Tensor:
        targets = torch.split(batch["targets"], [len(columns) for columns in self.columns], dim=1)
        parts = []
        for columns, target in zip(self.columns, targets, strict=True):
            student = log_softmax(logits[:, list(columns)] / self.temperature, dim=-1)
            parts.append(kl_div(student, target, reduction="none").sum(dim=-1))
        return batch["weights"] * self.temperature**2 * torch.stack(parts).sum(dim=0)


@dataclass(frozen=True)
class LogitMSE(Loss):
    """Shen et al. 2019: weight * the mean squared difference from the concatenated logits of all teachers.

    A label that several teachers share is compared with each of them.
    """

    columns: Columns

    def __call__(self, logits: torch.Tensor, batch: Batch, /) -> torch.Tensor:
        labels = [column for columns in self.columns for column in columns]
        squared = (logits[:, labels] - batch["targets"]).square()
        return batch["weights"] * squared.mean(dim=-1)


@dataclass(frozen=True)
class MTBertLoss(Loss):
    """MT-BERT: weight * (CE(teachers' weighted sum at t, softmax(logits / t)) + CE(gold, softmax(logits))).

    Targets are the concatenation of that sum and the one-hot gold label.
    """

    recordable = True
    temperature: float = 1.0

    def __call__(self, logits: torch.Tensor, batch: Batch, /) -> torch.Tensor:
        teachers, gold = batch["targets"].chunk(2, dim=-1)
        from_teachers = (teachers * log_softmax(logits / self.temperature, dim=-1)).sum(dim=-1)
        return -batch["weights"] * (from_teachers + (gold * log_softmax(logits, dim=-1)).sum(dim=-1))


def targets_loss(facts: LossFacts) -> Loss:
    temperature, columns = float(facts["student_temperature"]), facts["columns"]
    losses: dict[str, Loss] = {
        "kl": WeightedKL(temperature),
        "restricted": RestrictedKL(columns, temperature),
        "scores": LogitMSE(columns),
        "mt-bert": MTBertLoss(temperature),
    }
    return losses[facts["objective"]]
