"""Loads teachers and students for inference, and tokenises the texts of units."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from amalgam.data.keys import shown
from amalgam.pipeline.console import Console
from amalgam.pipeline.errors import DataError
from amalgam.pipeline.execution.stage import Run, Unit, once
from amalgam.pipeline.storage.store import Store
from amalgam.stages.common.cached.coverage import UnitRequest
from amalgam.stages.common.corpus import Bucket, Part
from amalgam.stages.common.load import model_reference
from amalgam.stages.common.models.resolve import resolve
from amalgam.stages.common.teachers import ResolvedTeacher

if TYPE_CHECKING:
    from amalgam.data.tokens import TokenRows
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
    _dropout_checked: bool = False
    _notes: set[str] = field(default_factory=set)

    def load(self, resolved: ResolvedTeacher, dtype: str, *, passes: int) -> Teacher:
        """Returns the teacher in memory or loads it; where passes are wanted, refuses one without active dropout."""
        if self._teacher is None or self._key != (resolved.name, dtype):
            self._teacher = None  # frees the memory before the next one is loaded
            self._teacher = self._load(resolved, dtype)
            self._key, self._dropout_checked = (resolved.name, dtype), False
            self.log_notes(self._teacher)
        if passes and not self._dropout_checked:
            self._teacher.check_dropout_active()
            self._dropout_checked = True
        return self._teacher

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
    cache, execution = run.experiment.cache, run.experiment.execution
    return TeacherLoader(cache.seed, execution.device, execution.batch_tokens, run.console)


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


@dataclass(frozen=True)
class TokenizedUnit:
    """The texts of one unit, ready for the teacher."""

    unit: Unit
    keys: list[bytes]
    tokens: TokenRows


@dataclass(frozen=True)
class UnitTexts:
    """The texts of units."""

    store: Store
    console: Console
    buckets: Mapping[tuple[str, str], Bucket]
    """By part and prefix."""
    refuse_long: bool
    """Whether a text longer than `max_tokens` is an error."""

    def tokenizer(self, resolved: ResolvedTeacher, teacher: Teacher) -> Callable[[Unit], TokenizedUnit]:
        """Returns the function that tokenises a unit's texts for this teacher."""
        from amalgam.stages.common.token_cache import tokenizer_digest

        return partial(self._tokenize, resolved, teacher, tokenizer_digest(teacher.tokenizer, resolved.files))

    def _tokenize(self, resolved: ResolvedTeacher, teacher: Teacher, digest: str, unit: Unit) -> TokenizedUnit:
        from amalgam.stages.common.token_cache import read_tokens

        request: UnitRequest = unit.payload
        rows, tokens = read_tokens(
            self.store,
            self.console,
            self.buckets[request.part, request.prefix],
            request.rows,
            teacher.tokenizer,
            digest=digest,
            limit=teacher.limit,
            types=teacher.takes_types,
        )
        teacher.check(tokens, lambda row: str(rows.column("text")[row]))
        if self.refuse_long and tokens.truncated.any():
            first = rows.column("text")[int(tokens.truncated.argmax())].as_py()
            raise DataError(
                f"{int(tokens.truncated.sum())} texts are longer than {resolved.max_tokens} tokens of "
                f"teacher {resolved.name}",
                where=f"the first: {shown(first)}",
                fix="cache.on_long_text=truncate cuts and counts them, or raise cache.max_tokens",
            )
        return TokenizedUnit(unit, rows.column("key").to_pylist(), tokens)


def unit_texts(run: Run, parts: Iterable[Part]) -> UnitTexts:
    buckets = {(part.name, bucket.prefix): bucket for part in parts for bucket in part.buckets}
    return UnitTexts(run.store, run.console, buckets, run.experiment.cache.on_long_text == "error")
