"""Checkpoints of a training run: safetensors and JSON without pickle; every file has a digest.

A checkpoint is a folder `step-000123`; state.json is written last. A folder without it or with a changed file is
skipped, and the one before is used. A complete checkpoint replaces all others.
Accelerate's save_state writes pickles and no digests, and its folders may be incomplete.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file

from amalgam.pipeline.console import size
from amalgam.pipeline.errors import DiskFullError, fix_of, is_disk_full, no_room, number_of
from amalgam.pipeline.storage.fingerprint import fingerprint
from amalgam.pipeline.storage.local import atomic_write, make_folder, sync
from amalgam.pipeline.storage.paths import TEMPORARY_NAME, is_regular
from amalgam.stages.common.training.checkpoint_files import FORMAT, STATE, STEP, BrokenError, has_content, read_state

MOMENTS = ("step", "exp_avg", "exp_avg_sq")

LOST = (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST)
"""Errors of a folder that another run of the same training removes, or has written first."""

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Checkpoint:
    """A run's progress: `state` is plain JSON, `tensors` has one table per file (weights, optimizer, best)."""

    step: int
    state: dict[str, Any]
    tensors: dict[str, Tensors]


def save(folder: Path, snapshot: Checkpoint) -> None:
    """Writes a checkpoint in `folder` and removes the others once it is complete.

    Another run of the same training may remove this one meanwhile; that run has a checkpoint of its own.
    """
    make_folder(folder)
    target = folder / f"step-{snapshot.step:06d}"
    try:
        with atomic_write(target) as temporary:
            temporary.mkdir()
            tables = snapshot.tensors.items()
            digests = {name: _write_tensors(temporary / f"{name}.safetensors", table) for name, table in tables}
            body = {"format": FORMAT, "step": snapshot.step, "files": digests, "state": snapshot.state}
            content = json.dumps({"fingerprint": fingerprint(body), "checkpoint": body})
            (temporary / STATE).write_text(content, "utf-8")
            sync(temporary / STATE)
            _remove(target)  # it is incomplete: a complete one would have been resumed
    except (OSError, SafetensorError) as error:
        if number_of(error) in LOST:
            return
        if not is_disk_full(error):
            raise
        need = sum(tensor.nbytes for table in snapshot.tensors.values() for tensor in table.values())
        what = f"{no_room(error, size(shutil.disk_usage(folder).free))}: a checkpoint needs {size(need)}"
        fix = f"{fix_of(error)} and run the command again: it resumes from the last checkpoint"
        raise DiskFullError(what, where=str(folder), fix=fix) from error
    for other in folder.glob("*"):
        if other != target and (STEP.fullmatch(other.name) or TEMPORARY_NAME.fullmatch(other.name)):
            _remove(other)


def _remove(checkpoint: Path) -> None:
    """Removes state.json first, so that an interrupted removal leaves no checkpoint that looks complete."""
    if checkpoint.is_dir() and not checkpoint.is_symlink():
        (checkpoint / STATE).unlink(missing_ok=True)
        shutil.rmtree(checkpoint, ignore_errors=True)


def latest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """Returns the latest complete checkpoint, if any, and notes on the skipped ones."""
    notes: list[str] = []
    for step, path in _folders(folder):
        try:
            return read(folder, step), notes
        except BrokenError as error:
            notes.append(f"checkpoint {path.name} is broken ({error}) and was skipped")
    return None, notes


def read(folder: Path, step: int) -> Checkpoint:
    """Reads and verifies a checkpoint; raises BrokenError if a byte has changed."""
    path, tensors = folder / f"step-{step:06d}", {}
    try:
        body = read_state(path)
        for name, digest in body["files"].items():
            file = path / f"{name}.safetensors"
            if file.exists() and not is_regular(file):
                raise BrokenError(f"{file.name} is no regular file")
            if not has_content(file, digest):  # before the file is read as a whole: it may be of any size
                raise BrokenError(f"{file.name} has changed since it was written")
            tensors[name] = load(file.read_bytes())
    except OSError as error:
        raise BrokenError(f"{Path(error.filename or path).name}: {error.strerror}") from error
    except SafetensorError as error:  # another run wrote it after the check
        raise BrokenError(str(error)) from error
    except (ValueError, KeyError, TypeError) as error:
        raise BrokenError(f"{STATE} is no checkpoint") from error
    return Checkpoint(body["step"], body["state"], tensors)


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> Tensors:
    """Returns AdamW's moments by parameter name; parameters without gradients have none."""
    return {
        f"{moment}/{names[parameter]}": moments[moment]
        for parameter, moments in optimizer.state.items()
        for moment in MOMENTS
        if moment in moments
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str], tensors: Tensors) -> None:
    for group in optimizer.param_groups:
        # Only the fused kernels keep the step count on the parameter's device.
        on_cpu = () if group["fused"] else ("step",)
        for parameter in group["params"]:
            for moment in MOMENTS:
                tensor = tensors.get(f"{moment}/{names[parameter]}")
                if tensor is not None:
                    tensor = tensor if moment in on_cpu else tensor.to(parameter.device)
                    optimizer.state[parameter][moment] = tensor


def _folders(folder: Path) -> list[tuple[int, Path]]:
    """Returns steps and folders, latest first."""
    named = [(STEP.fullmatch(path.name), path) for path in folder.glob("step-*") if path.is_dir()]
    return sorted(((int(match[1]), path) for match, path in named if match), reverse=True)


def _write_tensors(path: Path, table: Tensors) -> str:
    """Writes the tensors to the disk and returns the digest of the file."""
    # Copies: tied weights share memory, which the format refuses.
    save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in table.items()}, path)
    with path.open("rb+") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
    return digest
