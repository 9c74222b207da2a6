"""Names and digests of the files of checkpoints, and of the logs of trainings; needs no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

from amalgam.pipeline.input_files import file_digest
from amalgam.pipeline.storage.facts import fits
from amalgam.pipeline.storage.fingerprint import fingerprint
from amalgam.pipeline.storage.local import atomic_write
from amalgam.pipeline.storage.paths import MOST_BYTES, is_below, is_regular, regular, small_content
from amalgam.pipeline.storage.small_files import signed, verified

FORMAT = 2
STATE = "state.json"
CHECKPOINT = "checkpoint"
"""Folder of the checkpoints in the folder of a result."""
STEP = re.compile(r"step-(\d{6,})")
FILES = {STATE, "weights.safetensors", "optimizer.safetensors", "best.safetensors"}
LOGS = "training-logs"
TRAINING_STAGES = ("train-teachers", "train-student")


class BrokenError(Exception):
    """A checkpoint that cannot be resumed."""


def read_state(folder: Path) -> dict[str, Any]:
    """Returns the content of state.json; raises BrokenError if it has changed since it was written."""
    try:
        content = json.loads(small_content(folder / STATE) or b"")
        body: dict[str, Any] = content["checkpoint"]
        if content["fingerprint"] != fingerprint(body) or body["format"] != FORMAT:
            raise BrokenError(f"{STATE} has changed since it was written, or has another format than {FORMAT}")
        files = body["files"]
        if not (fits(files, dict[str, str]) and {f"{name}.safetensors" for name in files} <= FILES):
            raise BrokenError(f"{STATE} names other files than those of a checkpoint")
    except OSError as error:
        raise BrokenError(f"{Path(error.filename or folder).name}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BrokenError(f"{STATE} is no checkpoint") from error
    return body


def has_content(file: Path, digest: str) -> bool:
    """Returns whether a file of tensors has the digest; one that its header does not describe is not read."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = opened.read(size) if size <= MOST_BYTES else b""
    try:
        ends = [entry["data_offsets"][1] for name, entry in json.loads(header).items() if name != "__metadata__"]
        is_whole = 8 + size + max(ends, default=0) == file.stat().st_size
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return False
    return is_whole and file_digest(file) == digest


def checkpoint_folders(root: Path) -> Iterator[Path]:
    """Yields the folder `checkpoint` of each training below a workspace."""
    for stage in TRAINING_STAGES:
        for folder in sorted((root / stage).iterdir()) if (root / stage).is_dir() else ():
            if (folder / CHECKPOINT).is_dir() and is_below(f"{stage}/{folder.name}/{CHECKPOINT}", root):
                yield folder / CHECKPOINT


def resume_point(root: Path, unit: Path) -> tuple[str, float]:
    """Returns the latest checkpoint in the folder of a training in words, and the finished share of its steps.

    The tensors are not read. The share of a training in phases is 0, because the steps of the others are not known.
    """
    folder, states = unit / CHECKPOINT, list[tuple[int, Path, dict[str, Any]]]()
    for path in files_of(folder) if is_below(folder.relative_to(root).as_posix(), root) else ():
        with suppress(BrokenError, OSError):
            states += [(path.stat().st_mtime_ns, path.parent, read_state(path.parent))] if path.name == STATE else []
    if not states:
        return "", 0.0
    _, step_folder, body = max(states, key=itemgetter(0))
    step, phase, state = int(step_folder.name.partition("-")[2]), step_folder.parent, body.get("state")
    total = state.get("total", 0) if isinstance(state, dict) else 0
    has_total = fits(total, int) and total >= step
    steps = f"{step:,} of {total:,}" if has_total else f"{step:,}"
    if phase != folder:
        return f"resumes {phase.name} from step {steps}", 0.0
    return f"resumes from step {steps}", step / total if has_total else 0.0


def files_of(folder: Path) -> list[Path]:
    """Returns the files of checkpoints below a folder `checkpoint`, also of phases; other files are the user's."""
    paths = [path for path in (*folder.glob("*/*"), *folder.glob("*/*/*")) if STEP.fullmatch(path.parent.name)]
    return sorted(path for path in paths if path.name in FILES and regular(folder, path.relative_to(folder).as_posix()))


def damaged_files(folder: Path) -> dict[Path, str]:
    """Returns the damaged files of complete checkpoints, with their faults."""
    damaged: dict[Path, str] = {}
    for path in files_of(folder):
        if path.name != STATE:
            continue
        try:
            digests = read_state(path.parent)["files"]
            files = {path.parent / f"{name}.safetensors": digest for name, digest in digests.items()}
            changed = [file for file, digest in files.items() if is_regular(file) and not has_content(file, digest)]
            damaged |= {file: f"{file.name} has changed since it was written" for file in changed}
        except BrokenError as error:
            damaged |= {path: str(error)} if path.exists() else {}
        except FileNotFoundError:  # a training has replaced the checkpoint meanwhile
            continue
    return damaged


# ---- logs


def log_digest(log: Path) -> Path:
    return log.with_suffix(".digest.json")


def write_log_digest(log: Path) -> None:
    with atomic_write(log_digest(log)) as temporary:
        temporary.write_bytes(signed({"log": {"bytes": log.stat().st_size, "sha256": file_digest(log)}}))


def training_seconds(root: Path, folders: Iterable[str]) -> float:
    """Returns the seconds in the logs of trainings, without loading and saving; 0 if a log is absent or damaged.

    A resumed training has one log, whose seconds start again at each run.
    """
    seconds = 0.0
    try:
        for folder in folders:
            content = (root / LOGS / f"{folder.replace('/', '-')}.jsonl").read_text("utf-8")
            times = [float(json.loads(line)["seconds"]) for line in content.splitlines()]
            seconds += sum(time for time, after in pairwise([*times, 0.0]) if after < time)
    except (OSError, ValueError, TypeError, KeyError):
        return 0.0
    return seconds


def damaged_logs(root: Path) -> Iterator[Path]:
    """Yields the logs, and the files with their digests, that have changed since their trainings ended."""
    for stage in TRAINING_STAGES if is_below(LOGS, root) else ():
        for path in sorted((root / LOGS).glob(f"{stage}-*.digest.json")):
            log = path.with_name(path.name.replace(".digest.json", ".jsonl"))
            content = verified(small_content(path))
            if content is None:
                yield path
            elif is_regular(log) and not _is_unchanged(log, content.get("log")):
                yield log


def _is_unchanged(log: Path, expected: object) -> bool:
    match expected:
        case {"bytes": int(size), "sha256": str(digest)}:
            return log.stat().st_size == size and file_digest(log) == digest
    return False
