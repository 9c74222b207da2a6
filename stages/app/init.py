"""Writes an experiment file; `amalgam init --from-teachers` reads the teachers' labels from their configurations.

No weights are fetched. If a model cannot be a teacher, nothing is written, and the error names it with the fix.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from amalgam.data.keys import shown
from amalgam.pipeline.config.load import write_template
from amalgam.pipeline.config.schema import SAFE_NAME
from amalgam.pipeline.errors import ExperimentError, ModelError
from amalgam.stages.common.models import hub as model_hub
from amalgam.stages.common.models import model_folder
from amalgam.stages.common.models.resolve import ModelFiles, for_all, label_names, place_of

LABELS_SHOWN = 20

WHERE = "--from-teachers"

NOT_TEXT = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})


@dataclass(frozen=True)
class DetectedTeacher:
    name: str
    model: str
    commit: str | None
    labels: list[str]


def write_experiment(names: Sequence[str], *, from_teachers: bool, into: Path) -> str:
    """Writes the file and returns the message for the user."""
    if not from_teachers:
        if len(names) > 1:
            what = f"`init` takes one folder, got {len(names)}"
            raise ExperimentError(
                what, where=shown(" ".join(names)), fix="name one folder; for models add --from-teachers"
            )
        path = write_template(Path(names[0]) if names else into)
        return f"wrote {path}: name your texts and teachers in it, then `amalgam plan`"
    if not names:
        raise ExperimentError(
            "no teacher is named", where=WHERE, fix="amalgam init --from-teachers ./models/first org/model"
        )
    teachers = introduce(names, into)
    path = write_template(into, section(teachers))
    labels = {label for teacher in teachers for label in teacher.labels}
    count = f"{len(teachers)} teacher{'s' if len(teachers) > 1 else ''}"
    return f"wrote {path}: {count}, {len(labels)} labels; name your texts in it, then `amalgam plan`"


def introduce(given: Sequence[str], into: Path) -> list[DetectedTeacher]:
    teachers: list[DetectedTeacher] = []

    def add(model: str) -> None:
        teachers.append(_introduce(model, into, [teacher.name for teacher in teachers]))

    for_all(add, given, cannot="be teachers", where=WHERE)
    return teachers


def section(teachers: Sequence[DetectedTeacher]) -> str:
    lines = ["teachers:                       # each predicts its own labels; the student predicts all of them"]
    owners: dict[str, list[str]] = {}
    for teacher in teachers:
        for label in teacher.labels:
            owners.setdefault(label, []).append(teacher.name)
    for teacher in teachers:
        lines += [f"  - name: {teacher.name}", f"    model: {_quoted(teacher.model)}"]
        if teacher.commit:
            lines.append(f"    # revision: {teacher.commit}  # the commit of today; recorded at first use")
        lines += _about(teacher, owners)
    return "\n".join(lines) + "\n"


def _about(teacher: DetectedTeacher, owners: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns comments with the labels: shared ones, and ones that differ only in case."""
    named = ", ".join(shown(label) for label in teacher.labels[:LABELS_SHOWN])
    more = f" and {len(teacher.labels) - LABELS_SHOWN} more" if len(teacher.labels) > LABELS_SHOWN else ""
    lines = [f"    # {len(teacher.labels)} labels: {named}{more}"]
    shared = [label for label in teacher.labels if len(owners[label]) > 1]
    if shared:
        lines.append(f"    # shared with other teachers: {', '.join(shown(label) for label in shared[:LABELS_SHOWN])}")
    first = {label.casefold(): label for label in reversed(list(owners))}
    alike = {label: first[label.casefold()] for label in teacher.labels if first[label.casefold()] != label}
    if alike:
        pairs = ", ".join(f"{_quoted(old)}: {_quoted(new)}" for old, new in alike.items())
        lines.append(f"    # rename: {{{pairs}}}  # if these are the same label")
    return lines


def _introduce(given: str, into: Path, taken: Sequence[str]) -> DetectedTeacher:
    reference = _folder_or_id(given)
    where, place = f"{WHERE}: {reference}", place_of(reference, Path.cwd(), field=WHERE)
    folder, commit = (place, None) if isinstance(place, Path) else _from_hub(place)
    config = model_folder.read_config(folder, where=where)
    _refuse_headless(config, where)
    name = _name(given, taken)
    labels = label_names(
        ModelFiles(given, folder, "", commit, "safetensors", config), labels=None, rename={}, teacher=name
    )
    return DetectedTeacher(name, _as_named_in(into, given, place), commit, labels)


def _folder_or_id(given: str) -> str:
    """Returns ./NAME for a model folder in the working folder, else the reference unchanged."""
    here = Path(given)
    return f"./{given}" if not here.is_absolute() and (here / "config.json").is_file() else given


def _refuse_headless(config: Mapping[str, object], where: str) -> None:
    """Refuses a model that config.json names as one without a classification head; stage 1 checks the weights."""
    saved_as = config.get("architectures")
    names = [str(name) for name in saved_as] if isinstance(saved_as, list) else []
    if names and not any("Classif" in name for name in names):
        what = f"the model is a {shown(names[0])}, which has no head for labels"
        raise ModelError(what, where=where, fix="name a fine-tuned classifier; an encoder alone has no labels")


def _from_hub(model_id: str) -> tuple[Path, str]:
    model = model_hub.ask(model_id, None, where=WHERE)
    if model is not None:
        if "config.json" not in model.names:
            fix = "name a text classifier that transformers can load"
            raise ModelError(f"{model_id} has no config.json", where=WHERE, fix=fix)
        return model_hub.fetch(model, ["config.json"], where=WHERE, revision=model_hub.DEFAULT_REVISION), model.commit
    folder = model_hub.cached(model_id, None)
    if folder is None:
        what = f"the Hub cannot be reached, and {model_id} is not in this machine's cache"
        raise ModelError(what, where=WHERE, fix="go online once, or give a folder: ./like/this")
    return folder, folder.name


def _as_named_in(into: Path, given: str, place: Path | str) -> str:
    """Returns the reference as the experiment file writes it: a relative path starts from that file."""
    if isinstance(place, str) or given.startswith("package:"):
        return given
    if Path(given).expanduser().is_absolute():
        return str(place)
    relative = Path(os.path.relpath(place, into)).as_posix()
    return relative if relative.startswith("..") else f"./{relative}"


def _name(given: str, taken: Sequence[str]) -> str:
    bare = given.partition(":")[2] or given
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", bare.rstrip("/").rpartition("/")[2]).strip("-._")[:60]
    stem = stem if re.match(SAFE_NAME, stem) else "teacher"
    number = next(number for number in range(1, len(taken) + 2) if _numbered(stem, number) not in taken)
    return _numbered(stem, number)


def _numbered(stem: str, number: int) -> str:
    return stem if number == 1 else f"{stem}-{number}"


def _quoted(text: str) -> str:
    """Returns the text as a YAML scalar."""
    plain = re.fullmatch(r"[A-Za-z./][\w./-]*", text, re.ASCII)
    return text if plain and text.lower() not in NOT_TEXT else json.dumps(text)
