"""Makes an experiment from the arguments of `amalgam.Experiment`; refuses wrong ones before a model loads."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from amalgam.data.corpus import find_files
from amalgam.data.keys import shown
from amalgam.pipeline.config.load import GIVEN, GivenExperiment
from amalgam.pipeline.config.messages import OTHER_NAMES
from amalgam.pipeline.config.proposals import as_flow_yaml
from amalgam.pipeline.config.schema import FROM_CORPUS, ExperimentConfig
from amalgam.pipeline.errors import COMMAND_LINE, DataError, ExperimentError, ModelError, nearest
from amalgam.pipeline.input_files import SUFFIXES, kind_of
from amalgam.pipeline.user_paths import check_new
from amalgam.stages.app.in_memory_texts import store_labels, store_texts
from amalgam.stages.app.init import SCHEMA_LINE, write_with_schema
from amalgam.stages.common.corpus import IN_MEMORY
from amalgam.stages.common.models.hub import is_model_id
from amalgam.stages.common.models.model_folder import is_predictions

PART_ARGUMENTS = {"train": "texts", "train_texts": "texts", "val": "validation"}
"""Other names of the arguments for texts."""


def experiment_of(
    teachers: Any, texts: Mapping[str, Any], workspace: str | Path, sections: Mapping[str, Any]
) -> tuple[GivenExperiment, dict[str, Any]]:
    """Returns the experiment, and the texts in memory, whose files it does not have yet (`with_texts`)."""
    base = Path.cwd()
    files = {part: sources for part, given in texts.items() if (sources := _sources(given, part, base))}
    in_memory = {part: given for part, given in texts.items() if part not in files}
    data: dict[str, Any] = {"corpus": {**files, **dict.fromkeys(in_memory, IN_MEMORY)}}
    data["teachers"] = _teacher_entries(teachers, base)
    for name, fields in sections.items():
        if fields is None and name in ExperimentConfig.model_fields:  # as texts, test and labels
            continue
        section = _section(name, fields)
        for part in texts.keys() & section.keys() if name == "corpus" else ():
            fix = "leave one out: texts, test and validation are arguments, and fields of corpus"
            raise ExperimentError(f"the {part} texts are given twice", where=f"corpus={{{part!r}: ...}}", fix=fix)
        data[name] = {**data.get(name, {}), **section}
    if not isinstance(workspace, str | Path):
        what, fix = f"workspace is {workspace!r}", "give the path of a folder"
        raise ExperimentError(what, where=f"workspace={workspace!r}", fix=fix)
    place = workspace if "://" in str(workspace) else local_path(workspace, base)
    data["execution"] = {"workspace": place, **data.get("execution", {})}
    if texts.keys() & {"test", "validation"}:
        data["corpus"] = {"label": "label", **data["corpus"]}
    return GivenExperiment(data, base), in_memory


def with_texts(experiment: GivenExperiment, in_memory: Mapping[str, Any]) -> GivenExperiment:
    """Stores texts as files in the experiment's workspace, and returns the experiment with these files."""
    stored = {part: local_path(path, experiment.base) for part, path in store_texts(experiment, [], in_memory).items()}
    return replace(experiment, data={**experiment.data, "corpus": {**experiment.data["corpus"], **stored}})


def with_labels(experiment: GivenExperiment, labels: Any) -> GivenExperiment:
    """Returns the experiment with these labels: a path, "corpus", or a frame, which is stored in the workspace."""
    path = labels if isinstance(labels, str | Path) else store_labels(experiment, [], labels)
    if path == FROM_CORPUS:
        corpus = {"label": "label", **experiment.data["corpus"]}
        return replace(experiment, data={**experiment.data, "corpus": corpus, "labels": path})
    return replace(experiment, data={**experiment.data, "labels": local_path(path, experiment.base)})


def _section(name: str, fields: Any) -> dict[str, Any]:
    if isinstance(fields, Mapping):
        return {key: _plain(value) for key, value in fields.items()}
    sections, value = ExperimentConfig.model_fields.items(), shown(repr(fields))
    own = OTHER_NAMES.get(name, name)
    owners = [section for section, info in sections if own in getattr(info.annotation, "model_fields", ())]
    if name in ExperimentConfig.model_fields:
        is_model = set("/:") & set(str(fields)) or os.path.isdir(str(fields))  # noqa: PTH112 - False for a long text
        field = "FIELD" if name != "student" else "encoder" if is_model else "method"
        example = f"{name}={{{field!r}: {value}}}"
    elif name in PART_ARGUMENTS:
        example = f"{PART_ARGUMENTS[name]}={value}"
    else:
        near = [f"{close}={value}" for close in nearest(name, ExperimentConfig.model_fields, ratio=0.7)]
        example = " or ".join([f"{section}={{{own!r}: {value}}}" for section in owners] or near)
    fix = f"write {example}" if example else "run `amalgam schema`, which lists the sections and their fields"
    raise ExperimentError(f"{name}={value} is no section of fields", where=GIVEN, fix=fix)


def _plain(value: Any) -> Any:
    """Returns paths as text and numbers of numpy as Python's own."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value.item() if type(value).__module__ == "numpy" and hasattr(value, "item") else value


def local_path(path: str | Path, base: Path) -> str:
    """Returns a path within `base` as relative to it, with ./ or ../ first; any other path stays as it is."""
    expanded = os.path.expanduser(path)  # noqa: PTH111 - Path.expanduser raises for an unknown user
    absolute = base / expanded
    if expanded.startswith("~"):  # it is refused where it is opened
        return expanded
    if not absolute.is_relative_to(base):
        return str(absolute)
    relative = absolute.relative_to(base).as_posix()
    return relative if relative.startswith("../") else f"./{relative}"


def in_python(error: ExperimentError, where: str = "Experiment.load(overrides=...)") -> ExperimentError:
    """Makes an error of an experiment file and its overrides name the arguments of the call in Python."""
    error.what = re.sub(f"^( *){COMMAND_LINE}(?=[:,])", r"\1overrides", error.what, flags=re.MULTILINE)
    error.where = where if error.where == COMMAND_LINE else error.where
    fix = (error.fix or "").replace("did you mean -c ", "did you mean ")
    error.fix = fix.replace("with -c FILE", 'by Experiment.load("FILE")').replace("with -c ", "by path: ") or None
    return error


def assignments_of(values: Mapping[str, Any] | Iterable[str]) -> list[str]:
    """Returns overrides as assignments, like those of the command line; refuses other values than they have."""
    if not isinstance(values, Mapping):
        assignments = [values] if isinstance(values, str) else list(values)
        if isinstance(values, str) or not all(isinstance(assignment, str) for assignment in assignments):
            fix = f"[{values!r}]" if isinstance(values, str) else '{"student.seed": 1}, or ["student.seed=1"]'
            raise ExperimentError("overrides are a mapping, or a list of texts", where=shown(repr(values)), fix=fix)
        return assignments
    return [f"{field}={_written(field, value)}" for field, value in values.items()]


def _written(field: str, value: Any) -> str:
    try:
        return as_flow_yaml(_plain(value))
    except (TypeError, ValueError, RecursionError):
        what = f"the value of {field} is a {type(value).__name__}, which is no plain value"
        raise ExperimentError(what, where="overrides", fix="use text, numbers, lists and dicts") from None


def swept_fields(fields: Any) -> dict[str, list[str]]:
    """Returns the values of each field of a sweep as overrides write them."""
    if not isinstance(fields, Mapping) or not fields:
        what, fix = "a sweep takes the values of each field", 'experiment.sweep({"student.seed": [0, 1, 2]})'
        raise ExperimentError(what, where="sweep", fix=fix)
    for field, values in fields.items():
        if isinstance(values, str | Mapping) or not isinstance(values, Iterable):
            example = f"{field}.FIELD" if isinstance(values, Mapping) else field
            fix = f'experiment.sweep({{"{example}": [VALUE, VALUE]}})'
            raise ExperimentError(f"{field} has no list of values: {shown(repr(values))}", where="sweep", fix=fix)
    lists = {field: list(values) for field, values in fields.items()}
    empty = next((field for field, values in lists.items() if not values), None)
    if empty is not None:
        raise ExperimentError(f"{empty} has no values", where="sweep", fix="give one or more")
    return {field: [_written(field, value) for value in values] for field, values in lists.items()}


# ---- texts


def _sources(given: Any, part: str, base: Path) -> list[str] | None:
    """Returns the files if the texts are given as paths; a list of texts that end like file names is refused."""
    if isinstance(given, str | Path):
        if isinstance(given, str) and not Path(given).suffix and "://" not in given:
            try:
                find_files(given, base)
            except DataError as error:
                error.fix = f"{error.fix}; a text itself goes in a list: [{given[:20]!r}, ...]"
                raise
        given = [given]
    elif not isinstance(given, list | tuple) or not given:
        return None
    elif all(isinstance(entry, str) and kind_of(Path(entry[-100:])) in SUFFIXES for entry in given):
        fix = f"write pathlib.Path objects for files: [Path({given[0]!r}), ...]"
        raise DataError(f"the {part} texts look like names of files", where=f"texts[0] = {given[0]!r}", fix=fix)
    elif not all(isinstance(entry, Path) for entry in given):
        return None
    return [local_path(path, base) if isinstance(path, Path) else path for path in given]


# ---- teachers


def _teacher_entries(teachers: Any, base: Path) -> list[dict[str, Any]]:
    if isinstance(teachers, str | Path | Mapping) or not isinstance(teachers, Sequence):
        is_file = str(teachers).endswith((".yaml", ".yml"))
        fix = f"Experiment.load({str(teachers)!r})" if is_file else 'teachers=["./models/a", "org/model"]'
        if isinstance(teachers, Mapping) and teachers and not {"name", "model"} & teachers.keys():
            name, model = next(iter(teachers.items()))
            fix = f"teachers=[{{'name': {name!r}, 'model': {str(model)!r}}}, ...]"
        raise ExperimentError(f"teachers is a list, not a {type(teachers).__name__}", where=GIVEN, fix=fix)
    entries = [_teacher_entry(teacher, index, base) for index, teacher in enumerate(teachers)]
    models = [(entry["model"], entry.get("revision")) for entry in entries]
    for index, model in enumerate(models):
        if model in models[:index] and "name" not in entries[index]:
            fix = "remove one of them, or give both a name"
            raise ExperimentError(f"teacher {model[0]} is given twice", where=f"teachers[{index}]", fix=fix)
    return entries


def _teacher_entry(given: Any, index: int, base: Path) -> dict[str, Any]:
    where = f"teachers[{index}]"
    entry = {key: _plain(value) for key, value in given.items()} if isinstance(given, Mapping) else {"model": given}
    model = entry.get("model")
    if hasattr(model, "save_pretrained") or hasattr(getattr(model, "model", None), "save_pretrained"):
        fix = "model.save_pretrained(FOLDER), tokenizer.save_pretrained(FOLDER), then name FOLDER"
        raise ExperimentError("a teacher is a folder or a Hub id, not a model in memory", where=where, fix=fix)
    if not isinstance(model, str | Path):
        what = "a teacher has no model" if model is None else f"a teacher's model has the type {type(model).__name__}"
        fix = 'write a folder, a file of predictions, a Hub id, or {"name": ..., "model": ..., "labels": [...]}'
        raise ExperimentError(what, where=where, fix=fix)
    local = local_path(model, base)
    is_file = is_predictions(Path(model)) and ":" not in str(model)
    is_folder = ":" not in str(model) and os.path.isdir(base / local)  # noqa: PTH112 - False for a long text
    if isinstance(model, Path) or is_file or is_folder:
        return {**entry, "model": local}
    parent = base / model.partition("/")[0]
    if "/" in model and is_model_id(model) and parent.is_dir():
        folders = [path.name for path in parent.iterdir() if path.is_dir()]
        close = ", ".join(nearest(model.rpartition("/")[2], folders, 3) or sorted(folders)[:5]) or "no folders"
        fix = f"name a folder of {parent} ({close}), or write hub:{model} for a model on the Hub"
        raise ModelError(f"there is no folder {model}", where=where, fix=fix)
    return {**entry, "model": model}


# ---- the file


def write_file(experiment: GivenExperiment, path: Path) -> Path:
    """Writes the experiment as a file, from which the command line continues; keeps an equal one."""
    target = experiment.base / path
    if target.parent.resolve() != experiment.base.resolve():
        fix = f"write it to {experiment.base}, or move folder and file together afterwards"
        raise ExperimentError("the file's paths start from another folder", where=str(target), fix=fix)
    comment = "# Made by amalgam.Experiment in Python. Paths start from this file's folder.\n"
    text = f"{SCHEMA_LINE}{comment}{experiment.yaml}"
    if target.is_file() and target.read_bytes() == text.encode():  # a cell of a notebook runs again
        return target
    check_new(target)
    return write_with_schema(target, text)
