"""From units to teachers and back: which texts a unit asks about, and its answers committed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING

from amalgam.data.parquet import write_table
from amalgam.pipeline.execution.stage import Run, Unit
from amalgam.pipeline.execution.versions import library_versions
from amalgam.stages.cache_teachers.batching import UnitResult, run_pooled
from amalgam.stages.cache_teachers.conflict import note_divergence
from amalgam.stages.cache_teachers.tables import answer_table
from amalgam.stages.common.answers.question import Reader
from amalgam.stages.common.corpus import Bucket, part_of
from amalgam.stages.common.inference.load import launch_budget, load_teacher, log_notes
from amalgam.stages.common.teachers import ResolvedTeacher

if TYPE_CHECKING:
    pass


def ask_teachers(run: Run, teachers: Sequence[ResolvedTeacher], units: Sequence[Unit], dtype: str) -> None:
    """Teacher by teacher: one is in memory at a time."""
    from amalgam.stages.common.token_cache import tokenizer_digest

    by_name = {known.name: known for known in teachers}
    buckets = _buckets(run, units)
    order = {name: place for place, name in enumerate(by_name)}
    in_order = sorted(units, key=lambda unit: order[unit.payload.teacher])
    for name, mine in groupby(in_order, key=lambda unit: unit.payload.teacher):
        asked = list(mine)
        known = by_name[name]
        teacher = load_teacher(run, known, dtype, passes=max(unit.payload.last for unit in asked))
        budget = launch_budget(run, teacher)
        read = Reader(run, known, teacher, tokenizer_digest(teacher.tokenizer, known.files), buckets)
        run.cache["clock"] = run_pooled(
            run, teacher, asked, batch_tokens=budget, read=read, write=partial(_commit, run)
        )
        log_notes(run, teacher)


def _buckets(run: Run, units: Sequence[Unit]) -> dict[tuple[str, str], Bucket]:
    """(part, prefix): where the units' texts are."""
    parts = {name: part_of(run, name) for name in {unit.payload.part for unit in units}}
    return {(name, bucket.prefix): bucket for name, part in parts.items() if part for bucket in part.buckets}


def _commit(run: Run, answer: UnitResult) -> None:

    unit = answer.question.unit
    table = answer_table(answer.question.keys, answer.question.tokens, answer.logits, answer.passes)
    with run.store.draft(unit.folder, unit.name, ".parquet") as draft:
        write_table(table, draft.folder / "unit.parquet")
        draft.facts = answer.facts
        draft.made = {"libraries": library_versions(), **answer.made}
    if draft.rival is not None:
        note_divergence(run, unit, draft.files[0], draft.rival)
