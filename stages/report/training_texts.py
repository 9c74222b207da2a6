"""Selects the training texts that the report reads, and their part of its identity."""

from __future__ import annotations

from typing import Any

from amalgam.pipeline.config.schema import Targets
from amalgam.pipeline.execution.stage import Run
from amalgam.stages.common.answers.families import passes_counted
from amalgam.stages.common.corpus import Part, part_of
from amalgam.stages.common.load import teachers_of
from amalgam.stages.target_methods import target_method, weighs_by_domain, weighs_together


def taught_part(run: Run) -> Part | None:
    """None where nothing is learned from texts."""
    learns = run.experiment.student.learns and run.experiment.reads_texts
    return part_of(run, "train") if learns else None


def seen_targets(targets: Targets) -> Targets:
    """By what teachers are compared: as the targets do it, or by MUKA's entropy where these compare none.

    A temperature that the targets do not read is nothing to what is shown either.
    """
    method = target_method(targets)
    if "temperature" in method.fields(targets) or weighs_together(targets):
        return targets
    if method.weighted or weighs_by_domain(targets):
        return targets.model_copy(update={"temperature": Targets().temperature})
    return Targets(passes=targets.passes)


def teaching_identity(run: Run) -> dict[str, Any]:
    """What is shown of the training texts, beyond what the student is a function of."""
    part = taught_part(run)
    if part is None:
        return {}
    found: dict[str, Any] = {"gold": part.labels_digest}
    if teachers_of(run):
        targets = seen_targets(run.experiment.targets)
        fields = {"uncertainty", "temperature"} & target_method(targets).fields(targets)
        together = weighs_together(targets)  # then it is weigh-teachers that says, and what it reads is known by it
        found["compared by"] = {} if together else targets.model_dump(include=fields)
        found |= {} if weighs_by_domain(targets) else passes_counted(run)
    return found
