"""Losses on cached targets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class RestrictedKL:
    """UHC: for each teacher KL(its distribution || the student's over that teacher's labels), summed; times T^2.

    Targets are the teachers' distributions side by side; `columns` says which labels of the union they are over.
    """

    columns: tuple[tuple[int, ...], ...]
    temperature: float = 1.0

    def __call__(self, logits: torch.Tensor, batch: dict[str, torch.Tensor], /) -> torch.Tensor:
        import torch
        from torch.nn.functional import kl_div, log_softmax

        parts, start = [], 0
        for own in self.columns:
            target = batch["targets"][:, start : start + len(own)]
            student = log_softmax(logits[:, list(own)] / self.temperature, dim=-1)
            parts.append(kl_div(student, target, reduction="none").sum(dim=-1))
            start += len(own)
        return batch["weights"] * self.temperature**2 * torch.stack(parts).sum(dim=0)

    def parameters(self) -> Iterable[torch.nn.Parameter]:
        return ()
