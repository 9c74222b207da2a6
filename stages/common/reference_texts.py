"""Who asks how foreign texts are to teachers, by which measure, and which texts and states that is learned from."""

from __future__ import annotations

from amalgam.pipeline.config.schema import COMPARATIVE, ExperimentConfig
from amalgam.stages.target_methods import weighs_by_domain

MEASURES = COMPARATIVE


def measure_of(experiment: ExperimentConfig) -> str | None:
    """None: nothing asks. Beside other targets stratanet's states are weighed by rmd."""
    said = experiment.targets.uncertainty
    if experiment.objective.name == "stratanet":
        return said if said in MEASURES else "rmd"
    return said if weighs_by_domain(experiment.targets) else None
