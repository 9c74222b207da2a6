"""Stage make-embeddings, for `as-dfd` alone. A unit is the pseudo embeddings of one teacher and class.

A unit depends on the teacher, the class and the settings alone, so all experiments share it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypedDict

from amalgam.pipeline.config.schema import ExperimentConfig
from amalgam.pipeline.execution.stage import Identity, Run, Stage, Unit
from amalgam.pipeline.storage.facts import FactTypes
from amalgam.pipeline.storage.fingerprint import fingerprint
from amalgam.pipeline.storage.store import Record
from amalgam.stages.common.input_names import INPUT_NAMES
from amalgam.stages.common.load import prepare_teachers, teacher_loader, teachers_of
from amalgam.stages.objective_inputs import reads_texts

FILE = "embeddings.safetensors"

LOW_SHARE = 0.5
"""Below this share of embeddings that the teacher predicts as their class, a note is shown."""


class ClassUnitFacts(TypedDict):
    """The facts of a unit."""

    rows: int
    taken: int
    content: str
    label: int


class ClassFacts(TypedDict):
    rows: int
    taken: int
    """Number of rows that the teacher predicts as their class."""
    file: str


class EmbeddingFacts(TypedDict):
    teachers: dict[str, dict[str, ClassFacts]]
    """By teacher and label."""


class MakeEmbeddings(Stage):
    name = "make-embeddings"
    VERSION = 1
    parallelism = "units"
    unit_label = "embeddings"
    reads = ("train-teachers",)
    sections = ("pseudo_embeddings",)
    enabled_by = "set student.method: as-dfd"
    facts = FactTypes(EmbeddingFacts, ClassUnitFacts)
    input_names = INPUT_NAMES

    def is_needed(self, experiment: ExperimentConfig) -> bool:
        return experiment.student.learns and not reads_texts(experiment)

    def resolve_inputs(self, run: Run) -> None:
        prepare_teachers(run)

    def identity(self, run: Run) -> Identity:
        teachers = {
            teacher.name: {"content": teacher.files.digest, "of": list(teacher.labels)} for teacher in teachers_of(run)
        }
        return Identity({"pseudo_embeddings": run.experiment.pseudo_embeddings.model_dump()}, {"teachers": teachers})

    def units(self, run: Run, folder: Path) -> Sequence[Unit]:
        """Returns a unit for each class; names of teachers and labels are no part of its folder."""
        config, units = run.experiment.pseudo_embeddings, []
        for teacher in teachers_of(run):
            family = fingerprint([self.VERSION, config.model_dump(), teacher.files.digest, *run.versions.values()])
            shared, labels = run.store.folder(self.name, f"teacher-{family}"), range(len(teacher.labels))
            units += [Unit(f"{label:04}", shared, config.count, (teacher, label)) for label in labels]
        return units

    def workload(self, run: Run, units: Sequence[Unit] | None) -> float:
        """Returns the number of optimization steps, counted once for each embedding."""
        settings = run.experiment.pseudo_embeddings
        sizes = [unit.size for unit in (self.units(run, run.store.root) if units is None else units)]
        return float(sum(sizes) * settings.steps)

    def run_unit(self, run: Run, unit: Unit) -> None:
        from safetensors.torch import save_file

        from amalgam.stages.make_embeddings.search import search_embeddings

        teacher, label = unit.payload
        loaded = teacher_loader(run).load(teacher, "fp32", passes=0)
        embeddings, logits = search_embeddings(loaded, label, run.experiment.pseudo_embeddings, stop=run.signals.check)
        with run.store.draft(unit.folder, unit.name) as draft:
            save_file({"embeddings": embeddings, "logits": logits}, draft.folder / FILE)
            taken = int((logits.argmax(dim=-1) == label).sum())
            draft.facts = {"rows": len(logits), "taken": taken, "content": teacher.files.digest, "label": label}

    def finish(self, run: Run, records: Sequence[Record]) -> EmbeddingFacts:
        classes = dict[tuple[str, int], ClassFacts]()
        for record in records:
            facts = record.facts
            entry = ClassFacts(rows=facts["rows"], taken=facts["taken"], file=record.files[0].path)
            classes[facts["content"], facts["label"]] = entry
        return {
            "teachers": {
                teacher.name: {name: classes[teacher.files.digest, index] for index, name in enumerate(teacher.labels)}
                for teacher in teachers_of(run)
            }
        }

    def summary(self, run: Run, manifest: Record) -> Iterator[str]:
        for name, labels in manifest.facts["teachers"].items():
            counts = ", ".join(f"{label} {facts['taken']}/{facts['rows']}" for label, facts in labels.items())
            yield f"{name}: predicted as their class: {counts}"

    def notes(self, run: Run, manifest: Record) -> Iterator[str]:
        for name, labels in manifest.facts["teachers"].items():
            for label, facts in labels.items():
                if facts["taken"] < LOW_SHARE * facts["rows"]:
                    yield (
                        f"{name}, {label}: {facts['taken']} of {facts['rows']} pseudo embeddings are predicted as the "
                        "class; raise pseudo_embeddings.steps or pseudo_embeddings.learning_rate"
                    )

    def describe(self, manifest: Record) -> str:
        return f"pseudo embeddings of {', '.join(manifest.facts['teachers'])}"
