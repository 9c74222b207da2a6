"""Exports the student to another format and compares it with torch (`amalgam export`).

The logits of some texts are compared with those of torch; an export that differs is refused and removed. With --int8
the model is then quantised, and refused if it loses accuracy.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tokenizers import Tokenizer

from amalgam.data.keys import shown
from amalgam.pipeline.console import Console
from amalgam.pipeline.errors import ExperimentError
from amalgam.pipeline.execution.faults import storage_error
from amalgam.pipeline.user_paths import check_writable, user_path
from amalgam.stages.app import classify, export_numpy, export_onnx
from amalgam.stages.app.int8 import ComparedTexts, Int8Facts, check_loss, compared_texts, show
from amalgam.stages.app.student import StudentFolder, finished_student, name_student
from amalgam.stages.common.deliveries import EXPORT, Mark, delivered_students, replace_folder, write_mark, written_files
from amalgam.stages.common.inference.batches import Classifier
from amalgam.stages.common.models.model_folder import EXPORT_FACTS, ONNX_MODEL, light_names

TOKENIZER = "tokenizer.json"


class Format(NamedTuple):
    file: str
    """The model's file, which other formats lack."""
    check: Callable[[StudentFolder, str], None]
    """Refuses a student that has no such export, before it loads; the last argument names it in a command."""
    write: Callable[[Classifier, Path], dict[str, Any]]
    """Writes the model into a folder with the student's small files, and returns its comparison with torch."""
    quantise: Callable[[Classifier, Path, ComparedTexts, Path | None], Int8Facts]
    """Replaces the model in the folder by its int8 form; the last argument is the student's experiment, if known."""


FORMATS = {
    "onnx": Format(ONNX_MODEL, export_onnx.check, export_onnx.write, export_onnx.quantise),
    "numpy": Format(classify.ARRAYS, export_numpy.check, export_numpy.write, export_numpy.quantise),
}


def export(  # noqa: PLR0913 - the options of the command
    name: Literal["onnx", "numpy"],
    config: Path,
    student: Path | None,
    out: Path | None,
    *,
    int8: bool = False,
    source: Path | None = None,
    force: bool,
    quiet: bool,
) -> None:
    form, finished, console = FORMATS[name], finished_student(config, student), Console(quiet=quiet)
    name_student(console, finished, config, chosen=student is not None)
    form.check(finished, finished.file_option if student is None else f" --student {shlex.quote(str(student))}")
    texts = compared_texts(finished, config, source, int8=int8)
    folder = out or _next_to(finished.folder, f"-{name}{'-int8' if int8 else ''}")
    check_folder(folder, form.file, force=force)
    classifier = finished.load()
    classifier.model.to("cpu")
    facts: dict[str, Any] = {}

    def write(temporary: Path) -> None:
        for file in light_names([path.name for path in finished.folder.iterdir()]):
            shutil.copy2(finished.folder / file, temporary / file)
        _truncate_as(classifier, temporary / TOKENIZER)
        facts.update(form.write(classifier, temporary), text=list(finished.learned))
        if texts is not None:
            is_own = finished.fingerprint in delivered_students(config.parent)
            facts["int8"] = form.quantise(classifier, temporary, texts, config if is_own else None)
            check_loss(facts["int8"], force=force)
        (temporary / EXPORT_FACTS).write_text(json.dumps(facts, indent=1) + "\n")
        about = {"options": f"--{name}{' --int8' if int8 else ''}"}
        write_mark(temporary, Mark(finished.fingerprint or "", written_files(temporary), about, EXPORT))

    try:
        replace_folder(folder, write)
    except OSError as error:
        raise storage_error(error, "the export cannot be written", folder.absolute().parent) from error
    texts_compared, largest = facts["parity_texts"], facts["largest_difference"]
    console.say(f"on {texts_compared} texts no logit differs from torch's by more than {largest:.1e}")
    if texts is not None:
        show(console, facts["int8"])
    console.result(str(folder))


def _next_to(student: Path, ending: str) -> Path:
    named = student if student.name not in {"", ".."} else student.absolute().resolve()  # such as `.`
    return named.with_name(f"{named.name}{ending}")


def _truncate_as(classifier: Classifier, path: Path) -> None:
    """Makes the copied tokenizer truncate as `predict` does; that of a student from elsewhere may do otherwise."""
    if path.exists():  # a tokenizer in Python has no such file
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_padding()
        tokenizer.enable_truncation(classifier.limit, direction=classifier.tokenizer.truncation_side)
        tokenizer.save(str(path))


def check_folder(folder: Path, model: str, *, force: bool) -> None:
    """Refuses, before the student loads, a folder that could not be written or is no export of this form."""
    user_path(str(folder), where="--out")
    name = shown(folder.absolute().name) or str(folder.absolute())  # the name of `.` is that of the folder
    fix = "change its permissions, or name a folder elsewhere with --out"
    check_writable(folder.absolute().parent, fix)
    if folder.is_symlink():
        raise ExperimentError(f"{name} is a link", where=str(folder.absolute()), fix="name another folder")
    if not folder.exists():
        return
    what, way_out = f"{name} exists", "replace it with --force"
    if not (folder / EXPORT_FACTS).is_file() or not (folder / model).is_file():
        what, way_out = f"{what} and is no export", "name another folder with --out"
    elif force:
        check_writable(folder, fix)
        return
    raise ExperimentError(what, where=str(folder.absolute()), fix=way_out)
