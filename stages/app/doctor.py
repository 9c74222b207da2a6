"""Reports versions, device, disk, and missing files with the fix (`amalgam doctor`)."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from amalgam.data.keys import shown, similar_labels_note
from amalgam.pipeline.config.proposals import DEFAULT_FILE
from amalgam.pipeline.console import counted, size
from amalgam.pipeline.errors import AmalgamError
from amalgam.pipeline.execution.stage import PendingDependencyError, Run
from amalgam.pipeline.storage.fingerprint import library_versions
from amalgam.stages.app.api import open_run
from amalgam.stages.app.checks import (
    check_execution_device,
    check_folders,
    check_space,
    check_teacher_encoders,
    check_workspace,
)
from amalgam.stages.common.cached.load import ENCODER
from amalgam.stages.common.corpus import sources_of
from amalgam.stages.common.device import dtype_for, pick_device
from amalgam.stages.common.load import (
    check_labels,
    encoder_files,
    labels_by_teacher,
    prepare_teachers,
)
from amalgam.stages.generate.stage import language_model_files
from amalgam.stages.read_corpus.stage import check_texts
from amalgam.stages.train_teachers.stage import encoders_of


class Check(NamedTuple):
    check: str
    result: str
    fix: str = ""
    ok: bool = True


def diagnose(config: Path, overrides: list[str]) -> Iterator[Check]:
    yield Check("python", platform.python_version())
    for library, version in library_versions().items():
        yield Check(library, version, f"pip install {library}" if version == "not installed" else "")
    device = pick_device("auto")
    yield Check("device", f"{device}, {dtype_for(device)}")
    yield from _experiment(config, overrides)


def _experiment(config: Path, overrides: list[str]) -> Iterator[Check]:
    """Yields a check of the file and of each input that it names; loads no weights and fetches no texts."""
    if not config.exists() and config.name != DEFAULT_FILE.name:
        yield Check("experiment", f"no file {shown(str(config))}", "name another file with -c FILE", ok=False)
        return
    if not config.exists():
        yield Check("experiment", f"no {config.name} here", "amalgam init")
        yield Check("disk", f"{size(shutil.disk_usage(Path.cwd()).free)} free")
        return
    try:
        run = open_run(config, overrides)
    except AmalgamError as error:
        yield Check("experiment", error.what, error.fix or "", ok=False)
        return
    yield Check("experiment", config.name)
    checks = {
        "texts": _texts,
        "teachers": _teachers,
        "labels": _labels,
        "models": _models,
        "folders": _folders,
        "workspace": _workspace,
    }
    if run.experiment.execution.device != "auto":
        checks["execution.device"] = check_execution_device
    checks["disk"] = _disk
    for name, check in checks.items():
        try:
            yield Check(name, check(run))
        except PendingDependencyError as pending:
            yield Check(name, f"checked after {pending}")
        except AmalgamError as error:
            yield Check(name, error.what, error.fix or "", ok=False)


def _texts(run: Run) -> str:
    check_texts(run)
    return f"{', '.join(sources_of(run.experiment))}: every local file has rows and its columns"


def _teachers(run: Run) -> str:
    """Finds every teacher, on the Hub too, and reads its labels; of trained ones the encoder."""
    if run.experiment.train_teachers:
        check_teacher_encoders(run)
        encoders = sorted({str(settings.encoder) for settings, _ in encoders_of(run).values()})
        return f"trained by train-teachers from {', '.join(encoders)}"
    prepare_teachers(run)
    own, count = labels_by_teacher(run), len(run.experiment.teachers)
    labels = {label for names in own.values() for label in names}
    counts = f"{counted(count, 'teacher')}, {counted(len(labels), 'label')}"
    return "; ".join(filter(None, [counts, similar_labels_note(own)]))


def _labels(run: Run) -> str:
    """Checks the labels of training texts; without a result of read-corpus, their texts are not looked up."""
    check_labels(run)
    return f"labels: {run.experiment.labels}" if run.experiment.labels else "none given"


def _models(run: Run) -> str:
    """Checks the student's encoder and the language model."""
    if run.experiment.generate and run.experiment.generate.writes:
        language_model_files(run)
    student = run.experiment.student
    if not (student.learns or run.experiment.corpus.test):
        return "none needed"
    encoder_files(run, student, ENCODER)
    return f"{student.encoder} found"


def _folders(run: Run) -> str:
    check_folders(run)
    return "results can be written next to the experiment file"


def _disk(run: Run) -> str:
    return check_space(run, ())


def _workspace(run: Run) -> str:
    """Checks that a folder is writable, or that the object store is reachable and supports conditional writes."""
    if not run.store.backend.is_remote:
        check_workspace(run)
        return f"{run.store.root.name} is writable"
    run.store.backend.check()
    return f"{run.store.backend.address}: reached, supports conditional writes"
