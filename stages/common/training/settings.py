"""Settings of one training run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Training:
    epochs: int
    learning_rate: float
    batch_size: int
    """Rows of one step, over all processes and accumulated parts together."""
    accumulate: int
    warmup: float
    """Share of all steps."""
    weight_decay: float
    clip: float
    evaluate_every: int
    seed: int
    temperature: float = 1.0
    checkpoint_seconds: float = 120
    objective_rate: float | None = None
    """Learning rate of the objective's own weights; None: the model's."""
