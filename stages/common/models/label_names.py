"""The names of a classifier's outputs, read from its files: which are refused, renamed, or mean none of the others."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from amalgam.data.keys import shown, shown_names
from amalgam.data.rows import has_surrogate
from amalgam.pipeline.config.proposals import as_flow_yaml
from amalgam.pipeline.console import counted
from amalgam.pipeline.errors import ModelError, nearest
from amalgam.stages.common.models import model_folder
from amalgam.stages.common.models.resolve import ModelFiles

PLACEHOLDER = re.compile(r"LABEL_\d+")
"""The name that transformers gives an output without a name."""

NUMBER = re.compile(r"-?\d+(\.\d+)?")
"""A label that is no name: teachers of different tasks number their outputs alike."""

OTHER_TASKS = "ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice"
"""Ends of the names of classes whose weights have a head, but not for the labels of a text."""

SETFIT_HEAD = "model_head.pkl"

UNNAMED = "?"
"""Placeholder that `init` writes for the label of an output without a name."""


def label_names(
    files: ModelFiles, *, labels: list[str] | None, rename: dict[str, str], teacher: str, numbers: bool = True
) -> list[str]:
    """Returns the teacher's label names, renamed, by position; without `numbers`, a label of the model is no number."""
    where = f"teacher {teacher}: {files.names_of_labels}"
    check_single_label(files, "teacher", where, "use a teacher that chooses one label per text")
    outputs, _ = own_labels(files, teacher=teacher)
    if not (files.trust_remote_code or files.are_predictions) and not model_folder.may_have_head(
        files.folder, len(outputs)
    ):
        raise _no_head(files, len(outputs), where)
    names = labels if labels is not None else outputs
    if UNNAMED in names:
        fix = "give each output its name, in `labels` of this teacher"
        blank = [
            f"{index} ({outputs[index]!r})" for index in range(min(len(names), len(outputs))) if names[index] == UNNAMED
        ]
        raise ModelError(f'labels: "{UNNAMED}" is no name, for output {", ".join(blank[:5])}', where=where, fix=fix)
    if len(names) != len(outputs):
        extra = ", ".join(map(repr, names[len(outputs) :]))
        unnamed = ", ".join(f"{index} ({outputs[index]!r})" for index in range(len(names), len(outputs)))
        unmatched = f"no output for {extra}" if extra else f"no name for output {unnamed}"
        what = f"labels: {counted(len(names), 'name')} for {len(outputs)} outputs: {unmatched}"
        raise ModelError(what, where=where, fix=f"give exactly {len(outputs)} labels, by position")
    _check_has(names, rename, "rename", where)
    if blank := [repr(name) for name, renamed in rename.items() if renamed == UNNAMED]:
        fix = "give each of them its name, in `rename` of this teacher"
        raise ModelError(f'rename: "{UNNAMED}" is no name, for {", ".join(blank[:5])}', where=where, fix=fix)
    renamed = [rename.get(name, name) for name in names]
    if len(renamed) < 2:
        what = f"the teacher has one label ({shown_names(renamed)}), so it is never uncertain"
        fix = "leave it out, or give it two outputs as in docs/how-to/own-teachers.md, At least two outputs"
        if files.are_predictions:
            fix = "leave it out, or list its labels, also those without a row: `labels: [...]`"
        raise ModelError(what, where=where, fix=fix)
    twice = sorted({name for name in renamed if renamed.count(name) > 1})
    if twice:
        what = f"the teacher has two outputs named {', '.join(map(repr, twice))}"
        fix = "give labels: a different name for each position"
        if changed := [f"{name}: {new}" for name, new in rename.items() if new in twice]:
            fix = f"rename: {{{', '.join(changed)}}} gives both one name: choose another"
        raise ModelError(what, where=where, fix=fix)
    fix = f"give labels: the {len(names)} names, by position"
    if files.are_predictions:
        fix = f"write the names into the file, or set rename: {{{as_flow_yaml(names[0])}: NAME, ...}}"
    _check_named(names if labels is None else [], rename, where, fix, numbers=numbers)
    return renamed


def catch_all_places(
    files: ModelFiles, names: Sequence[str], catch_all: Sequence[str], *, teacher: str
) -> frozenset[int]:
    """Returns the places of the outputs that mean none of the others; a label must be left."""
    where = f"teacher {teacher}: {files.names_of_labels}"
    _check_has(names, catch_all, "catch_all", where)
    places = frozenset(place for place, name in enumerate(names) if name in catch_all)
    if len(places) == len(names):
        raise ModelError("catch_all leaves the teacher no label", where=where, fix="leave the teacher out")
    return places


def _check_has(names: Sequence[str], given: Iterable[str], field: str, where: str) -> None:
    """Refuses a field that names labels which the teacher does not have."""
    unknown = sorted(set(given) - set(names))
    if unknown:
        close = nearest(unknown[0], names, ratio=0.4) or names[:5]
        what = f"{field}: the teacher has no label {', '.join(map(repr, unknown))}"
        fix = f"name one of its labels, such as {', '.join(map(repr, close))}"
        new = given.get(unknown[0]) if isinstance(given, Mapping) else None
        if new in names:
            fix = f"write the teacher's name first: {{{as_flow_yaml(new)}: {as_flow_yaml(unknown[0])}}}"
        raise ModelError(what, where=where, fix=fix)


def _no_head(files: ModelFiles, count: int, where: str) -> ModelError:
    """Returns the error of weights without a head for this count of labels; names that of another head."""
    outputs = model_folder.head_outputs(files.folder)
    if outputs is None:
        what = f"the weights have no classification head of {count} outputs"
        return ModelError(what, where=where, fix=head_fix(files.folder))
    labels = counted(count, "label")
    statement = f"names {labels}" if files.config.get("id2label") else f"has no id2label, which means {labels}"
    what = f"config.json {statement}, but the weights have {counted(outputs, 'output')}"
    fix = 'name each output in config.json, by position: "id2label": {"0": "NAME", "1": "NAME", ...}'
    return ModelError(what, where=where, fix=fix)


def head_fix(folder: Path) -> str:
    """Returns the fix for a model without a head for labels."""
    if (folder / SETFIT_HEAD).is_file():
        return f"write the predictions of SetFit into a file, and name the file: its head, {SETFIT_HEAD}, is a pickle"
    return "name a classifier, that is a fine-tuned model, saved whole with its own config.json"


def check_single_label(files: ModelFiles, who: str, where: str, fix: str) -> None:
    """Refuses a model whose outputs are no distribution over labels."""
    kind = files.config.get("problem_type")
    if kind in ("multi_label_classification", "regression"):
        raise ModelError(f"the {who} does {kind}: its outputs are no distribution over labels", where=where, fix=fix)
    classes = files.config.get("architectures")
    name = str(classes[0]) if isinstance(classes, list) and classes else ""
    if name.endswith(OTHER_TASKS):
        raise ModelError(f"the {who} is a {shown(name)}, which labels no whole text", where=where, fix=fix)


def _check_named(names: list[str], rename: dict[str, str], where: str, fix: str, *, numbers: bool) -> None:
    """Refuses labels of the model that are placeholders, or numbers, which would be shared with other teachers."""
    blank = [name for name in names if PLACEHOLDER.fullmatch(rename.get(name, name))]
    if blank:
        raise ModelError(f"the model has no names for its labels: {', '.join(blank[:5])}", where=where, fix=fix)
    counts = [name for name in names if NUMBER.fullmatch(name) and name not in rename]
    if counts and not numbers:
        what = f"the model's labels are numbers ({', '.join(counts[:5])}), which teachers of other tasks share"
        same = ", ".join(as_flow_yaml(name) for name in names[:5]) + (", ..." if len(names) > 5 else "")
        raise ModelError(what, where=where, fix=f"{fix}; if the numbers are the names, write labels: [{same}]")


def _check_label_ids(files: ModelFiles, names: list[str], where: str) -> None:
    """Refuses a label2id that gives a label of id2label another position: one of them is wrong."""
    label2id = files.config.get("label2id")
    if not isinstance(label2id, dict) or any(map(PLACEHOLDER.fullmatch, names)):
        return
    for index, name in enumerate(names):
        if label2id.get(name, index) not in {index, str(index)}:
            what = f"id2label and label2id contradict: {name!r} is output {index} and {label2id[name]}"
            raise ModelError(what, where=where, fix="correct the wrong one; predictions show which")


def own_labels(files: ModelFiles, *, teacher: str) -> tuple[list[str], bool]:
    """Returns the labels of id2label and whether they are names; transformers leaves placeholders out of the file."""
    id2label = files.config.get("id2label")
    if id2label is None:
        return [f"LABEL_{index}" for index in range(int(files.config.get("num_labels") or 2))], False
    where = f"teacher {teacher}: {files.names_of_labels}"
    names: list[Any] = [None]
    if isinstance(id2label, dict):
        names = [id2label.get(str(index)) for index in range(len(id2label))]
    if not all(isinstance(name, str) and name for name in names):
        fix = "give labels: the names by position; or mend id2label to count 0, 1, 2, ..."
        raise ModelError("id2label does not name every output, from 0 on, by a text", where=where, fix=fix)
    for index, name in enumerate(names):
        if has_surrogate(name):
            what = f"id2label: the name of output {index} has half of a character (a lone surrogate)"
            raise ModelError(what, where=where, fix="give labels: the names by position; or mend id2label")
    _check_label_ids(files, names, where)
    return names, not any(map(PLACEHOLDER.fullmatch, names))
