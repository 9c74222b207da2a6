"""OBJECTIVE_INPUTS: the inputs of every `objective.name`. Its loss is in train_student/objectives.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from amalgam.pipeline.config.schema import Checks, ExperimentConfig
from amalgam.pipeline.errors import ModelError
from amalgam.stages.target_methods import COMPARATIVE, target_method


class ObjectiveInputs:
    """The inputs of one objective; its loss is in train_student/objectives.py. A subclass overrides what differs."""

    version: ClassVar[int] = 1
    """Another one makes students and reports of this objective stale."""
    reads_texts: ClassVar[bool] = True
    weighs_by_domain: ClassVar[bool] = False
    """Whether a text's distance from each teacher's domain weighs the teachers' states."""
    replaces_states: ClassVar[bool] = False
    """Whether each layer of the student reads another state than that of the layer below."""

    def __init__(self, experiment: ExperimentConfig) -> None:
        self.experiment, self.objective = experiment, experiment.objective

    @property
    def fields(self) -> set[str]:
        """Returns the fields of `objective` that change the result, without `name`."""
        return {"states", "blocks", "learning_rate"}

    @property
    def states(self) -> str | None:
        """Returns the kind of teachers' states, pooled or tokens, or None."""
        return self.objective.states

    def checks(self) -> Checks:
        """Yields the checks of settings that can contradict the objective."""
        yield from ()


class TargetsAlone(ObjectiveInputs):
    """The targets alone."""

    fields: ClassVar[set[str]] = set()
    states = None


class Layerwise(ObjectiveInputs):
    """Shen et al. 2019: the student's layers from amalgamated states, then the targets."""

    replaces_states = True

    @property
    def fields(self) -> set[str]:
        return {"schedule"} | ({"states", "amalgamation", "adapter", "learning_rate"} if self.states else set())

    @property
    def states(self) -> str | None:
        return None if self.objective.schedule == "joint" else self.objective.states

    def checks(self) -> Checks:
        message = (
            "the student's layers read tokens, so layer-wise learning needs tokens, "
            "or objective.schedule=joint where teachers tokenise otherwise"
        )
        yield self.states == "pooled", "objective.states", message
        message = "layer-wise learning needs a block for each layer of the student: null"
        yield self.objective.blocks is not None, "objective.blocks", message


class DFA(ObjectiveInputs):
    """Shen et al. 2019, as MUKA's baseline has it: amalgamated states as a guide next to the targets."""


class CFL(ObjectiveInputs):
    """Luo et al. 2019: student and teachers in a common feature space, which compares the texts of a step."""

    def checks(self) -> Checks:
        message = "cfl compares texts, each by the mean of its tokens: pooled"
        yield self.states == "tokens", "objective.states", message
        message = "cfl compares the texts of a step with each other: 1"
        yield self.experiment.student.accumulate > 1, "student.accumulate", message


class MTBertStates(ObjectiveInputs):
    """Wu et al. 2021: each teacher's states through its own maps."""


class StrataNetStates(ObjectiveInputs):
    """Vijayaraghavan et al. 2024: states weighted by distance from each teacher's domain."""

    weighs_by_domain = True
    fields: ClassVar[set[str]] = {"blocks", "alpha", "fusion", "learning_rate"}

    def checks(self) -> Checks:
        message = "stratanet measures a text's distance from a domain by the mean of its tokens: pooled"
        yield self.states == "tokens", "objective.states", message


class ASDFD(ObjectiveInputs):
    """Ma et al. 2020: pseudo embeddings without texts."""

    reads_texts = False
    fields: ClassVar[set[str]] = set()
    states = None

    def checks(self) -> Checks:
        message = "as-dfd runs each teacher on its own embeddings alone: vanilla-kd"
        yield self.experiment.targets.mode != "vanilla-kd", "targets.mode", message


OBJECTIVE_INPUTS: Mapping[str, type[ObjectiveInputs]] = {
    "targets": TargetsAlone,
    "layerwise": Layerwise,
    "dfa": DFA,
    "cfl": CFL,
    "mt-bert": MTBertStates,
    "stratanet": StrataNetStates,
    "as-dfd": ASDFD,
}


def objective_inputs(experiment: ExperimentConfig) -> ObjectiveInputs:
    """Returns the inputs of the objective that `objective.name` names."""
    return OBJECTIVE_INPUTS[experiment.objective.name](experiment)


def no_layers(count: int) -> ModelError:
    """Returns the error of an encoder whose layers cannot read other states."""
    return ModelError(
        f"the student's encoder has no list of {count} layers that each give a state of each token",
        where="objective.name: layerwise",
        fix="set objective.schedule=joint, or use a BERT-like encoder",
    )


def reads_texts(experiment: ExperimentConfig) -> bool:
    """Returns whether the student learns from texts."""
    return objective_inputs(experiment).reads_texts


def domain_measure(experiment: ExperimentConfig) -> str | None:
    """Returns the measure of distance from the teachers' domains that targets or objective read, or None."""
    uncertainty = experiment.targets.uncertainty
    if objective_inputs(experiment).weighs_by_domain:
        return uncertainty if uncertainty in COMPARATIVE else "rmd"
    return uncertainty if target_method(experiment.targets).weighs_by_domain else None
