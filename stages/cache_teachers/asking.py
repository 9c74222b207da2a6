"""From units to teachers and back: which texts a unit asks about, and its answers committed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

from amalgam.pipeline.errors import DataError
from amalgam.pipeline.plan import library_versions
from amalgam.pipeline.stage import Run, Unit
from amalgam.stages.cache_teachers.divergence import note_divergence
from amalgam.stages.cache_teachers.pools import Answer, Question, ask_in_pools
from amalgam.stages.read_corpus.parts import Bucket, fields, part_of, read_bucket
from amalgam.stages.teachers import KnownTeacher

if TYPE_CHECKING:
    import pyarrow as pa

    from amalgam.data.tokens import TokenRows
    from amalgam.stages.cache_teachers.family import Ask
    from amalgam.stages.cache_teachers.teacher import Teacher

SMALL_PART = 4
"""Of a bucket: fewer than one text in so many are tokenised without keeping the tokens."""


def ask_teachers(run: Run, teachers: Sequence[KnownTeacher], units: Sequence[Unit], dtype: str) -> None:
    """Teacher by teacher: one is in memory at a time."""
    from amalgam.stages.token_store import tokenizer_digest

    by_name = {known.name: known for known in teachers}
    buckets = _buckets(run, units)
    order = {name: place for place, name in enumerate(by_name)}
    in_order = sorted(units, key=lambda unit: order[unit.work.teacher])
    for name, mine in groupby(in_order, key=lambda unit: unit.work.teacher):
        asked = list(mine)
        known = by_name[name]
        teacher = loaded_teacher(run, known, dtype, passes=max(unit.work.last for unit in asked))
        budget = launch_budget(run, teacher)
        read = Reader(run, known, teacher, tokenizer_digest(teacher.tokenizer, known.files), buckets)
        run.memory["clock"] = ask_in_pools(
            run, teacher, asked, batch_tokens=budget, read=read, write=partial(_commit, run)
        )
        say_notes(run, teacher)


def launch_budget(run: Run, teacher: Teacher) -> int:
    from amalgam.stages.cache_teachers.hardware import tokens_at_once

    return run.experiment.execution.batch_tokens or tokens_at_once(teacher.device, teacher.width)


@dataclass(frozen=True)
class Reader:
    """Makes a unit's question: its texts in the tokens of one teacher."""

    run: Run
    known: KnownTeacher
    teacher: Teacher
    tokenizer: str
    buckets: dict[tuple[str, str], Bucket]

    def __call__(self, unit: Unit) -> Question:
        ask: Ask = unit.work
        bucket = self.buckets[ask.part, ask.prefix]
        rows = read_bucket(self.run, bucket)
        if ask.rows is not None:
            rows = rows.take(ask.rows)
        tokens = self._tokens(bucket, rows, ask.rows)
        self.teacher.check(tokens, lambda row: str(rows.column("text")[row]))
        if self.run.experiment.cache.on_long == "error" and tokens.cut.any():
            _refuse_long(rows, tokens, self.known)
        return Question(unit, rows.column("key").to_pylist(), tokens)

    def _tokens(self, bucket: Bucket, rows: pa.Table, places: Any) -> TokenRows:
        """Kept ones, or those of the whole bucket, made and kept; of a small part of a bucket, made in passing."""
        from amalgam.data.tokens import encode
        from amalgam.stages.token_store import tokens_of

        tokenizer, limit, types = self.teacher.tokenizer, self.teacher.limit, self.teacher.takes_types
        if places is not None and SMALL_PART * len(places) < bucket.rows:
            return encode(tokenizer, fields(rows), limit, types=types)
        tokens = tokens_of(self.run, bucket, tokenizer, digest=self.tokenizer, limit=limit, types=types)
        return tokens if places is None else tokens.take(places)


def _buckets(run: Run, units: Sequence[Unit]) -> dict[tuple[str, str], Bucket]:
    """(part, prefix): where the units' texts are."""
    parts = {name: part_of(run, name) for name in {unit.work.part for unit in units}}
    return {(name, bucket.prefix): bucket for name, part in parts.items() if part for bucket in part.buckets}


def _commit(run: Run, answer: Answer) -> None:
    from amalgam.data.shards import write_table
    from amalgam.stages.cache_teachers.tables import answer_table

    unit = answer.question.unit
    table = answer_table(answer.question.keys, answer.question.tokens, answer.logits, answer.passes)
    with run.store.draft(unit.folder, unit.name, ".parquet") as draft:
        write_table(table, draft.folder / "unit.parquet")
        draft.facts = answer.facts
        draft.made = {"libraries": library_versions(), **answer.made}
    if draft.rival is not None:
        note_divergence(run, unit, draft.files[0], draft.rival)


def loaded_teacher(run: Run, known: KnownTeacher, dtype: str, *, passes: int) -> Teacher:
    """One teacher is in memory at a time; units come teacher by teacher."""
    from amalgam.stages.cache_teachers.hardware import pick_device
    from amalgam.stages.cache_teachers.teacher import Teacher
    from amalgam.stages.models.loading import load_classifier, load_tokenizer, token_limit

    loaded, teacher = run.memory.get("loaded teacher", (None, None))
    if loaded != (known.name, dtype):
        run.memory.pop("loaded teacher", None)
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
        run.memory["loaded teacher"] = ((known.name, dtype), teacher)
        say_notes(run, teacher)
        run.memory.pop("alive", None)
    if passes and run.memory.get("alive") != known.name:
        teacher.check_dropout_is_alive()
        run.memory["alive"] = known.name
    found: Teacher = teacher
    return found


def say_notes(run: Run, teacher: Teacher) -> None:
    """Each once, also those that came up in the work."""
    said = run.memory.setdefault("teachers' notes", set())
    for note in teacher.notes:
        if note not in said:
            run.console.note(note)
            said.add(note)


def _refuse_long(rows: pa.Table, tokens: TokenRows, known: KnownTeacher) -> None:
    from amalgam.data.keys import shown

    first = int(tokens.cut.argmax())
    raise DataError(
        f"{int(tokens.cut.sum())} texts are longer than {known.max_tokens} tokens of teacher {known.name}",
        where=f"the first: {shown(rows.column('text')[first].as_py())}",
        fix="cache.on_long=truncate cuts and counts them, or raise cache.max_tokens",
    )
