"""Writes the page, report.json and the texts to label into reports/.

A file that amalgam did not write is never replaced, and links are not followed.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from amalgam.data.keys import shown
from amalgam.data.rows import FIELD_LIMIT
from amalgam.pipeline.config.schema import ExperimentConfig
from amalgam.pipeline.errors import READ_ONLY, ExperimentError, reason_of
from amalgam.pipeline.storage.local import atomic_write
from amalgam.pipeline.storage.paths import is_regular
from amalgam.pipeline.user_paths import check_writable
from amalgam.stages.common.deliveries import REPORTS, DeliveryServices, deliver_page, page_mark, refuse_links
from amalgam.stages.common.given_labels import PREDICTED_COLUMNS
from amalgam.stages.methods import method_name

MARKERS = {".html": '<meta name="generator" content="amalgam report">', ".json": '"amalgam_report": '}
"""Text near the start of every file that amalgam writes here."""

MARKER_BYTES = 400

TO_LABEL = ".to-label.csv"
"""End of the name of the file with the texts to label."""

LONGEST_FOLDER = 300
"""Characters that are printed of the experiment's folder."""


def place_of(base: Path) -> str:
    """Returns the folder of the experiment, in which paths and commands are, unless it is the current one."""
    here = Path.cwd()
    if base.resolve() == here.resolve():
        return ""
    folder = base.relative_to(here) if base.is_relative_to(here) else base
    return f" (in {shown(str(folder), LONGEST_FOLDER)})"


def page_name(settings: ExperimentConfig) -> str:
    """Returns the student's name, or the method's name for a method without training."""
    student = settings.student
    return student.name if student.learns else method_name(settings).replace(":", "-")


def check_page(base: Path, name: str) -> None:
    """Refuses, before any work, a page that `publish` could not write."""
    check_writable(base / REPORTS, "change its permissions")
    for suffix in MARKERS:
        _check_file(base, name, suffix, marked=True)


def publish(
    base: Path, name: str, page: str, numbers: Mapping[str, Any], services: DeliveryServices | None = None
) -> str:
    """Writes reports/NAME.html and NAME.json, leaves equal files untouched, and returns the page's path.

    The mark has the fingerprint of a report; a comparison has none. A page of the same report that cannot be written
    stays, with a note: only other students or notes may have changed.
    """
    texts = {".html": page, ".json": json.dumps(numbers, indent=1) + "\n"}
    for suffix in texts:
        _check_file(base, name, suffix, marked=services is not None)
    contents = {name + suffix: text.encode() for suffix, text in texts.items()}
    path, present = f"{REPORTS}/{name}.html", page_mark(base, name)
    try:
        deliver_page(base / REPORTS, name, numbers.get("fingerprint", ""), contents, services)
    except OSError as error:
        is_same = present and present.fingerprint == numbers.get("fingerprint") and (base / path).exists()
        if services is None or error.errno not in READ_ONLY or not is_same:
            raise
        services.note(f"{path} is not updated: {reason_of(error)}")
    return path


def publish_texts(base: Path, name: str, content: bytes) -> str:
    """Writes the texts to label as reports/NAME and returns a line about it; a file with labels is kept."""
    target = base / REPORTS / name
    refuse_links(base, target.parent)
    if target.is_symlink() or (target.exists() and not _without_labels(target, content)):
        return f"  texts to label: {REPORTS}/{name} has labels or other columns, so it was kept"
    if not target.exists() or target.read_bytes() != content:
        with atomic_write(target) as temporary:
            temporary.write_bytes(content)
    return f"  texts to label: {REPORTS}/{name}"


def _without_labels(path: Path, content: bytes) -> bool:
    """Returns whether the file has the columns of `content`, perhaps with other names, and no other labels."""
    if not is_regular(path):
        return False
    csv.field_size_limit(FIELD_LIMIT)  # of all readers of the csv module
    header, *new = csv.reader(io.StringIO(content.decode()))
    label = -1 - len(PREDICTED_COLUMNS)
    labels = {(row[0], row[label]) for row in new}
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.reader(file)
            first = next(rows, [])
            is_ours = len(first) == len(header) and first[0] == header[0] and first[label + 1 :] == header[label + 1 :]
            return is_ours and all(
                len(row) == len(header) and (not row[label].strip() or (row[0], row[label]) in labels) for row in rows
            )
    except (OSError, ValueError, csv.Error):
        return False


def _check_file(base: Path, page: str, suffix: str, *, marked: bool) -> None:
    """Refuses a file that does not look like one of amalgam; with `marked`, also a damaged one of the same size may."""
    name = page + suffix
    target, mark = base / REPORTS / name, page_mark(base, page) if marked else None
    refuse_links(base, target)
    written = mark.files.get(name) if mark else None
    if target.exists() and not _is_ours(target) and not (written and target.stat().st_size == written.bytes):
        what = f"{REPORTS}/{name} exists and was not made by amalgam"
        raise ExperimentError(what, where=str(target), fix="move it away, or choose another student.name")


def _is_ours(path: Path) -> bool:
    if not is_regular(path):  # a pipe would block
        return False
    try:
        with path.open("rb") as file:
            return MARKERS[path.suffix].encode() in file.read(MARKER_BYTES)
    except OSError:
        return False
