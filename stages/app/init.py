"""Writes an experiment file; `amalgam init --from-teachers` reads the teachers' labels from their configurations.

No weights are fetched; those of a folder are checked. If a model cannot be a teacher, nothing is written, and the error
names it with the fix. A model on the Hub whose configuration cannot be read now has a comment instead of its labels.
"""

from __future__ import annotations

import json
import os
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from amalgam.data.hub import DEFAULT_REVISION
from amalgam.data.keys import is_catch_all, label_notes, shown, shown_names, similar_labels
from amalgam.pipeline.config.load import name_of, note_on_name, template
from amalgam.pipeline.config.proposals import as_yaml, file_option
from amalgam.pipeline.console import counted
from amalgam.pipeline.errors import ExperimentError, ModelError
from amalgam.pipeline.storage.local import atomic_write, write_new
from amalgam.pipeline.storage.paths import json_object
from amalgam.pipeline.user_paths import DEFAULT_FILE, check_new, user_path, writing
from amalgam.stages.common.models import hub as model_hub
from amalgam.stages.common.models import model_folder, resolve
from amalgam.stages.common.models.label_names import NUMBER, PLACEHOLDER, UNNAMED, head_fix, label_names, own_labels
from amalgam.stages.methods import experiment_schema

LABELS_SHOWN = 20
WHERE = "--from-teachers"
SCHEMA_FILE = "amalgam.schema.json"
SCHEMA_LINE = f"# yaml-language-server: $schema={SCHEMA_FILE}\n"
"""First line of an experiment file, which names its schema to an editor."""


@dataclass(frozen=True)
class DetectedTeacher:
    name: str
    model: str
    commit: str | None
    labels: list[str]
    is_named: bool
    """Whether the model names its labels; numbers are no names."""
    is_read: bool = True
    """False for a model on the Hub that could not be reached; its labels are unknown."""
    is_file: bool = False
    """Whether it is a file of predictions, whose labels are renamed: a list of labels chooses its columns."""


def write_experiment(names: Sequence[str], *, from_teachers: bool, into: Path) -> str:
    """Writes the file and returns the message for the user."""
    return _write_for_teachers(names, into) if from_teachers else _write_template(names, into)


def _write_template(names: Sequence[str], into: Path) -> str:
    """Writes the commented file into the named folder, or into the option --into."""
    if names and into != Path():
        what, fix = "`init` takes one folder, and --into is a second one", "name one of them"
        raise ExperimentError(what, where=f"--into {into}", fix=fix)
    if len(names) > 1:
        what, fix = f"`init` takes one folder, got {len(names)}", "name one folder; for models add --from-teachers"
        raise ExperimentError(what, where=shown(" ".join(names)), fix=fix)
    folder = user_path(names[0]) if names else into
    if names and (folder / "config.json").is_file():
        what, fix = "this folder is a model", f"amalgam init --from-teachers {shlex.quote(names[0])}"
        raise ExperimentError(f"{what}; no experiment file is written into it", where=shown(names[0]), fix=fix)
    if names and folder.suffix in {".yaml", ".yml"} and not folder.is_dir():
        what, fix = "`init` takes a folder, not a file", f"amalgam init {shlex.quote(str(folder.parent))}"
        raise ExperimentError(f"{what}; it writes amalgam.yaml into it", where=shown(names[0]), fix=fix)
    path = write_with_schema(folder / DEFAULT_FILE, template())
    return f"wrote {path}: name your texts and teachers in it, then `amalgam plan{file_option(path)}`"


def _write_for_teachers(models: Sequence[str], into: Path) -> str:
    """Writes the file with these models as teachers, after reading their labels."""
    if not models:
        fix = "amalgam init --from-teachers ./models/first org/model"
        raise ExperimentError("no teacher is named", where=WHERE, fix=fix)
    teachers: list[DetectedTeacher] = []
    cannot = "be teachers"
    resolve.for_all(lambda model: teachers.append(_detect(model, into, teachers)), models, cannot=cannot, where=WHERE)
    path = write_with_schema(into / DEFAULT_FILE, template(_section(teachers)))
    labels = {label for teacher in teachers for label in teacher.labels}
    count = counted(len(teachers), "teacher")
    unnamed = [teacher.name for teacher in teachers if not teacher.is_named]
    task = f"name your texts and the labels of {', '.join(unnamed)}" if unnamed else "name your texts"
    message = f"wrote {path}: {count}, {len(labels)} labels; {task} in it, then `amalgam plan{file_option(path)}`"
    unread = [teacher.name for teacher in teachers if not teacher.is_read]
    notes = [note for teacher in teachers if (note := note_on_name(teacher.model, teacher.name))]
    notes += label_notes({teacher.name: teacher.labels for teacher in teachers if teacher.is_named})
    if unread:
        when = f"`amalgam doctor{file_option(path)}` reads them once it can"
        notes.append(f"the Hub cannot be reached, so the labels of {', '.join(unread)} are not in the file; {when}")
    return "\n".join([message, *(f"note: {note}" for note in notes)])


def write_with_schema(path: Path, text: str) -> Path:
    """Writes a new experiment file, and the schema with which an editor completes and checks it."""
    schema, content = path.with_name(SCHEMA_FILE), experiment_schema()
    if os.path.lexists(schema) and json_object(schema).get("title") != content["title"]:
        fix = "move it away, or write into another folder"
        raise ExperimentError(f"{SCHEMA_FILE} exists, and amalgam did not write it", where=str(schema), fix=fix)
    check_new(path, "edit it, move it away, or write into another folder: amalgam init --into FOLDER")
    with writing(schema), atomic_write(schema) as temporary:  # first: the file is refused where it exists
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    write_new(path, text)
    return path


# ---- the teachers in the file


def _section(teachers: Sequence[DetectedTeacher]) -> str:
    """Returns the section `teachers`, with comments on each teacher's labels."""
    lines = ["teachers:                       # each predicts its own labels; the student predicts all of them"]
    named = {teacher.name: teacher.labels for teacher in teachers if teacher.is_named}
    counts = Counter(label for labels in named.values() for label in labels)
    similar = {second: first for first, second in similar_labels(named)}
    for teacher in teachers:
        labels = teacher.labels
        lines += [f"  - name: {teacher.name}", f"    model: {as_yaml(teacher.model)}"]
        if teacher.commit:
            lines.append(f"    # revision: {teacher.commit}  # the commit of today; recorded at first use")
        if not teacher.is_read:
            lines.append("    # its labels were not read: the Hub could not be reached")
            continue
        if not teacher.is_named:
            lines.append(_to_name(teacher))
            continue
        lines.append(f"    # {len(labels)} labels: {shown_names(labels, LABELS_SHOWN)}")
        shared = [label for label in labels if counts[label] > 1]
        if shared:
            lines.append(f"    # shared with other teachers: {shown_names(shared, LABELS_SHOWN)}")
        alike = {label: similar[label] for label in labels if label in similar}
        if alike:
            pairs = ", ".join(f"{as_yaml(old)}: {as_yaml(new)}" for old, new in alike.items())
            lines.append(f"    # rename: {{{pairs}}}  # if these are the same label")
        if len(teachers) > 1 and (others := list(filter(is_catch_all, labels))):
            lines.append(
                f"    # catch_all: [{', '.join(map(as_yaml, others))}]  # if it means none of the other labels"
            )
    return "\n".join(lines) + "\n"


def _to_name(teacher: DetectedTeacher) -> str:
    """Returns the line in which the user names the labels."""
    blank, labels = f'"{UNNAMED}"', teacher.labels
    if teacher.is_file:
        pairs = ", ".join(f"{as_yaml(label)}: {blank}" for label in filter(_is_no_name, labels))
        return f"    rename: {{{pairs}}}  # name the labels of this file"
    names = [blank if _is_no_name(label) else as_yaml(label) for label in labels]
    return f"    labels: [{', '.join(names)}]  # name the {len(labels)} outputs, in the model's order"


# ---- the models


def _detect(given: str, into: Path, earlier: Sequence[DetectedTeacher]) -> DetectedTeacher:
    """Reads the labels of a folder, whose files it checks, or of a model on the Hub, without its weights."""
    where, place = f"{WHERE}: {given}", resolve.place_of(given, Path.cwd(), field=WHERE)
    name = name_of(given, {teacher.name for teacher in earlier})
    if isinstance(place, Path) and place.is_file():
        return _with_labels(name, _reference_from(into, given, place), resolve.prediction_file(place, where), None)
    read = (place, None) if isinstance(place, Path) else _from_hub(place)
    if read is None:
        return DetectedTeacher(name, _reference_from(into, given, place), None, [], is_named=True, is_read=False)
    folder, commit = read
    config = model_folder.read_config(folder, where=where)
    if headless := model_folder.headless_class(config):
        what = f"the model is a {shown(headless)}, which has no head for labels"
        raise ModelError(what, where=where, fix=head_fix(folder))
    if isinstance(place, Path):
        resolve.read_model(folder, where, allow_pickle=True)  # `plan` requires allow_pickle
    files = resolve.ModelFiles(given, folder, "", commit, "safetensors", config)
    resolve.check_model_type(files)
    return _with_labels(name, _reference_from(into, given, place), files, commit)


def _with_labels(name: str, reference: str, files: resolve.ModelFiles, commit: str | None) -> DetectedTeacher:
    stored, is_named = own_labels(files, teacher=name)
    is_named = is_named and not any(map(_is_no_name, stored))
    labels = label_names(files, labels=None if is_named else stored, rename={}, teacher=name)
    return DetectedTeacher(name, reference, commit, labels, is_named, is_file=files.are_predictions)


def _is_no_name(label: str) -> bool:
    return bool(PLACEHOLDER.fullmatch(label) or NUMBER.fullmatch(label))


def _from_hub(model_id: str) -> tuple[Path, str] | None:
    """Returns folder and commit of the configuration; None if the Hub cannot be reached and it is not cached."""
    model = model_hub.ask(model_id, None, where=WHERE)
    if model is not None:
        if "config.json" not in model.names:
            fix = "name a text classifier that transformers can load"
            raise ModelError(f"{model_id} has no config.json", where=WHERE, fix=fix)
        return model_hub.fetch(model, ["config.json"], where=WHERE, revision=DEFAULT_REVISION), model.commit
    folder = model_hub.cached(model_id, None)
    if folder is not None:
        return folder, folder.name
    close = " or ".join(resolve.folders_like(model_id, Path.cwd()))
    if close or ("/" in model_id and Path(model_id).parent.is_dir()):  # likely a folder with a slip in its name
        what = f"the Hub cannot be reached, and {model_id} is not in this machine's cache"
        meant = f"did you mean {close}? else " if close else ""
        fix = f"{meant}go online once, or give a folder: ./like/this"
        raise ModelError(what, where=f"{WHERE}: {model_id}", fix=fix)
    return None


def _reference_from(into: Path, given: str, place: Path | str) -> str:
    """Returns the reference as the experiment file writes it: a relative path starts from that file."""
    if isinstance(place, str) or given.startswith("package:"):
        return given
    if Path(given).expanduser().is_absolute():
        return str(place)
    relative = Path(os.path.relpath(place, into.resolve())).as_posix()  # `..` leaves the folder behind a link
    return relative if relative.startswith("..") else f"./{relative}"
