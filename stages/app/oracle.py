"""Compares the targets with those of an oracle, a model with all labels: `build-targets --oracle`.

KL(target || oracle) is finite because an oracle's softmax is never zero.
"""

from __future__ import annotations

from pathlib import Path

from amalgam.data.arrays import Array
from amalgam.data.lazy import np
from amalgam.data.parquet import matrix
from amalgam.pipeline.errors import ExperimentError
from amalgam.pipeline.execution.stage import Run
from amalgam.stages.build_targets.stage import read_targets, target_facts
from amalgam.stages.common.corpus import fields, tables
from amalgam.stages.common.load import load_student, train_part


def show_divergence(run: Run, folder: Path) -> None:
    """Prints the mean divergence of all texts, and of texts of large and of small weight."""
    facts = target_facts(run)
    if facts["objective"] != "kl":
        what = f"targets.mode: {run.experiment.targets.mode} has no distribution over all labels to compare"
        raise ExperimentError(what, where="--oracle", fix="remove --oracle, or choose another targets.mode")
    oracle = load_student(run, folder, facts["labels"], where="--oracle")
    divergences, weights = [], []
    for rows, targets in zip(tables(run.store, train_part(run)), read_targets(run), strict=True):
        target = matrix(targets.column("target")).astype(np.float64)
        log_target = np.log(np.where(target > 0, target, 1.0))
        divergences.append((target * (log_target - _log_softmax(oracle.logits(fields(rows))))).sum(axis=1))
        weights.append(targets.column("weight").to_numpy())
    divergence, weight = np.concatenate(divergences), np.concatenate(weights)
    for name, group in (("all", weight >= 0), ("weight >= 0.5", weight >= 0.5), ("weight < 0.5", weight < 0.5)):
        if group.any():
            run.console.result(f"KL to the oracle, {name}: {divergence[group].mean():.3f} nats (n={group.sum():,})")


def _log_softmax(logits: Array) -> Array:
    top = logits.max(axis=-1, keepdims=True)
    result: Array = logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))
    return result
