"""Lists the workspace's results, verifies its files, and finds garbage."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from amalgam.pipeline.execution.runner import TIMING
from amalgam.pipeline.execution.stage import Run, Stage
from amalgam.pipeline.storage.backend import QUARANTINE, TEMPORARY, FileInfo
from amalgam.pipeline.storage.local import remove_empty_folders
from amalgam.pipeline.storage.packing import may_be_packed
from amalgam.pipeline.storage.store import MANIFEST, PackCandidates, Record, compact, loose_units
from amalgam.stages.common.load import model_reference
from amalgam.stages.common.models.resolve import newer_revision
from amalgam.stages.registry import STAGES

OLD_SECONDS = 24 * 3600.0

READ_AT_ONCE = 4096
"""Records."""

ROOMS = ("pins", QUARANTINE, "training-logs", "given")
"""Folders without stages: no record names their files."""


def list_artifacts(run: Run) -> dict[str, Any]:
    """Returns every result and family, and marks the ones in HEAD."""
    head = run.store.head()
    entries = list(run.store.backend.list())
    sizes = {entry.path: entry.bytes for entry in entries}
    artifacts: list[dict[str, Any]] = []
    for stage in STAGES:
        mine = [entry for entry in entries if entry.path.startswith(f"{stage.name}/")]
        artifacts += _results(run, stage, head.get(stage.name, {}).get("fingerprint"), mine, sizes)
    return {
        "workspace": run.store.backend.address,
        "bytes": _bytes(entries),
        "head": head,
        "artifacts": artifacts,
        "notes": list(_newer_models(run)),
    }


def _results(
    run: Run, stage: Stage, head: str | None, entries: Sequence[FileInfo], sizes: Mapping[str, int]
) -> Iterator[dict[str, Any]]:
    by_name: dict[str, list[FileInfo]] = {}
    for entry in entries:
        by_name.setdefault(entry.path.split("/")[1], []).append(entry)
    for name, mine in sorted(by_name.items()):
        names = {entry.path.split("/", 2)[-1] for entry in mine}
        manifest = run.store.manifest(stage.name, name) if MANIFEST in names else None
        if manifest is None and "family.json" not in names:
            continue
        line = _manifest_line(stage, manifest, sizes) if manifest else _family_line(run, stage.name, name, names)
        yield {
            "stage": stage.name,
            "name": name,
            "head": name == head,
            "bytes": _bytes(mine),
            "says": line,
        }


def _bytes(entries: Iterable[FileInfo]) -> int:
    return sum(entry.bytes for entry in entries if not entry.packed)


def _manifest_line(stage: Stage, manifest: Record, sizes: Mapping[str, int]) -> str:
    total = len(manifest.files)
    complete = sum(sizes.get(file.path) == file.bytes for file in manifest.files)
    rest = "" if complete == total else " (the next run builds the missing ones)"
    return f"{stage.describe(manifest)}; {complete}/{total} files{rest}"


def _family_line(run: Run, stage: str, name: str, files: Collection[str]) -> str:
    key = run.store.read_json(run.store.folder(stage, name) / "family.json")
    if not isinstance(key, dict):
        return "family (family.json cannot be read)"
    units = sum(1 for file in files if file.startswith("units/") and file.endswith(".json"))
    return f"family of {key.get('teacher')}, {units} units, {key.get('dtype', 'fp32')}"


def _newer_models(run: Run) -> Iterator[str]:
    for teacher in run.experiment.teachers:
        newer = newer_revision(model_reference(run, teacher.model, teacher.revision))
        if newer:
            yield f"teacher {teacher.name}: the Hub has a newer version, {newer[:12]}; revision: {newer} takes it"


def verify(run: Run) -> dict[str, Any]:
    """Verifies every file of every record, and quarantines the damaged ones."""
    damaged, files, size = [], 0, 0
    seen: set[str] = set()
    for _, record in _records(run):
        for file in record.files:
            if file.path in seen:
                continue
            seen.add(file.path)
            files, size = files + 1, size + file.bytes
            fault = run.store.check_file(file, refetch=True)
            if fault:
                damaged.append({"path": file.path, "fault": fault})
                run.store.quarantine(run.store.path(file))
    return {"files": files, "bytes": size, "damaged": damaged}


def find_garbage(run: Run, *, unused: bool) -> list[dict[str, Any]]:
    entries = list(run.store.backend.list())
    records = list(_records(run, entries))
    rows = list(_leftovers(run, entries, records))
    if unused:
        kept, sizes = _in_use(run, records), {entry.path: entry.bytes for entry in entries}
        rows += [
            _item(inside, sizes[inside], "the last builds do not use it")
            for record_inside, record in records
            for inside in [record_inside, *(file.path for file in record.files)]
            if inside not in kept and inside in sizes
        ]
    return list({row["path"]: row for row in rows}.values())


def remove(run: Run, rows: list[dict[str, Any]]) -> None:
    """Deletes records before their files, so that an interrupted deletion leaves no record without files."""
    whole = sorted((row["path"] for row in rows if "loose" not in row), key=lambda path: not path.endswith(".json"))
    run.store.backend.delete(whole)
    run.store.backend.inner.delete([row["path"] for row in rows if "loose" in row])
    if not run.store.backend.is_remote:
        remove_empty_folders(run.store.root)


def _leftovers(
    run: Run, entries: Sequence[FileInfo], records: Sequence[tuple[str, Record]]
) -> Iterator[dict[str, Any]]:
    """Temporary files of dead processes (a day old), quarantine, data files that no record names, and packed ones."""
    packed = dict(_packed(run, entries))
    named = {file.path for _, record in records for file in record.files} | set(packed.values())
    changed = {entry.path: entry.modified for entry in entries}
    now = time.time()
    for entry in entries:
        parts, old = entry.path.split("/"), now - entry.modified > OLD_SECONDS
        if any(part.startswith(TEMPORARY) for part in parts):
            if old:
                yield _item(entry.path, entry.bytes, "temporary, over a day old")
        elif parts[0] == QUARANTINE:
            yield _item(entry.path, entry.bytes, "quarantined")
        elif entry.path in packed and not entry.packed:
            if now - changed.get(packed[entry.path], now) > OLD_SECONDS:
                yield _item(entry.path, entry.bytes, "packed, over a day ago", loose=True)
        elif _is_data(parts) and entry.path not in named and old:
            yield _item(entry.path, entry.bytes, "no record names it, over a day old")


def _packed(run: Run, entries: Sequence[FileInfo]) -> Iterator[tuple[str, str]]:
    """Yields (path, pack) of every packed file."""
    for folder in sorted({entry.path.rpartition("/")[0] for entry in entries}):
        if may_be_packed(folder):
            yield from ((inside, piece.pack) for inside, piece in run.store.backend.index(folder).pieces.items())


def _is_data(parts: Sequence[str]) -> bool:
    metadata = parts[-1].endswith((".json", ".gz"))
    return len(parts) > 2 and parts[0] not in ROOMS and not metadata and "checkpoint" not in parts


def _records(run: Run, entries: Sequence[FileInfo] | None = None) -> Iterator[tuple[str, Record]]:
    """Yields all records, read in batches."""
    listed = run.store.backend.list() if entries is None else entries
    insides = [entry.path for entry in listed if _may_be_record(entry.path.split("/"))]
    for start in range(0, len(insides), READ_AT_ONCE):
        paths = {run.store.root / inside: inside for inside in insides[start : start + READ_AT_ONCE]}
        for path, record in run.store.records(list(paths), complete=False).items():
            yield paths[path], record


def _may_be_record(parts: Sequence[str]) -> bool:
    return parts[-1].endswith(".json") and len(parts) > 1 and parts[0] not in ROOMS


def _in_use(run: Run, records: Sequence[tuple[str, Record]]) -> set[str]:
    """Returns the files of HEAD's manifests and the records that name them."""
    from amalgam.stages.common.token_cache import ROOM

    kept: set[str] = set()
    for stage, entry in run.store.head().items():
        manifest = run.store.manifest(stage, entry["fingerprint"])
        if manifest is not None:
            kept |= {f"{stage}/{entry['fingerprint']}/{name}" for name in (MANIFEST, TIMING)}
            kept |= {file.path for file in manifest.files}
    texts = _texts_in_use(run)
    for inside, record in records:
        if inside.startswith(f"{ROOM}/") and record.facts.get("bucket") in texts:
            kept |= {file.path for file in record.files}
        if any(file.path in kept for file in record.files):
            kept.add(inside)
    return kept


def _texts_in_use(run: Run) -> set[str]:
    """Returns the digests of the last corpus, whose token cache is in use."""
    entry = run.store.head().get("read-corpus")
    manifest = run.store.manifest("read-corpus", entry["fingerprint"]) if entry else None
    return {file.sha256 for file in manifest.files} if manifest else set()


def _item(inside: str, size: int, why: str, *, loose: bool = False) -> dict[str, Any]:
    """`loose`: only the loose copy of a packed file is garbage."""
    return {"path": inside, "bytes": size, "why": why} | ({"loose": True} if loose else {})


def packable(run: Run) -> list[PackCandidates]:
    return list(loose_units(run.store, run.store.backend.list()))


def pack(run: Run, folders: Sequence[PackCandidates]) -> int:
    """Packs the units and returns their number."""
    return sum(compact(run.store, loose) for loose in folders)
