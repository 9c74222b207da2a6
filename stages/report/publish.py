"""Putting the page where a person finds it: reports/NAME.html and NAME.json beside the experiment file.

Copies of what the workspace holds by content. Never over a file that we did not make, never through a link.
"""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path
from typing import Any

from amalgam.pipeline.errors import ExperimentError
from amalgam.pipeline.execution.stage import Run
from amalgam.pipeline.storage.fingerprint import fingerprint
from amalgam.stages.methods import method_name
from amalgam.stages.report.html import drawn_by, page
from amalgam.stages.report.report_json import numbers_of

ROOM = "reports"

OURS = {".html": '<meta name="generator" content="amalgam report">', ".json": '"amalgam_report": '}
"""What stands at the head of the files that we make."""

HEAD_BYTES = 400

PAGE_VERSION = 1
"""Raised whenever our code gives the same numbers another look; a changed template tells by itself."""


def page_name(run: Run) -> str:
    """The student's; of a method that makes none, its own."""
    student = run.experiment.student
    return student.name if student.learns else method_name(run.experiment).replace(":", "-")


def check_page(run: Run) -> None:
    """Refuses, before any work, what `deliver_page` must not write over."""
    for suffix in OURS:
        _check(run.base, page_name(run) + suffix)


def deliver_page(run: Run, evaluation: dict[str, Any], findings: dict[str, Any]) -> str:
    """Draws the page if the workspace does not hold it yet; where it lies, from the experiment's folder."""
    numbers = numbers_of(run, evaluation, findings, page_name(run))
    files = _stored(run, numbers)
    return put(run.base, page_name(run), {suffix: path.read_bytes() for suffix, path in files.items()})


def _stored(run: Run, numbers: dict[str, Any]) -> dict[str, Path]:

    folder = run.store.folder("report", run.fingerprint("report")) / "pages"
    name = f"page-{fingerprint([PAGE_VERSION, drawn_by(), numbers])}"
    record = run.store.record(folder / f"{name}.json")
    if record is None or any(run.store.check_file(file) for file in record.files):
        with run.store.draft(folder, name) as draft:
            (draft.folder / "report.html").write_text(page(numbers), "utf-8")
            (draft.folder / "report.json").write_text(json.dumps(numbers, indent=1) + "\n", "utf-8")
        files = draft.files
    else:
        files = record.files
    return {Path(file.path).suffix: run.store.verified_path(file) for file in files}


def put(base: Path, name: str, contents: dict[str, bytes]) -> str:
    """Files of one name in reports/; what stands there already stays untouched."""
    for suffix, content in contents.items():
        target = _check(base, name + suffix)
        if target.exists() and target.read_bytes() == content:
            continue
        target.parent.mkdir(exist_ok=True)
        aside = target.with_name(f".tmp-{os.getpid()}-{uuid.uuid4().hex[:12]}")
        try:
            aside.write_bytes(content)
            aside.replace(target)
        finally:
            aside.unlink(missing_ok=True)
    return f"{ROOM}/{name}.html"


def _check(base: Path, name: str) -> Path:
    target = base / ROOM / name
    if target.is_symlink() or not target.parent.resolve().is_relative_to(base.resolve()):
        raise ExperimentError(
            f"{ROOM}/{name} leads out of the experiment's folder", where=str(target), fix="remove the link"
        )
    if target.exists() and not _is_ours(target):
        raise ExperimentError(
            f"{ROOM}/{name} exists and was not made by amalgam",
            where=str(target),
            fix="move it away, or choose another student.name",
        )
    return target


def _is_ours(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return OURS[path.suffix].encode() in file.read(HEAD_BYTES)
    except OSError:
        return False
