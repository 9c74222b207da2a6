"""Lists the workspace's results, packs small files, and finds garbage."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TypedDict

from amalgam.pipeline.console import counted
from amalgam.pipeline.errors import AmalgamError
from amalgam.pipeline.execution.plan import plan
from amalgam.pipeline.execution.stage import Run, Stage
from amalgam.pipeline.storage import compaction, paths
from amalgam.pipeline.storage.backend import QUARANTINE, FileInfo
from amalgam.pipeline.storage.local import LocalStorage, remove_empty_folders
from amalgam.pipeline.storage.packing import may_be_packed
from amalgam.pipeline.storage.store import HEAD, MANIFEST, TIMING, HeadEntry, Record
from amalgam.stages.app.cost import RATES
from amalgam.stages.common.corpus import FETCHED, sources_of
from amalgam.stages.common.deliveries import FOLDERS, delivered_students, files_of_user
from amalgam.stages.common.load import model_reference
from amalgam.stages.common.models.resolve import newer_revision
from amalgam.stages.common.training.checkpoint_files import CHECKPOINT, LOGS, checkpoint_folders, files_of, resume_point
from amalgam.stages.registry import STAGES

OLD_SECONDS = 24 * 3600.0

READ_AT_ONCE = 4096
"""Records."""

OTHER_FOLDERS = ("pins", QUARANTINE, LOGS, paths.GIVEN, "failed-units", "divergence")
"""Folders of the workspace without units."""

PIN_PATH = re.compile(r"pins/[a-z]+-[^/]+\.json")

FAMILY_PATH = re.compile(rf"[a-z-]+/{paths.FINGERPRINT}/family(\.copy)?\.json")

READERS = ("read-corpus/", "generate/")
"""Starts of the folders of results that are read from files of texts, whose digests are inputs."""

SMALL_FILES = (HEAD, "HEAD.copy.json", "digests.json", RATES)


# ---- results


class Artifact(TypedDict):
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
    notes = [
        f"teacher {teacher.name}: the Hub has a newer version, {new[:12]}; revision: {new} takes it"
        for teacher in run.experiment.teachers
        if (new := newer_revision(model_reference(run, teacher.model, teacher.revision)))
    ]
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
        description = stage.describe(manifest)
        return f"{description}{'; ' if description else ''}{complete}/{total} files{rest}"
    if words := resume_point(run.store.root, run.store.folder(stage.name, name))[0]:
        return f"an interrupted training, which {words}"
    if "family.json" not in names:
        return None
    key = run.store.read_json(run.store.folder(stage.name, name) / "family.json")
    if not isinstance(key, dict):
        return "family (family.json cannot be read)"
    units = sum(name.startswith("units/") and name.endswith(".json") for name in names)
    return f"family of {key.get('teacher')}, {counted(units, 'unit')}, {key.get('dtype', 'fp32')}"


# ---- packing


class Packing(TypedDict):
    units: int
    folders: list[str]
    loose: bool


def compact(run: Run, *, write: bool) -> Packing:
    """Counts the small units to pack, and packs them with `write`; `loose`: their files stay for a day."""
    store, loose = run.store, compaction.loose_units(run.store, run.store.backend.list())
    packed = (compaction.compact(store, folder, units) if write else len(units.new) for folder, units in loose.items())
    return {"units": sum(packed), "folders": list(loose), "loose": not run.store.backend.is_remote}


# ---- garbage


class Garbage(TypedDict):
    path: str
    """Inside the workspace, or absolute for a file elsewhere on this machine."""
    bytes: int
    kind: str
    why: str


KINDS = {
    "temporary": "unfinished, over a day old",
    "quarantined": "quarantined, over a day ago",
    "packed": "packed, over a day ago",
    "orphan": "no record names it, over a day old",
    "family": "description of a family without units, over a day old",
    "copy": "local copy of a deleted file, over a day old",
    "checkpoint": "of a training that this experiment does not continue, over a day old",
    "unused": "neither the last builds nor this experiment use it",
}


def find_garbage(run: Run, *, unused: bool, delete: bool = False) -> tuple[list[Garbage], int]:
    """Returns the files that can be deleted, and deletes exactly these with `delete`.

    Only names that amalgam gives to its files count; every file stays for a day. With `unused`, the number is that of
    the unused results that are kept because a file is younger. A command may be at work on these.
    """
    entries = list(run.store.backend.list())
    records = list(records_in(run, entries))
    leftovers = [*_leftovers(run, entries, records), *_local_leftovers(run, entries), *_checkpoints(run)]
    garbage, young = {row["path"]: row for row in leftovers}, 0
    young_folders = _young_folders(entries, records)
    for inside, present in _unused_records(run, entries, records) if unused else ():
        if result_folder(inside) in young_folders:
            young += inside.endswith(MANIFEST)
        else:
            garbage |= {entry.path: _row(entry.path, entry.bytes, "unused") for entry in present}
    if delete:
        _delete(run, garbage.values())
    return list(garbage.values()), young


class YoungQuarantine(TypedDict):
    """The quarantined files that are kept for a day."""

    files: int
    bytes: int
    until: str | None
    """Local time at which the last one can be deleted; None without files."""


def young_quarantine(run: Run) -> YoungQuarantine:
    """Returns the quarantined files that `find_garbage` keeps because they are younger than a day."""
    entries = run.store.backend.list(QUARANTINE)
    young = [entry for entry in entries if _is_quarantined(entry.path.split("/")) and not _is_old(entry.modified)]
    until = max((entry.modified + OLD_SECONDS for entry in young), default=None)
    last = None if until is None else datetime.fromtimestamp(until).astimezone().isoformat(" ", "minutes")
    return {"files": len(young), "bytes": _bytes(young), "until": last}


def _delete(run: Run, garbage: Iterable[Garbage]) -> None:
    """Deletes records before their files, so that an interrupted deletion leaves no record without files."""
    by_place: dict[str, list[str]] = {"loose": [], "stored": [], "local": []}
    for row in garbage:
        place = "local" if Path(row["path"]).is_absolute() else "loose" if row["kind"] == "packed" else "stored"
        by_place[place].append(row["path"])
    run.store.backend.delete(sorted(by_place["stored"], key=lambda path: not path.endswith(".json")))
    run.store.backend.inner.delete(by_place["loose"])
    for path in map(Path, by_place["local"]):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    if not run.store.backend.is_remote:
        remove_empty_folders(run.store.root, [*by_place["stored"], *by_place["loose"]])


def _row(path: str, size: int, kind: str) -> Garbage:
    return Garbage(path=path, bytes=size, kind=kind, why=KINDS[kind])


def _leftovers(run: Run, entries: Sequence[FileInfo], records: Sequence[tuple[str, Record]]) -> Iterator[Garbage]:
    """Yields temporary files of killed processes, quarantine, files of units without a record, and packed ones."""
    folders, roots = {entry.path.rpartition("/")[0] for entry in entries}, _unit_folders()
    indexes = [run.store.backend.index(folder) for folder in sorted(folders) if may_be_packed(folder)]
    packs = {inside: piece.pack for index in indexes for inside, piece in index.pieces.items()}
    named = {file.path for _, record in records for file in record.files} | set(packs.values())
    complete = {path.rpartition("/")[0] for path in named}
    with_records = {result_folder(inside) for inside, _ in records}
    old = {entry.path for entry in entries if _is_old(entry.modified)}
    for entry in entries:
        parts, kind = entry.path.split("/"), ""
        if entry.path in packs and not entry.packed:
            kind = "packed" if packs[entry.path] in old else ""
        elif entry.path not in old or entry.path in named:
            continue
        elif paths.is_unfinished(parts, roots, OTHER_FOLDERS):
            kind = "temporary"
        elif _is_quarantined(parts):
            kind = "quarantined"
        elif paths.is_pack(parts, roots) or (paths.unit_of(parts, roots) and not _is_in_unit(parts, complete)):
            kind = "orphan"
        elif result_folder(entry.path) not in with_records and FAMILY_PATH.fullmatch(entry.path):
            kind = "family"
        if kind:
            yield _row(entry.path, entry.bytes, kind)


def _is_quarantined(parts: Sequence[str]) -> bool:
    return parts[0] == QUARANTINE and len(parts) == 2 and paths.QUARANTINED.fullmatch(parts[1]) is not None


def _is_in_unit(parts: Sequence[str], complete: Collection[str]) -> bool:
    """Returns whether a record names other files of the same folder: then the file is not of amalgam."""
    folder = "/".join(parts[:-1])
    return parts[-2] != "units" and len(parts) > 3 and folder in complete


def _local_leftovers(run: Run, entries: Sequence[FileInfo]) -> Iterator[Garbage]:
    """Yields the temporary entries of deliveries and of local caches, and cached copies of deleted objects."""
    backend, stored = run.store.backend, {entry.path for entry in entries}
    for folder in (run.base / name for name in FOLDERS):
        for path in sorted(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else ():
            sizes = _old_sizes(partial(_below, path)) if paths.TEMPORARY_NAME.fullmatch(path.name) else {}
            if sizes and not files_of_user(path):
                yield _row(str(path), sum(sizes.values()), "temporary")
    has_cache = backend.is_remote or any(entry.packed for entry in entries)
    if not has_cache or backend.unpacked.is_symlink():
        return  # amalgam makes a folder: a link there is someone else's
    cache = LocalStorage(backend.unpacked)
    for entry in cache.list():
        parts = entry.path.split("/")
        if not _is_old(entry.modified) or entry.path in stored:
            continue
        if paths.temporary_part(parts) is not None:
            yield _row(str(cache.root / entry.path), entry.bytes, "temporary")
        elif paths.unit_of(parts, _unit_folders()):
            yield _row(str(cache.root / entry.path), entry.bytes, "copy")
        elif _is_quarantined(parts):
            yield _row(str(cache.root / entry.path), entry.bytes, "quarantined")


def _checkpoints(run: Run) -> Iterator[Garbage]:
    """Yields the checkpoints of trainings that are complete, or not of this experiment; they are on this machine."""
    folders = checkpoint_folders(run.store.root)
    old = {folder: sizes for folder in folders if (sizes := _old_sizes(partial(files_of, folder)))}
    if not old:
        return
    units = [unit for state in plan(STAGES, run) for unit in state.missing]
    continued = {unit.folder / CHECKPOINT for unit in units}
    for path, size in (pair for folder, sizes in old.items() if folder not in continued for pair in sizes.items()):
        yield _row(str(path) if run.store.backend.is_remote else run.store.inside(path), size, "checkpoint")


def _old_sizes(files: Callable[[], Iterable[Path]]) -> dict[Path, int]:
    """Returns the sizes of files that are all old; none if one is new, or disappears: another process is at work."""
    try:
        states = {path: path.lstat() for path in files()}
    except FileNotFoundError:
        return {}
    are_old = all(_is_old(state.st_mtime) for state in states.values())
    return {path: state.st_size for path, state in states.items()} if are_old else {}


def _below(path: Path) -> list[Path]:
    return [path, *path.rglob("*")] if path.is_dir() and not path.is_symlink() else [path]


def _is_old(modified: float) -> bool:
    return time.time() - modified > OLD_SECONDS


def _unit_folders() -> list[str]:
    return [*(stage.name for stage in STAGES), paths.CACHED_TOKENS]


def record_paths(entries: Iterable[FileInfo]) -> Iterator[str]:
    """Yields the paths of pins, manifests and of the records of units whose files exist."""
    insides, roots = [entry.path for entry in entries], _unit_folders()
    units = {f"{unit}.json" for path in insides if (unit := paths.unit_of(path.split("/"), roots))}
    for path in insides:
        folder, _, name = path.rpartition("/")
        is_result = name in {MANIFEST, TIMING} and folder.count("/") == 1 and folder.split("/")[0] in roots
        if path in units or is_result or PIN_PATH.fullmatch(path):
            yield path


def records_in(run: Run, entries: Iterable[FileInfo]) -> Iterator[tuple[str, Record]]:
    """Yields all records of units and results, read in batches."""
    roots = _unit_folders()
    named = [(entry.path, entry.path.split("/")) for entry in entries if entry.path.endswith(".json")]
    insides = [path for path, parts in named if len(parts) > 2 and parts[0] in roots]
    for start in range(0, len(insides), READ_AT_ONCE):
        batch = {run.store.root / inside: inside for inside in insides[start : start + READ_AT_ONCE]}
        for path, record in run.store.records(list(batch), complete=False).items():
            yield batch[path], record


# ---- results that no build uses


def _unused_records(
    run: Run, entries: Sequence[FileInfo], records: Sequence[tuple[str, Record]]
) -> Iterator[tuple[str, list[FileInfo]]]:
    """Yields each record that neither HEAD nor the experiment as it is now uses, with itself and its unused files."""
    kept = _in_use(run, records)
    by_path = {entry.path: entry for entry in entries if entry.path not in kept}
    for inside, record in records:
        if inside not in kept:
            yield inside, [by_path[path] for path in _paths_of(inside, record) if path in by_path]


def _young_folders(entries: Sequence[FileInfo], records: Sequence[tuple[str, Record]]) -> set[str]:
    """Returns the results and families with a file of the last day, and those whose files the former name."""
    young = {result_folder(entry.path) for entry in entries if not _is_old(entry.modified)}
    named = (record.files for inside, record in records if result_folder(inside) in young)
    return young | {result_folder(file.path) for files in named for file in files}


def result_folder(path: str) -> str:
    """Returns the folder of the result or the family that a file belongs to."""
    return "/".join(path.split("/")[:2])


def _in_use(run: Run, records: Sequence[tuple[str, Record]]) -> set[str]:
    """Returns the paths of HEAD's results, of reports on delivered students, and of all units of this experiment."""
    results, folders = {**dict(_reports_of_delivered(run, records)), **dict(_head_results(run, records))}, set[str]()
    for state in plan(STAGES, run):
        stage = next(stage for stage in STAGES if stage.name == state.stage)
        if state.state == "current":
            results[f"{stage.name}/{state.fingerprint}"] = run.result(stage.name)
        elif state.fingerprint is not None:
            units = stage.units(run, run.store.folder(stage.name, state.fingerprint))
            folders |= {run.store.inside(unit.folder) for unit in units}
    kept = {f"{folder}/{name}" for folder in results for name in (MANIFEST, TIMING)}
    kept |= {file.path for manifest in results.values() for file in manifest.files}
    corpora = (manifest for folder, manifest in results.items() if folder.startswith("read-corpus/"))
    buckets = {file.sha256 for manifest in corpora for file in manifest.files}
    # A manifest may share files with a result in use: it is no unit of it.
    committed = [(inside, record) for inside, record in records if not inside.endswith((MANIFEST, TIMING))]
    folders |= {
        inside.rpartition("/")[0] for inside, record in committed if any(file.path in kept for file in record.files)
    }
    for inside, record in committed:
        has_tokens = inside.startswith(f"{paths.CACHED_TOKENS}/") and record.facts.get("bucket") in buckets
        if has_tokens or inside.rpartition("/")[0] in folders:
            kept.update(_paths_of(inside, record))
    return kept.union(*(_paths_of(*copy) for copy in _remote_copies(run, results, committed)))


def _paths_of(inside: str, record: Record) -> list[str]:
    """Returns the paths of a record and of its files."""
    return [inside, *(file.path for file in record.files)]


def _remote_copies(
    run: Run, results: Mapping[str, Record], records: Sequence[tuple[str, Record]]
) -> Iterator[tuple[str, Record]]:
    """Yields the copies of remote files that these results were read from, or that the experiment names.

    Later runs read them, also offline, and after the address has other content.
    """
    named = {source for sources in sources_of(run.experiment).values() for source in sources}
    named.update((run.experiment.generate and run.experiment.generate.corpus) or ())
    inputs = [manifest.identity.get("inputs", {}) for folder, manifest in results.items() if folder.startswith(READERS)]
    listed = [values for each in inputs for values in each.values() if isinstance(values, list)]
    digests = {str(digest).partition(" ")[0] for values in listed for digest in values}
    for inside, record in records:
        is_read = record.facts.get("source") in named or any(file.sha256 in digests for file in record.files)
        if result_folder(inside) == f"read-corpus/{FETCHED}" and is_read:
            yield inside, record


def _reports_of_delivered(run: Run, records: Sequence[tuple[str, Record]]) -> Iterator[tuple[str, Record]]:
    """Yields the folder and the manifest of each report on a student in students/: later reports compare with it."""
    delivered = delivered_students(run.base)
    for inside, record in records:
        folder, _, name = inside.rpartition("/")
        upstream = record.identity.get("upstream") if folder.startswith("report/") and name == MANIFEST else None
        if isinstance(upstream, dict) and str(upstream.get("train-student")) in delivered:
            yield folder, record


def _head_results(run: Run, records: Sequence[tuple[str, Record]]) -> Iterator[tuple[str, Record]]:
    """Yields the folder and the manifest of each stage's last result; raises AmalgamError if one is not known."""
    run_again, collect = (f"`amalgam {command}{run.options}`" for command in ("run", "gc"))
    fix = f"run {run_again}, which writes it again; {collect} without --unused deletes leftovers only"
    path = run.store.root / HEAD
    if run.store.read_json(path) is None and any(inside.endswith(MANIFEST) for inside, _ in records):
        what = f"{HEAD} is missing or damaged, so the results in use are not known"
        raise AmalgamError(what, where=run.store.where(path), fix=fix)
    for stage, entry in run.store.head().items():
        manifest = run.store.manifest(stage, entry["fingerprint"])
        if manifest is None:
            what = f"{HEAD} names a result of {stage} that is absent or damaged, so the results in use are not known"
            raise AmalgamError(what, where=run.store.where(run.store.folder(stage, entry["fingerprint"])), fix=fix)
        yield f"{stage}/{entry['fingerprint']}", manifest
