"""Which states an experiment asks for, and the families they are kept in: one for an encoder, one for each teacher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from amalgam.pipeline.execution.stage import Run
from amalgam.stages.common.answers.coverage import family_name
from amalgam.stages.common.answers.families import dtype_of
from amalgam.stages.common.corpus import Part, train_part
from amalgam.stages.common.load import encoder_digest, encoder_files, teachers_of
from amalgam.stages.common.models.resolve import depth_of
from amalgam.stages.common.reference_texts import extra_parts, measure_of
from amalgam.stages.common.teachers import ResolvedTeacher

ENCODER = "student.encoder"

LAST = 0
"""Blocks of states of which only the last layer is kept."""

ENCODER_STATES = "the encoder"
"""No teacher can be named so."""


@dataclass(frozen=True)
class Kept:
    """States that are kept: of the student's encoder where `teacher` is None, else of that teacher."""

    key: dict[str, Any]
    teacher: ResolvedTeacher | None = None

    @property
    def family(self) -> str:
        return family_name(self.key)

    @property
    def who(self) -> str:
        return self.teacher.name if self.teacher else ENCODER_STATES


def kept_states(run: Run) -> list[Kept]:
    """Everything that is asked for, in the order in which it is computed."""
    found = [encoder_states(run)] if run.experiment.targets.looks_at_encoder else []
    kinds = kinds_of_states(run)
    return [*found, *(_states(run, teacher, *kind) for kind in kinds for teacher in teachers_of(run))]


def kinds_of_states(run: Run) -> list[tuple[str, int]]:
    """Of the teachers: (grain, blocks) of each kind that is asked for."""
    said = run.experiment.objective.read_states
    foreign = measure_of(run.experiment) is not None and run.experiment.objective.name != "stratanet"
    last = [("pooled", LAST)] if run.experiment.targets.looks_at_states or foreign else []
    return [*last, *([(said, blocks_of(run))] if said else [])]


def encoder_states(run: Run) -> Kept:
    """For looking at neighbours: before the student learns, the mean over tokens of the last state."""
    student = run.experiment.student
    digest = encoder_digest(run, student, ENCODER)
    return Kept({"feature": "mean of the last block's tokens", "content": digest, "max_tokens": student.max_tokens})


def teacher_states(run: Run, teacher: ResolvedTeacher) -> Kept:
    """For learning from: as `objective` says it."""
    return _states(run, teacher, str(run.experiment.objective.read_states), blocks_of(run))


def last_states(run: Run, teacher: ResolvedTeacher) -> Kept:
    """For telling whether the teacher knows a text: the mean over tokens of its last layer's."""
    return _states(run, teacher, "pooled", LAST)


def statistics_states(run: Run, teacher: ResolvedTeacher) -> Kept:
    """For telling how foreign a text is: those that stratanet learns from, or else the last layer's."""
    return (teacher_states if run.experiment.objective.name == "stratanet" else last_states)(run, teacher)


def parts_of(run: Run, kept: Kept) -> list[Part]:
    """Whose texts' states are kept: the training part's, and what statistics are learned from."""
    more = extra_parts(run) if kept.teacher else []
    if more and kept.teacher and kept.key != statistics_states(run, kept.teacher).key:
        more = []
    return [train_part(run), *more]


def _states(run: Run, teacher: ResolvedTeacher, grain: str, blocks: int) -> Kept:
    """What a teacher's states are a function of. Passes, dropout and label names are not part of it."""
    key = {
        "states": grain,
        "blocks": blocks,
        "content": teacher.files.digest,
        "max_tokens": teacher.max_tokens,
        "dtype": dtype_of(run),
    }
    return Kept(key, teacher)


def blocks_of(run: Run) -> int:
    """Never asks the Hub: NotKnownYetError while the encoder's config is not here."""
    said, student = run.experiment.objective, run.experiment.student
    if said.blocks or student.layers:
        return said.blocks or student.layers or 0
    encoder_digest(run, student, ENCODER)
    return depth_of(encoder_files(run, student, ENCODER))
