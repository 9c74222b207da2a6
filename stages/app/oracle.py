"""Compares the targets with those of an oracle, a model with all labels: `build-targets --oracle`.

The direction is KL(oracle || target), as in Figure 4 of the MUKA paper. It is infinite for hard targets, whose other
labels have probability 0; their first labels are compared too.
"""

from __future__ import annotations

from pathlib import Path

from amalgam.data.arrays import Array, entropy_nats, softmax
from amalgam.data.lazy import np
from amalgam.data.parquet import matrix
from amalgam.pipeline.console import counted
from amalgam.pipeline.errors import ExperimentError
from amalgam.pipeline.execution.stage import Run
from amalgam.stages.build_targets.stage import read_targets, target_facts
from amalgam.stages.common.corpus import fields, tables
from amalgam.stages.common.load import load_student, train_part
from amalgam.stages.target_methods import gives_label_distributions


def show_divergence(run: Run, folder: Path) -> None:
    """Prints the mean divergence and the agreement of all texts, and of texts of large and of small weight."""
    facts = target_facts(run)
    if not gives_label_distributions(facts["objective"]):
        what = f"targets.mode: {run.experiment.targets.mode} has no distribution over all labels to compare"
        raise ExperimentError(what, where="--oracle", fix="remove --oracle, or choose another targets.mode")
    oracle = load_student(run, folder, facts["labels"], where="the oracle")
    parts = []
    for rows, table in zip(tables(run.store, train_part(run)), read_targets(run), strict=True):
        target, logits = matrix(table.column("target")), oracle.logits(fields(rows))
        same = target.argmax(axis=1) == logits.argmax(axis=1)
        parts.append(np.stack([divergence(logits, target), same, table.column("weight").to_numpy()]))
    nats, same, weight = np.concatenate(parts, axis=1)
    for name, group in (("all", weight >= 0), ("weight >= 0.5", weight >= 0.5), ("weight < 0.5", weight < 0.5)):
        if group.any():
            agreeing = f"the same first label for {same[group].mean():.3f}"
            run.console.result(f"KL(oracle || target), {name}: {_mean(nats[group])}, {agreeing} (n={group.sum():,})")


def divergence(logits: Array, target: Array) -> Array:
    """Returns KL(oracle || target) in nats for each text, from the oracle's logits; infinite where a target has a 0."""
    oracle = softmax(logits.astype(np.float64))
    with np.errstate(divide="ignore"):
        return -entropy_nats(oracle) - (oracle * np.log(target.astype(np.float64))).sum(axis=1)


def _mean(nats: Array) -> str:
    finite = np.isfinite(nats)
    if finite.all():
        return f"{nats.mean():.3f} nats"
    others = f"; {nats[finite].mean():.3f} nats for the others" if finite.any() else ""
    return f"infinite, as {counted(int((~finite).sum()), 'target', 'has', 'have')} a label of probability 0{others}"
