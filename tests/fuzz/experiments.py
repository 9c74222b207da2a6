"""Small experiments for the fuzzers: built once, restored before each case, compared after it."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import resource
import shutil
import signal
import stat
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main

from amalgam.pipeline.storage import compaction
from amalgam.pipeline.storage.store import Store
from amalgam.stages.cache_teachers import stage as cache_teachers
from amalgam.stages.common.training import checkpoint as checkpoints
from amalgam.tests.test_together import SECTION
from amalgam.tests.workspaces import (
    Workspace,
    age,
    amalgam,
    new_generating_workspace,
    new_workspace,
    word_list,
    write_model,
)

SECONDS = 10.0
"""Limit of one command, of the processor's time."""

MOST_MEMORY = 3 << 29
"""Bytes that all commands of one process may take more than it has after the first experiment."""

MOST_SECONDS = 60.0
"""Limit of one command on a busy machine."""

TEXTS, TEST = 24, 8

CLOSE = 3e-4
"""Largest difference of equal numbers: a unit that is computed again can be rounded otherwise."""

CHANGING = {
    "date",
    "seconds",
    "steps_per_second",
    "per_second",
    "resumed_from_step",
    "stages",
    "teacher_costs",
}
"""Keys of facts that differ between two equal runs: times, and which stages ran."""


class HangError(BaseException):
    """A command exceeds its limit; no handler of Exception may catch it."""


@dataclass(frozen=True)
class Outcome:
    """A command with its exit code, its output and the exception that left it."""

    words: tuple[str, ...]
    code: int
    text: str
    escaped: str = ""
    seconds: float = 0.0

    @property
    def is_fault(self) -> bool:
        """Returns whether the command ended with a traceback, a fault of amalgam, without memory, or not at all."""
        has_trace = self.code == FAULT or "Traceback (most recent" in self.text
        return bool(self.escaped) or has_trace or "out of memory" in self.text

    def __str__(self) -> str:
        return f"$ amalgam {' '.join(self.words)}\n{self.text[-1500:]}{self.escaped[-3000:]}[exit {self.code}]"


FAULT = 70


@contextlib.contextmanager
def quick() -> Iterator[None]:
    """Runs commands in this process without waiting for the disk, on a machine that computes bf16."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("AMALGAM_CACHE", "")
        patch.delenv("COLUMNS", raising=False)
        patch.setattr(os, "fsync", id)
        patch.setattr(typer.main, "get_command", cache(typer.main.get_command))
        patch.setattr(compaction, "LEAST", 2)  # a few units are packed
        patch.setattr(cache_teachers, "dtype_for", lambda _device: "bf16")
        yield


def limit_memory() -> None:
    """Lets this process take MOST_MEMORY more than it has now: larger requests raise MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    limit = pages * resource.getpagesize() + MOST_MEMORY
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def command(folder: Path, *words: str) -> Outcome:
    """Runs a command in this process, for a limited time."""
    seconds = SECONDS

    def stop(*_: object) -> None:
        if time.process_time() - used < seconds and time.monotonic() - began < MOST_SECONDS:  # a busy machine
            signal.setitimer(signal.ITIMER_REAL, 1)
            return
        raise HangError(f"still running after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    began, used = time.monotonic(), time.process_time()
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(MOST_SECONDS + SECONDS, exit=True)  # a library that no signal reaches
    try:
        result = amalgam(*words, folder=folder)
        outcome = Outcome(words, result.code, result.err + result.out, "", time.monotonic() - began)
    except BaseException as error:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if isinstance(error, KeyboardInterrupt):
            raise
        outcome = Outcome(words, -1, "", "".join(traceback.format_exception(error)))
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return outcome


# ---- trees


@dataclass(frozen=True)
class Kept:
    """A file, link or folder as it was, and the status that shows a change."""

    content: bytes | str | None
    """Bytes of a file, target of a link, None for a folder."""
    mode: int
    times: tuple[int, int]
    status: tuple[int, ...]


def kept(path: Path) -> Kept:
    status = path.lstat()
    mode = status.st_mode
    content = str(path.readlink()) if stat.S_ISLNK(mode) else path.read_bytes() if stat.S_ISREG(mode) else None
    return Kept(content, mode, (status.st_atime_ns, status.st_mtime_ns), _status(status))


def _status(status: os.stat_result) -> tuple[int, ...]:
    is_folder = stat.S_ISDIR(status.st_mode)  # a folder changes with the files in it
    return (
        status.st_mode,
        status.st_ino,
        *(() if is_folder else (status.st_size, status.st_mtime_ns, status.st_ctime_ns)),
    )


def entries(folder: Path) -> Iterator[Path]:
    """Yields every path below a folder, parents first; follows no link."""
    for parent, folders, names in os.walk(folder):
        yield from (Path(parent) / name for name in (*folders, *names))


class Snapshot:
    """The files of some folders, which can be restored quickly: only changed files are written."""

    def __init__(self, *folders: Path) -> None:
        self.folders = folders
        self.kept = {path: kept(path) for folder in folders for path in self._below(folder)}

    @staticmethod
    def _below(folder: Path) -> Iterator[Path]:
        if os.path.lexists(folder):
            yield folder
            yield from () if folder.is_symlink() else entries(folder)

    def files(self) -> list[Path]:
        return sorted(path for path, entry in self.kept.items() if isinstance(entry.content, bytes))

    def changes(self) -> list[str]:
        """Returns the paths that differ from the snapshot in content, kind or mode, or that are new or absent."""
        present = {path for folder in self.folders for path in self._below(folder)}
        differing = {path for path in present & self.kept.keys() if self._differs(path)}
        return sorted(map(str, (present ^ self.kept.keys()) | differing))

    def _differs(self, path: Path) -> bool:
        before = self.kept[path]
        now = kept(path)
        return (before.content, before.mode) != (now.content, now.mode)

    def restore(self) -> None:
        for folder in self.folders:
            for path in sorted(self._below(folder), reverse=True):
                entry = self.kept.get(path)
                if entry is None or entry.status != _status(path.lstat()):
                    self._remove(path)
        for path, entry in self.kept.items():
            if not os.path.lexists(path):
                self.kept[path] = self._write(path, entry)

    @staticmethod
    def _remove(path: Path) -> None:
        is_folder = path.is_dir() and not path.is_symlink()
        if is_folder:
            path.chmod(0o700)
            shutil.rmtree(path)
        elif os.path.lexists(path):
            path.unlink()

    @staticmethod
    def _write(path: Path, entry: Kept) -> Kept:
        if isinstance(entry.content, bytes):
            path.write_bytes(entry.content)
        elif isinstance(entry.content, str):
            path.symlink_to(entry.content)
        else:
            path.mkdir()
        if not isinstance(entry.content, str):
            path.chmod(stat.S_IMODE(entry.mode))
            os.utime(path, ns=entry.times)
        return Kept(entry.content, entry.mode, entry.times, _status(path.lstat()))


# ---- experiments


@dataclass
class Bench:
    """An experiment with a snapshot of all files that amalgam made, and of all others."""

    workspace: Workspace
    cache: Path
    """Folder of the local copies of packed files."""
    canary: Path
    """Files of a user, outside."""
    made: Snapshot
    inputs: Snapshot
    results: Mapping[str, Any]
    """Contents of the complete results."""
    raw: Mapping[str, bytes]
    """Bytes of the delivered files."""

    def command(self, *words: str) -> Outcome:
        os.environ["AMALGAM_CACHE"] = str(self.cache)
        return command(self.workspace.folder, *words)


OURS = ("artifacts", "students", "teachers", "reports")
INPUTS = ("texts", "models", "amalgam.yaml")


def small(folder: Path, new: Callable[[Path], Workspace] = new_workspace) -> Workspace:
    workspace = new(folder)
    for part, count in (("train", TEXTS), ("test", TEST)):
        if (folder / f"texts/{part}.csv").exists():
            workspace.write(workspace.texts(part)[:count], part)
    return workspace


def complete(folder: Path) -> tuple[Workspace, Mapping[str, Any]]:
    """Packed and loose units, a pinned dtype, copies of packed files, an earlier result, a quarantined file."""
    workspace = small(folder)
    workspace.edit("passes: 4", "passes: 16")
    workspace.edit("dtype: fp32", "dtype: auto")
    rows = workspace.texts()
    workspace.write(rows[:-4])
    workspace("run")
    workspace("gc", "--compact", "--yes")
    age(workspace.artifacts)
    workspace("gc", "--yes")
    workspace.write(rows)
    workspace("run")
    workspace("report", "--force")
    return workspace, results_of(workspace)


def stopped(folder: Path) -> tuple[Workspace, Mapping[str, Any]]:
    """A training that was stopped after its second checkpoint."""
    workspace = small(folder)
    workspace.edit("epochs: 1", "epochs: 2")
    workspace.edit("batch_size: 32", "batch_size: 8")
    with workspace.config.open("a") as file:
        file.write("execution:\n  training_checkpoint_seconds: 1\n")
    workspace("run")
    results = results_of(workspace)
    for name in OURS:
        shutil.rmtree(workspace.folder / name, ignore_errors=True)
    save, monotonic = checkpoints.save, time.monotonic

    def save_and_stop(*given: Any) -> None:
        save(*given)
        signal.raise_signal(signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "save", save_and_stop)
        patch.setattr(time, "monotonic", lambda: monotonic() * 1000)  # each step is a second
        assert workspace.attempt("run").code == 128 + signal.SIGTERM
    assert list(workspace.artifacts.glob("**/checkpoint/*/state.json"))
    return workspace, results


def trained(folder: Path) -> tuple[Workspace, Mapping[str, Any]]:
    """Teachers that are trained here, and a student of MT-BERT."""
    workspace = small(folder)
    write_model(folder / "models/deeper", words=word_list(workspace)[::-1], seed=5, num_hidden_layers=2)
    workspace.replace_teachers(SECTION)
    workspace.edit("targets:\n  mode: soft\n", "")
    workspace.edit("student:\n", "student:\n  method: mt-bert\n")
    workspace("run")
    return workspace, results_of(workspace)


def weighed(folder: Path) -> tuple[Workspace, Mapping[str, Any]]:
    """The default method: hidden states, statistics and weights of texts."""
    workspace = small(folder)
    workspace.edit("targets:\n  mode: soft\n", "")
    workspace.edit("student:\n", "student:\n  method: amalgam\n")
    workspace("run")
    return workspace, results_of(workspace)


def written(folder: Path) -> tuple[Workspace, Mapping[str, Any]]:
    """Texts of a language model."""
    workspace = small(folder, new_generating_workspace)
    workspace("run")
    return workspace, results_of(workspace)


EXPERIMENTS: Mapping[str, Callable[[Path], tuple[Workspace, Mapping[str, Any]]]] = {
    "complete": complete,
    "stopped": stopped,
    "trained": trained,
    "weighed": weighed,
    "written": written,
}


def bench(name: str, scratch: Path) -> Bench:
    """Builds an experiment; its path stays the same for all cases, since local copies of packs are found by it."""
    cache_folder, canary = scratch / name / "cache", scratch / name / "canary"
    os.environ["AMALGAM_CACHE"] = str(cache_folder)
    return bench_of(*EXPERIMENTS[name](scratch / name / "experiment"), cache_folder, canary)


def bench_of(workspace: Workspace, results: Mapping[str, Any], cache_folder: Path, canary: Path) -> Bench:
    write_canary(canary)
    made = Snapshot(*(workspace.folder / room for room in OURS), cache_folder)
    inputs = Snapshot(*(workspace.folder / room for room in INPUTS), canary)
    return Bench(workspace, cache_folder, canary, made, inputs, results, delivered(workspace, Path.read_bytes))


def write_canary(folder: Path) -> None:
    """Writes files of a user with names like ours, links and a repository."""
    names = ("model.safetensors", "a/b/c.parquet", ".git/objects/ab/cd01", "units/all-01234567.parquet", "HEAD.json")
    for name in (*names, "WORKSPACE.json", "pins/dtype-0.json", ".tmp-1-0123456789ab/x", "report.html", "thesis.tex"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{{}} {name}")
    (folder / "link").symlink_to("thesis.tex")
    (folder / "empty").mkdir()
    for path in entries(folder):
        os.utime(path, (0, 0), follow_symlinks=False)


# ---- results


def results_of(workspace: Workspace) -> dict[str, Any]:
    """Returns the contents of all files of the last results, and of the delivered ones; raises if one is damaged."""
    store = Store(workspace.artifacts)
    contents: dict[str, Any] = {}
    for stage, entry in store.head().items():
        manifest = store.manifest(stage, entry["fingerprint"])
        assert manifest is not None, f"{stage} has no readable manifest"
        contents[f"{stage}/MANIFEST"] = plain([entry, manifest.identity, manifest.facts])
        for file in manifest.files:
            fault = store.check_file(file)
            assert fault is None, f"{file.path}: {fault}"
            path = store.backend.local_path(file.path)
            assert path is not None
            contents[f"{stage}/{UNIT_DIGEST.sub('-*', file.path)}"] = content_of(path)
    return contents | {path: content for path, content in delivered(workspace, content_of).items() if PAGES not in path}


def delivered(workspace: Workspace, content: Callable[[Path], Any]) -> dict[str, Any]:
    """Returns the content of every file outside the workspace that amalgam wrote."""
    files = (path for name in OURS[1:] for path in entries(workspace.folder / name) if path.is_file())
    return {str(path.relative_to(workspace.folder)): content(path) for path in files}


PAGES = "reports/.amalgam/"
"""Folder of the pages' marks, which have the digests of pages with times."""

UNIT_DIGEST = re.compile(r"-[0-9a-f]{8}(?=\.|/|$)")


def content_of(path: Path) -> Any:
    """Returns the content as values that can be compared within rounding."""
    raw = path.read_bytes()
    if path.suffix == ".json":
        return plain(json.loads(raw))
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        return plain(pq.read_table(path).to_pylist())
    if path.suffix == ".safetensors":
        from safetensors.numpy import load

        return {name: tensor.tolist() for name, tensor in sorted(load(raw).items())}
    if path.suffix == ".npy":
        import numpy as np

        return np.load(path).tolist()
    return b"" if path.suffix == ".html" else raw  # it shows the JSON next to it, and times


def plain(value: Any) -> Any:
    """Returns a JSON value without the facts that differ between two equal runs."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items() if key not in CHANGING}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def difference(one: Any, other: Any, path: str = "") -> str | None:
    """Returns the place of the first difference beyond rounding, or None."""
    if one is other or (type(one) is type(other) and one == other):
        return None
    if isinstance(one, float | int) and isinstance(other, float | int) and not isinstance(one, bool):
        both_nan = one != one and other != other  # noqa: PLR0124
        return None if both_nan or abs(one - other) <= CLOSE else f"{path}: {one} -> {other}"
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        if one.keys() != other.keys():
            return f"{path}: keys differ: {sorted(map(str, one.keys() ^ other.keys()))[:4]}"
        return next((d for key in one if (d := difference(one[key], other[key], f"{path}/{key}"))), None)
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return next((d for index, (a, b) in pairs if (d := difference(a, b, f"{path}/{index}"))), None)
    return f"{path}: {str(one)[:60]} -> {str(other)[:60]}"
