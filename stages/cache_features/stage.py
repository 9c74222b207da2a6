"""Stage cache-features: hidden states of the training texts, kept by key for the methods that look at them.

Of the student's encoder before it learns, where neighbouring texts are looked at; of every teacher, where the student
learns from their states. Families like a teacher's answers: appended texts cost themselves, and no pass is run again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amalgam.data.parquet import write_table
from amalgam.pipeline.config.schema import ExperimentConfig
from amalgam.pipeline.execution.stage import Identity, Run, Stage, Unit
from amalgam.pipeline.execution.versions import library_versions
from amalgam.pipeline.storage.store import Record
from amalgam.stages.common.answers.coverage import bucket_requests, cached_units, units_for
from amalgam.stages.common.load import encoder_digest, encoder_files, extra_parts, train_part
from amalgam.stages.common.reference_texts import measure_of
from amalgam.stages.common.states.load import ENCODER, CachedStates, load_encoder, parts_of, required_states

if TYPE_CHECKING:
    pass


class CacheFeatures(Stage):
    name = "cache-features"
    VERSION = 1
    parallelism = "units"
    unit_label = "texts"
    help = "Optional: cache hidden states of the texts, for methods that compare texts or states."
    examples = ("amalgam cache-features", "amalgam cache-features --part 0/4")
    enabled_by = "choose targets or an objective that read hidden states"

    def is_needed(self, experiment: ExperimentConfig) -> bool:
        looked_at = experiment.targets.looks_at_encoder or experiment.objective.read_states is not None
        return experiment.student.learns and (looked_at or measure_of(experiment) is not None)

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
        if run.experiment.objective.read_states == "tokens":  # as this encoder's tokenizer cuts texts too
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
        _check_tokenizers(run)
        for family, mine in groupby(units, key=lambda unit: unit.folder.parent.name):
            asked = list(mine)
            kept = next(kept for kept in required_states(run) if kept.family == family)
            if kept.teacher is None:
                super().run_units(run, asked)
            else:
                from amalgam.stages.cache_features.write_teacher_states import ask_for_states

                ask_for_states(run, kept.teacher, kept.key, asked)

    def run_unit(self, run: Run, unit: Unit) -> None:
        from amalgam.stages.common.states.compute import feature_table

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
    """key.json: what the family is, for a person who finds the folder."""
    path = run.store.folder("cache-teachers", kept.family) / "key.json"
    if not run.store.has(path):
        who = f"features of {run.experiment.student.encoder}" if kept.teacher is None else f"states of {kept.owner}"
        run.store.replace(path, {"teacher": who, **kept.key})


def _units(run: Run) -> Iterator[Unit]:
    asked = {part.name: list(bucket_requests(run, part)) for part in (train_part(run), *extra_parts(run))}
    for kept in required_states(run):
        cached = cached_units(run, kept.family)
        for bucket in (bucket for part in parts_of(run, kept) for bucket in asked[part.name]):
            yield from units_for(run, kept.family, kept.owner, bucket, cached, 0)


def _check_tokenizers(run: Run) -> None:
    if run.experiment.objective.read_states == "tokens":
        from amalgam.stages.cache_features.write_teacher_states import refuse_other_tokenizers

        refuse_other_tokenizers(run)
