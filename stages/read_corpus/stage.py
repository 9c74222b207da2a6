"""Stage read-corpus: each part of the corpus is a unit, recognised by the digests of its source files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from amalgam.data.corpus import leaks, read_part
from amalgam.pipeline.config.schema import ExperimentConfig
from amalgam.pipeline.execution.stage import Identity, Run, Stage, Unit
from amalgam.pipeline.storage.fingerprint import fingerprint
from amalgam.pipeline.storage.store import Record
from amalgam.stages.common.corpus import GENERATED, corpus_for, corpus_settings, gates_of, sources_of
from amalgam.stages.common.load import fetch, generated_file, local_files, part_identity
from amalgam.stages.read_corpus.generated import gate_lines, write_kept
from amalgam.stages.target_methods import reads_texts, target_method

KEPT = "kept.parquet"


class ReadCorpus(Stage):
    name = "read-corpus"
    VERSION = 2
    parallelism = "single"
    unit_label = "parts"
    sections = ("corpus",)

    def needs(self, experiment: ExperimentConfig) -> tuple[str, ...]:  # noqa: ARG002
        return ("generate",)

    def resolve_inputs(self, run: Run) -> None:
        """Downloads remote files once and pins their content."""
        for sources in sources_of(run.experiment).values():
            fetch(run, sources)

    def identity(self, run: Run) -> Identity:
        settings: dict[str, Any] = {"corpus": corpus_settings(run.experiment.corpus)}
        if run.experiment.generate and reads_texts(run.experiment):
            settings["generate"] = gates_of(run.experiment)
        if "teachers" in sources_of(run.experiment):
            settings["train_teachers"] = {"limit": corpus_for(run.experiment, "teachers").limit}
        return Identity(settings, {part: part_identity(run, part) for part in sources_of(run.experiment)})

    def units(self, run: Run, folder: Path) -> Sequence[Unit]:  # noqa: ARG002 - a part is shared by all experiments
        return [
            Unit(part, run.store.folder(self.name, f"part-{_part_fingerprint(run, part)}"), 1, part)
            for part in sources_of(run.experiment)
        ]

    def workload(self, run: Run, units: Sequence[Unit] | None) -> float:
        """Returns the bytes of the source files."""
        sources = sources_of(run.experiment)
        parts = sources if units is None else [unit.name for unit in units]
        paths = [path for part in parts for source in sources[part] for path in local_files(run, source)]
        return float(sum(path.stat().st_size for path in paths))

    def run_unit(self, run: Run, unit: Unit) -> None:

        with run.store.draft(unit.folder, unit.name) as draft:
            files, gates = _files(run, unit.name, draft.folder)
            needs_label = unit.name == "train" and _train_needs_label(run.experiment)
            facts = read_part(
                files,
                corpus_for(run.experiment, unit.name),
                part=unit.payload,
                folder=draft.folder,
                require_label=needs_label,
            )
            draft.facts = {"part": unit.name, **asdict(facts), **gates}
            (draft.folder / KEPT).unlink(missing_ok=True)

    def finish(self, run: Run, records: Sequence[Record]) -> dict[str, Any]:

        parts = {record.name: record.facts for record in records}
        folders = {record.name: run.store.written_folder(record.files) for record in records if record.files}
        leaked = {
            part: list(leaks(folders["train"], folders[part]))
            for part in ("validation", "test")
            if {part, "train"} <= folders.keys()
        }
        return {"parts": parts, "leaks": leaked}

    def publish(self, run: Run, manifest: Record, *, fresh: bool) -> None:
        if not fresh:
            return
        for part, facts in manifest.facts["parts"].items():
            run.console.say(f"  {part}: {_counts(facts)}")
            _say_gates(run, part, facts)
        for part, (count, which) in manifest.facts["leaks"].items():
            if count:
                run.console.note(
                    f"{count} {part} texts are also in train: {', '.join(which)}{', ...' if count > len(which) else ''}"
                )

    def describe(self, manifest: Record) -> str:
        return ", ".join(f"{part} {facts['texts']:,} texts" for part, facts in manifest.facts["parts"].items())


def _say_gates(run: Run, part: str, facts: dict[str, Any]) -> None:
    """Prints the filters' counts; a held-out part is small, so its classes without texts get no note."""
    if "accepted" in facts:
        summary, poor = gate_lines(facts)
        run.console.say(f"    {summary}")
        for line in poor if part == "train" else []:
            run.console.note(line)


def _files(run: Run, part: str, folder: Path) -> tuple[list[Path], dict[str, Any]]:
    """Returns the part's files and facts; generated texts that pass are written to a temporary file."""
    sources = sources_of(run.experiment)[part]
    if sources == [GENERATED] and run.experiment.generate:
        source = run.store.verified_path(generated_file(run))
        return [folder / KEPT], write_kept(source, run.experiment.generate, part, folder / KEPT)
    return [path for source in sources for path in local_files(run, source)], {}


def _counts(facts: dict[str, Any]) -> str:
    counts = [f"{facts['texts']:,} text{'' if facts['texts'] == 1 else 's'}"]
    counts += [f"{facts['duplicates']:,} duplicate rows"] if facts["duplicates"] else []
    counts += [f"{facts['conflicts']:,} texts with contradicting labels"] if facts["conflicts"] else []
    skipped = sum(facts["skipped"].values())
    counts += [f"{skipped:,} rows skipped (skipped.parquet)"] if skipped else []
    counts += [f"{len(facts['labels'])} labels"] if facts["labels"] else []
    return ", ".join(counts)


def _part_fingerprint(run: Run, part: str) -> str:
    """Paths are left out: a file is known by its content."""
    config = corpus_settings(corpus_for(run.experiment, part))
    return fingerprint([ReadCorpus.VERSION, part, config, part_identity(run, part)])


def _train_needs_label(experiment: ExperimentConfig) -> bool:
    trains = experiment.train_teachers is not None and experiment.train_teachers.texts is None
    return trains or target_method(experiment.targets).reads_gold
