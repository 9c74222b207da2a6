"""`amalgam doctor`: what this machine offers, and what is missing and how to get it."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

from amalgam.pipeline.errors import AmalgamError
from amalgam.pipeline.plan import library_versions


def examine(config: Path, overrides: list[str]) -> list[dict[str, str]]:
    rows = [_row("python", platform.python_version())]
    for library, found in library_versions().items():
        missing = found == "not installed"
        rows.append(_row(library, found, f"pip install {library}" if missing else ""))
    rows += [_device(), _experiment(config, overrides), *_workspace(config, overrides), _disk()]
    return rows


def _device() -> dict[str, str]:
    from amalgam.stages.cache_teachers.hardware import dtype_for, pick_device

    device = pick_device("auto")
    return _row("device", f"{device}, {dtype_for(device)}")


def _experiment(config: Path, overrides: list[str]) -> dict[str, str]:
    from amalgam.stages.commands import open_run
    from amalgam.stages.generate.families import language_model_files
    from amalgam.stages.teachers import prepare_teachers

    if not config.exists():
        return _row("experiment", f"no {config.name} here", "amalgam init")
    try:
        _, run = open_run(config, overrides)
        prepare_teachers(run)
        if run.experiment.generate and run.experiment.generate.writes:
            language_model_files(run)
    except AmalgamError as error:
        return _row("experiment", error.what.splitlines()[0], error.fix or "")
    return _row("experiment", f"{config.name}: {len(run.experiment.teachers)} teachers found")


def _workspace(config: Path, overrides: list[str]) -> Iterator[dict[str, str]]:
    """One in an object store: is it reached, and does it keep the first of two writers?"""
    from amalgam.stages.commands import open_run

    try:
        store = open_run(config, overrides)[1].store
        if store.place.far:
            store.place.check()
            yield _row("workspace", f"{store.place.address}: reached, puts if absent")
    except AmalgamError as error:
        if config.exists() and error.where != str(config):
            yield _row("workspace", error.what.splitlines()[0], error.fix or "")


def _disk() -> dict[str, str]:
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    return _row("disk", f"{free:,.1f} GB free", "amalgam gc" if free < 1 else "")


def _row(what: str, found: str, fix: str = "") -> dict[str, str]:
    return {"what": what, "found": found, "fix": fix}
