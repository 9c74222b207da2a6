"""Stage train-teachers: a unit is one teacher, known by its encoder, its labels and the texts it learns from.

Teachers that are trained together are units of their own all the same: the first that is missing brings all.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from amalgam.data.labels import cut_in_groups
from amalgam.pipeline.errors import DataError, ExperimentError
from amalgam.pipeline.experiment import ExperimentFile
from amalgam.pipeline.experiment import TrainTeachers as Settings
from amalgam.pipeline.fingerprint import fingerprint
from amalgam.pipeline.plan import library_versions
from amalgam.pipeline.stage import Identity, Run, Unit, UnitByUnit
from amalgam.pipeline.store import Record
from amalgam.stages.models.encoder import Beginner, encoder_digest, encoder_files
from amalgam.stages.models.placing import check_place, place
from amalgam.stages.read_corpus.parts import Part, part_of
from amalgam.stages.teachers import trained_folder

ENCODER = "train_teachers.encoder"
NOT_IDENTITY = {"encoder", "revision", "texts", "limit", "groups", "together"}


class TrainTeachers(UnitByUnit):
    name: ClassVar[str] = "train-teachers"
    VERSION: ClassVar[int] = 1
    spread: ClassVar[Literal["units", "together", "alone"]] = "together"
    measure: ClassVar[str] = "teachers"

    def wanted(self, experiment: ExperimentFile) -> bool:
        return experiment.train_teachers is not None

    def prepare(self, run: Run) -> None:
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

    def run_unit(self, run: Run, unit: Unit) -> None:
        from amalgam.stages.models.loading import save_pretrained_folder

        for one, learned, facts in self._trained(run, unit):
            if run.share.leads:
                with run.store.draft(one.folder, one.name) as draft:
                    save_pretrained_folder(learned.model, learned.tokenizer, draft.folder)
                    draft.facts, draft.made = facts, {"libraries": library_versions()}
        if run.share.leads:
            shutil.rmtree(unit.folder / "checkpoint", ignore_errors=True)

    def _trained(self, run: Run, unit: Unit) -> Iterator[tuple[Unit, Beginner, dict[str, Any]]]:
        """The unit's teacher, and those that were trained with it."""
        checkpoint = unit.folder / "checkpoint"
        if not settings_of(run).together:
            from amalgam.stages.train_teachers.training import train

            yield (unit, *train(run, unit.work, _part(run), checkpoint))
        elif not run.memory.get("trained together"):
            from amalgam.stages.train_teachers.together import train_together

            found = train_together(run, unit.work, _part(run), checkpoint)
            run.memory["trained together"] = True  # all processes know it, whoever writes
            for one in self.units(run, unit.folder):
                yield (one, *found[one.name])

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


def encoders_of(run: Run) -> dict[str, tuple[Settings, str]]:
    """Settings that name one encoder each, and where they say it: by teacher where these are trained together."""
    settings = settings_of(run)
    return {
        name: (settings.model_copy(update={"encoder": encoder}), f"train_teachers.together.{name}")
        for name, encoder in (settings.together or {}).items()
    } or {"": (settings, ENCODER)}


def _encoder_digests(run: Run) -> Any:
    digests = {name: encoder_digest(run, said, where) for name, (said, where) in encoders_of(run).items()}
    return digests.get("", digests)


def groups_of(run: Run) -> dict[str, list[str]]:
    """Teacher -> its labels."""
    settings, known = settings_of(run), _part(run).labels
    groups = settings.groups or dict.fromkeys(settings.together or {}, known)
    if isinstance(groups, int):
        if groups * 2 > len(known):
            raise ExperimentError(
                f"{len(known)} labels cannot be cut in {groups} groups of at least two",
                where="train_teachers.groups",
                fix=f"at most {len(known) // 2} groups; or name: [labels] for each",
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
        raise DataError(
            "the texts to train teachers on have no labels",
            where="corpus.label",
            fix="name the column of their labels, or name teachers that are finished in the place of train_teachers",
        )
    return part


def _teacher_fingerprint(run: Run, name: str, labels: Sequence[str]) -> str:
    """A teacher's name is no part of it, unless it is one of several that are trained together."""
    settings = settings_of(run).model_dump(exclude=NOT_IDENTITY)
    content = [_encoder_digests(run), _part(run).labels_digest]
    among = [name] if settings_of(run).together else []
    return fingerprint([TrainTeachers.VERSION, settings, list(labels), content, *among])
