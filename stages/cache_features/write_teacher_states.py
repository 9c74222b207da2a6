"""From units to teachers' states: loaded as for their passes, asked with dropout off, each unit committed when done."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from amalgam.pipeline.errors import ModelError
from amalgam.pipeline.execution.retry import with_retries
from amalgam.pipeline.execution.stage import Run, Unit
from amalgam.pipeline.execution.versions import library_versions
from amalgam.stages.common.answers.question import Reader
from amalgam.stages.common.inference.load import load_teacher
from amalgam.stages.common.load import encoder_files, extra_parts, teachers_of, train_part
from amalgam.stages.common.models.loading import load_tokenizer
from amalgam.stages.common.models.resolve import ModelFiles
from amalgam.stages.common.states.compute import write_states
from amalgam.stages.common.states.load import ENCODER
from amalgam.stages.common.teachers import ResolvedTeacher
from amalgam.stages.common.token_cache import tokenizer_digest


def ask_for_states(run: Run, known: ResolvedTeacher, key: dict[str, Any], units: Sequence[Unit]) -> None:
    """`key`: the family's; it says the grain, the blocks and the dtype."""
    teacher = load_teacher(run, known, key["dtype"], passes=0)
    parts = [train_part(run), *extra_parts(run)]
    buckets = {(part.name, bucket.prefix): bucket for part in parts for bucket in part.buckets}
    read = Reader(
        run.store,
        run.console,
        known,
        teacher,
        tokenizer_digest(teacher.tokenizer, known.files),
        buckets,
        run.experiment.cache.on_long_text == "error",
    )

    def work(unit: Unit) -> None:
        question = read(unit)
        with run.store.draft(unit.folder, unit.name) as draft:
            how = {"blocks": key["blocks"], "by_token": key["states"] == "tokens"}
            width = write_states(draft.folder, teacher, question.keys, question.tokens, **how)
            whole = {"prefix": unit.payload.prefix, "logits": True, "first": 0, "last": 0}
            draft.facts = {**whole, "rows": len(question.keys), "width": width}
            draft.made = {"libraries": library_versions()}

    for unit in units:
        run.signals.check()
        with_retries(partial(work, unit), run, f"cache-features {unit.name}")
        run.console.advance(unit.size)


def refuse_other_tokenizers(run: Run) -> None:
    """Tokens are compared one by one, so all must cut a text into the same ones."""
    student = run.experiment.student
    wanted = _digest(encoder_files(run, student, ENCODER))
    for known in teachers_of(run):
        fix = "objective.states=pooled; of layerwise, objective.schedule=joint; or an encoder that shares its tokenizer"
        if _digest(known.files, trust_remote_code=known.trust_remote_code) != wanted:
            what = f"teacher {known.name} and the student's encoder {student.encoder} do not tokenise alike"
            raise ModelError(f"{what}, so their tokens have no counterparts", where="objective.states: tokens", fix=fix)
        if known.max_tokens != student.max_tokens:
            what = f"teacher {known.name} reads {known.max_tokens} tokens of a text, the student {student.max_tokens}"
            fix = f"student.max_tokens={known.max_tokens}, or cache.max_tokens={student.max_tokens}"
            raise ModelError(f"{what}: long texts are cut otherwise", where="objective.states: tokens", fix=fix)


def _digest(files: ModelFiles, *, trust_remote_code: bool = False) -> str:
    return tokenizer_digest(load_tokenizer(files, trust_remote_code=trust_remote_code), files)
