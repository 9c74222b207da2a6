"""The measure of how far a text is from a teacher's domain, if the configuration needs one."""

from __future__ import annotations

from amalgam.pipeline.config.schema import COMPARATIVE, ExperimentConfig
from amalgam.stages.target_methods import weighs_by_domain

MEASURES = COMPARATIVE


def measure_of(experiment: ExperimentConfig) -> str | None:
    """Returns the measure, or None without one; stratanet uses rmd where the targets name no measure."""
    uncertainty = experiment.targets.uncertainty
    if experiment.objective.name == "stratanet":
        return uncertainty if uncertainty in MEASURES else "rmd"
    return uncertainty if weighs_by_domain(experiment.targets) else None
