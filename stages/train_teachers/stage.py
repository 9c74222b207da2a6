"""Stage train-teachers: a unit is one teacher, known by its encoder, its labels and the texts it learns from.

Teachers that are trained together are units of their own all the same: the first that is missing brings all.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from amalgam.pipeline.config.schema import ExperimentConfig
from amalgam.pipeline.execution.stage import Identity, Run, Stage, Unit
from amalgam.pipeline.execution.versions import library_versions
from amalgam.pipeline.storage.fingerprint import fingerprint
from amalgam.pipeline.storage.store import Record
from amalgam.stages.common.encoders import NewClassifier
from amalgam.stages.common.load import encoder_files, trained_folder
from amalgam.stages.common.models.output_folder import check_place, place
from amalgam.stages.train_teachers.settings import (
    NOT_IDENTITY,
    _encoder_digests,
    _part,
    encoders_of,
    groups_of,
    settings_of,
)


class TrainTeachers(Stage):
    name = "train-teachers"
    VERSION = 1
    parallelism = "collective"
    unit_label = "teachers"
    help = "Optional: fine-tune one teacher per group of labels from labelled texts."
    examples = ("amalgam train-teachers", "amalgam train-teachers train_teachers.epochs=5")
    sections = ("train_teachers",)
    enabled_by = "add a `train_teachers` section"

    def is_needed(self, experiment: ExperimentConfig) -> bool:
        return experiment.train_teachers is not None

    def needs(self, experiment: ExperimentConfig) -> tuple[str, ...]:  # noqa: ARG002
        return ("read-corpus",)

    def resolve_inputs(self, run: Run) -> None:
        for said, where in encoders_of(run).values():
            encoder_files(run, said, where)
        for name in groups_of(run):
            check_place(run.base, "teachers", name)

    def identity(self, run: Run) -> Identity:
        settings = settings_of(run)
        inputs = {"encoder": _encoder_digests(run), "texts": _part(run).labels_digest, "groups": groups_of(run)}
        return Identity({"train_teachers": settings.model_dump(exclude=NOT_IDENTITY)}, inputs)

    def units(self, run: Run, folder: Path) -> Sequence[Unit]:  # noqa: ARG002 - a teacher is shared by all experiments
        return [
            Unit(name, run.store.folder(self.name, "teacher-" + _teacher_fingerprint(run, name, labels)), 1, labels)
            for name, labels in groups_of(run).items()
        ]

    def workload(self, run: Run, units: Sequence[Unit] | None) -> float:
        """Returns the number of examples over all epochs."""
        groups = groups_of(run)
        share = 1.0 if units is None else len(units) / len(groups)
        return settings_of(run).epochs * _part(run).texts * share

    def run_unit(self, run: Run, unit: Unit) -> None:
        from amalgam.stages.common.models.loading import save_pretrained_folder

        for one, learned, facts in self._trained(run, unit):
            if run.share.is_leader:
                with run.store.draft(one.folder, one.name) as draft:
                    save_pretrained_folder(learned.model, learned.tokenizer, draft.folder)
                    draft.facts, draft.made = facts, {"libraries": library_versions()}
        if run.share.is_leader:
            shutil.rmtree(unit.folder / "checkpoint", ignore_errors=True)

    def _trained(self, run: Run, unit: Unit) -> Iterator[tuple[Unit, NewClassifier, dict[str, Any]]]:
        """The unit's teacher, and those that were trained with it."""
        checkpoint = unit.folder / "checkpoint"
        if not settings_of(run).co_train:
            from amalgam.stages.train_teachers.training import train

            yield (unit, *train(run, unit.payload, _part(run), checkpoint))
        elif not run.cache.get("trained together"):
            from amalgam.stages.train_teachers.co_train import train_together

            found = train_together(run, unit.payload, _part(run), checkpoint)
            run.cache["trained together"] = True  # all processes know it, whoever writes
            for one in self.units(run, unit.folder):
                yield (one, *found[one.name])

    def finish(self, run: Run, folder: Path, records: Sequence[Record]) -> dict[str, Any]:  # noqa: ARG002
        return {"teachers": {record.name: dict(record.facts) for record in records}}

    def publish(self, run: Run, manifest: Record, *, fresh: bool) -> None:
        for name, facts in manifest.facts["teachers"].items():
            folder = trained_folder(run, name)
            place(folder, run.base, "teachers", name, folder.name)
            if fresh:
                run.console.say(
                    f"  {name}: {', '.join(facts['labels'])}; accuracy {facts['best_score']:.3f} on its own labels, "
                    f"{facts['selected_by']} -> teachers/{name}"
                )

    def describe(self, manifest: Record) -> str:
        return ", ".join(manifest.facts["teachers"])


def _teacher_fingerprint(run: Run, name: str, labels: Sequence[str]) -> str:
    """A teacher's name is no part of it, unless it is one of several that are trained together."""
    settings = settings_of(run).model_dump(exclude=NOT_IDENTITY)
    content = [_encoder_digests(run), _part(run).labels_digest]
    among = [name] if settings_of(run).co_train else []
    return fingerprint([TrainTeachers.VERSION, settings, list(labels), content, *among])
