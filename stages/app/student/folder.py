"""Finds the folder of a trained student, and reads its teachers' labels from the metadata in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from amalgam.data.keys import shown
from amalgam.pipeline.config.load import load_experiment
from amalgam.pipeline.errors import ModelError
from amalgam.stages.common.models.output_folder import METADATA, read_metadata
from amalgam.stages.methods import PRESETS

if TYPE_CHECKING:
    from amalgam.stages.common.inference.classifier import Classifier


@dataclass(frozen=True)
class StudentFolder:
    folder: Path
    teachers: Mapping[str, Sequence[str]]
    """Labels of each teacher; empty if the folder has no metadata."""
    max_tokens: int | None
    device: str = "auto"
    columns: Sequence[str] = ("text",)
    """Names of the text columns in input files, from corpus.text."""

    def load(self) -> Classifier:
        from amalgam.stages.common.inference.classifier import Classifier

        return Classifier.in_folder(self.folder, device=self.device, max_tokens=self.max_tokens, where="the student")


def finished_student(config: Path, folder: Path | None) -> StudentFolder:
    """Returns the student in `folder`, or that of the experiment file."""
    if folder is not None:
        return finished_in(folder, f"name the folder of a model, such as students/student, not {shown(str(folder))}")
    loaded = load_experiment(config, presets=PRESETS)
    placed = loaded.base / "students" / loaded.experiment.student.name
    fix = f"run `amalgam run -c {config}`, or name a folder with --student FOLDER"
    student = finished_in(placed, fix, device=loaded.experiment.execution.device)
    return replace(student, columns=loaded.experiment.corpus.text)


def finished_in(folder: Path, fix: str = "run the experiment", *, device: str = "auto") -> StudentFolder:
    if not folder.is_dir():
        raise ModelError("the student does not exist", where=str(folder.absolute()), fix=fix)
    metadata = read_metadata(folder) or {}
    most = metadata.get("max_tokens")
    return StudentFolder(folder, _teacher_labels(metadata.get("teachers")), most if type(most) is int else None, device)


def _teacher_labels(content: object) -> dict[str, list[str]]:
    """Returns the labels of each teacher, or an empty dict if the metadata is damaged."""
    if not isinstance(content, dict) or not all(isinstance(labels, list) for labels in content.values()):
        return {}
    return {str(teacher): [str(label) for label in labels] for teacher, labels in content.items()}


def columns_of(finished: StudentFolder, labels: Sequence[str]) -> dict[str, list[int]]:
    """Returns the column of each teacher's labels in the student's outputs."""
    if not finished.teachers:
        raise ModelError(
            "the student's folder lists no labels of its teachers",
            where=f"no teachers in {finished.folder / METADATA}",
            fix="run `amalgam train-student`, which trains nothing again, or omit --explain",
        )
    place = {label: index for index, label in enumerate(labels)}
    strange = [label for own in finished.teachers.values() for label in own if label not in place]
    if strange:
        raise ModelError(
            f"the student lacks the label of a teacher: {shown(strange[0])}",
            where=str(finished.folder / METADATA),
            fix="run `amalgam train-student`, which writes the file again",
        )
    return {teacher: [place[label] for label in own] for teacher, own in finished.teachers.items()}
