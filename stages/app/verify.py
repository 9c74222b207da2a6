"""Verifies every file that amalgam wrote, names the cost of each damage, and mends it (`amalgam verify --repair`).

Small files are restored from their copies at once. Damaged results go to quarantine, and the next run computes them
again; delivered files are copied from the workspace with `repair`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TypedDict

from amalgam.data import parquet
from amalgam.data.lazy import np, pq
from amalgam.pipeline.console import duration
from amalgam.pipeline.errors import READ_ONLY, fix_of, number_of, reason_of
from amalgam.pipeline.execution.stage import Run
from amalgam.pipeline.input_files import file_digest
from amalgam.pipeline.storage.backend import QUARANTINE, FileInfo
from amalgam.pipeline.storage.packing import may_be_packed
from amalgam.pipeline.storage.paths import (
    CACHED_TOKENS,
    GIVEN,
    GIVEN_NAME,
    is_below,
    is_regular,
    small_content,
    unit_of,
)
from amalgam.pipeline.storage.small_files import COPY, verified
from amalgam.pipeline.storage.store import MANIFEST, TIMING, Record, Store, StoredFile
from amalgam.stages.app.maintenance import FAMILY_PATH, PIN_PATH, SMALL_FILES, record_paths, records_in, result_folder
from amalgam.stages.common import deliveries
from amalgam.stages.common.corpus import FETCHED
from amalgam.stages.common.deliveries import REPORTS, STUDENTS, TEACHERS, DeliveryServices, Mark
from amalgam.stages.common.load import delivery_services
from amalgam.stages.common.training.checkpoint_files import LOGS, checkpoint_folders, damaged_files, damaged_logs
from amalgam.stages.registry import STAGE_NAMED

FROM_COPY = "restored from its copy"
FROM_DELIVERY = "copied from the delivered folder"
FROM_STORE = "copied from the workspace"
FROM_PACKS = "rebuilt from its packs"
NOT_NEEDED = "in quarantine; not needed, because its result is complete"
NO_MATCH = "its content does not match its digest"


class Damage(TypedDict):
    path: str
    """Inside the workspace; of a delivered file relative to the experiment's folder."""
    fault: str
    repair: str
    """How the file is mended, with the cost."""
    mended: bool
    command: str
    """The command that mends it; empty if the file is mended, or cannot be."""


class Verification(TypedDict):
    files: int
    bytes: int
    damaged: list[Damage]
    quarantine: str


RUN, REPAIR = "amalgam run", "amalgam verify --repair"

NOTE_PATH = re.compile(rf"failed-units/({'|'.join(STAGE_NAMED)})-.+\.json|divergence/.+-[0-9a-f]{{8}}\.json")
"""Notes for a person: units that were left out, and units that were computed twice and differ."""
NO_RESULT = "in quarantine; no result depends on it"


def verify(run: Run, *, repair: bool = False) -> Verification:
    """Verifies stored, delivered and small files, and mends them; a damaged result goes to quarantine."""
    entries = list(run.store.backend.list())
    damages = [
        *_links(run.base, run.store),
        *_small_files(run.store, [entry.path for entry in entries]),
        *_indexes(run.store, entries),
        *_checkpoints(run.store),
        *_logs(run.store),
        *_given_texts(run.store),
    ]
    results, delivered = _Results(run, entries), _Deliveries(run, repair=repair)
    damages += results.damages(delivered, repair=repair)
    damages += delivered.damages()
    files = [*results.files.values(), *delivered.files]
    size = sum(file.bytes for file in files)
    return {
        "files": len(files),
        "bytes": size,
        "damaged": damages,
        "quarantine": run.store.where(run.store.root / QUARANTINE),
    }


def _mended(path: str, fault: str, repair: str) -> Damage:
    return Damage(path=path, fault=fault, repair=repair, mended=True, command="")


def _unmended(path: str, fault: str, repair: str, command: str = "") -> Damage:
    return Damage(path=path, fault=fault, repair=repair, mended=False, command=command)


def _mend(damages: Sequence[Damage], write: Callable[[], object]) -> list[Damage]:
    """Mends damages, or moves the files away; returns them unmended, with the reason, where that is not allowed."""
    try:
        if damages:
            write()
    except OSError as error:
        if number_of(error) not in READ_ONLY:
            raise
        repair = f"it stays there ({reason_of(error)}): {fix_of(error)}, then verify again"
        return [_unmended(damage["path"], damage["fault"], repair) for damage in damages]
    return [*damages]


def _links(base: Path, store: Store) -> Iterator[Damage]:
    fault, repair = "it is a link, behind which no file is checked or written", "move the link away and run again"
    folders = [] if store.backend.is_remote else [*STAGE_NAMED, CACHED_TOKENS, LOGS]
    for path in (*(base / name for name in (STUDENTS, TEACHERS, REPORTS)), *(store.root / name for name in folders)):
        if path.is_symlink():
            yield _unmended(path.relative_to(base if path.parent == base else store.root).as_posix(), fault, repair)


# ---- small files


def _small_files(store: Store, paths: Iterable[str]) -> Iterator[Damage]:
    """Restores damaged files from their copies, and damaged copies from their files."""
    patterns = (FAMILY_PATH, PIN_PATH, NOTE_PATH)
    small = [path for path in paths if path in SMALL_FILES or any(pattern.fullmatch(path) for pattern in patterns)]
    for path, text in store.backend.read(small).items():
        if verified(text) is None:
            original = path.removesuffix(COPY) + ".json" if path.endswith(COPY) else path
            content = store.read_json(store.root / original)
            if content is None:
                again = _unmended(path, NO_MATCH, "written again", RUN)
                damage = _mended(path, NO_MATCH, NO_RESULT) if NOTE_PATH.fullmatch(path) else again
                yield from _mend([damage], partial(store.quarantine, store.root / path))
            else:
                write = partial(store.replace, store.root / original, content, copy=True)
                yield from _mend([_mended(path, NO_MATCH, FROM_COPY)], write)


def _indexes(store: Store, entries: Iterable[FileInfo]) -> Iterator[Damage]:
    """Restores the indexes of packed units."""
    folders = {entry.path.rpartition("/packs/")[0] for entry in entries if "/packs/" in entry.path}
    for folder in sorted(filter(may_be_packed, folders)):
        damaged = store.backend.damaged_indexes(folder)
        repairs = {path: FROM_COPY if is_copied else FROM_PACKS for path, (_, is_copied) in damaged.items()}
        contents = {path: text for path, (text, _) in damaged.items()}
        write = partial(store.backend.put_indexes, folder, contents)
        yield from _mend([_mended(path, NO_MATCH, repair) for path, repair in repairs.items()], write)


def _checkpoints(store: Store) -> Iterator[Damage]:
    for folder in checkpoint_folders(store.root):
        for path, fault in damaged_files(folder).items():
            repair = "a training resumes from the checkpoint before, or begins again"
            damage = _unmended(path.relative_to(store.root).as_posix(), fault, repair, RUN)
            yield from _mend([damage], partial(deliveries.set_aside, store, path))


def _logs(store: Store) -> Iterator[Damage]:
    for path in damaged_logs(store.root):
        damage = _mended(path.relative_to(store.root).as_posix(), NO_MATCH, NO_RESULT)
        yield from _mend([damage], partial(deliveries.set_aside, store, path))


def _given_texts(store: Store) -> Iterator[Damage]:
    """Texts that Python passed as an object are in files with the names of their digests."""
    folder = store.root / GIVEN
    for path in sorted(folder.glob("*.parquet")) if is_below(GIVEN, store.root) else ():
        if is_regular(path) and len(path.stem) == GIVEN_NAME and file_digest(path)[:GIVEN_NAME] != path.stem:
            damage = _unmended(f"{GIVEN}/{path.name}", NO_MATCH, "pass the texts from Python again")
            yield from _mend([damage], partial(deliveries.set_aside, store, path))


# ---- results


@dataclass
class _Results:
    run: Run
    entries: Sequence[FileInfo]

    @cached_property
    def records(self) -> dict[str, Record]:
        return dict(records_in(self.run, self.entries))

    @cached_property
    def files(self) -> dict[str, StoredFile]:
        return {file.path: file for record in self.records.values() for file in record.files}

    def damages(self, delivered: _Deliveries, *, repair: bool) -> list[Damage]:
        """Quarantines damaged results; of a damaged file a delivered folder may have a copy."""
        store, by_path = self.run.store, self._irregular()
        verified_paths = self.records.keys() | self.files.keys()
        unread = [path for path in record_paths(self.entries) if path not in verified_paths]
        paths = [path for path in map(store.root.joinpath, unread) if store.record(path) is None]
        by_path |= {store.inside(path): "the record cannot be read" for path in paths if store.has(path)}
        heads = {stage: entry for stage, entry in store.head().items() if not entry.get("rebuilding")}
        manifests = (store.folder(stage, entry["fingerprint"]) / MANIFEST for stage, entry in heads.items())
        by_path |= {store.inside(path): "missing" for path in manifests if not store.has(path)}
        by_path |= {path: fault for path, file in self.files.items() if (fault := store.check_file(file, refetch=True))}
        copies = {path: copy for path in by_path if path in self.files and (copy := delivered.copy(self.files[path]))}
        damages = [self._damage(path, fault, copies, repair=repair) for path, fault in by_path.items()]
        lost = {path: fault for path, fault in by_path.items() if path not in copies}

        def mend() -> None:
            store.quarantine(*map(store.root.joinpath, by_path))
            for path, copy in copies.items() if repair else ():
                deliveries.restore_original(store, self.files[path], copy)
            store.quarantine(*map(store.root.joinpath, self._never_rebuilt(lost)))

        return _mend(damages, mend)

    def _damage(self, path: str, fault: str, copies: Mapping[str, Path], *, repair: bool) -> Damage:
        if path in copies:
            return _mended(path, fault, FROM_DELIVERY) if repair else _unmended(path, fault, FROM_DELIVERY, REPAIR)
        stage = STAGE_NAMED.get(path.partition("/")[0])
        if stage is not None and path in self._records_in_results:
            lost = stage.on_lost_record
            return _unmended(path, fault, *lost) if lost else _mended(path, fault, NOT_NEEDED)
        return _unmended(path, fault, self._repair(path), RUN)

    @cached_property
    def _records_in_results(self) -> set[str]:
        """Returns the records of the units whose files a manifest names: the next run reuses these files."""
        manifests = (record for inside, record in self.records.items() if inside.endswith(MANIFEST))
        return {path for record in manifests for file in record.files if (path := _record_of(file.path))}

    def _irregular(self) -> dict[str, str]:
        """Returns the records of units that are links, folders, pipes or devices, which no listing has.

        A record that another process wrote after the listing is a regular file.
        """
        listed = {entry.path for entry in self.entries}
        units = {record for path in listed if (record := _record_of(path))}
        root = self.run.store.root
        unlisted = [path for path in sorted(units - listed) if os.path.lexists(root / path)]
        return {path: "no regular file" for path in unlisted if not is_regular(root / path)}

    def _never_rebuilt(self, damaged: Mapping[str, str]) -> list[str]:
        """Returns the records of damaged files that no run computes again: those that no last result names."""
        store = self.run.store
        heads = {f"{stage}/{entry['fingerprint']}/{MANIFEST}" for stage, entry in store.head().items()}
        lost = damaged.keys() - {file.path for path in heads & self.records.keys() for file in self.records[path].files}
        return [path for path, record in self.records.items() if any(file.path in lost for file in record.files)]

    @cached_property
    def _records_of_files(self) -> dict[str, Record]:
        units = (record for path, record in self.records.items() if not path.endswith(MANIFEST))
        return {file.path: record for record in units for file in record.files}

    def _repair(self, path: str) -> str:
        """Returns how a result is computed again, with the seconds of the last build."""
        room, _, name = path.split("/", 2) if path.count("/") > 1 else (path.partition("/")[0], "", path)
        stage = STAGE_NAMED.get(room)
        if stage is None:
            return "computed when it is needed" if room == CACHED_TOKENS else "decided again"
        if name in {MANIFEST, TIMING}:
            return "written again; no unit is computed"
        store, family = self.run.store, result_folder(path)
        key = store.read_json(store.root / family / "family.json") or {}
        seconds = _seconds(store, stage.name)
        again = stage.recomputed(self._records_of_files.get(path), str(key.get("teacher", "")))
        return f"{again}, about {duration(seconds)}" if seconds else again


def _record_of(path: str) -> str | None:
    """Returns the path of the record of a unit's file; None for other files."""
    unit = unit_of(path.split("/"), STAGE_NAMED)
    return f"{unit}.json" if unit else None


def _seconds(store: Store, stage: str) -> float:
    """Returns the seconds of one unit in the last build of the stage; 0 if they are not known."""
    last = store.last(stage)
    timing = store.record(store.folder(stage, last) / TIMING) if last else None
    facts = timing.facts if timing else {}
    units = int(facts.get("units", 0)) - int(facts.get("found", 0))
    return float(facts.get("seconds", 0.0)) / units if units > 0 else 0.0


# ---- deliveries


@dataclass
class _Deliveries:
    run: Run
    repair: bool
    files: list[StoredFile] = field(default_factory=list)

    @cached_property
    def _services(self) -> DeliveryServices:
        return replace(delivery_services(self.run), note=lambda _: None)

    def damages(self) -> Iterator[Damage]:
        for folder, target in deliveries.marked_folders(self.run.base):
            mark = deliveries.read_mark(folder)
            yield from self._marks(folder, mark)
            if mark is not None:
                self.files += mark.files.values()
                yield from self._files(target, mark)

    def copy(self, file: StoredFile) -> Path | None:
        """Returns an intact delivered copy of a file of the workspace."""
        marks = ((target, deliveries.read_mark(folder)) for folder, target in deliveries.marked_folders(self.run.base))
        for target, mark in marks:
            for name, copy in mark.files.items() if mark else ():
                if copy == file and not deliveries.faults(target, {name: copy}):
                    return target / name
        return None

    def _marks(self, folder: Path, mark: Mark | None) -> Iterator[Damage]:
        places = {self._shown(place): place for place in map(folder.joinpath, deliveries.unreadable_marks(folder))}
        if mark is not None:
            faults = {path: NO_MATCH if place.exists() else "missing" for path, place in places.items()}
            damages = [_mended(path, fault, FROM_COPY) for path, fault in faults.items()]
            yield from _mend(damages, partial(deliveries.write_mark, folder, mark))
            return
        for path in places:
            fault = "it cannot be read, and neither can its copy"
            if deliveries.is_copy_of(folder, self._originals(folder)):
                yield _unmended(path, fault, "written again: the files are those of the workspace", RUN)
            else:
                repair = f"move {self._shown(folder)} away; the next run delivers it again"
                yield _unmended(path, fault, repair)

    def _originals(self, folder: Path) -> dict[str, StoredFile]:
        """Returns the files that the next run delivers to the folder, by their names in it."""
        stage = {STUDENTS: "train-student", TEACHERS: "train-teachers"}.get(folder.parent.name, "")
        last = self.run.store.last(stage)
        manifest = self.run.store.manifest(stage, last) if last else None
        if manifest is None or (stage == "train-student" and folder.name != self.run.experiment.student.name):
            return {}
        unit = re.compile(rf"{stage}/[^/]+/({re.escape(folder.name)}|student)-[0-9a-f]{{8}}/.+")
        return deliveries.named(file for file in manifest.files if unit.fullmatch(file.path))

    def _files(self, target: Path, mark: Mark) -> Iterator[Damage]:
        damaged, is_page = deliveries.faults(target, mark.files), target == self.run.base / REPORTS
        if is_page and len(damaged) == len(mark.files) and set(damaged.values()) == {"missing"}:
            return  # a user has deleted the page
        for name, fault in damaged.items():
            path, file = self._shown(target / name), mark.files[name]
            if file.path and self.run.store.has(self.run.store.path(file)) and not self.run.store.check_file(file):
                if self.repair:
                    write = partial(deliveries.mend, self._services, target, {name: file}, {name: fault})
                    yield from _mend([_mended(path, fault, FROM_STORE)], write)
                else:
                    yield _unmended(path, fault, FROM_STORE, REPAIR)
            elif is_page:
                is_own = Path(name).stem == self.run.experiment.student.name
                again = f"written again by `{RUN}{self.run.options}`"
                other = f"written again by a run of that student; or delete {self._shown(target / Path(name).stem)}.*"
                yield _unmended(path, fault, again if is_own else other, RUN if is_own else "")
            elif mark.kind == deliveries.EXPORT:
                yield _unmended(path, fault, f"exported again by `{self._export_command(target, mark)}`")
            else:
                yield _unmended(path, fault, "the workspace no longer has it: train it again, or restore a backup")

    def _export_command(self, folder: Path, mark: Mark) -> str:
        """Returns the command that writes the export in this folder again."""
        base, own, options = self.run.base, self.run.experiment.student.name, str(mark.facts.get("options", "--onnx"))
        is_own = deliveries.delivered_student(base, own) == mark.fingerprint
        student = own if is_own else deliveries.delivered_students(base).get(mark.fingerprint, own)
        arguments = [*options.split(), "--force", *(["--student", f"{STUDENTS}/{student}"] if student != own else [])]
        default = "-".join([student, *(option.removeprefix("--") for option in options.split())])
        arguments += ["--out", self._shown(folder)] if folder.name != default else []
        return f"amalgam export {shlex.join(arguments)}{self.run.file_option}"

    def _shown(self, path: Path) -> str:
        return path.relative_to(self.run.base).as_posix()


# ---- contents that no digest contradicts


def unreadable_files(store: Store) -> list[str]:
    """Returns the files that this process may have read, and that have not the format of their suffix and stage."""
    unreadable = []
    for path in sorted(store.verified_files):
        local = store.backend.local_path(path)
        kind = READERS.get(Path(path).suffix)
        try:
            if kind is not None and local is not None:
                kind(local)
                stage, result, _ = path.split("/", 2)
                tables = TABLES.get(stage, ()) if local.suffix == ".parquet" and result != FETCHED else ()
                columns = set(pq.read_schema(local).names) if tables else set()
                if tables and not any({column.name for column in table} <= columns for table in tables):
                    unreadable.append(path)
        except Exception:  # noqa: BLE001 - each library has exceptions of its own
            unreadable.append(path)
    return unreadable


TABLES: Mapping[str, Sequence[Sequence[parquet.Column]]] = {
    "read-corpus": (parquet.CORPUS, parquet.SKIPPED),
    "generate": (parquet.WRITTEN,),
    "cache-teachers": (parquet.CACHE_TEXTS, parquet.STOPS, parquet.STOP_REGRESSIONS),
    "cache-features": (parquet.FEATURES, parquet.STATES),
    CACHED_TOKENS: (parquet.TOKENS,),
    "weigh-teachers": (parquet.WEIGHTS, parquet.LABELLED_WEIGHTS),
    "build-targets": (parquet.TARGETS,),
    "report": (parquet.SIMILARITIES,),
}
"""The tables of each stage's files."""


def _read_rows(path: Path) -> None:
    with pq.ParquetFile(path) as file:  # its footer may be readable, and its pages not
        for _ in file.iter_batches():
            pass


def _read_header(path: Path) -> None:
    from safetensors import safe_open

    with safe_open(path, framework="np"):
        pass


READERS: Mapping[str, Callable[[Path], object]] = {
    ".parquet": _read_rows,
    ".json": lambda path: json.loads(small_content(path) or b""),
    ".npy": lambda path: np.load(path, mmap_mode="r"),
    ".safetensors": _read_header,
}
"""Reads the structure of a file of each kind; raises an exception if it is another kind."""
