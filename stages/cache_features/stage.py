"""Stage cache-features: hidden states of the training texts, kept by key for the methods that look at them.

It stores states of the untrained student encoder for methods that use neighbouring texts, and states of every teacher
for objectives that learn from them. Families work as for predictions: appended texts cost only themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amalgam.data.parquet import write_table
from amalgam.pipeline.config.schema import ExperimentConfig
from amalgam.pipeline.errors import ModelError
from amalgam.pipeline.execution.faults import with_retries
from amalgam.pipeline.execution.stage import Identity, Run, Stage, Unit
from amalgam.pipeline.storage.fingerprint import library_versions
from amalgam.pipeline.storage.store import Record
from amalgam.stages.common.cached.coverage import units_for
from amalgam.stages.common.cached.load import (
    ENCODER,
    CachedStates,
    load_encoder,
    parts_of,
    requests_of,
    required_states,
    units_of,
)
from amalgam.stages.common.cached.question import Reader
from amalgam.stages.common.inference.load import load_teacher
from amalgam.stages.common.load import encoder_digest, encoder_files, extra_parts, teachers_of, train_part
from amalgam.stages.common.models.resolve import ModelFiles
from amalgam.stages.common.teachers import ResolvedTeacher
from amalgam.stages.target_methods import measure_of, objective_inputs, target_method

if TYPE_CHECKING:
    pass


class CacheFeatures(Stage):
    name = "cache-features"
    VERSION = 1
    parallelism = "units"
    unit_label = "texts"
    enabled_by = "choose targets or an objective that read hidden states"

    def is_needed(self, experiment: ExperimentConfig) -> bool:
        reads_states = objective_inputs(experiment).states is not None or measure_of(experiment) is not None
        return experiment.student.learns and (reads_states or target_method(experiment.targets).reads_features)

    def needs(self, experiment: ExperimentConfig) -> tuple[str, ...]:
        return ("read-corpus", *(("train-teachers",) if experiment.train_teachers else ()))

    def resolve_inputs(self, run: Run) -> None:
        encoder_files(run, run.experiment.student, ENCODER)

    def identity(self, run: Run) -> Identity:
        inputs: dict[str, Any] = {"texts": train_part(run).texts_digest}
        inputs |= {part.name: part.texts_digest for part in extra_parts(run)}
        for kept in required_states(run):
            if kept.teacher is None:
                inputs["features"] = kept.key
            else:
                inputs.setdefault("states", []).append([kept.owner, kept.key])
        if objective_inputs(run.experiment).states == "tokens":  # as this encoder's tokenizer cuts texts too
            student = run.experiment.student
            inputs["tokens_of"] = [encoder_digest(run, student, ENCODER), student.max_tokens]
        return Identity({}, inputs)

    def units(self, run: Run, folder: Path) -> Sequence[Unit]:  # noqa: ARG002 - units stand in the families
        return list(_units(run))

    def workload(self, run: Run, units: Sequence[Unit] | None) -> float:
        """Returns the number of texts, counted once for each kind of states."""
        expected = train_part(run).texts * len(required_states(run)) if units is None else 0
        return float(expected or sum(unit.size for unit in units or ()))

    def run_units(self, run: Run, units: Sequence[Unit]) -> None:
        if objective_inputs(run.experiment).states == "tokens":
            _check_tokenizers(run)
        for family, mine in groupby(units, key=lambda unit: unit.folder.parent.name):
            group = list(mine)
            kept = next(kept for kept in required_states(run) if kept.family == family)
            if kept.teacher is None:
                super().run_units(run, group)
            else:
                _run_teacher(run, kept.teacher, kept.key, group)

    def run_unit(self, run: Run, unit: Unit) -> None:
        from amalgam.stages.common.inference.states import feature_table

        bucket = next(one for one in train_part(run).buckets if one.prefix == unit.payload.prefix)
        table = feature_table(run.store, run.console, load_encoder(run), bucket, unit.payload.rows)
        with run.store.draft(unit.folder, unit.name, ".parquet") as draft:
            write_table(table, draft.folder / "unit.parquet")
            whole = {"prefix": bucket.prefix, "logits": True, "first": 0, "last": 0}
            draft.facts = {**whole, "rows": table.num_rows}
            draft.made = {"libraries": library_versions()}

    def finish(self, run: Run, folder: Path, records: Sequence[Record]) -> dict[str, Any]:  # noqa: ARG002
        families: dict[str, list[str]] = {}
        for kept in required_states(run):
            _describe(run, kept)
            families.setdefault(kept.owner, []).append(kept.family)
        return {"families": families}

    def describe(self, manifest: Record) -> str:
        return f"states of {', '.join(manifest.facts['families'])}"


def _describe(run: Run, kept: CachedStates) -> None:
    """Writes family.json, which describes the family to a person who opens the folder."""
    path = run.store.folder("cache-teachers", kept.family) / "family.json"
    if not run.store.has(path):
        who = f"features of {run.experiment.student.encoder}" if kept.teacher is None else f"states of {kept.owner}"
        run.store.replace(path, {"teacher": who, **kept.key})


def _units(run: Run) -> Iterator[Unit]:
    requests = {part.name: list(requests_of(run, part)) for part in (train_part(run), *extra_parts(run))}
    for kept in required_states(run):
        cached = units_of(run, kept.family)
        for bucket in (bucket for part in parts_of(run, kept) for bucket in requests[part.name]):
            yield from units_for(kept.owner, bucket, cached, 0)


def _run_teacher(run: Run, resolved: ResolvedTeacher, key: dict[str, Any], units: Sequence[Unit]) -> None:
    """Computes the states of one teacher; `key` is that of the family."""
    from amalgam.stages.common.inference.states import write_states
    from amalgam.stages.common.token_cache import tokenizer_digest

    teacher = load_teacher(run, resolved, key["dtype"], passes=0)
    parts = [train_part(run), *extra_parts(run)]
    buckets = {(part.name, bucket.prefix): bucket for part in parts for bucket in part.buckets}
    read = Reader(
        run.store,
        run.console,
        resolved,
        teacher,
        tokenizer_digest(teacher.tokenizer, resolved.files),
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
        with_retries(partial(work, unit), f"cache-features {unit.name}", run.store, run.console)
        run.console.advance(unit.size)


def _check_tokenizers(run: Run) -> None:
    """Tokens are compared one by one, so all must cut a text into the same ones."""
    student = run.experiment.student
    wanted = _digest(encoder_files(run, student, ENCODER))
    for teacher in teachers_of(run):
        fix = "objective.states=pooled; of layerwise, objective.schedule=joint; or an encoder that shares its tokenizer"
        if _digest(teacher.files, trust_remote_code=teacher.trust_remote_code) != wanted:
            what = f"teacher {teacher.name} and the student's encoder {student.encoder} do not tokenise alike"
            raise ModelError(f"{what}, so their tokens have no counterparts", where="objective.states: tokens", fix=fix)
        if teacher.max_tokens != student.max_tokens:
            what = (
                f"teacher {teacher.name} reads {teacher.max_tokens} tokens of a text, the student {student.max_tokens}"
            )
            fix = f"student.max_tokens={teacher.max_tokens}, or cache.max_tokens={student.max_tokens}"
            raise ModelError(f"{what}: long texts are cut otherwise", where="objective.states: tokens", fix=fix)


def _digest(files: ModelFiles, *, trust_remote_code: bool = False) -> str:
    from amalgam.stages.common.models.loading import load_tokenizer
    from amalgam.stages.common.token_cache import tokenizer_digest

    return tokenizer_digest(load_tokenizer(files, trust_remote_code=trust_remote_code), files)
