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
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from amalgam.pipeline.errors import DamagedError
from amalgam.pipeline.fingerprint import canonical, file_digest, fingerprint

MANIFEST = "MANIFEST.json"
TEMPORARY = ".tmp-"


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
    def from_json(cls, text: str) -> Record:
        raw = json.loads(text)
        if not isinstance(raw, dict) or raw.pop("sha256") != _digest_of(raw):
            raise ValueError("a record that is not what was written")
        files = tuple(StoredFile(str(f["path"]), int(f["bytes"]), str(f["sha256"])) for f in raw["files"])
        return cls(str(raw["name"]), files, dict(raw["facts"]), dict(raw["made"]), dict(raw["identity"]))


class Draft:
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
    def __init__(self, root: Path) -> None:
        self.root = root
        self._verified: set[str] = set()

    # ---- where things are

    def folder(self, stage: str, name: str) -> Path:
        return self.root / stage / name

    def manifest(self, stage: str, name: str) -> Record | None:
        return self.record(self.folder(stage, name) / MANIFEST)

    def record(self, path: Path) -> Record | None:
        """The record at `path`; None when absent or unreadable, which both mean: not committed."""
        try:
            return Record.from_json(path.read_text("utf-8"))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def path(self, file: StoredFile) -> Path:
        return self.root / file.path

    # ---- reading

    def absent(self, record: Record) -> list[tuple[StoredFile, str]]:
        """The record's files that are not there ("missing") or have another size ("damaged ..."). Cheap: no digests."""
        found = []
        for file in record.files:
            try:
                size = self.path(file).stat().st_size
            except OSError:
                found.append((file, "missing"))
                continue
            if size != file.bytes:
                found.append((file, f"damaged (size {size}, expected {file.bytes})"))
        return found

    def checked(self, file: StoredFile) -> Path:
        """The file's path, its digest verified before its first use by this process."""
        path = self.path(file)
        if file.path not in self._verified:
            wrong = self.fault(file)
            if wrong:
                self.quarantine(path)
                raise DamagedError(f"{file.path} is damaged ({wrong})", path=file.path, where=str(path))
            self._verified.add(file.path)
        return path

    def checked_folder(self, files: Iterable[StoredFile]) -> Path:
        """The folder that the files share, every one of them checked."""
        return [self.checked(file) for file in files][0].parent  # noqa: RUF015 - all are checked, not only the first

    def fault(self, file: StoredFile) -> str | None:
        path = self.path(file)
        try:
            size = path.stat().st_size
            if size != file.bytes:
                return f"size {size}, expected {file.bytes}"
            return None if file_digest(path) == file.sha256 else "its content is not what was written"
        except (FileNotFoundError, NotADirectoryError):  # another error is the mount's: a whole file is not set aside
            return "missing"

    def quarantine(self, path: Path) -> None:
        """Moved, never deleted: a person may want to see what happened."""
        if path.exists():
            target = self.root / "quarantine"
            target.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                path.rename(target / f"{uuid.uuid4().hex[:8]}-{path.name}")

    # ---- writing

    @contextlib.contextmanager
    def draft(self, folder: Path, name: str, suffix: str = "") -> Iterator[Draft]:
        """Write a unit's files into the draft's folder; leaving the block without an exception publishes them."""
        temporary = folder / f"{TEMPORARY}{os.getpid()}-{uuid.uuid4().hex[:12]}"
        temporary.mkdir(parents=True)
        try:
            draft = Draft(temporary)
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
        target = folder / (f"{name}-{mark}{suffix}" if single else f"{name}-{mark}")
        places = {p: target if single else target / p.relative_to(temporary) for p in paths}
        inside = target.relative_to(self.root)
        files = tuple(
            StoredFile(str(inside if single else inside / p.relative_to(temporary)), p.stat().st_size, digests[p])
            for p in paths
        )
        for path, place in places.items():
            place.parent.mkdir(parents=True, exist_ok=True)
            path.replace(place)  # the name holds the digest: whatever stood there has, or should have had, these bytes
        for parent in sorted({place.parent for place in places.values()} | {folder}):
            _sync_folder(parent)
        return files

    def commit(self, path: Path, record: Record) -> Record:
        """Publish a record if none is there; the first complete one wins and is returned."""
        if path.exists():  # looked at first: a record that appears from here on is another writer's, and wins below
            standing = self.record(path)
            if standing is not None and not self.absent(standing):
                return standing
            self.quarantine(path)  # garbage, or its files are gone: it no longer says the truth
        return record if _publish(path, canonical_record(record)) else (self.record(path) or record)

    def replace(self, path: Path, value: Mapping[str, Any]) -> None:
        """The few files that change: HEAD.json."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{uuid.uuid4().hex[:12]}")
        try:
            _write_synced(temporary, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        _sync_folder(path.parent)

    # ---- what the workspace remembers

    def head(self) -> dict[str, dict[str, Any]]:
        try:
            raw = json.loads((self.root / "HEAD.json").read_text("utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return {stage: entry for stage, entry in raw.items() if _is_entry(entry)} if isinstance(raw, dict) else {}

    def move_head(self, stage: str, name: str, overrides: Mapping[str, Any]) -> None:
        head = self.head()
        entry = {"fingerprint": name, "overrides": dict(overrides)}
        if head.get(stage) != entry:
            self.replace(self.root / "HEAD.json", {**head, stage: entry})

    def get(self, kind: str, name: str) -> str | None:
        """A pin: a decision taken once and kept (a Hub commit, the dtype that `auto` meant)."""
        record = self.record(self._pin(kind, name))
        return None if record is None else str(record.facts["value"])

    def keep(self, kind: str, name: str, value: str, **said: str) -> str:
        path = self._pin(kind, name)
        self.commit(path, Record(f"{kind} {name}", (), {"value": value, **said}))
        return self.get(kind, name) or value

    def _pin(self, kind: str, name: str) -> Path:
        return self.root / "pins" / f"{kind}-{fingerprint(name)}.json"


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


def _publish(path: Path, text: str) -> bool:
    """True if `path` now holds `text`; False if another writer was first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{uuid.uuid4().hex[:12]}")
    try:
        _write_synced(temporary, text)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError:  # a file system without hard links: rename is atomic too, only the last writer wins
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)
    return True


def _write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _synced_digest(path: Path) -> str:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    return file_digest(path)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
