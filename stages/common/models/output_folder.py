"""Copies finished models to students/NAME and teachers/NAME next to the experiment file.

Changes to a copy cannot damage the workspace. A folder that amalgam did not make is never replaced.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from amalgam.pipeline.errors import ExperimentError

MARK = ".amalgam.json"


def place(  # noqa: PLR0913 - where, and what
    source: Path, base: Path, room: str, name: str, fingerprint: str, about: Mapping[str, Any] | None = None
) -> Path:
    """Copy `source` to base/room/name, replacing only what an earlier run placed there.

    `about`: facts for users of the model, stored in its metadata file.
    """
    target = check_place(base, room, name)
    mark = {"fingerprint": fingerprint, **(about or {})}
    found = read_mark(target)
    if found == mark:
        return target
    aside = target.with_name(f".tmp-{os.getpid()}-{uuid.uuid4().hex[:12]}")
    if found is not None and found["fingerprint"] == fingerprint:  # the same model with new facts
        aside.write_text(_as_text(mark), "utf-8")
        aside.replace(target / MARK)
        return target
    shutil.copytree(source, aside)
    (aside / MARK).write_text(_as_text(mark), "utf-8")
    if target.exists():
        old = aside.with_name(aside.name + "-old")
        target.rename(old)
        aside.rename(target)
        shutil.rmtree(old)
    else:
        aside.rename(target)
    return target


def check_place(base: Path, room: str, name: str) -> Path:
    """Refuses, before any work, a folder that `place` must not replace."""
    target = base / room / name
    _check_inside(target, base)
    if target.exists() and read_mark(target) is None:
        raise ExperimentError(
            f"{room}/{name} exists and was not made by amalgam",
            where=str(target),
            fix="move it away, or choose another name",
        )
    return target


def _check_inside(target: Path, base: Path) -> None:
    root = base.resolve()
    if target.is_symlink() or not target.parent.resolve().is_relative_to(root):
        raise ExperimentError(
            f"{target.relative_to(base)} leads out of the experiment's folder",
            where=str(target),
            fix="remove the link, or choose another name",
        )


def read_mark(folder: Path) -> dict[str, Any] | None:
    """Returns the metadata that `place` wrote to the folder, or None."""
    try:
        found = json.loads((folder / MARK).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("fingerprint"), str) else None


def _as_text(mark: Mapping[str, Any]) -> str:
    return json.dumps(mark, ensure_ascii=False) + "\n"
