"""The encoder that an experiment names: found, identified, and made ready to learn with a new head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from amalgam.pipeline.config.schema import TEACHER, Student, TrainTeachers
from amalgam.pipeline.execution.stage import PendingDependencyError, Run
from amalgam.stages.common.models.resolve import ModelFiles, needs_network, resolve
from amalgam.stages.common.teachers import teachers_of


@dataclass(frozen=True)
class NewClassifier:
    """A model that has not learned its labels yet, and how texts are put to it."""

    model: Any
    tokenizer: Any
    tokenizer_digest: str
    limit: int
    types: bool
    pad_id: int


def encoder_files(run: Run, said: Student | TrainTeachers, where: str) -> ModelFiles:
    """`teacher:NAME` is that teacher's body; its head is left behind."""
    name = _teacher_in(said)
    if name is not None:
        return _teacher_files(run, name)
    if where not in run.cache:
        run.cache[where] = resolve(
            str(said.encoder),
            revision=said.revision,
            base=run.base,
            pins=run.store,
            digest_of=run.digest_of,
            where=where,
        )
    found: ModelFiles = run.cache[where]
    return found


def encoder_digest(run: Run, said: Student | TrainTeachers, where: str) -> str:
    """For identities: never asks the Hub."""
    if _teacher_in(said) is None and needs_network(
        str(said.encoder), revision=said.revision, base=run.base, pins=run.store
    ):
        raise PendingDependencyError(str(said.encoder))
    return encoder_files(run, said, where).digest


def _teacher_in(said: Student | TrainTeachers) -> str | None:
    return (
        said.encoder.removeprefix(TEACHER) if isinstance(said, Student) and said.encoder.startswith(TEACHER) else None
    )


def _teacher_files(run: Run, name: str) -> ModelFiles:

    return next(teacher.files for teacher in teachers_of(run) if teacher.name == name)  # the experiment has checked it


def beginner(run: Run, said: Student | TrainTeachers, labels: Sequence[str], where: str) -> NewClassifier:
    from amalgam.stages.common.models.loading import check_tokens, load_student, load_tokenizer, token_limit
    from amalgam.stages.common.token_cache import tokenizer_digest

    files = encoder_files(run, said, where)
    layers, dropout = (said.layers, said.dropout) if isinstance(said, Student) else (None, None)
    model = load_student(files, labels=list(labels), layers=layers, seed=said.seed, dropout=dropout)
    tokenizer = load_tokenizer(files)
    for note in check_tokens(model, tokenizer, name=where):
        run.console.note(note)
    digest = tokenizer_digest(tokenizer, files)
    limit = token_limit(model.config, tokenizer, said.max_tokens)
    return NewClassifier(model, tokenizer, digest, limit, takes_types(model.config), int(tokenizer.pad_token_id))


def takes_types(config: Any) -> bool:
    """Whether the model tells the two texts of a pair apart by token types."""
    return int(getattr(config.get_text_config(), "type_vocab_size", 0) or 0) > 1
