"""A finished student, which needs its folder alone: facts, predictions, and differences from the experiment."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from amalgam.data.arrays import Array, is_whole, softmax
from amalgam.data.keys import shown
from amalgam.data.lazy import np
from amalgam.pipeline.config import proposals
from amalgam.pipeline.config.schema import ExperimentConfig
from amalgam.pipeline.console import Console, counted
from amalgam.pipeline.errors import ExperimentError, ModelError
from amalgam.pipeline.user_paths import user_path
from amalgam.stages.common.deliveries import (
    METADATA,
    STUDENTS,
    check_delivered,
    delivered_students,
    read_mark,
    read_metadata,
)
from amalgam.stages.common.models.label_names import check_single_label
from amalgam.stages.common.models.model_folder import ONNX_MODEL, UNKNOWN, is_export
from amalgam.stages.common.models.read_card import Source, TrainingSummary, model_digests
from amalgam.stages.common.models.resolve import read_model
from amalgam.stages.methods import load_with_methods, method_name

if TYPE_CHECKING:
    from amalgam.stages.common.inference.batches import Classifier

T = TypeVar("T")


# ---- the folder


@dataclass(frozen=True)
class StudentFolder:
    folder: Path
    teachers: Mapping[str, Sequence[str]]
    """Labels of each teacher; empty if the folder has no metadata."""
    max_tokens: int | None
    device: str = "auto"
    columns: Sequence[str] = ("text",)
    """Names of the text columns in input files, from corpus.text."""
    fingerprint: str | None = None
    """The training that made it; None without metadata."""
    sources: Sequence[Source] = ()
    """The model cards of its encoder and teachers."""
    training: TrainingSummary | None = None
    learned: Sequence[str] = ()
    """Names of the text columns that it learned; empty if they are not recorded."""
    file_option: str = ""

    def check_pairs(self, texts: int, where: str, fix: str = "", fix_pairs: str = "") -> None:
        """Refuses one text where the student learned pairs of texts, and a pair where it learned single texts."""
        if texts > len(self.learned) > 0:
            what = f"the student classifies single texts ({shown(self.learned[0])}), not pairs of texts"
            raise ExperimentError(
                what, where=where, fix=fix_pairs or f"name one column: --text {shlex.quote(self.learned[0])}"
            )
        if texts < len(self.learned):
            what = f"the student classifies pairs of texts, and the second one is missing: {shown(self.learned[1])}"
            columns = shlex.join(part for name in self.learned for part in ("--text", name))
            fix = fix or f"name both columns of a file: amalgam predict --input FILE {columns}{self.file_option}"
            raise ExperimentError(what, where=where, fix=fix)

    def load(self) -> Classifier:
        from amalgam.stages.common.inference.batches import Classifier

        files, where = read_model(self.folder, "the student"), str(self.folder)
        fix = "name a model that chooses one label per text; for this one, use transformers.pipeline"
        check_single_label(files, "student", where, fix)
        classifier = Classifier(files, device=self.device, max_tokens=self.max_tokens)
        if len(classifier.labels) < 2:
            raise ModelError("the student has one output, so it chooses no label", where=where, fix=fix)
        return classifier

    def positions(self, labels: Sequence[str]) -> dict[str, list[int]]:
        """Returns the positions of each teacher's labels in the student's outputs."""
        command = f"amalgam train-student{self.file_option}"
        if self.fingerprint is None:
            what = f"--explain needs a student that amalgam trained; this folder has no {METADATA}"
            fix = (
                f"omit --explain; or, for the student of this experiment, run `{command}`, which writes the file again"
            )
            raise ModelError(what, where=str(self.folder), fix=fix)
        position = {label: index for index, label in enumerate(labels)}
        missing = [label for names in self.teachers.values() for label in names if label not in position]
        if missing or not self.teachers:
            what = "the student's folder lists no labels of its teachers"
            if missing:
                what = f"the student lacks the label of a teacher: {shown(missing[0])}"
            fix = f"run `{command}`, which writes the file again and trains nothing, or omit --explain"
            raise ModelError(what, where=str(self.folder / METADATA), fix=fix)
        return {teacher: [position[label] for label in names] for teacher, names in self.teachers.items()}


def finished_student(config: Path, folder: Path | None) -> StudentFolder:
    """Returns the student in `folder`, or that of the experiment file."""
    file_option = proposals.file_option(config)
    if folder is not None:
        named = config.parent / STUDENTS / folder
        example = shlex.quote(str(named)) if os.path.isdir(named) else f"{STUDENTS}/student"  # noqa: PTH112 - any length
        fix = f"name the folder of a model, such as {example}, not {shown(str(folder))}"
        return finished_in(folder, fix, file_option, config.parent)
    loaded = load_with_methods(config)
    fix = f"run `amalgam run{file_option}`, or name a folder with --student FOLDER"
    student = finished_in(loaded.base / STUDENTS / loaded.experiment.student.name, fix, file_option)
    return replace(student, device=loaded.experiment.execution.device, columns=loaded.experiment.corpus.text)


def finished_in(
    folder: Path, fix: str = "run the experiment", file_option: str = "", base: Path = Path()
) -> StudentFolder:
    """Returns the student in `folder`; `base` is the folder of the experiment file."""
    folder = user_path(str(folder), kind=ModelError)
    if not folder.is_dir():
        raise ModelError("the student does not exist", where=str(folder.absolute()), fix=fix)
    check_delivered(folder, file_option)
    if is_export(folder):
        use = "`amalgam serve` uses this one" if (folder / ONNX_MODEL).is_file() else "its classify.py uses this one"
        what = "this folder is an export, without the weights of a student"
        fix = f"name the student, such as {shlex.quote(_exported_student(folder, base))}; {use}"
        raise ModelError(what, where=str(folder.absolute()), fix=fix)
    metadata = read_metadata(folder) or {}
    return StudentFolder(
        folder,
        _of_type(dict[str, list[str]], metadata.get("teachers")) or {},
        _of_type(int, metadata.get("max_tokens")),
        fingerprint=metadata.get("fingerprint"),
        sources=_of_type(list[Source], metadata.get("sources")) or (),
        training=_of_type(TrainingSummary, metadata.get("training")),
        learned=_of_type(list[str], metadata.get("text")) or (),
        file_option=file_option,
    )


def _exported_student(export: Path, base: Path) -> str:
    """Returns the folder of the student of which this is an export, or an example."""
    mark, folder = read_mark(export), export.absolute()
    name = delivered_students(base).get(mark.fingerprint) if mark else None
    named = folder.with_name(re.sub("-(onnx|numpy)(-int8)?$", "", folder.name))
    if name is None and named != folder and named.is_dir():
        return _shortest(named)
    return str(base / STUDENTS / (name or "student"))


def _of_type(kind: type[T], value: Any) -> T | None:
    """Returns the value as this type, or None: the metadata may be of an older version, or edited."""
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError:
        return None


def name_student(console: Console, student: StudentFolder, config: Path, *, chosen: bool) -> None:
    """Prints the student in one line; unless it was chosen by folder, also how it differs from the experiment."""
    training = student.training
    method = f"{training.method}, " if training else ""
    made = f" ({method}fingerprint {student.fingerprint})" if student.fingerprint else ""
    console.say(f"student: {_shortest(student.folder)}{made}")
    if chosen:
        return
    changes = changes_since(load_with_methods(config).experiment, student)
    if changes:
        listed, update = "; ".join(changes), f"`amalgam run{proposals.file_option(config)}` updates it"
        console.note(f"{config.name} differs from this student's training: {listed}. {update}")


def changes_since(experiment: ExperimentConfig, student: StudentFolder) -> list[str]:
    """Returns the method, the models and all fields that differ from those of the training, if it is recorded.

    Where the file leaves a field to amalgam (null), the value that amalgam chooses for the same texts is compared.
    """
    training = student.training
    if training is None:
        return []
    now, teachers = experiment.model_dump(mode="json"), experiment.teacher_names
    sections = {name: fields for name, fields in training.settings.items() if isinstance(now.get(name), dict)}
    names = {"method": (training.method, method_name(experiment))}
    if set(teachers) != set(student.teachers):
        names["teachers"] = ", ".join(student.teachers), ", ".join(teachers)
    changes = [f"{name} {before} -> {after}" for name, (before, after) in names.items() if before != after]
    models = model_digests(experiment)
    changes += [name for name, digest in training.models.items() if models.get(name, digest) != digest]
    for section, fields in sections.items():
        for name, trained in fields.items():
            value, automatic = now[section].get(name), training.automatic.get(name) if section == "student" else None
            if value is None and automatic not in (None, trained):
                changes.append(f"{section}.{name} {json.dumps(trained)} -> auto")
            elif value not in (None, trained):
                changes.append(f"{section}.{name} {json.dumps(trained)} -> {json.dumps(value)}")
    return changes


def _shortest(folder: Path) -> str:
    """Returns the path from the present folder if it is below it."""
    relative = os.path.relpath(folder)
    return str(folder) if relative.startswith("..") else relative


# ---- its predictions


@dataclass(frozen=True)
class UnknownTexts:
    """Which texts are unlike the texts that the student was trained on."""

    flags: Array
    scores: Array
    threshold: float
    source: str
    """"states" or "logits", of which the scores are."""


@dataclass(frozen=True)
class Predictions:
    """Predictions in the order of the texts, the most likely labels first."""

    labels: list[list[str]]
    probabilities: Array
    masses: Mapping[str, Array]
    """The summed probability of each teacher's labels, with `explain`."""
    unknown: UnknownTexts | None = None

    @property
    def columns(self) -> list[Any]:
        """Returns the values of the columns of `data.parquet.predictions`, from the label on."""
        ranked: list[Any] = []
        for index, probabilities in enumerate(self.probabilities.T):
            ranked += [[labels[index] for labels in self.labels], probabilities]
        unknown = [self.unknown.flags, self.unknown.scores] if self.unknown else []
        return [*ranked, *unknown, *self.masses.values()]


class Student:
    def __init__(self, finished: StudentFolder, *, top: int, explain: bool, unknown: bool = False) -> None:
        if not is_whole(top, 1):
            what, fix = f"top is {top!r}, not a whole number from 1 on", "predict(texts, top=3) returns three labels"
            raise ExperimentError(what, where="predict", fix=fix)
        self.finished, self._classifier = finished, finished.load()
        self.labels = self._classifier.labels
        self.top = min(int(top), len(self.labels))
        self.positions = finished.positions(self.labels) if explain else {}
        self.threshold = _unknown_threshold(self._classifier, finished) if unknown else None

    @property
    def note(self) -> str | None:
        """Returns how many texts so far were truncated; None if none was."""
        if not (count := self._classifier.truncated):
            return None
        return f"{counted(count, 'text', 'was', 'were')} longer than {self._classifier.limit:,} tokens, and truncated"

    def __call__(self, texts: Sequence[tuple[str, ...]]) -> Predictions:
        unknown = None
        if self.threshold is None:
            logits = self._classifier.logits(texts)
        else:
            logits, scores = self._classifier.logits_and_scores(texts)
            source = "states" if self._classifier.unknown_states else "logits"
            unknown = UnknownTexts(scores > self.threshold, scores, self.threshold, source)
        probabilities = softmax(logits)
        best = np.argsort(-probabilities, axis=1, kind="stable")[:, : self.top]
        return Predictions(
            [[self.labels[position] for position in row] for row in best],
            np.take_along_axis(probabilities, best, axis=1),
            {teacher: probabilities[:, positions].sum(axis=1) for teacher, positions in self.positions.items()},
            unknown,
        )


def _unknown_threshold(classifier: Classifier, student: StudentFolder) -> float:
    threshold = classifier.unknown_threshold
    if threshold is None:
        what = f"the student has no {UNKNOWN}, and its config.json no unknown_threshold"
        fix = f"train it again on texts: `amalgam train-student{student.file_option}`; or omit --unknown"
        raise ModelError(what, where=str(student.folder), fix=fix)
    return threshold
