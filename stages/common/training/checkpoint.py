"""Checkpoints of a training run: safetensors and JSON, no pickle, every file known by its digest.

Each is a folder `step-000123` whose state.json is written last: without it, or with a file that is not what was
written, the folder counts as broken and the one before it is used. The older one goes when the newer is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amalgam.pipeline.errors import DiskFullError
from amalgam.pipeline.execution.retry import is_disk_full
from amalgam.pipeline.storage.fingerprint import fingerprint
from amalgam.pipeline.storage.local import sync

if TYPE_CHECKING:
    import torch


if TYPE_CHECKING:
    Tensors = dict[str, torch.Tensor]


FORMAT = 1

STATE = "state.json"

FOLDER = re.compile(r"step-(\d{6,})")

MOMENTS = ("step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Checkpoint:
    """Where a run stands: `state` is plain JSON, `tensors` one table per file (weights, optimizer, best)."""

    step: int
    state: dict[str, Any]
    tensors: dict[str, Tensors]


class BrokenError(Exception):
    """A checkpoint that cannot be gone on from."""


def save(folder: Path, snapshot: Checkpoint) -> Path:
    """A new checkpoint in `folder`; those before it are removed once it is complete."""
    target = folder / _name(snapshot.step)
    # What stands here can only be the remains of a broken one: a whole one would have been resumed from.
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    with _disk_full_explained(target, snapshot):
        tables = snapshot.tensors.items()
        digests = {name: _write_tensors(target / f"{name}.safetensors", table) for name, table in tables}
        body = {"format": FORMAT, "step": snapshot.step, "files": digests, "state": snapshot.state}
        _write_state(target / STATE, json.dumps({"fingerprint": fingerprint(body), "checkpoint": body}))
    sync(folder)
    for _, older in _folders(folder):
        if older != target:
            # state.json goes first, so that a removal cut short leaves no checkpoint that looks complete.
            (older / STATE).unlink(missing_ok=True)
            shutil.rmtree(older, ignore_errors=True)
    return target


def newest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint, if any, and what a person should know of those passed over."""
    notes: list[str] = []
    for step, path in _folders(folder):
        try:
            return read(folder, step), notes
        except BrokenError as error:
            notes.append(f"checkpoint {path.name} is broken ({error}) and was passed over")
    return None, notes


def read(folder: Path, step: int) -> Checkpoint:
    """A checkpoint whose every byte is what was written; BrokenError otherwise."""
    path = folder / _name(step)
    body = _read_state(path / STATE)
    tensors = {name: _read_tensors(path / f"{name}.safetensors", digest) for name, digest in body["files"].items()}
    return Checkpoint(body["step"], body["state"], tensors)


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> Tensors:
    """AdamW's moments by parameter name; parameters that never had a gradient have none."""
    return {
        f"{moment}/{names[parameter]}": held[moment]
        for parameter, held in optimizer.state.items()
        for moment in MOMENTS
        if moment in held
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str], tensors: Tensors) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            held = {m: tensors[f"{m}/{names[parameter]}"] for m in MOMENTS if f"{m}/{names[parameter]}" in tensors}
            # Only the fused kernels keep the step count beside the parameter.
            stays = () if group["fused"] else ("step",)
            if held:
                optimizer.state[parameter] = {
                    m: tensor if m in stays else tensor.to(parameter.device) for m, tensor in held.items()
                }


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _folders(folder: Path) -> list[tuple[int, Path]]:
    """Newest first."""
    if not folder.is_dir():
        return []
    named = [(FOLDER.fullmatch(path.name), path) for path in folder.iterdir() if path.is_dir()]
    return sorted(((int(match[1]), path) for match, path in named if match), reverse=True)


def _write_tensors(path: Path, table: Tensors) -> str:
    from safetensors.torch import save_file

    # Copies, because tied weights share memory, which the format refuses.
    save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in table.items()}, path)
    with path.open("rb+") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
    return digest


def _write_state(path: Path, text: str) -> None:
    aside = path.with_suffix(".tmp")
    with aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    sync(path.parent)
    aside.replace(path)
    sync(path.parent)


def _read_tensors(path: Path, digest: str) -> Tensors:
    from safetensors.torch import load

    try:
        content = path.read_bytes()
    except OSError as error:
        raise BrokenError(f"{path.name}: {error.strerror}") from error
    if hashlib.sha256(content).hexdigest() != digest:
        raise BrokenError(f"{path.name} is not what was written")
    return load(content)


def _read_state(path: Path) -> dict[str, Any]:
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        body: dict[str, Any] = held["checkpoint"]
        intact = held["fingerprint"] == fingerprint(body)
    except OSError as error:
        raise BrokenError(f"{STATE}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise BrokenError(f"{STATE} is not a checkpoint's") from error
    if not intact:
        raise BrokenError(f"{STATE} is not what was written")
    if body["format"] != FORMAT:
        raise BrokenError(f"{STATE} is of format {body['format']}, not {FORMAT}")
    return body


@contextlib.contextmanager
def _disk_full_explained(target: Path, snapshot: Checkpoint) -> Iterator[None]:
    """A failed write leaves nothing behind, and a full disk is called that."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        shutil.rmtree(target, ignore_errors=True)
        if not is_disk_full(error):
            raise
        need = sum(tensor.nbytes for table in snapshot.tensors.values() for tensor in table.values())
        free = shutil.disk_usage(target.parent).free
        raise DiskFullError(
            f"disk full: a checkpoint needs {need / 1e9:.1f} GB, {free / 1e9:.1f} GB are free",
            where=str(target.parent),
            fix="make room and run the command again: it goes on from the checkpoint before",
        ) from error
