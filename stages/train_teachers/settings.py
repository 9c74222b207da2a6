"""Settings of the teachers that train-teachers fine-tunes."""

from __future__ import annotations

from typing import Any

from amalgam.data.labels import cut_in_groups
from amalgam.pipeline.config.schema import TrainTeachers as Settings
from amalgam.pipeline.errors import DataError, ExperimentError
from amalgam.pipeline.execution.stage import Run
from amalgam.stages.common.corpus import Part
from amalgam.stages.common.load import encoder_digest, part_of

ENCODER = "train_teachers.encoder"

NOT_IDENTITY = {"encoder", "revision", "texts", "limit", "groups", "co_train"}


def settings_of(run: Run) -> Settings:
    if run.experiment.train_teachers is None:
        raise AssertionError("train-teachers is not wanted")  # `wanted` says so
    return run.experiment.train_teachers


def encoders_of(run: Run) -> dict[str, tuple[Settings, str]]:
    """Settings that name one encoder each, and where they say it: by teacher where these are trained together."""
    settings = settings_of(run)
    return {
        name: (settings.model_copy(update={"encoder": encoder}), f"train_teachers.co_train.{name}")
        for name, encoder in (settings.co_train or {}).items()
    } or {"": (settings, ENCODER)}


def _encoder_digests(run: Run) -> Any:
    digests = {name: encoder_digest(run, said, where) for name, (said, where) in encoders_of(run).items()}
    return digests.get("", digests)


def groups_of(run: Run) -> dict[str, list[str]]:
    """Teacher -> its labels."""
    settings, known = settings_of(run), _part(run).labels
    groups = settings.groups or dict.fromkeys(settings.co_train or {}, known)
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
