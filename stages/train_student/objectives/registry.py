"""OBJECTIVES: one class for each value of `objective.name` that learns from texts, with its loss and its phases.

A new objective is a class in this folder, a line here, and its inputs in OBJECTIVE_INPUTS of target_methods.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from amalgam.stages.train_student.objectives.amalgamation import DFAObjective, LayerwiseObjective
from amalgam.stages.train_student.objectives.guides import CFLObjective, MTBertObjective
from amalgam.stages.train_student.objectives.states import ObjectiveContext, Phases
from amalgam.stages.train_student.objectives.stratanet import StrataNetObjective

OBJECTIVES: Mapping[str, Callable[[ObjectiveContext], Phases]] = {
    "targets": lambda context: [("", context.targets)],
    "layerwise": LayerwiseObjective.phases,
    "dfa": DFAObjective.phases,
    "cfl": CFLObjective.phases,
    "mt-bert": MTBertObjective.phases,
    "stratanet": StrataNetObjective.phases,
}
