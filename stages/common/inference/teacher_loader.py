"""Loads teachers, one at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

from amalgam.pipeline.console import Console
from amalgam.stages.common.device import pick_device, tokens_at_once
from amalgam.stages.common.inference.teacher import Teacher
from amalgam.stages.common.models import loading
from amalgam.stages.common.models.resolve import ResolvedTeacher


@dataclass
class TeacherLoader:
    """Loads teachers and keeps the latest in memory: units come teacher by teacher."""

    seed: int
    device: str
    batch_tokens: int | None
    console: Console
    last_layer: bool
    _key: tuple[ResolvedTeacher, str] | None = None
    _teacher: Teacher | None = None
    _notes: set[str] = field(default_factory=set)

    def load(self, resolved: ResolvedTeacher, dtype: str, *, passes: int) -> Teacher:
        """Returns the teacher in memory or loads it; where passes are wanted, refuses one without active dropout."""
        if self._teacher is None or self._key != (resolved, dtype):
            self._teacher = None  # frees the memory before the next one is loaded
            self._teacher = self._load(resolved, dtype)
            self._key = resolved, dtype
            self.log_notes(self._teacher)
        if passes:
            self._teacher.check_dropout_active()
        return self._teacher

    def _load(self, resolved: ResolvedTeacher, dtype: str) -> Teacher:
        model = loading.load_classifier(resolved.files, dropout=resolved.dropout, dtype=dtype)
        tokenizer = loading.load_tokenizer(resolved.files)
        return Teacher(
            model,
            tokenizer,
            name=resolved.name,
            digest=resolved.files.digest,
            seed=self.seed,
            limit=loading.token_limit(model.config, tokenizer, resolved.max_tokens),
            device=pick_device(self.device),
            last_layer=self.last_layer,
        )

    def tokens_at_once(self, teacher: Teacher) -> int:
        return self.batch_tokens or tokens_at_once(teacher.device, teacher.width)

    def log_notes(self, teacher: Teacher) -> None:
        """Prints each note of the teacher once; inference may add notes."""
        for note in teacher.notes:
            self.note_once(note)

    def note_once(self, text: str) -> None:
        """Prints a note, which a later round of units has too."""
        if text not in self._notes:
            self.console.note(text)
            self._notes.add(text)
