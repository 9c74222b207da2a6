"""What the outputs of a teacher are called: its own names, the given ones, or an error that says which is missing."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from amalgam.pipeline.errors import ModelError
from amalgam.stages.common.models.resolve import ModelFiles


def label_names(files: ModelFiles, *, labels: list[str] | None, rename: dict[str, str], teacher: str) -> list[str]:
    """The teacher's label names by position of its outputs, as the union is to know them."""
    where = f"teacher {teacher}: {files.folder / 'config.json'}"
    own = _own_labels(files.config, where)
    names = labels if labels is not None else own
    if len(names) != len(own):
        raise ModelError(_unmatched(names, own), where=where, fix=f"give exactly {len(own)} labels, by position")
    unknown = sorted(set(rename) - set(names))
    if unknown:
        close = difflib.get_close_matches(unknown[0], names, n=1, cutoff=0.4) or names[:5]
        what = f"rename: the teacher has no label {', '.join(map(repr, unknown))}"
        raise ModelError(what, where=where, fix=f"its labels are like {', '.join(map(repr, close))}")
    renamed = [rename.get(name, name) for name in names]
    _refuse_labels(renamed, given=labels is not None, where=where)
    if files.config.get("problem_type") in ("multi_label_classification", "regression"):
        what = f"the teacher does {files.config['problem_type']}: its outputs are no distribution over labels"
        raise ModelError(what, where=where, fix="use a teacher that chooses one label per text")
    return renamed


def _own_labels(config: Mapping[str, Any], where: str) -> list[str]:
    """Transformers leaves id2label out of the file where it says nothing: two labels without names."""
    id2label = config.get("id2label")
    if id2label is None:
        return [f"LABEL_{index}" for index in range(int(config.get("num_labels") or 2))]
    id2label = id2label if isinstance(id2label, dict) else {"": id2label}
    positions = {int(key): value for key, value in id2label.items() if str(key).isdecimal()}
    names = [positions.get(index) for index in range(len(id2label))]
    if not all(isinstance(name, str) and name for name in names):
        fix = "give labels: the names by position; or mend id2label to count 0, 1, 2, ..."
        raise ModelError("id2label does not name every output, from 0 on, by a text", where=where, fix=fix)
    return [str(name) for name in names]


def _refuse_labels(names: list[str], *, given: bool, where: str) -> None:
    if len(names) < 2:
        fix = "a teacher must choose between labels: leave it out, or give one with two labels or more"
        raise ModelError(
            f"the teacher has one label ({', '.join(names)}), so it is never uncertain", where=where, fix=fix
        )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        what = f"the teacher has two outputs named {', '.join(map(repr, twice))}"
        raise ModelError(what, where=where, fix="give labels: a different name for each position")
    blank = [name for name in names if re.fullmatch(r"LABEL_\d+", name)]
    if blank and not given:
        what = f"the model does not say what its labels mean: {', '.join(blank[:5])}"
        raise ModelError(what, where=where, fix=f"give labels: the {len(names)} names, by position")


def _unmatched(names: Sequence[str], own: Sequence[str]) -> str:
    if len(names) > len(own):
        return f"labels: there is no output for {', '.join(map(repr, names[len(own) :]))}: the model has {len(own)}"
    left = ", ".join(f"{index} ({own[index]!r})" for index in range(len(names), len(own)))
    return f"labels: {len(names)} names for {len(own)} outputs: no name for output {left}"
