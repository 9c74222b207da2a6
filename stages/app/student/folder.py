"""A finished student: its folder, found by the experiment or by name, and what its mark says of its teachers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from amalgam.data.keys import shown
from amalgam.pipeline.config.load import load_experiment
from amalgam.pipeline.errors import ModelError
from amalgam.stages.common.models.output_folder import MARK, read_mark
from amalgam.stages.methods import PRESETS

if TYPE_CHECKING:
    from amalgam.stages.common.inference.classifier import Classifier


@dataclass(frozen=True)
class StudentFolder:
    folder: Path
    teachers: Mapping[str, Sequence[str]]
    """What each of its teachers knows; empty where the folder does not say."""
    max_tokens: int | None
    device: str = "auto"
    columns: Sequence[str] = ("text",)
    """Of a file, those that hold the texts: as in the experiment's corpus."""

    def load(self) -> Classifier:
        from amalgam.stages.common.inference.classifier import Classifier

        return Classifier.in_folder(self.folder, device=self.device, max_tokens=self.max_tokens, where="the student")


def finished_student(config: Path, folder: Path | None) -> StudentFolder:
    """`folder`, or the student that the experiment file names."""
    if folder is not None:
        return finished_in(
            folder, f"name the folder of a model, such as students/student: {shown(str(folder))} is none"
        )
    loaded = load_experiment(config, presets=PRESETS)
    placed = loaded.base / "students" / loaded.experiment.student.name
    fix = f"`amalgam run -c {config}` makes it; --student FOLDER names another"
    found = finished_in(placed, fix, device=loaded.experiment.execution.device)
    return replace(found, columns=loaded.experiment.corpus.text)


def finished_in(folder: Path, fix: str = "run the experiment", *, device: str = "auto") -> StudentFolder:
    if not folder.is_dir():
        raise ModelError("there is no student", where=str(folder.absolute()), fix=fix)
    mark = read_mark(folder) or {}
    most = mark.get("max_tokens")
    return StudentFolder(folder, _knowledge(mark.get("teachers")), most if type(most) is int else None, device)


def _knowledge(found: object) -> dict[str, list[str]]:
    """Teachers' labels as a mark has them; none where it says something else."""
    if not isinstance(found, dict) or not all(isinstance(labels, list) for labels in found.values()):
        return {}
    return {str(teacher): [str(label) for label in labels] for teacher, labels in found.items()}


def columns_of(finished: StudentFolder, labels: Sequence[str]) -> dict[str, list[int]]:
    """Where each teacher's labels stand among the student's."""
    if not finished.teachers:
        raise ModelError(
            "the student's folder does not say which teacher knows which labels",
            where=f"no teachers in {finished.folder / MARK}",
            fix="`amalgam train-student` writes them there (nothing is trained again); leave --explain out otherwise",
        )
    place = {label: index for index, label in enumerate(labels)}
    strange = [label for own in finished.teachers.values() for label in own if label not in place]
    if strange:
        raise ModelError(
            f"a teacher's label is none of the student's: {shown(strange[0])}",
            where=str(finished.folder / MARK),
            fix="`amalgam train-student` writes the file again",
        )
    return {teacher: [place[label] for label in own] for teacher, own in finished.teachers.items()}
