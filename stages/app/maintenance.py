"""Lists the workspace's results, verifies its files, packs small ones, and finds garbage."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NotRequired, TypedDict

from amalgam.pipeline.execution.runner import TIMING
from amalgam.pipeline.execution.stage import Run, Stage
from amalgam.pipeline.storage import store
from amalgam.pipeline.storage.backend import QUARANTINE, TEMPORARY, FileInfo
from amalgam.pipeline.storage.local import remove_empty_folders
from amalgam.pipeline.storage.packing import may_be_packed
from amalgam.pipeline.storage.store import MANIFEST, HeadEntry, Record
from amalgam.stages.common.load import model_reference
from amalgam.stages.common.models.resolve import newer_revision
from amalgam.stages.registry import STAGES

OLD_SECONDS = 24 * 3600.0

READ_AT_ONCE = 4096
"""Records."""

ROOMS = ("pins", QUARANTINE, "training-logs", "given")
"""Folders without stages: no record names their files."""


# ---- results


class Artifact(TypedDict):
    """A result or a family."""

    stage: str
    name: str
    head: bool
    bytes: int
    summary: str


class Status(TypedDict):
    workspace: str
    bytes: int
    head: dict[str, HeadEntry]
    artifacts: list[Artifact]
    notes: list[str]


def list_artifacts(run: Run) -> Status:
    """Returns every result and family of the workspace, and marks those in HEAD."""
    entries, head = list(run.store.backend.list()), run.store.head()
    folders: dict[str, dict[str, list[FileInfo]]] = {stage.name: {} for stage in STAGES}
    for entry in entries:
        stage_name, _, inside = entry.path.partition("/")
        if stage_name in folders:
            folders[stage_name].setdefault(inside.partition("/")[0], []).append(entry)
    sizes = {entry.path: entry.bytes for entry in entries}
    last = {(name, entry["fingerprint"]) for name, entry in head.items()}
    artifacts = [
        Artifact(stage=stage.name, name=name, head=(stage.name, name) in last, bytes=_bytes(files), summary=summary)
        for stage in STAGES
        for name, files in sorted(folders[stage.name].items())
        if (summary := _summary(run, stage, name, files, sizes))
    ]
    notes = list(_newer_models(run))
    address = run.store.backend.address
    return {"workspace": address, "bytes": _bytes(entries), "head": head, "artifacts": artifacts, "notes": notes}


def _bytes(entries: Iterable[FileInfo]) -> int:
    return sum(entry.bytes for entry in entries if not entry.packed)


def _summary(run: Run, stage: Stage, name: str, files: Sequence[FileInfo], sizes: Mapping[str, int]) -> str | None:
    """Describes a result or a family in one line; None for a folder that is neither."""
    names = [entry.path.removeprefix(f"{stage.name}/{name}/") for entry in files]
    manifest = run.store.manifest(stage.name, name) if MANIFEST in names else None
    if manifest:
        total = len(manifest.files)
        complete = sum(sizes.get(file.path) == file.bytes for file in manifest.files)
        rest = "" if complete == total else " (the next run builds the missing ones)"
        return f"{stage.describe(manifest)}; {complete}/{total} files{rest}"
    if "family.json" not in names:
        return None
    key = run.store.read_json(run.store.folder(stage.name, name) / "family.json")
    if not isinstance(key, dict):
        return "family (family.json cannot be read)"
    units = sum(name.startswith("units/") and name.endswith(".json") for name in names)
    return f"family of {key.get('teacher')}, {units} units, {key.get('dtype', 'fp32')}"


def _newer_models(run: Run) -> Iterator[str]:
    for teacher in run.experiment.teachers:
        newer = newer_revision(model_reference(run, teacher.model, teacher.revision))
        if newer:
            yield f"teacher {teacher.name}: the Hub has a newer version, {newer[:12]}; revision: {newer} takes it"


# ---- verification and packing


class Damage(TypedDict):
    path: str
    fault: str


class Verification(TypedDict):
    files: int
    bytes: int
    damaged: list[Damage]
    quarantine: str


class Packing(TypedDict):
    units: int
    folders: list[str]
    loose: bool


def verify(run: Run) -> Verification:
    """Verifies every record and every file that a record names, and quarantines the damaged ones."""
    entries = list(run.store.backend.list())
    records = dict(_records(run, entries))
    files = {file.path: file for record in records.values() for file in record.files}
    unread = (path for entry in entries if _is_record(path := entry.path) and path not in records and path not in files)
    paths = [path for path in map(run.store.root.joinpath, unread) if run.store.record(path) is None]
    faults = {run.store.inside(path): "the record cannot be read" for path in paths if run.store.has(path)}
    faults |= {path: fault for path, file in files.items() if (fault := run.store.check_file(file, refetch=True))}
    run.store.quarantine(*(run.store.root / path for path in faults))
    size = sum(file.bytes for file in files.values())
    quarantine = run.store.where(run.store.root / QUARANTINE)
    damaged = [Damage(path=path, fault=fault) for path, fault in faults.items()]
    return {"files": len(files), "bytes": size, "damaged": damaged, "quarantine": quarantine}


def compact(run: Run, *, write: bool) -> Packing:
    """Counts the small units to pack, and packs them with `write`; `loose`: their files stay for a day."""
    loose = store.loose_units(run.store, run.store.backend.list())
    packed = (store.compact(run.store, folder, units) if write else len(units.new) for folder, units in loose.items())
    return {"units": sum(packed), "folders": list(loose), "loose": not run.store.backend.is_remote}


# ---- garbage


class Garbage(TypedDict):
    path: str
    bytes: int
    why: str
    loose: NotRequired[bool]
    """Only the loose copy of a packed file is garbage."""


def find_garbage(run: Run, *, unused: bool, delete: bool = False) -> list[Garbage]:
    entries = list(run.store.backend.list())
    records = list(_records(run, entries))
    garbage = {row["path"]: row for row in _leftovers(run, entries, records)}
    if unused:
        kept, sizes = _in_use(run, records), {entry.path: entry.bytes for entry in entries}
        for record_inside, record in records:
            for inside in (record_inside, *(file.path for file in record.files)):
                if inside not in kept and inside in sizes:
                    garbage[inside] = Garbage(path=inside, bytes=sizes[inside], why="the last builds do not use it")
    if delete:
        _delete(run, garbage.values())
    return list(garbage.values())


def _delete(run: Run, garbage: Iterable[Garbage]) -> None:
    """Deletes records before their files, so that an interrupted deletion leaves no record without files."""
    paths: dict[bool, list[str]] = {True: [], False: []}
    for row in garbage:
        paths["loose" in row].append(row["path"])
    run.store.backend.delete(sorted(paths[False], key=lambda path: not path.endswith(".json")))
    run.store.backend.inner.delete(paths[True])
    if not run.store.backend.is_remote:
        remove_empty_folders(run.store.root)


def _leftovers(run: Run, entries: Sequence[FileInfo], records: Sequence[tuple[str, Record]]) -> Iterator[Garbage]:
    """Temporary files of dead processes (a day old), quarantine, data files that no record names, and packed ones."""
    folders = {entry.path.rpartition("/")[0] for entry in entries}
    indexes = [run.store.backend.index(folder) for folder in sorted(folders) if may_be_packed(folder)]
    packs = {inside: piece.pack for index in indexes for inside, piece in index.pieces.items()}
    named = {file.path for _, record in records for file in record.files} | set(packs.values())
    changed, now = {entry.path: entry.modified for entry in entries}, time.time()
    for entry in entries:
        parts, old = entry.path.split("/"), now - entry.modified > OLD_SECONDS
        row = Garbage(path=entry.path, bytes=entry.bytes, why="")
        if any(part.startswith(TEMPORARY) for part in parts):
            if old:
                yield {**row, "why": "temporary, over a day old"}
        elif parts[0] == QUARANTINE:
            yield {**row, "why": "quarantined"}
        elif entry.path in packs and not entry.packed:
            if now - changed.get(packs[entry.path], now) > OLD_SECONDS:
                yield {**row, "why": "packed, over a day ago", "loose": True}
        elif _is_data(parts) and entry.path not in named and old:
            yield {**row, "why": "no record names it, over a day old"}


def _is_data(parts: Sequence[str]) -> bool:
    metadata = parts[-1].endswith((".json", ".gz"))
    return len(parts) > 2 and parts[0] not in ROOMS and not metadata and "checkpoint" not in parts


def _is_record(path: str) -> bool:
    """Returns whether this is a pin, or a record in a folder of units; JSON files of models are data."""
    *folders, name = path.split("/")
    in_folder = folders[:1] == ["pins"] or (len(folders) - (folders[-1:] == ["units"]) == 2 and folders[0] not in ROOMS)
    return in_folder and name.endswith(".json") and name != "family.json" and not name.startswith(TEMPORARY)


def _records(run: Run, entries: Iterable[FileInfo]) -> Iterator[tuple[str, Record]]:
    """Yields all records, read in batches."""
    named = [(entry.path, entry.path.split("/")) for entry in entries]
    insides = [path for path, parts in named if path.endswith(".json") and len(parts) > 1 and parts[0] not in ROOMS]
    for start in range(0, len(insides), READ_AT_ONCE):
        paths = {run.store.root / inside: inside for inside in insides[start : start + READ_AT_ONCE]}
        for path, record in run.store.records(list(paths), complete=False).items():
            yield paths[path], record


def _in_use(run: Run, records: Sequence[tuple[str, Record]]) -> set[str]:
    """Returns the files of HEAD's manifests, the token cache of its texts, and the records that name them."""
    from amalgam.stages.common.token_cache import ROOM

    kept, texts = set[str](), set[str]()
    for stage, entry in run.store.head().items():
        manifest = run.store.manifest(stage, entry["fingerprint"])
        if manifest is not None:
            kept |= {f"{stage}/{entry['fingerprint']}/{name}" for name in (MANIFEST, TIMING)}
            kept |= {file.path for file in manifest.files}
            texts |= {file.sha256 for file in manifest.files} if stage == "read-corpus" else set()
    for inside, record in records:
        if inside.startswith(f"{ROOM}/") and record.facts.get("bucket") in texts:
            kept |= {file.path for file in record.files}
        if any(file.path in kept for file in record.files):
            kept.add(inside)
    return kept
