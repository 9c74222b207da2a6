"""Stage generate: per teacher and class a family of texts, in blocks; then all of them gathered into one file.

Gates are not its business: they are applied when the corpus is read, so that another gate writes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amalgam.data.parquet import write_table
from amalgam.pipeline.config.schema import ExperimentConfig
from amalgam.pipeline.execution.retry import with_retries
from amalgam.pipeline.execution.stage import Identity, Run, Stage, Unit, pending_units
from amalgam.pipeline.execution.versions import library_versions
from amalgam.pipeline.storage.store import Record
from amalgam.stages.common.generated_texts import texts_file
from amalgam.stages.common.load import prepare_teachers, teachers_of
from amalgam.stages.common.sources import fetch
from amalgam.stages.generate.requests import (
    Block,
    block_units,
    corpus_digests,
    generate_config,
    language_model_digest,
    language_model_files,
    no_word,
    said_of,
    teacher_identity,
    text_families,
)

if TYPE_CHECKING:
    from amalgam.stages.generate.decoding import GeneratedText


ALL_TEXTS = "texts"


class Generate(Stage):
    name = "generate"
    VERSION = 2
    parallelism = "units"
    unit_label = "texts"
    help = "Stage 0, optional: generate texts, steered by the teachers. Needs a `generate` section."
    examples = ("amalgam generate", "amalgam generate generate.texts=500 -c no-texts.yaml")
    sections = ("generate",)
    enabled_by = "add a `generate` section"

    def is_needed(self, experiment: ExperimentConfig) -> bool:
        return experiment.generate is not None and experiment.reads_texts

    def resolve_inputs(self, run: Run) -> None:

        prepare_teachers(run)
        fetch(run, generate_config(run).corpus or [])
        if generate_config(run).writes:
            language_model_files(run)

    def identity(self, run: Run) -> Identity:
        settings = generate_config(run)
        teachers = {known.name: {**teacher_identity(known), "labels": list(known.labels)} for known in teachers_of(run)}
        inputs: dict[str, Any] = {"teachers": teachers}
        if settings.writes:
            inputs["language_model"] = language_model_digest(run)
        if settings.source == "cross-domain":
            inputs["texts"] = corpus_digests(run)
        return Identity({"generate": {**said_of(settings), "texts": settings.texts}}, inputs)

    def units(self, run: Run, folder: Path) -> Sequence[Unit]:
        """Blocks stand in the families. What was gathered counts once it is there: --force sets it aside too."""
        gathered = Unit(ALL_TEXTS, folder)
        return [*block_units(run), *([gathered] if run.store.has(gathered.record_path) else [])]

    def more_units(self, run: Run, folder: Path) -> Sequence[Unit]:
        """Gathering is possible once all blocks are there."""
        return [*block_units(run), Unit(ALL_TEXTS, folder)]

    def run_units(self, run: Run, units: Sequence[Unit]) -> None:
        from amalgam.stages.generate.sources import make

        blocks = [unit for unit in units if isinstance(unit.payload, Block)]
        if blocks:
            _describe(run)
            _warn_of_names(run)
            began = [time.monotonic()]
            try:
                make(run, blocks, partial(_commit, run, began))
            finally:
                run.cache.pop("language model", None)
        for unit in units:
            if not isinstance(unit.payload, Block) and not pending_units(run, list(block_units(run))):
                with_retries(partial(_gather, run, unit), run, f"{self.name} {unit.name}")

    def finish(self, run: Run, folder: Path, records: Sequence[Record]) -> dict[str, Any]:  # noqa: ARG002
        gathered = next(record for record in records if record.name == ALL_TEXTS)
        families = [family.name for family in text_families(run)]
        return {"families": families, "file": gathered.files[0].path, **gathered.facts}

    def publish(self, run: Run, manifest: Record, *, fresh: bool) -> None:
        if fresh:
            facts = manifest.facts
            where = run.store.where(run.store.path(texts_file(manifest)))
            run.console.say(f"  {facts['texts']:,} texts ({facts['source']}) -> {where}")

    def describe(self, manifest: Record) -> str:
        return f"{manifest.facts['texts']:,} texts, {manifest.facts['source']}"


def _commit(run: Run, began: list[float], unit: Unit, texts: Sequence[GeneratedText]) -> None:
    """`began`: when the last unit was done, so that all seconds are counted once."""
    seconds, began[0] = time.monotonic() - began[0], time.monotonic()

    def commit() -> None:
        from amalgam.stages.generate.tables import written_table

        with run.store.draft(unit.folder, unit.name, ".parquet") as draft:
            write_table(written_table(unit.payload.first, texts), draft.folder / "unit.parquet")
            scored, tokens = sum(text.scored for text in texts), sum(text.tokens for text in texts)
            draft.facts = {"first": unit.payload.first, "rows": len(texts), "tokens": tokens, "scored": scored}
            draft.made = {"libraries": library_versions(), "seconds": round(seconds, 3)}

    with_retries(commit, run, f"generate {unit.name}")


def _gather(run: Run, unit: Unit) -> None:
    from amalgam.stages.generate.tables import generated_table

    table = generated_table(run)
    with run.store.draft(unit.folder, unit.name, ".parquet") as draft:
        write_table(table, draft.folder / "texts.parquet")
        draft.facts = {"source": generate_config(run).source, "texts": table.num_rows}
        draft.made = {"libraries": library_versions()}


def _describe(run: Run) -> None:
    """key.json: what a family is, for a person who finds the folder."""
    for family in text_families(run):
        path = run.store.folder("generate", family.name) / "key.json"
        if not run.store.has(path):
            who = family.teacher or generate_config(run).source
            run.store.replace(path, {"teacher": who, "dtype": "fp32", **family.key})


def _warn_of_names(run: Run) -> None:
    settings = generate_config(run)
    prompts = settings.prompt or (["{label}"] if settings.source == "prompted" else [])
    if not settings.writes or not any("{label}" in prompt for prompt in prompts):
        return
    strange = [f"{label} ({known.name})" for known in teachers_of(run) for label in known.labels if no_word(label)]
    if strange:
        run.console.note(
            f"prompts name the class, and {', '.join(strange[:5])} tells a language model nothing: "
            "rename such labels (teachers: rename), or leave {label} out and steer"
        )
