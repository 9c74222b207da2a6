"""Reports versions, device, disk, and missing files with the fix (`amalgam doctor`)."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

from amalgam.data.sources import find_files
from amalgam.pipeline.errors import AmalgamError
from amalgam.pipeline.execution.stage import PendingDependencyError, Run
from amalgam.pipeline.storage.fingerprint import library_versions
from amalgam.stages.app.api import open_run
from amalgam.stages.common.corpus import GENERATED, REMOTE, sources_of
from amalgam.stages.common.load import encoder_files, prepare_teachers
from amalgam.stages.generate.stage import language_model_files
from amalgam.stages.report.stage import ENCODER


def diagnose(config: Path, overrides: list[str]) -> list[dict[str, str]]:
    rows = [_row("python", platform.python_version())]
    for library, installed in library_versions().items():
        missing = installed == "not installed"
        rows.append(_row(library, installed, f"pip install {library}" if missing else ""))
    return [*rows, _device(), *_experiment(config, overrides), _disk()]


def _device() -> dict[str, str]:
    from amalgam.stages.common.device import dtype_for, pick_device

    device = pick_device("auto")
    return _row("device", f"{device}, {dtype_for(device)}")


def _experiment(config: Path, overrides: list[str]) -> list[dict[str, str]]:
    """Returns a row for the file and for each input that it names; loads no weights and fetches no texts."""
    if not config.exists():
        return [_row("experiment", f"no {config.name} here", "amalgam init")]
    try:
        run = open_run(config, overrides)
    except AmalgamError as error:
        return [_row("experiment", error.what, error.fix or "")]
    rows = [_row("experiment", config.name)]
    looks = {"texts": _texts, "teachers": _teachers, "models": _models}
    for what, look in (looks | ({"workspace": _workspace} if run.store.backend.is_remote else {})).items():
        try:
            rows.append(_row(what, look(run)))
        except PendingDependencyError as unknown:
            rows.append(_row(what, f"after {unknown.dependency}"))
        except AmalgamError as error:
            rows.append(_row(what, error.what, error.fix or ""))
    return rows


def _texts(run: Run) -> str:

    sources = sources_of(run.experiment)
    elsewhere = (*REMOTE, GENERATED)
    for one in (one for named in sources.values() for one in named if not one.startswith(elsewhere)):
        find_files(one, run.base)
    return f"{', '.join(sources)}: every local file exists"


def _teachers(run: Run) -> str:

    prepare_teachers(run)
    return f"{len(run.experiment.teachers)} teachers found"


def _models(run: Run) -> str:
    """Checks the student's encoder and the language model."""
    if run.experiment.generate and run.experiment.generate.writes:
        language_model_files(run)
    student = run.experiment.student
    if not (student.learns or run.experiment.corpus.test):
        return "none needed"
    encoder_files(run, student, ENCODER)
    return f"{student.encoder} found"


def _workspace(run: Run) -> str:
    """Checks that the object store is reachable and supports conditional writes."""
    run.store.backend.check()
    return f"{run.store.backend.address}: reached, supports conditional writes"


def _disk() -> dict[str, str]:
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    return _row("disk", f"{free:,.1f} GB free", "amalgam gc" if free < 1 else "")


def _row(what: str, value: str, fix: str = "") -> dict[str, str]:
    return {"what": what, "found": value, "fix": fix}
