"""Placing a finished model where the user looks for it: students/NAME and teachers/NAME beside the experiment file.

A copy, so that nothing done to it can damage the workspace. Never over a folder that we did not make.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from pathlib import Path

from amalgam.pipeline.errors import ExperimentError

MARK = ".amalgam.json"


def place(source: Path, base: Path, room: str, name: str, fingerprint: str) -> Path:
    """Copy `source` to base/room/name, replacing only what an earlier run placed there."""
    target = check_place(base, room, name)
    if _mark(target) == fingerprint:
        return target
    aside = target.with_name(f".tmp-{os.getpid()}-{uuid.uuid4().hex[:12]}")
    shutil.copytree(source, aside)
    (aside / MARK).write_text(json.dumps({"fingerprint": fingerprint}) + "\n")
    if target.exists():
        old = aside.with_name(aside.name + "-old")
        target.rename(old)
        aside.rename(target)
        shutil.rmtree(old)
    else:
        aside.rename(target)
    return target


def check_place(base: Path, room: str, name: str) -> Path:
    """Refuses, before any work, what `place` must not write over."""
    target = base / room / name
    _check_inside(target, base)
    if target.exists() and _mark(target) is None:
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


def _mark(target: Path) -> str | None:
    try:
        return str(json.loads((target / MARK).read_text())["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
