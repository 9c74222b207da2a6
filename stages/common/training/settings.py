"""Settings of one training run, and the services it uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from amalgam.pipeline.console import Console
from amalgam.pipeline.execution.faults import InterruptHandler


@dataclass(frozen=True)
class Training:
    epochs: int
    learning_rate: float
    batch_size: int
    """Rows per step, over all processes and accumulated parts."""
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
    """Learning rate of the objective's own weights; None: the model's rate."""


@dataclass(frozen=True)
class TrainingServices:
    """Console, interrupts and files of the run that a training belongs to."""

    console: Console
    interrupts: InterruptHandler
    workspace: Path
    """Root of the store: logs are written below it, and checkpoints are inside."""
    trackers: Sequence[str] = ()
    cpu: bool = False
