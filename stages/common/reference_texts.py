"""Who asks how foreign texts are to teachers, by which measure, and which texts and states that is learned from."""

from __future__ import annotations

from amalgam.pipeline.config.schema import COMPARATIVE, ExperimentConfig
from amalgam.pipeline.execution.stage import Run
from amalgam.stages.common.corpus import Part, part_of, train_part
from amalgam.stages.common.generated_texts import HELD_OUT
from amalgam.stages.target_methods import weighs_by_domain

MEASURES = COMPARATIVE


def measure_of(experiment: ExperimentConfig) -> str | None:
    """None: nothing asks. Beside other targets stratanet's states are weighed by rmd."""
    said = experiment.targets.uncertainty
    if experiment.objective.name == "stratanet":
        return said if said in MEASURES else "rmd"
    return said if weighs_by_domain(experiment.targets) else None


def reference_part(run: Run) -> Part:
    """What is learned from: the held-out generated texts, or the training texts where there are none."""
    return part_of(run, HELD_OUT) or train_part(run)


def extra_parts(run: Run) -> list[Part]:
    """Parts that teachers are asked about for this alone."""
    held_out = part_of(run, HELD_OUT) if measure_of(run.experiment) else None
    return [held_out] if held_out else []
