"""Loads a teacher for inference."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amalgam.pipeline.execution.stage import Run
from amalgam.stages.common.teachers import ResolvedTeacher

if TYPE_CHECKING:
    from amalgam.stages.common.inference.teacher import Teacher


def launch_budget(run: Run, teacher: Teacher) -> int:
    from amalgam.stages.common.device import tokens_at_once

    return run.experiment.execution.batch_tokens or tokens_at_once(teacher.device, teacher.width)


def load_teacher(run: Run, known: ResolvedTeacher, dtype: str, *, passes: int) -> Teacher:
    """One teacher is in memory at a time; units come teacher by teacher."""
    from amalgam.stages.common.device import pick_device
    from amalgam.stages.common.inference.teacher import Teacher
    from amalgam.stages.common.models.loading import load_classifier, load_tokenizer, token_limit

    loaded, teacher = run.cache.get("loaded teacher", (None, None))
    if loaded != (known.name, dtype):
        run.cache.pop("loaded teacher", None)
        model = load_classifier(
            known.files,
            dropout=known.dropout,
            dtype=dtype,
            trust_remote_code=known.trust_remote_code,
            allow_pickle=known.allow_pickle,
            labels=len(known.labels),
        )
        tokenizer = load_tokenizer(known.files, trust_remote_code=known.trust_remote_code)
        limit = token_limit(model.config, tokenizer, known.max_tokens)
        teacher = Teacher(
            model,
            tokenizer,
            name=known.name,
            digest=known.files.digest,
            seed=run.experiment.cache.seed,
            limit=limit,
            device=pick_device(run.experiment.execution.device),
        )
        run.cache["loaded teacher"] = ((known.name, dtype), teacher)
        log_notes(run, teacher)
        run.cache.pop("alive", None)
    if passes and run.cache.get("alive") != known.name:
        teacher.check_dropout_is_alive()
        run.cache["alive"] = known.name
    found: Teacher = teacher
    return found


def log_notes(run: Run, teacher: Teacher) -> None:
    """Each once, also those that came up in the work."""
    said = run.cache.setdefault("teachers' notes", set())
    for note in teacher.notes:
        if note not in said:
            run.console.note(note)
            said.add(note)
