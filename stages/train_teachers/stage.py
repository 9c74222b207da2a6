"""Stage train-teachers: a unit is one teacher, identified by its encoder, its labels and its training texts.

Co-trained teachers are separate units; the first missing one trains all of them.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amalgam.data.keys import cut_in_groups
from amalgam.pipeline.config.schema import ExperimentConfig
from amalgam.pipeline.config.schema import TrainTeachers as Settings
from amalgam.pipeline.errors import DataError, ExperimentError
from amalgam.pipeline.execution.stage import Identity, Run, Stage, Unit
from amalgam.pipeline.storage.fingerprint import fingerprint, library_versions
from amalgam.pipeline.storage.store import Record
from amalgam.stages.common.corpus import Part
from amalgam.stages.common.load import (
    encoder_digest,
    encoder_files,
    load_new_classifier,
    part_of,
    tokenized_buckets,
    trained_folder,
    training_services,
)
from amalgam.stages.common.models.model_folder import check_target, publish_folder

if TYPE_CHECKING:
    from amalgam.stages.train_teachers.training import Encoders, TeachersFacts


ENCODER = "train_teachers.encoder"
NOT_IDENTITY = {"encoder", "revision", "texts", "limit", "groups", "co_train"}


class TrainTeachers(Stage):
    name = "train-teachers"
    VERSION = 2
    parallelism = "collective"
    unit_label = "teachers"
    reads = ("read-corpus",)
    sections = ("train_teachers",)
    enabled_by = "add a `train_teachers` section"

    def is_needed(self, experiment: ExperimentConfig) -> bool:
        return experiment.train_teachers is not None

    def resolve_inputs(self, run: Run) -> None:
        for settings, where in encoders_of(run).values():
            encoder_files(run, settings, where)
        for name in groups_of(run):
            check_target(run.base, "teachers", name)

    def identity(self, run: Run) -> Identity:
        settings = settings_of(run)
        inputs = {
            "encoder": _encoder_digests(run),
            "texts": _labelled_part(run).labels_digest,
            "groups": groups_of(run),
        }
        return Identity({"train_teachers": settings.model_dump(exclude=NOT_IDENTITY)}, inputs)

    def units(self, run: Run, folder: Path) -> Sequence[Unit]:  # noqa: ARG002 - all experiments share a teacher
        return [
            Unit(name, run.store.folder(self.name, "teacher-" + _teacher_fingerprint(run, name, labels)), 1, labels)
            for name, labels in groups_of(run).items()
        ]

    def workload(self, run: Run, units: Sequence[Unit] | None) -> float:
        """Returns the number of examples over all epochs."""
        groups = groups_of(run)
        share = 1.0 if units is None else len(units) / len(groups)
        return settings_of(run).epochs * _labelled_part(run).texts * share

    def run_units(self, run: Run, units: Sequence[Unit]) -> None:
        """Trains each teacher; co-trained teachers are all results of the first unit's training."""
        trainings = units[:1] if settings_of(run).co_train else units
        super().run_units(run, trainings)
        run.console.advance(len(units) - len(trainings))

    def run_unit(self, run: Run, unit: Unit) -> None:
        from amalgam.stages.common.models.loading import save_pretrained_folder
        from amalgam.stages.common.training.loop import training_of
        from amalgam.stages.train_teachers.training import co_train, train

        settings, checkpoint = settings_of(run), unit.folder / "checkpoint"
        method, units = (co_train, self.units(run, unit.folder)) if settings.co_train else (train, [unit])
        trained = method(_encoders(run, unit), unit.payload, training_of(settings), training_services(run), checkpoint)
        if run.share.is_leader:
            for own in units:
                learned, facts = trained[own.name]
                with run.store.draft(own.folder, own.name) as draft:
                    save_pretrained_folder(learned.model, learned.tokenizer, draft.folder, max_tokens=learned.limit)
                    draft.facts, draft.made = facts, {"libraries": library_versions()}
            shutil.rmtree(checkpoint, ignore_errors=True)

    def finish(self, run: Run, records: Sequence[Record]) -> TeachersFacts:  # noqa: ARG002
        return {"teachers": {record.name: record.facts for record in records}}

    def publish(self, run: Run, manifest: Record, *, fresh: bool) -> None:
        trained: TeachersFacts = manifest.facts
        for name, facts in trained["teachers"].items():
            folder = trained_folder(run, name)
            publish_folder(folder, check_target(run.base, "teachers", name), folder.name)
            if fresh:
                run.console.say(
                    f"  {name}: {', '.join(facts['labels'])}; accuracy {facts['best_score']:.3f} on its own labels, "
                    f"{facts['selected_by']} -> teachers/{name}"
                )

    def describe(self, manifest: Record) -> str:
        return ", ".join(manifest.facts["teachers"])


# ---- inputs


def settings_of(run: Run) -> Settings:
    if run.experiment.train_teachers is None:
        raise AssertionError("train-teachers is not needed")  # is_needed decides
    return run.experiment.train_teachers


def encoders_of(run: Run) -> dict[str, tuple[Settings, str]]:
    """Returns settings with one encoder each and their field; by teacher if teachers are co-trained."""
    settings = settings_of(run)
    return {
        name: (settings.model_copy(update={"encoder": encoder}), f"train_teachers.co_train.{name}")
        for name, encoder in (settings.co_train or {}).items()
    } or {"": (settings, ENCODER)}


def groups_of(run: Run) -> dict[str, list[str]]:
    """Returns each teacher's labels."""
    settings, known_labels = settings_of(run), _labelled_part(run).labels
    groups = settings.groups or dict.fromkeys(settings.co_train or {}, known_labels)
    if isinstance(groups, int):
        if groups * 2 > len(known_labels):
            raise ExperimentError(
                f"{len(known_labels)} labels cannot be divided into {groups} groups of at least two",
                where="train_teachers.groups",
                fix=f"set at most {len(known_labels) // 2} groups, or name: [labels] for each teacher",
            )
        return {f"teacher-{index}": labels for index, labels in enumerate(cut_in_groups(known_labels, groups), 1)}
    for name, labels in groups.items():
        unknown = sorted(set(labels) - set(known_labels))
        if unknown or len(labels) < 2:
            what = (
                f"{', '.join(unknown)} is not a label of the texts"
                if unknown
                else "a teacher needs at least two labels"
            )
            where, fix = f"train_teachers.groups.{name}", f"use these labels: {', '.join(known_labels)}"
            raise ExperimentError(what, where=where, fix=fix)
    return {name: list(labels) for name, labels in groups.items()}


def _encoders(run: Run, unit: Unit) -> Encoders:
    part, encoders = _labelled_part(run), {}
    for name, (settings, where) in encoders_of(run).items():
        new = load_new_classifier(run, settings, unit.payload, where)
        encoders[name or unit.name] = new, tokenized_buckets(run, part, new, ["key", "label"])
    return encoders


def _labelled_part(run: Run) -> Part:
    part = part_of(run, "teachers") or part_of(run, "train")
    if part is None or part.labels_digest is None:
        raise DataError(
            "the training texts of the teachers have no labels",
            where="corpus.label",
            fix="set corpus.label to the column of their labels, or name trained teachers instead of train_teachers",
        )
    return part


def _encoder_digests(run: Run) -> Any:
    digests = {name: encoder_digest(run, settings, where) for name, (settings, where) in encoders_of(run).items()}
    return digests.get("", digests)


def _teacher_fingerprint(run: Run, name: str, labels: Sequence[str]) -> str:
    """Returns a teacher's fingerprint; it includes the name only if teachers are co-trained."""
    settings = settings_of(run).model_dump(exclude=NOT_IDENTITY)
    content = [_encoder_digests(run), _labelled_part(run).labels_digest]
    names = [name] if settings_of(run).co_train else []
    return fingerprint([TrainTeachers.VERSION, settings, list(labels), content, *names])
