"""Stage make-embeddings: wanted by `as-dfd` alone. A unit is the pseudo embeddings of one teacher and class.

Each is a pure function of the teacher, the class and the settings, and is shared by all experiments that ask for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from amalgam.pipeline.config.schema import ExperimentConfig
from amalgam.pipeline.execution.stage import Identity, Run, Stage, Unit
from amalgam.pipeline.execution.versions import library_versions
from amalgam.pipeline.storage.fingerprint import fingerprint
from amalgam.pipeline.storage.store import Record
from amalgam.stages.common.inference.load import load_teacher
from amalgam.stages.common.load import prepare_teachers, teachers_of
from amalgam.stages.common.teachers import ResolvedTeacher

FILE = "embeddings.safetensors"

FEW = 0.5
"""Less than this share of a class's embeddings taken for the class is said."""


class MakeEmbeddings(Stage):
    name = "make-embeddings"
    VERSION = 1
    parallelism = "units"
    unit_label = "embeddings"
    help = "Optional, as-dfd only: search embeddings that the teachers assign to their classes; no text is used."
    examples = ("amalgam make-embeddings student.method=as-dfd",)
    sections = ("pseudo_embeddings",)
    enabled_by = "set student.method: as-dfd"

    def is_needed(self, experiment: ExperimentConfig) -> bool:
        return experiment.student.learns and not experiment.reads_texts

    def needs(self, experiment: ExperimentConfig) -> tuple[str, ...]:
        return ("train-teachers",) if experiment.train_teachers else ()

    def resolve_inputs(self, run: Run) -> None:
        prepare_teachers(run)

    def identity(self, run: Run) -> Identity:
        known = {teacher.name: {"content": teacher.files.digest, "of": list(teacher.labels)} for teacher in _known(run)}
        return Identity({"pseudo_embeddings": run.experiment.pseudo_embeddings.model_dump()}, {"teachers": known})

    def units(self, run: Run, folder: Path) -> Sequence[Unit]:  # noqa: ARG002  shared by all experiments
        said = run.experiment.pseudo_embeddings
        return [
            Unit(f"{place:04}", run.store.folder(self.name, f"teacher-{_name(run, known)}"), said.count, (known, place))
            for known in _known(run)
            for place in range(len(known.labels))
        ]

    def workload(self, run: Run, units: Sequence[Unit] | None) -> float:
        """Returns the number of optimization steps, counted once for each embedding."""
        settings = run.experiment.pseudo_embeddings
        sizes = [unit.size for unit in (self.units(run, run.store.root) if units is None else units)]
        return float(sum(sizes) * settings.steps)

    def run_unit(self, run: Run, unit: Unit) -> None:
        from safetensors.torch import save_file

        from amalgam.stages.make_embeddings.search import guess

        known, place = unit.payload
        teacher = load_teacher(run, known, "fp32", passes=0)
        embeddings, logits = guess(teacher, place, run.experiment.pseudo_embeddings, stop=run.signals.check)
        with run.store.draft(unit.folder, unit.name) as draft:
            save_file({"embeddings": embeddings, "logits": logits}, draft.folder / FILE)
            taken = int((logits.argmax(dim=-1) == place).sum())
            draft.facts = {"rows": len(logits), "taken": taken, "content": known.files.digest, "label": place}
            draft.made = {"libraries": library_versions()}

    def finish(self, run: Run, folder: Path, records: Sequence[Record]) -> dict[str, Any]:  # noqa: ARG002
        found = {(record.facts["content"], record.facts["label"]): record for record in records}
        return {
            "teachers": {
                known.name: {
                    label: {
                        "rows": int(found[known.files.digest, place].facts["rows"]),
                        "taken": int(found[known.files.digest, place].facts["taken"]),
                        "file": found[known.files.digest, place].files[0].path,
                    }
                    for place, label in enumerate(known.labels)
                }
                for known in _known(run)
            }
        }

    def publish(self, run: Run, manifest: Record, *, fresh: bool) -> None:
        if not fresh:
            return
        for name, labels in manifest.facts["teachers"].items():
            said = ", ".join(f"{label} {one['taken']}/{one['rows']}" for label, one in labels.items())
            run.console.say(f"  {name}: taken for their class: {said}")
            for label, one in labels.items():
                if one["taken"] < FEW * one["rows"]:
                    run.console.note(
                        f"{name}, {label}: {one['taken']} of {one['rows']} pseudo embeddings are taken for the class; "
                        "more pseudo_embeddings.steps, or a larger pseudo_embeddings.learning_rate, may reach it"
                    )

    def describe(self, manifest: Record) -> str:
        return f"pseudo embeddings of {', '.join(manifest.facts['teachers'])}"


def _known(run: Run) -> list[ResolvedTeacher]:
    return teachers_of(run)


def _name(run: Run, known: ResolvedTeacher) -> str:
    """Names of teachers and labels are no part of it."""
    return fingerprint([MakeEmbeddings.VERSION, run.experiment.pseudo_embeddings.model_dump(), known.files.digest])
