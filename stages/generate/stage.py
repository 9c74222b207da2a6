"""Stage generate: per teacher and class a family of texts, in blocks; then one file with all of them.

Filters are applied when the corpus is read, so a changed filter generates no new text.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from amalgam.data.keys import shown_names
from amalgam.data.parquet import write_table
from amalgam.pipeline.config.schema import ExperimentConfig
from amalgam.pipeline.config.schema import Generate as GenerateConfig
from amalgam.pipeline.console import counted
from amalgam.pipeline.execution.faults import with_retries
from amalgam.pipeline.execution.stage import Identity, Run, Stage, Unit, once, pending_units
from amalgam.pipeline.storage.facts import FactTypes
from amalgam.pipeline.storage.store import Record
from amalgam.stages.common import load
from amalgam.stages.common.cached.load import describe_family
from amalgam.stages.common.corpus import content_of, texts_file
from amalgam.stages.common.input_names import INPUT_NAMES
from amalgam.stages.common.models.resolve import ModelFiles
from amalgam.stages.generate.requests import (
    LANGUAGE_MODEL,
    Block,
    TextPlan,
    fingerprint_config,
    sampling_choices,
    teacher_identity,
    uninformative_label,
)
from amalgam.stages.objective_inputs import reads_texts

if TYPE_CHECKING:
    from amalgam.stages.generate.decoding import GeneratedText
    from amalgam.stages.generate.texts import SourceInputs


ALL_TEXTS = "texts"

SHOWN_LABELS = 5


class BlockFacts(TypedDict):
    rows: int


class CollectedFacts(TypedDict):
    """The facts of the file with all texts."""

    source: str
    texts: int


class GeneratedFacts(CollectedFacts):
    families: list[str]
    file: str


class Generate(Stage):
    name = "generate"
    VERSION = 5  # halfwidth katakana are words
    parallelism = "units"
    unit_label = "texts"
    sections = ("generate",)
    enabled_by = "add a `generate` section"
    facts = FactTypes(GeneratedFacts, BlockFacts | CollectedFacts)
    input_names = {r"texts(\.\d+)?": "content of generate.corpus"} | INPUT_NAMES

    def is_needed(self, experiment: ExperimentConfig) -> bool:
        return experiment.generate is not None and reads_texts(experiment)

    def resolve_inputs(self, run: Run) -> None:
        settings = generate_config(run)
        load.prepare_teachers(run)
        load.fetch(run, settings.corpus or [])
        if settings.writes:
            language_model_files(run)

    def identity(self, run: Run) -> Identity:
        plan = text_plan(run)
        teachers = {}
        for teacher in plan.teachers:
            places = dict(zip(teacher.labels, teacher.places, strict=True))
            teachers[teacher.name] = {**teacher_identity(teacher), "labels": places}
        inputs: dict[str, object] = {"teachers": teachers}
        if plan.settings.writes:
            inputs["language_model"] = plan.language_model
        if plan.settings.reads_corpus:
            inputs["texts"] = list(plan.corpus)
        return Identity({"generate": {**fingerprint_config(plan.settings), "texts": plan.settings.texts}}, inputs)

    def units(self, run: Run, folder: Path) -> Sequence[Unit]:
        """Returns the blocks in their families' folders, and the collected file if it exists: --force replaces it."""
        collected = Unit(ALL_TEXTS, folder)
        return [*text_plan(run).units(run.store), *([collected] if run.store.has(collected.record_path) else [])]

    def workload(self, run: Run, units: Sequence[Unit] | None) -> float | None:
        """Returns the number of texts in the blocks, which are complete even where fewer texts are requested."""
        blocks = [unit.payload for unit in units or () if isinstance(unit.payload, Block)]
        return None if units is None else float(sum(len(block.indices) for block in blocks))

    def more_units(self, run: Run, folder: Path) -> Sequence[Unit]:
        """Returns all units again with the collected file, which needs every block."""
        return [*text_plan(run).units(run.store), Unit(ALL_TEXTS, folder)]

    def run_units(self, run: Run, units: Sequence[Unit]) -> None:
        from amalgam.stages.generate.texts import produce

        blocks = [unit for unit in units if isinstance(unit.payload, Block)]
        if blocks:
            _describe_families(run)
            _warn_of_labels(run)
            began = time.monotonic()
            for unit, texts in produce(source_inputs(run), blocks):
                write = partial(_write_block, run, unit, texts, time.monotonic() - began)
                began = time.monotonic()
                with_retries(write, f"{self.name} {unit.name}", run.store, run.console)
        for unit in units:
            if not isinstance(unit.payload, Block) and not pending_units(run, text_plan(run).units(run.store)):
                with_retries(partial(_collect, run, unit), f"{self.name} {unit.name}", run.store, run.console)

    def finish(self, run: Run, records: Sequence[Record]) -> dict[str, object]:
        collected = next(record for record in records if record.name == ALL_TEXTS)
        families = [family.name for family in text_plan(run).families]
        return {"families": families, "file": collected.files[0].path, **collected.facts}

    def summary(self, run: Run, manifest: Record) -> Iterator[str]:
        where = run.store.where(run.store.path(texts_file(manifest)))
        yield f"{counted(manifest.facts['texts'], 'text')} ({manifest.facts['source']}) -> {where}"

    def recomputed(self, unit: Record | None, teacher: str) -> str:
        texts = counted(unit.facts["rows"], "text") if unit and "rows" in unit.facts else "one unit"
        return f"generated again: {texts}{f' of teacher {teacher}' if teacher else ''}"

    def describe(self, manifest: Record) -> str:
        return f"{counted(manifest.facts['texts'], 'text')}, {manifest.facts['source']}"


# ---- inputs


def generate_config(run: Run) -> GenerateConfig:
    if run.experiment.generate is None:
        raise AssertionError("generate is not needed")  # is_needed decides
    return run.experiment.generate


@once
def text_plan(run: Run) -> TextPlan:
    """Returns the texts to generate; raises PendingDependencyError while a model or a corpus is not fetched."""
    settings = generate_config(run)
    model, revision = str(settings.language_model), settings.revision
    digests = {file.path: file.sha256 for file in load.text_inputs(run, settings.corpus or [])}
    return TextPlan(
        settings,
        load.teachers_of(run),
        language_model=load.model_digest(run, model, revision, LANGUAGE_MODEL) if settings.writes else None,
        corpus=sorted(content_of(digests.get(path) or run.digest_of(path), path.name) for path in _corpus_files(run)),
        libraries=run.versions.get("libraries"),
    )


def language_model_files(run: Run) -> ModelFiles:
    settings = generate_config(run)
    return load.model_files(run, str(settings.language_model), settings.revision, LANGUAGE_MODEL)


def source_inputs(run: Run) -> SourceInputs:
    from amalgam.stages.generate.texts import SourceInputs

    settings = generate_config(run)
    return SourceInputs(
        settings=settings,
        teachers=load.teachers_of(run),
        language_model=language_model_files(run) if settings.writes else None,
        corpus_files=_corpus_files(run),
        corpus_inputs=load.text_inputs(run, settings.corpus or []),
        loader=load.teacher_loader(run),
        console=run.console,
        stop=run.signals.check,
    )


def _corpus_files(run: Run) -> list[Path]:
    return [path for source in generate_config(run).corpus or [] for path in load.local_files(run, source)]


# ---- units


def _write_block(run: Run, unit: Unit, texts: Sequence[GeneratedText], seconds: float) -> None:
    from amalgam.stages.generate.texts import block_table

    with run.store.draft(unit.folder, unit.name, ".parquet") as draft:
        write_table(block_table(unit.payload.first, texts), draft.folder / "unit.parquet")
        draft.facts = {"rows": len(texts)}
        draft.made = {**draft.made, "seconds": round(seconds, 3)}


def _collect(run: Run, unit: Unit) -> None:
    from amalgam.stages.generate.texts import collected_table

    plan = text_plan(run)
    table, requested = collected_table(plan, run.store), sum(family.count for family in plan.families)
    if table.num_rows < requested:
        run.console.note(f"generate.corpus has only {counted(table.num_rows, 'text')}; {requested:,} were requested")
    with run.store.draft(unit.folder, unit.name, ".parquet") as draft:
        write_table(table, draft.folder / "texts.parquet")
        draft.facts = {"source": generate_config(run).source, "texts": table.num_rows}


def _describe_families(run: Run) -> None:
    """Writes family.json, which describes a family to a person who opens its folder."""
    for family in text_plan(run).families:
        teacher = family.teacher or generate_config(run).source
        content = {"dtype": "fp32", **family.key, "model": family.key.get("teacher"), "teacher": teacher}
        describe_family(run, "generate", family.name, content)


def _warn_of_labels(run: Run) -> None:
    settings = generate_config(run)
    if not settings.writes or not any("{label}" in prompt for prompt in sampling_choices(settings)["prompt"]):
        return
    labels = [(label, teacher.name) for teacher in load.teachers_of(run) for label in teacher.labels]
    strange = [f"{label} ({teacher})" for label, teacher in labels if uninformative_label(label)]
    if strange:
        run.console.note(
            f"prompts name the class, but a language model cannot interpret {shown_names(strange, SHOWN_LABELS)}: "
            "rename such labels (teachers: rename), or remove {label} from the prompts and steer"
        )
