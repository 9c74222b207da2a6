"""Which states an experiment asks for, and the families they are kept in: one for an encoder, one for each teacher."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from amalgam.pipeline.stage import Run
from amalgam.stages.cache_teachers.family import family_name
from amalgam.stages.cache_teachers.stage import dtype_of
from amalgam.stages.models.encoder import encoder_digest, encoder_files
from amalgam.stages.models.shape import depth_of
from amalgam.stages.teachers import KnownTeacher, teachers_of

ENCODER = "student.encoder"
ENCODER_STATES = "the encoder"
"""No teacher can be named so."""


@dataclass(frozen=True)
class Kept:
    """States that are kept: of the student's encoder where `teacher` is None, else of that teacher."""

    key: dict[str, Any]
    teacher: KnownTeacher | None = None

    @property
    def family(self) -> str:
        return family_name(self.key)

    @property
    def who(self) -> str:
        return self.teacher.name if self.teacher else ENCODER_STATES


def kept_states(run: Run) -> list[Kept]:
    """Everything that is asked for, in the order in which it is computed."""
    found = [encoder_states(run)] if run.experiment.targets.looks_at_neighbours else []
    return [*found, *(teacher_states(run, teacher) for teacher in _asked_teachers(run))]


def encoder_states(run: Run) -> Kept:
    """For looking at neighbours: before the student learns, the mean over tokens of the last state."""
    student = run.experiment.student
    digest = encoder_digest(run, student, ENCODER)
    return Kept({"feature": "mean of the last block's tokens", "content": digest, "max_tokens": student.max_tokens})


def teacher_states(run: Run, teacher: KnownTeacher) -> Kept:
    """What a teacher's states are a function of. Passes, dropout and label names are not part of it."""
    key = {
        "states": run.experiment.objective.states,
        "blocks": blocks_of(run),
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


def _asked_teachers(run: Run) -> Iterator[KnownTeacher]:
    if run.experiment.objective.states:
        yield from teachers_of(run)
