"""From the experiment's objective to what the student minimises: one phase of training, or several, each by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from numpy.typing import NDArray

from amalgam.pipeline.errors import ModelError
from amalgam.pipeline.execution.stage import Run
from amalgam.stages.common.encoders import NewClassifier
from amalgam.stages.common.load import train_part
from amalgam.stages.common.states.load import states_of
from amalgam.stages.common.states.read import States
from amalgam.stages.common.training.examples import TrainingData
from amalgam.stages.common.training.learner import Objective
from amalgam.stages.fit_statistics.stage import domain_confidences
from amalgam.stages.train_student.objectives import cfl, dfa, layerwise, mt_bert, stratanet
from amalgam.stages.train_student.objectives.states import ObjectiveContext

Phases = list[tuple[str, Objective]]


PHASES: Mapping[str, Callable[[ObjectiveContext], Phases]] = {
    "targets": lambda setting: [("", setting.targets)],
    "layerwise": layerwise.phases,
    "dfa": dfa.phases,
    "cfl": cfl.phases,
    "mt-bert": mt_bert.phases,
    "stratanet": stratanet.phases,
}
"""By objective.name. A phase without a name of its own is the only one."""


def phases_of(run: Run, new: NewClassifier, material: TrainingData, targets: Objective) -> Phases:
    states = _states(run, material) if run.experiment.objective.read_states else []
    return phases_over(run, new, states, targets, _confidence(run, material))


def phases_over(
    run: Run, new: NewClassifier, states: list[States], targets: Objective, confidence: NDArray[Any] | None = None
) -> Phases:
    """What the objectives add to the student starts from the student's seed."""
    said, config = run.experiment.objective, new.model.config.get_text_config()
    shape = int(config.num_hidden_layers), int(config.hidden_size)
    setting = ObjectiveContext(said, targets, states, *shape, int(new.model.config.num_labels), confidence)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(run.experiment.student.seed)
        return PHASES[said.name](setting)


def _confidence(run: Run, material: TrainingData) -> NDArray[Any] | None:
    """In each teacher, by block of its states, where an objective weighs them."""
    if run.experiment.objective.name != "stratanet":
        return None

    prefixes = [bucket.prefix for bucket in train_part(run).buckets]
    return domain_confidences(run, material.keys, prefixes).astype("float32")


def _states(run: Run, material: TrainingData) -> list[States]:

    found = states_of(run, material.keys)
    lengths: Any = material.learn.lengths
    for states in found if run.experiment.objective.read_states == "tokens" else []:
        if (states.lengths != lengths).any():
            what = f"teacher {states.teacher} and the student do not read the same tokens of a text"
            raise ModelError(
                what, where="objective.states: tokens", fix="give both the same max_tokens, or states=pooled"
            )
    return found
