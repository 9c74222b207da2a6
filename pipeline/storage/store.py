"""Stores the results of stages: complete or absent, verified when read.

A *unit* is content-addressed files and then one record (JSON) with their digests; the record makes the unit complete.
MANIFEST.json makes a stage's result complete. No lock is needed: the first record wins, and equal units are harmless.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from amalgam.pipeline.errors import DamagedError, ExperimentError, is_disk_full, nearest, reason_of
from amalgam.pipeline.input_files import file_digest
from amalgam.pipeline.storage.backend import StorageBackend
from amalgam.pipeline.storage.facts import DECLARED, FactTypes, ResultIdentity, Timing, fits
from amalgam.pipeline.storage.fingerprint import fingerprint, library_versions
from amalgam.pipeline.storage.local import LocalStorage, make_folder, sync, temporary_path
from amalgam.pipeline.storage.packing import PackedStorage
from amalgam.pipeline.storage.paths import check_path, inside, is_name
from amalgam.pipeline.storage.small_files import copy_of, signed, verified
from amalgam.pipeline.user_paths import check_address, check_utf8, readable, user_path

MANIFEST = "MANIFEST.json"

MARK = "WORKSPACE.json"
"""File that makes a folder or a prefix a workspace: its id and layout."""

HEAD = "HEAD.json"

TIMING, TIMING_NAME = "timing.json", "timing"
"""File and name of the record of a build's cost."""

LAYOUT = 2
"""Version of the workspace's folders and file names, in its mark."""


@dataclass(frozen=True)
class StoredFile:
    """Describes a file by its path inside the workspace, size and digest."""

    path: str
    bytes: int
    sha256: str

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


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
        return cls(str(raw["name"]), files, dict(raw["facts"]), dict(raw["made"]), dict(raw["identity"]))


def content_fault(path: Path, file: StoredFile, digest_of: Callable[[Path], str] = file_digest) -> str | None:
    """Returns how the content at a path differs from that of the file, or None."""
    size = path.stat().st_size
    if size != file.bytes:
        return f"size {size}, expected {file.bytes}"
    return None if digest_of(path) == file.sha256 else "its content does not match its digest"


def _fault_at(path: Path, file: StoredFile) -> str | None:
    try:
        return content_fault(path, file)
    except (FileNotFoundError, NotADirectoryError):  # other errors come from the mount: the file is not quarantined
        return "missing"


class HeadEntry(TypedDict):
    """The last result of a stage, in HEAD.json."""

    fingerprint: str
    overrides: dict[str, Any]
    """Those of the last complete command."""
    file: NotRequired[str]
    """The experiment file of that command, as a path from the workspace."""
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
        self.notify: Callable[[str], None] = lambda _note: None  # a command prints the notes
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
        return path.relative_to(self.root).as_posix()

    def own_folder(self, folder: Path) -> Path:
        """Returns a folder to write in; raises DamagedError if it is a file, a pipe or a link out of the workspace."""
        place = self.inside(folder)
        resolved = inside(self.root, f"{place}/file").parent
        if os.path.lexists(resolved) and not resolved.is_dir():
            raise DamagedError(f"{place} is no folder", path=place, where=str(resolved), fix="move it away")
        return resolved

    def path(self, file: StoredFile) -> Path:
        return self.root / file.path

    def has(self, path: Path) -> bool:
        return bool(self.backend.sizes([self.inside(path)]))

    # ---- reading

    def manifest(self, stage: str, name: str) -> Record | None:
        return self.record(self.folder(stage, name) / MANIFEST)

    def identity(self, stage: str, name: str) -> Mapping[str, Any] | None:
        """Returns the inputs of a result, also if an earlier version wrote facts of other types."""
        place = self.inside(self.folder(stage, name) / MANIFEST)
        record = parsed_record(place, self.backend.read([place]).get(place), any_facts=True)
        return record.identity if record else None

    def record(self, path: Path) -> Record | None:
        """Returns the record at `path`, or None if it is absent or unreadable: the unit is not committed."""
        place = self.inside(path)
        return parsed_record(place, self.backend.read([place]).get(place))

    def records(self, paths: Sequence[Path], *, complete: bool = True) -> dict[Path, Record]:
        """Returns the committed records; `complete`: only those whose files have the right sizes."""
        by_inside = {self.inside(path): path for path in paths}
        contents, trusts = self.backend.read(list(by_inside)), self.backend.trusts
        parsed = {path: parsed_record(path, text, trusted=trusts(path)) for path, text in contents.items()}
        records = {by_inside[path]: record for path, record in parsed.items() if record is not None}
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
        """Returns the local path of a file; its digest is verified before this process's first use.

        A file that was deleted since then is missing.
        """
        path = self.backend.local_path(file.path)
        if path is None or not (file.path in self.verified_files or _fault_at(path, file) is None):
            fault = self.check_file(file)
            if fault:
                moved = self._set_aside(file.path)
                what = "is missing" if fault == "missing" else f"is damaged ({fault}) and {moved}"
                raise DamagedError(f"{file.path} {what}", path=file.path, where=self.where(self.path(file)))
            path = self.backend.local_path(file.path) or self.path(file)
        self.verified_files.add(file.path)
        return path

    def content(self, file: StoredFile, kind: Any) -> Any:
        """Returns the content of a JSON file of this type; quarantines a file with other content."""
        text = self.verified_path(file).read_text("utf-8")
        with contextlib.suppress(ValueError, RecursionError):
            content = json.loads(text)
            if fits(content, kind):
                return content
        self.verified_files.discard(file.path)
        what = f"{file.path} has other content than amalgam writes and {self._set_aside(file.path)}"
        raise DamagedError(what, path=file.path, where=self.where(self.path(file)))

    def _set_aside(self, path: str) -> str:
        """Moves a damaged file to the quarantine folder, if this user may; returns the end of a message on it."""
        try:
            self.backend.quarantine([path])
        except OSError as error:
            if is_disk_full(error):
                raise
            return f"cannot be moved to quarantine: {reason_of(error)}"
        return "was quarantined"

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
        if not refetch and self._fault(file) is None:
            return None
        if self.backend.refetch(file.path):
            self._keep_whole_copy(file)
        return self._fault(file)

    def _keep_whole_copy(self, file: StoredFile) -> None:
        """Keeps the loose or the packed copy of a file, the one that matches its digest."""
        loose = self.backend.unequal_loose(file.path)
        if loose is None:
            return
        if file_digest(loose) == file.sha256:
            self.backend.keep_loose(file.path, file.path.rpartition("-")[0] + ".json")
            self.notify(f"{file.path} is damaged in its pack; its loose file is used")
        else:
            self.backend.quarantine_loose([file.path])

    def _fault(self, file: StoredFile) -> str | None:
        path = self.backend.local_path(file.path)
        if path is None:
            return "no regular file in the workspace" if os.path.lexists(self.path(file)) else "missing"
        return _fault_at(path, file)

    def quarantine(self, *paths: Path) -> None:
        """Moves files to the quarantine folder; nothing is deleted."""
        self.backend.quarantine([self.inside(path) for path in paths])

    # ---- writing

    @contextlib.contextmanager
    def draft(self, folder: Path, name: str, suffix: str = "") -> Iterator[UnitWriter]:
        """Yields a folder for a unit's files, and publishes them if the block raises no exception."""
        temporary = temporary_path(self.own_folder(folder))
        make_folder(temporary.parent)
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
        place, content = self.inside(path), canonical_record(record).encode()
        if self.backend.put_if_absent(place, content):
            return record
        earlier, ours = self.record(path), {file.path: file for file in record.files}
        has_ours = earlier and all(ours.get(file.path, file) == file for file in earlier.files)
        if earlier is not None and has_ours and not self.missing_files(earlier):
            return earlier
        self.quarantine(path)  # unreadable, its files are missing, or it has another digest for a file of this record
        return record if self.backend.put_if_absent(place, content) else (self.record(path) or record)

    def replace(self, path: Path, value: Mapping[str, Any], *, copy: bool = False) -> None:
        """Writes one of the few files that change, with its digest; `copy`: and then its copy."""
        place = self.inside(path)
        self.backend.put({place: signed(value)})
        if copy:
            self.backend.put({copy_of(place): signed(value)})

    def read_json(self, path: Path) -> dict[str, Any] | None:
        """Returns the content of such a file, restored from its copy if it is damaged; None if both are."""
        place = self.inside(path)
        texts = self.backend.read([place, copy_of(place)])
        content = verified(texts.get(place))
        copied = verified(texts.get(copy_of(place))) if content is None else None
        if copied is None:
            return content
        self.notify(f"{place} was damaged or missing; it is restored from its copy")
        with contextlib.suppress(OSError, DamagedError):  # a reader may not be allowed to write
            self.backend.put({place: signed(copied)})
        return copied

    # ---- the workspace

    def check_workspace(self) -> None:
        """Refuses a folder of other files and a workspace of another layout, before any file is read or deleted."""
        with readable(self.root, ExperimentError):
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
        contents = map(verified, self.backend.read([HEAD, copy_of(HEAD)]).values())
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
        return _entries(self.read_json(self.root / HEAD) or {})

    def _change_head(self, changed: Callable[[dict[str, HeadEntry]], dict[str, HeadEntry]]) -> None:
        """Stores the entries that `changed` returns; no entry of another process or machine is lost."""

        def edit(text: bytes | None) -> bytes | None:
            content = verified(text)
            head = self.head() if content is None else _entries(content)
            after = {**head, **changed(head)}
            return signed({"layout": LAYOUT, **after}) if after != head else None

        def copy(text: bytes | None) -> bytes | None:
            content = self.backend.read([HEAD]).get(HEAD)
            return content if content != text and verified(content) else None

        self.backend.change(HEAD, edit)
        self.backend.change(copy_of(HEAD), copy)

    def last(self, stage: str) -> str | None:
        """Returns the fingerprint of the stage's last result."""
        entry = self.head().get(stage)
        return entry["fingerprint"] if entry else None

    def move_head(self, stage: str, name: str) -> None:
        """Marks the last result of a stage; the overrides of the last complete command stay."""

        def moved(head: dict[str, HeadEntry]) -> dict[str, HeadEntry]:
            entry: HeadEntry = {**head.get(stage, HeadEntry(fingerprint=name, overrides={})), "fingerprint": name}
            entry.pop("rebuilding", None)
            return {stage: entry}

        self._change_head(moved)

    def mark_rebuilding(self, stage: str, name: str) -> None:
        """Records that the last result is computed again although it was complete."""

        def marked(head: dict[str, HeadEntry]) -> dict[str, HeadEntry]:
            is_last = stage in head and head[stage]["fingerprint"] == name
            return {stage: {**head[stage], "rebuilding": True}} if is_last else {}

        self._change_head(marked)

    def store_overrides(self, results: Mapping[str, str], overrides: Mapping[str, Any], file: str) -> None:
        """Stores the overrides of a complete command for later commands of single stages with the same file.

        `results` are its stages and fingerprints: another command may have moved HEAD meanwhile.
        """
        entries = {
            stage: HeadEntry(fingerprint=name, overrides=dict(overrides), file=file) for stage, name in results.items()
        }
        self._change_head(lambda head: {stage: entries[stage] for stage in head.keys() & entries.keys()})

    def pinned(self, kind: str, name: str) -> str | None:
        """Returns a pinned decision, such as a Hub commit or the dtype chosen for `auto`; None if there is none."""
        place = self.inside(self._pin(kind, name))
        copy = copy_of(place)
        texts = self.backend.read([place, copy])
        records = ((at, parsed_record(at, text)) for at, text in texts.items())
        pins = {at: pin for at, pin in records if pin and pin.name == f"{kind} {name}" and "value" in pin.facts}
        if place not in pins and copy in pins:
            self.notify(f"{place} was damaged or missing; it is restored from its copy")
            with contextlib.suppress(OSError):
                self._put_record(place, pins[copy])
        elif place not in pins and place in texts:  # of the same look: another process may have pinned it meanwhile
            self.notify(f"{place} is damaged, and so is its copy: {kind} is decided again")
            self.quarantine(self.root / place)
        return next((str(pin.facts["value"]) for pin in pins.values()), None)

    def pin(self, kind: str, name: str, value: str, **facts: str) -> str:
        """Pins a decision and returns the pinned value: that of the first call."""
        if self.backend.is_empty():  # `doctor` may write the first file of a workspace
            self.claim()
        path = self._pin(kind, name)
        record = self.commit(path, Record(f"{kind} {name}", (), {"value": value, **facts}))
        self._put_record(copy_of(self.inside(path)), record)
        return str(record.facts["value"])

    def _put_record(self, place: str, record: Record) -> None:
        self.backend.put({place: canonical_record(record).encode()})

    def _pin(self, kind: str, name: str) -> Path:
        return self.root / "pins" / f"{kind}-{fingerprint(name)}.json"


def _entries(content: Mapping[str, Any]) -> dict[str, HeadEntry]:
    """Returns the entries of HEAD.json by stage."""
    head = dict[str, HeadEntry]()
    for stage, entry in content.items():
        match entry:
            case {"fingerprint": str(name), "overrides": dict()} if is_name(name):
                head[stage] = entry
    return head


def parsed_record(
    place: str, content: bytes | None, *, trusted: bool = False, any_facts: bool = False
) -> Record | None:
    """Returns the record at a path, or None if it is absent, damaged, or belongs to another path."""
    try:
        record = None if content is None else Record.from_json(content, trusted=trusted)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return None
    if record is None or not _belongs(record, place):
        return None
    return record if any_facts or _has_types(record, place) else None


def _has_types(record: Record, place: str) -> bool:
    """Returns whether the record has the fields that its stage declares; an undeclared stage's has any."""
    room, name = place.partition("/")[0], place.rpartition("/")[2]
    if name == TIMING:
        return fits(record.facts, Timing) and record.facts["seconds"] >= 0 <= record.facts["workload"]
    kinds = DECLARED.get(room, FactTypes())
    is_empty = name == MANIFEST and record.facts.get("units") == 0  # as-dfd without test texts
    if not fits(record.made, kinds.made) or (room in DECLARED and not record.files and not is_empty):
        return False
    if name != MANIFEST:
        return fits(record.facts, kinds.unit)
    is_result = fits(record.identity, ResultIdentity) and fits(record.identity.get("config"), kinds.config)
    return is_result and fits(record.facts.get("units", 1), int) and fits(record.facts, kinds.manifest)


def _belongs(record: Record, place: str) -> bool:
    """Returns whether a manifest is in the folder of its identity, or a unit's files are next to its record."""
    folder, _, name = place.rpartition("/")
    if name == MANIFEST:
        return fingerprint(record.identity) == folder.rpartition("/")[2]
    return all(file.path.startswith(f"{place.removesuffix('.json')}-") for file in record.files)


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
        fix = f"name a folder, or {' or '.join(nearest(other[0], BACKENDS, ratio=0.7) or BACKENDS)}"
        raise ExperimentError(what, where=WORKSPACE, fix=fix)
    check_address(workspace, ExperimentError, WORKSPACE)  # also if an earlier version has made this folder
    root = user_path(workspace, base, where=WORKSPACE).absolute()
    check_utf8(root)
    return Store(root)


def canonical_record(record: Record) -> str:
    """Returns the record as JSON with its own digest."""
    return signed(asdict(record)).decode()
