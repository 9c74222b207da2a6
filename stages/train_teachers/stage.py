"""Stage train-teachers: a unit is one teacher, known by its encoder, its labels and the texts it learns from."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from amalgam.data.labels import cut_in_groups
from amalgam.pipeline.errors import DataError, ExperimentError
from amalgam.pipeline.experiment import Experiment
from amalgam.pipeline.experiment import TrainTeachers as Settings
from amalgam.pipeline.fingerprint import fingerprint
from amalgam.pipeline.plan import library_versions
from amalgam.pipeline.stage import Identity, Run, Unit, UnitByUnit
from amalgam.pipeline.store import Record
from amalgam.stages.models.encoder import encoder_digest, encoder_files
from amalgam.stages.models.placing import check_place, place
from amalgam.stages.read_corpus.parts import Part, part_of
from amalgam.stages.teachers import trained_folder

ENCODER = "train_teachers.encoder"
NOT_IDENTITY = {"encoder", "revision", "texts", "limit", "groups"}


class TrainTeachers(UnitByUnit):
    name: ClassVar[str] = "train-teachers"
    VERSION: ClassVar[int] = 1
    spread: ClassVar[Literal["units", "together", "alone"]] = "together"
    measure: ClassVar[str] = "teachers"

    def wanted(self, experiment: Experiment) -> bool:
        return experiment.train_teachers is not None

    def prepare(self, run: Run) -> None:
        encoder_files(run, settings_of(run), ENCODER)
        for name in groups_of(run):
            check_place(run.base, "teachers", name)

    def identity(self, run: Run) -> Identity:
        settings = settings_of(run)
        digest = encoder_digest(run, settings, ENCODER)
        inputs = {"encoder": digest, "texts": _part(run).labels_digest, "groups": groups_of(run)}
        return Identity({"train_teachers": settings.model_dump(exclude=NOT_IDENTITY)}, inputs)

    def units(self, run: Run, folder: Path) -> Sequence[Unit]:  # noqa: ARG002 - a teacher is shared by all experiments
        return [
            Unit(name, run.store.folder(self.name, "teacher-" + _teacher_fingerprint(run, labels)), 1, labels)
            for name, labels in groups_of(run).items()
        ]

    def run_unit(self, run: Run, unit: Unit) -> None:
        from amalgam.stages.models.loading import save_pretrained_folder
        from amalgam.stages.train_teachers.training import train

        learned, facts = train(run, unit.work, _part(run), unit.folder / "checkpoint")
        if run.share.leads:
            with run.store.draft(unit.folder, unit.name) as draft:
                save_pretrained_folder(learned.model, learned.tokenizer, draft.folder)
                draft.facts, draft.made = facts, {"libraries": library_versions()}
            shutil.rmtree(unit.folder / "checkpoint", ignore_errors=True)

    def finish(self, run: Run, folder: Path, records: Sequence[Record]) -> dict[str, Any]:  # noqa: ARG002
        return {"teachers": {record.name: dict(record.facts) for record in records}}

    def deliver(self, run: Run, manifest: Record, *, fresh: bool) -> None:
        for name, facts in manifest.facts["teachers"].items():
            folder = trained_folder(run, name)
            place(folder, run.base, "teachers", name, folder.name)
            if fresh:
                run.console.say(
                    f"  {name}: {', '.join(facts['labels'])}; accuracy {facts['best_score']:.3f} on its own labels, "
                    f"{facts['selected_by']} -> teachers/{name}"
                )


def settings_of(run: Run) -> Settings:
    if run.experiment.train_teachers is None:
        raise AssertionError("train-teachers is not wanted")  # `wanted` says so
    return run.experiment.train_teachers


def groups_of(run: Run) -> dict[str, list[str]]:
    """Teacher -> its labels."""
    groups, known = settings_of(run).groups, _part(run).labels
    if isinstance(groups, int):
        if groups * 2 > len(known):
            raise ExperimentError(
                f"{len(known)} labels cannot be cut in {groups} groups of at least two", where="train_teachers.groups"
            )
        return {f"teacher-{index}": own for index, own in enumerate(cut_in_groups(known, groups), 1)}
    for name, labels in groups.items():
        strange = sorted(set(labels) - set(known))
        if strange or len(labels) < 2:
            what = (
                f"{', '.join(strange)} is not a label of the texts" if strange else "a teacher needs two labels or more"
            )
            raise ExperimentError(
                what, where=f"train_teachers.groups.{name}", fix=f"the labels are: {', '.join(known)}"
            )
    return {name: list(labels) for name, labels in groups.items()}


def _part(run: Run) -> Part:
    part = part_of(run, "teachers") or part_of(run, "train")
    if part is None or part.labels_digest is None:
        raise DataError("the texts to train teachers on have no labels", where="corpus.label")
    return part


def _teacher_fingerprint(run: Run, labels: Sequence[str]) -> str:
    settings = settings_of(run).model_dump(exclude=NOT_IDENTITY)
    content = [encoder_digest(run, settings_of(run), ENCODER), _part(run).labels_digest]
    return fingerprint([TrainTeachers.VERSION, settings, list(labels), content])
