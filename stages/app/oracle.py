"""How far the targets are from those of an oracle: a model that knows all labels, such as a supervised student.

KL(target || oracle), finite because an oracle's softmax is nowhere zero; apart for texts of large and of small weight.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from amalgam.data.parquet import matrix
from amalgam.pipeline.errors import ExperimentError
from amalgam.pipeline.execution.stage import Run
from amalgam.stages.build_targets.read import read_targets
from amalgam.stages.common.corpus import fields, tables, train_part
from amalgam.stages.common.inference.classifier import Classifier, log_softmax

Array = np.ndarray[Any, np.dtype[Any]]


def show_divergence(run: Run, folder: Path) -> None:
    if run.result("build-targets").facts["objective"] != "kl":
        what = f"targets of mode {run.experiment.targets.mode} are no distribution over all labels, as an oracle's are"
        raise ExperimentError(what, where="--oracle", fix="leave it out, or choose another mode")
    divergence, weight = _divergence(run, folder)
    for name, group in (("all", weight >= 0), ("weight >= 0.5", weight >= 0.5), ("weight < 0.5", weight < 0.5)):
        if group.any():
            run.console.result(f"KL to the oracle, {name}: {divergence[group].mean():.3f} nats (n={group.sum():,})")


def _divergence(run: Run, folder: Path) -> tuple[Array, Array]:
    oracle = Classifier.of_run(run, folder, run.result("build-targets").facts["labels"], where="--oracle")
    found, weights = [], []
    for rows, taught in zip(tables(run, train_part(run)), read_targets(run), strict=True):
        target = matrix(taught.column("target")).astype(np.float64)
        log_target = np.log(np.where(target > 0, target, 1.0))
        found.append((target * (log_target - log_softmax(oracle.logits(fields(rows))))).sum(axis=1))
        weights.append(taught.column("weight").to_numpy())
    return np.concatenate(found), np.concatenate(weights)
