"""Stores the results of stages: complete or absent, verified when read.

A *unit* is content-addressed files and then one record (JSON) with their digests; the record makes the unit complete.
MANIFEST.json makes a stage's result complete. No lock is needed: the first record wins, and equal units are harmless.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict

from amalgam.pipeline.errors import DamagedError, ExperimentError, nearest
from amalgam.pipeline.input_files import file_digest
from amalgam.pipeline.storage.backend import FileInfo, StorageBackend
from amalgam.pipeline.storage.fingerprint import fingerprint, library_versions
from amalgam.pipeline.storage.local import LocalStorage, alone_in, sync, temporary_path
from amalgam.pipeline.storage.packing import FOLDER, PackedStorage, PackIndex, may_be_packed, pack_end
from amalgam.pipeline.storage.paths import check_path
from amalgam.pipeline.storage.small_files import copy_of, signed, verified, without_digest
from amalgam.pipeline.user_paths import user_path

MANIFEST = "MANIFEST.json"

MARK = "WORKSPACE.json"
"""File that makes a folder or a prefix a workspace: its id and layout."""

HEAD = "HEAD.json"

TIMING_NAME, TIMING_FIELDS = "timing", ("seconds", "units", "found", "workload", "bytes")
"""Name of the record of a build's cost, and the numbers in it."""

LAYOUT = 2
"""Version of the workspace's folders and file names, in its mark."""


@dataclass(frozen=True)
class StoredFile:
    """Describes a file by its path inside the workspace, size and digest."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Record:
    """Describes a committed unit, or, as MANIFEST.json, a stage's complete result."""

    name: str
    files: tuple[StoredFile, ...]
    facts: Any = field(default_factory=dict)
    """A JSON object; the stage that writes it has its type."""
    made: Mapping[str, Any] = field(default_factory=dict)
    identity: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, text: str | bytes, *, trusted: bool = False) -> Record:
        """Parses a record and verifies its digest and paths; `trusted`: the text comes from a verified index."""
        raw = verified(text, trusted=trusted)
        if raw is None:
            raise ValueError("the record does not match its digest")
        files = tuple(StoredFile(check_path(f["path"]), int(f["bytes"]), str(f["sha256"])) for f in raw["files"])
        name, facts, made = str(raw["name"]), dict(raw["facts"]), dict(raw["made"])
        is_valid = name != TIMING_NAME or all(0 <= float(facts[field]) < math.inf for field in TIMING_FIELDS)
        if not is_valid or not all(isinstance(text, str) for text in dict(made.get("libraries", {})).values()):
            raise ValueError("a timing is no number, or a version is no text")
        return cls(name, files, facts, made, dict(raw["identity"]))


class HeadEntry(TypedDict):
    """The last result of a stage, in HEAD.json."""

    fingerprint: str
    overrides: dict[str, Any]
    rebuilding: NotRequired[bool]
    """`--force` has quarantined the result, and the new one is not complete."""


@dataclass
class UnitWriter:
    """Holds the temporary folder of a unit's files, and the facts for its record."""

    folder: Path
    facts: Mapping[str, object] = field(default_factory=dict)
    made: Mapping[str, object] = field(default_factory=dict)
    files: tuple[StoredFile, ...] = ()
    """The published files, after the block."""
    rival: Record | None = None
    """The record of another writer that was first and wrote other bytes."""


class Store:
    """Reads and writes records and their files in a storage backend.

    A file's address is its path under `root`, also in a remote workspace.
    """

    def __init__(self, root: Path, backend: StorageBackend | None = None) -> None:
        self.backend = PackedStorage(backend or LocalStorage(root))
        self.root = self.backend.root
        self.notify: Callable[[str], None] = _ignored  # a command prints the notes
        self.verified_files: set[str] = set()  # paths of the files that this process may have read

    # ---- paths

    def folder(self, stage: str, name: str) -> Path:
        return self.root / stage / name

    def folders(self, stage: str) -> list[Path]:
        """Returns the folders of a stage's results, complete or not."""
        return [self.folder(stage, name) for name in self.backend.names(stage)]

    def where(self, path: Path) -> str:
        """Returns the path or address for messages."""
        return f"{self.backend.address}/{self.inside(path)}" if self.backend.is_remote else str(path)

    def inside(self, path: Path) -> str:
        """Returns the path inside the workspace."""
        return path.relative_to(self.root).as_posix()

    def path(self, file: StoredFile) -> Path:
        return self.root / file.path

    def has(self, path: Path) -> bool:
        return bool(self.backend.sizes([self.inside(path)]))

    # ---- reading

    def manifest(self, stage: str, name: str) -> Record | None:
        return self.record(self.folder(stage, name) / MANIFEST)

    def record(self, path: Path) -> Record | None:
        """Returns the record at `path`, or None if it is absent or unreadable: the unit is not committed."""
        inside = self.inside(path)
        return _record(inside, self.backend.read([inside]).get(inside))

    def records(self, paths: Sequence[Path], *, complete: bool = True) -> dict[Path, Record]:
        """Returns the committed records; `complete`: only those whose files have the right sizes."""
        by_inside = {self.inside(path): path for path in paths}
        contents, trusts = self.backend.read(list(by_inside)), self.backend.trusts
        parsed = {by_inside[inside]: _record(inside, text, trusted=trusts(inside)) for inside, text in contents.items()}
        records = {path: record for path, record in parsed.items() if record is not None}
        if complete:
            sizes = self.backend.sizes([file.path for record in records.values() for file in record.files])
            records = {
                path: record
                for path, record in records.items()
                if all(sizes.get(file.path) == file.bytes for file in record.files)
            }
        return records

    def units(self, folder: Path, names: Iterable[str] | None = None) -> dict[str, Record]:
        """Returns the complete units of a folder by name; without names, all of them."""
        paths = self.units_in(folder) if names is None else [folder / f"{name}.json" for name in names]
        return {path.stem: record for path, record in self.records(paths).items()}

    def units_in(self, folder: Path) -> list[Path]:
        """Returns the paths of the units' records in a folder, complete or not."""
        return [folder / name for name in self.backend.names(self.inside(folder)) if name.endswith(".json")]

    def missing_files(self, record: Record) -> list[tuple[StoredFile, str]]:
        """Returns the record's absent files ("missing") and those of another size ("damaged ..."); reads no content."""
        sizes = self.backend.sizes([file.path for file in record.files])
        return [
            (file, f"damaged (size {sizes[file.path]}, expected {file.bytes})" if file.path in sizes else "missing")
            for file in record.files
            if sizes.get(file.path) != file.bytes
        ]

    def verified_path(self, file: StoredFile) -> Path:
        """Returns the local path of a file; its digest is verified before this process's first use."""
        if file.path not in self.verified_files:
            fault = self.check_file(file)
            if fault:
                self.backend.quarantine([file.path])
                what = "is missing" if fault == "missing" else f"is damaged ({fault}) and was quarantined"
                raise DamagedError(f"{file.path} {what}", path=file.path, where=self.where(self.path(file)))
            self.verified_files.add(file.path)
        return self.backend.local_path(file.path) or self.path(file)

    def verified_paths(self, files: Iterable[StoredFile]) -> list[Path]:
        """Returns the verified paths of several files, copied to this machine together."""
        named = list(files)
        self.backend.fetch([file.path for file in named if file.path not in self.verified_files])
        return [self.verified_path(file) for file in named]

    def verified_folder(self, files: Iterable[StoredFile]) -> Path:
        """Returns the common folder of the files after verifying each."""
        return self.verified_paths(files)[0].parent

    def written_folder(self, files: Iterable[StoredFile]) -> Path:
        """Returns the common folder of files that this process has just written; verifies no digest."""
        return [self.backend.local_path(file.path) or self.path(file) for file in files][0].parent  # noqa: RUF015 - all of them

    def check_file(self, file: StoredFile, *, refetch: bool = False) -> str | None:
        """Returns the file's fault, or None. A damaged copy is fetched again; `refetch`: every copy is."""
        if refetch:
            self.backend.refetch(file.path)
            self._keep_whole_copy(file)
        fault = self._fault(file)
        return self._fault(file) if fault and not refetch and self.backend.refetch(file.path) else fault

    def _keep_whole_copy(self, file: StoredFile) -> None:
        """Keeps the loose or the packed copy of a file, the one that matches its digest."""
        copies = self.backend.unequal_copies(file.path)
        if copies is None:
            return
        if file_digest(copies[0]) == file.sha256:
            self.backend.keep_loose(file.path, file.path.rpartition("-")[0] + ".json")
            self.notify(f"{file.path} is damaged in its pack; its loose file is used")
        else:
            self.backend.keep_packed(file.path)

    def _fault(self, file: StoredFile) -> str | None:
        path = self.backend.local_path(file.path)
        if path is None:
            return "no regular file in the workspace" if os.path.lexists(self.path(file)) else "missing"
        try:
            size = path.stat().st_size
            if size != file.bytes:
                return f"size {size}, expected {file.bytes}"
            return None if file_digest(path) == file.sha256 else "its content does not match its digest"
        except (FileNotFoundError, NotADirectoryError):  # other errors come from the mount: the file is not quarantined
            return "missing"

    def quarantine(self, *paths: Path) -> None:
        """Moves files to the quarantine folder; nothing is deleted."""
        self.backend.quarantine([self.inside(path) for path in paths])

    # ---- writing

    @contextlib.contextmanager
    def draft(self, folder: Path, name: str, suffix: str = "") -> Iterator[UnitWriter]:
        """Yields a folder for a unit's files, and publishes them if the block raises no exception."""
        temporary = temporary_path(folder)
        temporary.mkdir(parents=True)
        try:
            draft = UnitWriter(temporary, made={"libraries": library_versions()})
            yield draft
            draft.files = self._publish_files(draft.folder, folder, name, suffix)
            committed = self.commit(folder / f"{name}.json", Record(name, draft.files, draft.facts, draft.made))
            draft.rival = committed if committed.files != draft.files else None
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _publish_files(self, temporary: Path, folder: Path, name: str, suffix: str) -> tuple[StoredFile, ...]:
        """Publishes one file as NAME-DIGEST.suffix, several files as the folder NAME-DIGEST."""
        paths = sorted(path for path in temporary.rglob("*") if path.is_file())
        mode = stat.S_IMODE(temporary.stat().st_mode) & 0o666  # as the umask has it; safetensors writes 0600
        for path in paths:
            path.chmod(mode)
            sync(path)
        digests = {path: file_digest(path) for path in paths}
        suffix_digest = fingerprint([[str(p.relative_to(temporary)), d] for p, d in digests.items()])[:8]
        single = len(paths) == 1 and bool(suffix)
        target = self.inside(folder / (f"{name}-{suffix_digest}{suffix}" if single else f"{name}-{suffix_digest}"))
        places = {p: target if single else f"{target}/{p.relative_to(temporary).as_posix()}" for p in paths}
        files = tuple(StoredFile(places[p], p.stat().st_size, digests[p]) for p in paths)
        self.backend.put({place: path for path, place in places.items()})
        return files

    def commit(self, path: Path, record: Record) -> Record:
        """Publishes a record if the path is free; returns the first complete record."""
        inside, content = self.inside(path), canonical_record(record).encode()
        if self.backend.put_if_absent(inside, content):
            return record
        earlier = self.record(path)
        if earlier is not None and not self.missing_files(earlier):
            return earlier
        self.quarantine(path)  # unreadable, or its files are missing
        return record if self.backend.put_if_absent(inside, content) else (self.record(path) or record)

    def replace(self, path: Path, value: Mapping[str, Any], *, copy: bool = False) -> None:
        """Writes one of the few files that change, with its digest; `copy`: and then its copy."""
        inside = self.inside(path)
        self.backend.put({inside: signed(value)})
        if copy:
            self.backend.put({copy_of(inside): signed(value)})

    def read_json(self, path: Path) -> dict[str, Any] | None:
        """Returns the content of such a file, restored from its copy if it is damaged; None if both are."""
        inside = self.inside(path)
        texts = self.backend.read([inside, copy_of(inside)])
        content = verified(texts.get(inside))
        copied = verified(texts.get(copy_of(inside))) if content is None else None
        if copied is None:
            return content
        self.notify(f"{inside} was damaged or missing; it is restored from its copy")
        with contextlib.suppress(OSError, DamagedError):  # a reader may not be allowed to write
            self.backend.put({inside: signed(copied)})
        return copied

    # ---- the workspace

    def check_workspace(self) -> None:
        """Refuses a folder of other files and a workspace of another layout, before any file is read or deleted."""
        mark = self.read_json(self.root / MARK)
        if mark is None and not self.backend.is_empty():
            mark = self.read_json(self.root / MARK) or self._adopted()  # another process may have marked it meanwhile
            if mark is None:
                raise ExperimentError(
                    f"the folder is neither empty nor a workspace of amalgam: it has no readable {MARK}",
                    where=self.backend.address,
                    fix="set execution.workspace to a new folder; amalgam writes, and `gc` deletes, in its own only",
                )
        if mark is not None and mark.get("layout") != LAYOUT:
            what = f"the workspace has layout {mark.get('layout')}; this version of amalgam uses {LAYOUT}"
            fix = "set execution.workspace to a new folder, or use the version of amalgam that made it"
            raise ExperimentError(what, where=self.backend.address, fix=fix)

    def _adopted(self) -> dict[str, Any] | None:
        """Returns a new mark for a workspace without a mark, if its HEAD.json has this layout."""
        texts = self.backend.read([HEAD, copy_of(HEAD)])
        contents = [verified(text) or without_digest(text) for text in texts.values()]
        head = next((content for content in contents if content and content.get("layout") == LAYOUT), None)
        if head is None:
            return None
        self.replace(self.root / HEAD, head, copy=True)
        return self._mark()

    def claim(self) -> None:
        """Checks that the workspace can be written, and marks a new one; called before its first file."""
        self.check_workspace()
        self.backend.check()
        if self.read_json(self.root / MARK) is None:
            self._mark()

    def _mark(self) -> dict[str, Any]:
        mark = {"id": uuid.uuid4().hex, "layout": LAYOUT}
        if self.backend.put_if_absent(MARK, signed(mark)):
            return mark
        present = self.read_json(self.root / MARK)
        if present is None:  # damaged: HEAD.json has shown that the folder is a workspace
            self.replace(self.root / MARK, mark)
        return present or mark

    # ---- HEAD and pins

    def head(self) -> dict[str, HeadEntry]:
        """Returns the entry of each stage; without a readable HEAD.json there are none."""
        head = dict[str, HeadEntry]()
        for stage, entry in (self.read_json(self.root / HEAD) or {}).items():
            match entry:
                case {"fingerprint": str(), "overrides": dict()}:
                    head[stage] = entry
        return head

    @contextlib.contextmanager
    def _changing_head(self) -> Iterator[dict[str, HeadEntry]]:
        """Yields the entries, and stores the changed ones; other processes wait meanwhile, so no entry is lost."""
        with alone_in(self.root):
            head = self.head()
            before = dict(head)
            yield head
            if head != before:
                self.replace(self.root / HEAD, {"layout": LAYOUT, **head}, copy=True)

    def last(self, stage: str) -> str | None:
        """Returns the fingerprint of the stage's last result."""
        entry = self.head().get(stage)
        return entry["fingerprint"] if entry else None

    def move_head(self, stage: str, name: str) -> None:
        """Marks the last result of a stage; the overrides of the last complete command stay."""
        with self._changing_head() as head:
            head[stage] = HeadEntry(fingerprint=name, overrides=head[stage]["overrides"] if stage in head else {})

    def mark_rebuilding(self, stage: str, name: str) -> None:
        """Records that the last result is computed again although it was complete."""
        with self._changing_head() as head:
            if stage in head and head[stage]["fingerprint"] == name:
                head[stage] = {**head[stage], "rebuilding": True}

    def store_overrides(self, stages: Iterable[str], overrides: Mapping[str, Any]) -> None:
        """Stores the overrides of a complete command for the later commands of single stages."""
        with self._changing_head() as head:
            for stage in head.keys() & set(stages):
                head[stage] = HeadEntry(fingerprint=head[stage]["fingerprint"], overrides=dict(overrides))

    def pinned(self, kind: str, name: str) -> str | None:
        """Returns a pinned decision, such as a Hub commit or the dtype chosen for `auto`; None if there is none."""
        path = self._pin(kind, name)
        copy = self.root / copy_of(self.inside(path))
        records = self.records([path, copy], complete=False)
        pins = {place: pin for place, pin in records.items() if pin.name == f"{kind} {name}" and "value" in pin.facts}
        if path not in pins and copy in pins:
            self.notify(f"{self.inside(path)} was damaged or missing; it is restored from its copy")
            with contextlib.suppress(OSError):
                self._put_record(path, pins[copy])
        elif path not in pins and self.has(path):
            self.notify(f"{self.inside(path)} is damaged, and so is its copy: {kind} is decided again")
            self.quarantine(path)
        return next((str(pin.facts["value"]) for pin in pins.values()), None)

    def pin(self, kind: str, name: str, value: str, **facts: str) -> str:
        """Pins a decision and returns the pinned value: that of the first call."""
        if self.backend.is_empty():  # `doctor` may write the first file of a workspace
            self.claim()
        path = self._pin(kind, name)
        record = self.commit(path, Record(f"{kind} {name}", (), {"value": value, **facts}))
        self._put_record(self.root / copy_of(self.inside(path)), record)
        return str(record.facts["value"])

    def _put_record(self, path: Path, record: Record) -> None:
        self.backend.put({self.inside(path): canonical_record(record).encode()})

    def _pin(self, kind: str, name: str) -> Path:
        return self.root / "pins" / f"{kind}-{fingerprint(name)}.json"


def _ignored(note: str) -> None: ...


def _record(inside: str, content: bytes | None, *, trusted: bool = False) -> Record | None:
    """Returns the record at a path, or None if it is absent, damaged, or belongs to another path."""
    try:
        record = None if content is None else Record.from_json(content, trusted=trusted)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return None
    return record if record is None or _belongs(record, inside) else None


def _belongs(record: Record, inside: str) -> bool:
    """Returns whether a manifest is in the folder of its identity, or a unit's files are next to its record."""
    folder, _, name = inside.rpartition("/")
    if name == MANIFEST:
        return fingerprint(record.identity) == folder.rpartition("/")[2]
    return all(file.path.startswith(f"{inside.removesuffix('.json')}-") for file in record.files)


def _object_storage(address: str) -> StorageBackend:
    try:
        from amalgam.pipeline.storage.object_store import ObjectStorage
    except ImportError as error:
        scheme = address.partition(":")[0]
        raise ExperimentError(
            f"a workspace in {scheme}:// needs obstore", where=address, fix=f"pip install 'amalgam-distill[{scheme}]'"
        ) from error
    return ObjectStorage(address)


BACKENDS: Mapping[str, Callable[[str], StorageBackend]] = {
    "s3://": _object_storage,
    "gs://": _object_storage,
    "az://": _object_storage,
}
"""The backends of execution.workspace by the start of its address; any other address is a folder."""


WORKSPACE = "execution.workspace"


def open_store(workspace: str, base: Path) -> Store:
    """Opens execution.workspace: an address of BACKENDS, or a folder relative to `base`."""
    for scheme, backend_of in BACKENDS.items():
        if workspace.startswith(scheme):
            backend = backend_of(workspace)
            return Store(backend.root, backend)
    other = re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", workspace)
    if other:
        what = f"a workspace in {other[0]} is not supported"
        fix = f"name a folder, or {' or '.join(nearest(other[0], BACKENDS) or BACKENDS)}"
        raise ExperimentError(what, where=WORKSPACE, fix=fix)
    return Store(user_path(workspace, base, where=WORKSPACE).absolute())


def canonical_record(record: Record) -> str:
    """Returns the record as JSON with its own digest."""
    return signed(asdict(record)).decode()


# ---- many small units

SMALL = 4 << 20
"""Size limit of a packed file."""

PACK_BYTES = 64 << 20
"""Approximate size of a pack."""

LEAST = 16
"""Number of loose units from which a folder is packed."""

AT_ONCE = 256
"""Number of units whose files are fetched together."""


class LooseUnits(NamedTuple):
    """Paths of the records of a folder's small units."""

    new: list[str]
    packed: list[str]
    """An earlier run was stopped before it removed their loose files."""


def loose_units(store: Store, entries: Iterable[FileInfo]) -> dict[str, LooseUnits]:
    """Returns the folders with many small units."""
    large: set[str] = set()
    records: dict[str, list[str]] = {}
    for entry in entries:
        folder, _, name = entry.path.rpartition("/")
        if may_be_packed(folder) and not entry.packed:
            if name.endswith(".json"):
                records.setdefault(folder, []).append(entry.path)
            elif entry.bytes > SMALL:
                large.add(entry.path.rpartition("-")[0] + ".json")
    folders = {}
    for folder, paths in sorted(records.items()):
        texts = store.backend.index(folder, refresh=True).texts
        packed = sorted(path for path in paths if path in texts)
        new = sorted(path for path in paths if path not in large and path not in texts)
        if packed or len(new) >= LEAST:
            folders[folder] = LooseUnits(new if len(new) >= LEAST else [], packed)
    return folders


def compact(store: Store, folder: str, loose: LooseUnits) -> int:
    """Packs the units and returns their number; damaged and incomplete units stay loose.

    A kill loses nothing, because the index with the units is complete before their loose records are removed.
    """
    texts: dict[str, str] = {}
    pieces: dict[str, tuple[str, int, int]] = {}
    packs: dict[str, int] = {}
    index = store.backend.index(folder)
    for group in _groups(_small_units(store, loose.new)):
        content = _pack(group)
        pack = f"{folder}/{FOLDER}/{hashlib.sha256(content).hexdigest()[:20]}.pack"
        store.backend.put({pack: content})
        packs[pack], offset = len(content), 0
        for path, text, file, data in group:
            texts[path], pieces[file.path] = text.decode(), (pack, offset, len(data))
            offset += len(data)
    if texts:
        store.backend.add(folder, texts=texts, pieces=pieces, packs=packs)
    _remove_loose(store, index, [*loose.new, *loose.packed])
    return len(texts)


SmallUnit = tuple[str, bytes, StoredFile, bytes]
"""Path and text of the record, the unit's file and its content."""


def _small_units(store: Store, paths: Sequence[str]) -> Iterator[SmallUnit]:
    """Yields the units of one small file that matches its digest."""
    for start in range(0, len(paths), AT_ONCE):
        texts = store.backend.inner.read(paths[start : start + AT_ONCE])
        records = {path: record for path, text in texts.items() if (record := _record(path, text)) is not None}
        files = {path: record.files[0] for path, record in records.items() if len(record.files) == 1}
        files = {path: file for path, file in files.items() if file.bytes <= SMALL}
        store.backend.fetch([file.path for file in files.values()])
        for path, file in files.items():
            if store.check_file(file) is None:
                yield path, texts[path], file, store.verified_path(file).read_bytes()


def _pack(group: Sequence[SmallUnit]) -> bytes:
    """Returns the content of a pack: the files, and their records at the end."""
    places, offset = dict[str, tuple[int, int]](), 0
    for _, _, file, data in group:
        places[file.path] = offset, len(data)
        offset += len(data)
    records = {path: text.decode() for path, text, _, _ in group}
    return b"".join([*(data for _, _, _, data in group), pack_end(records, places)])


def _groups(units: Iterable[SmallUnit]) -> Iterator[list[SmallUnit]]:
    group: list[SmallUnit] = []
    size = 0
    for unit in units:
        group.append(unit)
        size += len(unit[-1])
        if size >= PACK_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _remove_loose(store: Store, index: PackIndex, paths: Sequence[str]) -> None:
    """Removes loose records that equal their packed ones, and the units' files in an object store.

    On a disk the files stay for a day, for processes that are about to read them; object stores' readers have copies.
    """
    inner = store.backend.inner
    contents = inner.read([path for path in paths if path in index.texts])
    same = [path for path, content in contents.items() if content == index.texts[path]]
    inner.delete(same)
    if inner.is_remote:
        files = {file.path for path in same for file in Record.from_json(index.texts[path], trusted=True).files}
        inner.delete(sorted(files & index.pieces.keys()))
