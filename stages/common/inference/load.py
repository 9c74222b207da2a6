"""Loads the teachers of a run for inference, one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from amalgam.pipeline.console import Console
from amalgam.pipeline.execution.stage import Run, once
from amalgam.stages.common.load import model_reference
from amalgam.stages.common.models.resolve import resolve
from amalgam.stages.common.teachers import ResolvedTeacher

if TYPE_CHECKING:
    from amalgam.stages.common.inference.classifier import Classifier
    from amalgam.stages.common.inference.teacher import Teacher


@dataclass
class TeacherLoader:
    """Loads teachers and keeps the latest in memory: units come teacher by teacher."""

    seed: int
    device: str
    batch_tokens: int | None
    console: Console
    _key: tuple[str, str] | None = None
    _teacher: Teacher | None = None
    _active_dropout: str | None = None
    _notes: set[str] = field(default_factory=set)

    def load(self, resolved: ResolvedTeacher, dtype: str, *, passes: int) -> Teacher:
        """Returns the teacher in memory or loads it; where passes are wanted, refuses one without active dropout."""
        teacher = self._teacher
        if teacher is None or self._key != (resolved.name, dtype):
            self._teacher = self._key = self._active_dropout = None  # frees the memory before the next one is loaded
            teacher = None
            teacher = self._load(resolved, dtype)
            self._teacher, self._key = teacher, (resolved.name, dtype)
            self.log_notes(teacher)
        if passes and self._active_dropout != resolved.name:
            teacher.check_dropout_active()
            self._active_dropout = resolved.name
        return teacher

    def _load(self, resolved: ResolvedTeacher, dtype: str) -> Teacher:
        from amalgam.stages.common.device import pick_device
        from amalgam.stages.common.inference.teacher import Teacher
        from amalgam.stages.common.models.loading import load_classifier, load_tokenizer, token_limit

        model = load_classifier(
            resolved.files,
            dropout=resolved.dropout,
            dtype=dtype,
            trust_remote_code=resolved.trust_remote_code,
            allow_pickle=resolved.allow_pickle,
            labels=len(resolved.labels),
        )
        tokenizer = load_tokenizer(resolved.files, trust_remote_code=resolved.trust_remote_code)
        return Teacher(
            model,
            tokenizer,
            name=resolved.name,
            digest=resolved.files.digest,
            seed=self.seed,
            limit=token_limit(model.config, tokenizer, resolved.max_tokens),
            device=pick_device(self.device),
        )

    def tokens_at_once(self, teacher: Teacher) -> int:
        """Returns execution.batch_tokens, or the device's own number."""
        from amalgam.stages.common.device import tokens_at_once

        return self.batch_tokens or tokens_at_once(teacher.device, teacher.width)

    def log_notes(self, teacher: Teacher) -> None:
        """Prints each note of the teacher once; inference may add notes."""
        for note in teacher.notes:
            if note not in self._notes:
                self.console.note(note)
                self._notes.add(note)


@once
def teacher_loader(run: Run) -> TeacherLoader:
    """Returns the loader that all stages of the run share."""
    execution = run.experiment.execution
    return TeacherLoader(run.experiment.cache.seed, execution.device, execution.batch_tokens, run.console)


def load_teacher(run: Run, resolved: ResolvedTeacher, dtype: str, *, passes: int) -> Teacher:
    """Loads a teacher with the run's shared loader."""
    return teacher_loader(run).load(resolved, dtype, passes=passes)


def load_student(run: Run, folder: Path, labels: Sequence[str], *, where: str) -> Classifier:
    """Loads a finished student whose logits follow these labels; refuses one with other labels."""
    from amalgam.stages.common.inference.classifier import Classifier

    files = resolve(model_reference(run, str(folder.absolute()), where=where))
    device, limit = run.experiment.execution.device, run.experiment.student.max_tokens
    classifier = Classifier(files, device=device, max_tokens=limit)
    classifier.reorder(labels, where=where)
    return classifier
