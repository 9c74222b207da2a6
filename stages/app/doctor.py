"""Reports versions, device, disk, and missing files with the fix (`amalgam doctor`)."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from amalgam.data.keys import label_notes
from amalgam.pipeline.config.schema import Execution
from amalgam.pipeline.console import counted, size
from amalgam.pipeline.errors import AmalgamError, ModelError
from amalgam.pipeline.execution.faults import expected_error
from amalgam.pipeline.execution.stage import PendingDependencyError, Run
from amalgam.pipeline.storage.fingerprint import library_versions
from amalgam.pipeline.user_paths import DEFAULT_FILE
from amalgam.stages.app import checks
from amalgam.stages.app.runs import open_run
from amalgam.stages.cache_features.stage import check_states
from amalgam.stages.common import load, load_labels
from amalgam.stages.common.cached.load import ENCODER
from amalgam.stages.common.corpus import sources_of
from amalgam.stages.common.device import dtype_for, pick_device
from amalgam.stages.common.models.resolve import Finder, ModelFiles, check_model_type
from amalgam.stages.generate.stage import language_model_files
from amalgam.stages.methods import method_name
from amalgam.stages.read_corpus.stage import check_texts
from amalgam.stages.registry import STAGES
from amalgam.stages.train_teachers.stage import encoders_of


class CheckResult(NamedTuple):
    check: str
    result: str
    fix: str = ""
    ok: bool = True


def diagnose(config: Path, overrides: list[str]) -> Iterator[CheckResult]:
    """Yields a row for each check; of a library that cannot be imported one row, not those of all checks with it."""
    yield CheckResult("python", platform.python_version())
    libraries = [
        row
        for library, version in library_versions().items()
        for row in _rows(library, [partial(import_module, library)], version)
    ]
    yield from libraries
    faults = {row.result for row in libraries if not row.ok}
    checks = chain(_rows("device", [_device]), _experiment(config, overrides))
    yield from (row for row in checks if row.result not in faults)


def _device() -> str:
    device = pick_device("auto")
    return f"{device}, {dtype_for(device)}"


def _experiment(config: Path, overrides: list[str]) -> Iterator[CheckResult]:
    """Yields a check of the file and of each input that it names; loads no weights and fetches no texts."""
    if not config.exists() and config == DEFAULT_FILE:
        yield CheckResult("experiment", f"no {config.name} here", "amalgam init")
        yield CheckResult("disk", f"{size(shutil.disk_usage(Path.cwd()).free)} free")
        return
    try:
        run = open_run(config, overrides)
    except AmalgamError as error:
        is_store = "://" in (error.where or "")  # opening the run reads the workspace
        yield CheckResult("workspace" if is_store else "experiment", error.what, error.fix or "", ok=False)
        return
    yield CheckResult("experiment", config.name)
    yield CheckResult("method", method_name(run.experiment))
    parts = sources_of(run.experiment)
    text_checks = [partial(check_texts, run, part=part) for part in parts]
    yield from _rows("texts", text_checks, f"{', '.join(parts)}: every local file has rows and its columns")
    yield from (teachers := list(_teachers(run)))
    labels = run.experiment.labels
    label_checks = [partial(load_labels.check_unknown, run), partial(load_labels.check_labels, run)]
    yield from _rows("labels", label_checks, f"labels: {labels}" if labels else "none given")
    yield from (row for row in _models(run) if row.ok or row[1:] not in {teacher[1:] for teacher in teachers})
    yield from (CheckResult("max_tokens", note) for note in checks.limit_notes(run))
    folder_checks = [partial(checks.check_public_folder, run, stage) for stage in STAGES]
    yield from _rows("folders", folder_checks, "results can be written next to the experiment file")
    yield from _rows("workspace", [partial(_workspace, run)])
    for field, check in checks.OF_EXECUTION.items():
        if getattr(run.experiment.execution, field) != Execution.model_fields[field].default:
            yield from _rows(f"execution.{field}", [partial(check, run)])
    yield from _rows("disk", [partial(checks.check_space, run, ())])


def _rows(name: str, inspections: Iterable[Callable[[], object]], result: str = "") -> list[CheckResult]:
    """Returns a row for each different fault; without one, a row with the result, by default that of the last check."""
    rows = []
    for check in inspections:
        try:
            value = check()
        except PendingDependencyError as pending:
            result = f"checked after {pending}"
        except Exception as error:
            expected = expected_error(error)
            if expected is None:
                raise
            rows.append(CheckResult(name, expected.what, expected.fix or "", ok=False))
        else:
            result = result or str(value)
    return list(dict.fromkeys(rows)) or [CheckResult(name, result)]


def _model(
    name: str, find: Callable[[], ModelFiles], *further: Callable[[ModelFiles], object], result: str = ""
) -> list[CheckResult]:
    """Returns a row for each fault of a model; the other checks need its files."""
    files: list[ModelFiles] = []
    rows = _rows(name, [lambda: files.append(find())], result)
    further = (check_model_type, _check_tokenizer, *further)
    return _rows(name, [partial(check, files[0]) for check in further], result) if files else rows


def _teachers(run: Run) -> Iterator[CheckResult]:
    """Finds every teacher, on the Hub too, and reads its labels; of trained ones the encoder."""
    experiment, find = run.experiment, Finder().find
    encoders = encoders_of(run).values() if experiment.train_teachers else ()
    rows = _rows("train_teachers", [partial(load.check_encoder, run, *encoder) for encoder in encoders])
    for teacher in experiment.teachers:
        find_model = partial(find, load.teacher_reference(run, teacher))
        rows += _model(f"teacher {teacher.name}", find_model, partial(load.labels_of, run, teacher))
    for name, base in load.named_bases(run).items():
        reference = load.model_reference(run, base.model, base.revision, where=base.where)
        rows += _rows(f"teacher {name}", [partial(find, reference)])
    yield from [row for row in rows if not row.ok] or _rows("teachers", [partial(_summary, run)])


def _check_tokenizer(files: ModelFiles) -> None:
    from amalgam.stages.common.models.loading import load_tokenizer

    if files.are_predictions:
        return
    try:
        load_tokenizer(files)
    except ModelError as error:
        error.fix = f"restore its files, or save it again: tokenizer.save_pretrained({str(files.folder)!r})"
        raise


def _summary(run: Run) -> str:
    """Returns the number of the teachers and of their labels, and the encoders of trained teachers."""
    load.prepare_teachers(run)
    named, trained = load.labels_by_teacher(run), run.experiment.train_teachers
    labels = {label for names in named.values() for label in names}
    parts = [f"{counted(len(named), 'teacher')}, {counted(len(labels), 'label')}"] if named or not trained else []
    if trained:
        encoders = sorted({str(settings.encoder) for settings, _ in encoders_of(run).values()})
        parts.append(f"trained by train-teachers from {', '.join(encoders)}")
    return "; ".join([*parts, *label_notes(named)])


def _models(run: Run) -> Iterator[CheckResult]:
    experiment, student, rows = run.experiment, run.experiment.student, list[CheckResult]()
    if experiment.generate and experiment.generate.writes:
        rows += _rows("models", [partial(language_model_files, run)])
    if student.learns or experiment.corpus.test:
        find = partial(load.encoder_files, run, student, ENCODER)
        rows += _model("models", find, lambda _: check_states(run), result=f"{student.encoder} found")
    yield from [row for row in rows if not row.ok] or rows[-1:] or [CheckResult("models", "none needed")]


def _workspace(run: Run) -> str:
    """Checks that a folder is writable, or that the object store is reachable and supports conditional writes."""
    if not run.store.backend.is_remote:
        checks.check_workspace(run)
        return f"{run.store.root.name} is writable"
    run.store.backend.check()
    return f"{run.store.backend.address}: reached, supports conditional writes"
