"""Copies finished models to students/NAME and teachers/NAME next to the experiment file.

Changes to a copy cannot damage the workspace. A folder that amalgam did not make is never replaced.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from amalgam.pipeline.errors import ExperimentError
from amalgam.pipeline.storage.local import atomic_write, temporary_path

METADATA = ".amalgam.json"


def publish_folder(  # noqa: PLR0913 - source, target and metadata
    source: Path, base: Path, folder: str, name: str, fingerprint: str, about: Mapping[str, Any] | None = None
) -> Path:
    """Copies `source` to base/folder/name, and replaces only a folder that amalgam made.

    `about` holds facts for users of the model; they are stored in the metadata file.
    """
    target = check_target(base, folder, name)
    metadata = {"fingerprint": fingerprint, **(about or {})}
    present = read_metadata(target)
    if present == metadata:
        return target
    if present is not None and present["fingerprint"] == fingerprint:  # the same model with new facts
        with atomic_write(target / METADATA) as temporary:
            temporary.write_text(_as_text(metadata), "utf-8")
        return target
    replaced = temporary_path(target.parent)
    with atomic_write(target) as temporary:
        shutil.copytree(source, temporary)
        (temporary / METADATA).write_text(_as_text(metadata), "utf-8")
        if target.exists():
            target.rename(replaced)
    if replaced.exists():
        shutil.rmtree(replaced)
    return target


def check_target(base: Path, folder: str, name: str) -> Path:
    """Returns the target folder; raises an error, before any work, if amalgam did not make the present one."""
    target = base / folder / name
    _check_inside(target, base)
    if target.exists() and read_metadata(target) is None:
        raise ExperimentError(
            f"{folder}/{name} exists and was not made by amalgam",
            where=str(target),
            fix="move it away, or choose another name",
        )
    return target


def _check_inside(target: Path, base: Path) -> None:
    root = base.resolve()
    if target.is_symlink() or not target.parent.resolve().is_relative_to(root):
        raise ExperimentError(
            f"{target.relative_to(base)} is a link to a folder outside the experiment's folder",
            where=str(target),
            fix="remove the link, or choose another name",
        )


def read_metadata(folder: Path) -> dict[str, Any] | None:
    """Returns the metadata that `publish_folder` wrote to the folder, or None."""
    try:
        metadata = json.loads((folder / METADATA).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return metadata if isinstance(metadata, dict) and isinstance(metadata.get("fingerprint"), str) else None


def _as_text(metadata: Mapping[str, Any]) -> str:
    return json.dumps(metadata, ensure_ascii=False) + "\n"
