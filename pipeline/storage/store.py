"""Artifacts: written aside, verified, published whole; read back checked.

A *unit* is published as content-addressed files and then one record (JSON) that names them with their digests: the
record's presence means that the unit is complete. A stage's result is complete when its MANIFEST.json is there.
No lock is needed: the first record wins, and the same unit computed twice is harmless.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from amalgam.pipeline.errors import DamagedError
from amalgam.pipeline.storage.backend import StorageBackend
from amalgam.pipeline.storage.fingerprint import canonical, file_digest, fingerprint
from amalgam.pipeline.storage.local import LocalStorage, temporary_path
from amalgam.pipeline.storage.object_store import ObjectStorage, is_object_store
from amalgam.pipeline.storage.packing import PackedStorage

MANIFEST = "MANIFEST.json"


@dataclass(frozen=True)
class StoredFile:
    """A file by its path relative to the workspace, and what it must contain."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Record:
    """What was committed: a unit's files, or, as MANIFEST.json, a whole stage's."""

    name: str
    files: tuple[StoredFile, ...]
    facts: dict[str, Any] = field(default_factory=dict)
    made: dict[str, Any] = field(default_factory=dict)
    identity: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, text: str, *, vouched: bool = False) -> Record:
        """`vouched`: it stands in what holds a digest of its own."""
        raw = json.loads(text)
        said = raw.pop("sha256") if isinstance(raw, dict) else None
        if said is None or not (vouched or said == _digest_of(raw)):
            raise ValueError("a record that is not what was written")
        files = tuple(StoredFile(str(f["path"]), int(f["bytes"]), str(f["sha256"])) for f in raw["files"])
        return cls(str(raw["name"]), files, dict(raw["facts"]), dict(raw["made"]), dict(raw["identity"]))


class UnitWriter:
    """A temporary folder to write a unit's files into, and what is to be remembered of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.facts: dict[str, Any] = {}
        self.made: dict[str, Any] = {}
        self.files: tuple[StoredFile, ...] = ()
        """What was published, once it is."""
        self.rival: Record | None = None
        """The record that stands instead of ours, when another writer was first and wrote other bytes."""


class Store:
    """Records, and the files that they name, in a place of any kind.

    A file's address is its path under `root`, also where the files themselves lie elsewhere.
    """

    def __init__(self, root: Path, place: StorageBackend | None = None) -> None:
        self.backend = PackedStorage(place or LocalStorage(root))
        self.root = self.backend.root
        self._verified: set[str] = set()

    # ---- where things are

    def folder(self, stage: str, name: str) -> Path:
        return self.root / stage / name

    def folders(self, stage: str) -> list[Path]:
        """Of every result of a stage that was ever begun."""
        return [self.folder(stage, name) for name in self.backend.names(stage)]

    def where(self, path: Path) -> str:
        """As a person finds it."""
        return f"{self.backend.address}/{self.inside(path)}" if self.backend.far else str(path)

    def inside(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def path(self, file: StoredFile) -> Path:
        return self.root / file.path

    def has(self, path: Path) -> bool:
        return bool(self.backend.sizes([self.inside(path)]))

    # ---- reading

    def manifest(self, stage: str, name: str) -> Record | None:
        return self.record(self.folder(stage, name) / MANIFEST)

    def record(self, path: Path) -> Record | None:
        """The record at `path`; None when absent or unreadable, which both mean: not committed."""
        return _record(self.backend.read(self.inside(path)))

    def records(self, paths: Sequence[Path], *, whole: bool = True) -> dict[Path, Record]:
        """Of many units at once, those that are committed and, unless said otherwise, whole."""
        insides = {self.inside(path): path for path in paths}
        return {insides[inside]: record for inside, record in self._records(list(insides), whole=whole).items()}

    def units(self, folder: Path, names: Iterable[str] | None = None) -> dict[str, Record]:
        """By name, those of a folder that are committed and whole; without names all that are there."""
        inside = self.inside(folder)
        if names is None:
            names = [name.removesuffix(".json") for name in self.backend.names(inside) if name.endswith(".json")]
        known = {f"{inside}/{name}.json": name for name in names}
        return {known[one]: record for one, record in self._records(list(known)).items()}

    def _records(self, insides: Sequence[str], *, whole: bool = True) -> dict[str, Record]:
        texts, vouched = self.backend.texts(insides), self.backend.trusts
        found = {inside: _record(text, vouched=vouched(inside)) for inside, text in texts.items()}
        there = {inside: record for inside, record in found.items() if record is not None}
        if whole:
            sizes = self.backend.sizes([file.path for record in there.values() for file in record.files])
            there = {inside: record for inside, record in there.items() if _is_whole(record, sizes)}
        return there

    def units_in(self, folder: Path) -> list[Path]:
        """Where records of units stand in a folder, whole or not."""
        return [folder / name for name in self.backend.names(self.inside(folder)) if name.endswith(".json")]

    def missing_files(self, record: Record) -> list[tuple[StoredFile, str]]:
        """The record's files that are not there ("missing") or have another size ("damaged ..."). Cheap: no digests."""
        sizes = self.backend.sizes([file.path for file in record.files])
        found = []
        for file in record.files:
            size = sizes.get(file.path)
            if size is None:
                found.append((file, "missing"))
            elif size != file.bytes:
                found.append((file, f"damaged (size {size}, expected {file.bytes})"))
        return found

    def verified_path(self, file: StoredFile) -> Path:
        """Where the file can be read, its digest verified before its first use by this process."""
        if file.path not in self._verified:
            wrong = self.check_file(file)
            if wrong:
                self.backend.quarantine([file.path])
                where = self.where(self.path(file))
                raise DamagedError(f"{file.path} is damaged ({wrong})", path=file.path, where=where)
            self._verified.add(file.path)
        return self.backend.local_path(file.path) or self.path(file)

    def verified_paths(self, files: Iterable[StoredFile]) -> list[Path]:
        """As `checked`, fetched together."""
        named = list(files)
        self.backend.fetch([file.path for file in named if file.path not in self._verified])
        return [self.verified_path(file) for file in named]

    def verified_folder(self, files: Iterable[StoredFile]) -> Path:
        """The folder that the files share, every one of them checked."""
        return self.verified_paths(files)[0].parent

    def written_folder(self, files: Iterable[StoredFile]) -> Path:
        """The folder that files share which this process has just written: no digest is verified."""
        return [self.backend.local_path(file.path) or self.path(file) for file in files][0].parent  # noqa: RUF015 - all of them

    def check_file(self, file: StoredFile, *, renewed: bool = False) -> str | None:
        """What is wrong with a file. Of a copy that is damaged another is fetched; `renewed`: in any case."""
        if renewed:
            self.backend.refetch(file.path)
        wrong = self._fault(file)
        return self._fault(file) if wrong and not renewed and self.backend.refetch(file.path) else wrong

    def _fault(self, file: StoredFile) -> str | None:
        path = self.backend.local_path(file.path)
        if path is None:
            return "missing"
        try:
            size = path.stat().st_size
            if size != file.bytes:
                return f"size {size}, expected {file.bytes}"
            return None if file_digest(path) == file.sha256 else "its content is not what was written"
        except (FileNotFoundError, NotADirectoryError):  # another error is the mount's: a whole file is not set aside
            return "missing"

    def quarantine(self, *paths: Path) -> None:
        """Moved, never deleted: a person may want to see what happened."""
        self.backend.quarantine([self.inside(path) for path in paths])

    # ---- writing

    @contextlib.contextmanager
    def draft(self, folder: Path, name: str, suffix: str = "") -> Iterator[UnitWriter]:
        """Write a unit's files into the draft's folder; leaving the block without an exception publishes them."""
        temporary = temporary_path(folder)
        temporary.mkdir(parents=True)
        try:
            draft = UnitWriter(temporary)
            yield draft
            draft.files = self._publish_files(draft.folder, folder, name, suffix)
            standing = self.commit(folder / f"{name}.json", Record(name, draft.files, draft.facts, draft.made))
            draft.rival = standing if standing.files != draft.files else None
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _publish_files(self, temporary: Path, folder: Path, name: str, suffix: str) -> tuple[StoredFile, ...]:
        """A unit of one file becomes NAME-DIGEST.suffix; one of several becomes the folder NAME-DIGEST."""
        paths = sorted(path for path in temporary.rglob("*") if path.is_file())
        digests = {path: _synced_digest(path) for path in paths}
        mark = fingerprint([[str(p.relative_to(temporary)), d] for p, d in digests.items()])[:8]
        single = len(paths) == 1 and bool(suffix)
        target = self.inside(folder / (f"{name}-{mark}{suffix}" if single else f"{name}-{mark}"))
        places = {p: target if single else f"{target}/{p.relative_to(temporary).as_posix()}" for p in paths}
        files = tuple(StoredFile(places[p], p.stat().st_size, digests[p]) for p in paths)
        self.backend.publish(places, self.inside(folder))
        return files

    def commit(self, path: Path, record: Record) -> Record:
        """Publish a record if none is there; the first complete one wins and is returned."""
        inside, text = self.inside(path), canonical_record(record)
        if self.backend.create(inside, text):
            return record
        standing = self.record(path)
        if standing is not None and not self.missing_files(standing):
            return standing
        self.quarantine(path)  # garbage, or its files are gone: it no longer says the truth
        return record if self.backend.create(inside, text) else (self.record(path) or record)

    def replace(self, path: Path, value: Mapping[str, Any]) -> None:
        """The few files that change: HEAD.json."""
        self.backend.replace(self.inside(path), json.dumps(value, indent=2, ensure_ascii=False) + "\n")

    def read_json(self, path: Path) -> Any:
        """What `replace` wrote; None where it cannot be read."""
        try:
            return json.loads(self.backend.read(self.inside(path)) or b"null")
        except (ValueError, RecursionError):
            return None

    # ---- what the workspace remembers

    def head(self) -> dict[str, dict[str, Any]]:
        raw = self.read_json(self.root / "HEAD.json")
        return {stage: entry for stage, entry in raw.items() if _is_entry(entry)} if isinstance(raw, dict) else {}

    def move_head(self, stage: str, name: str, overrides: Mapping[str, Any]) -> None:
        head = self.head()
        entry = {"fingerprint": name, "overrides": dict(overrides)}
        if head.get(stage) != entry:
            self.replace(self.root / "HEAD.json", {**head, stage: entry})

    def pinned(self, kind: str, name: str) -> str | None:
        """A pin: a decision taken once and kept (a Hub commit, the dtype that `auto` meant)."""
        record = self.record(self._pin(kind, name))
        return None if record is None else str(record.facts["value"])

    def pin(self, kind: str, name: str, value: str, **said: str) -> str:
        path = self._pin(kind, name)
        self.commit(path, Record(f"{kind} {name}", (), {"value": value, **said}))
        return self.pinned(kind, name) or value

    def _pin(self, kind: str, name: str) -> Path:
        return self.root / "pins" / f"{kind}-{fingerprint(name)}.json"


def _is_whole(record: Record, sizes: Mapping[str, int]) -> bool:
    return all(sizes.get(file.path) == file.bytes for file in record.files)


def _record(text: bytes | None, *, vouched: bool = False) -> Record | None:
    try:
        return None if text is None else Record.from_json(text.decode("utf-8"), vouched=vouched)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def open_store(workspace: str, base: Path) -> Store:
    """As the experiment file names it: a folder beside it, or an object store."""
    if is_object_store(workspace):
        place = ObjectStorage(workspace)
        return Store(place.root, place)
    return Store((base / workspace).absolute())


def _is_entry(entry: Any) -> bool:
    """Whether an entry of HEAD says what it must: a hand or a disk may have changed it."""
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("fingerprint"), str)
        and isinstance(entry.get("overrides"), dict)
    )


def canonical_record(record: Record) -> str:
    """JSON that holds its own digest: a record too must be what was written."""
    raw = json.loads(canonical(asdict(record)))
    return json.dumps({**raw, "sha256": _digest_of(raw)}, indent=1, ensure_ascii=False) + "\n"


def _digest_of(raw: Any) -> str:
    return hashlib.sha256(canonical(raw).encode()).hexdigest()


def _synced_digest(path: Path) -> str:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    return file_digest(path)
