"""Packs: the files of many small units in a few large files, their records in one index.

Next to the units, packs/000000.gz, 000001.gz and so on are put only if absent; each adds entries to the earlier ones or
removes some. No listing is needed, nothing is overwritten, and packed units keep their paths.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import threading
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar

from amalgam.pipeline.storage.backend import PROBE, QUARANTINE, FileInfo, StorageBackend
from amalgam.pipeline.storage.fingerprint import fingerprint
from amalgam.pipeline.storage.local import replacing
from amalgam.pipeline.storage.paths import (
    CACHED_TOKENS,
    check_path,
    folder_of,
    inside,
    is_below,
    regular,
    temporary_part,
)

FOLDER = "packs"

ENDPOINTS = {"s3://": "AWS_ENDPOINT_URL", "gs://": "GOOGLE_BASE_URL", "az://": "AZURE_STORAGE_ENDPOINT"}
"""Environment variables that name a server other than the provider's own."""

UNREADABLE = (zlib.error, ValueError, LookupError, ArithmeticError, TypeError, AttributeError, RecursionError)
"""Errors of a damaged index."""

LARGEST = 1 << 40
"""Limit of a pack's size in bytes."""

MOST_TIMES, LEAST_LIMIT = 30, 1 << 20
"""Limits of an index's size, in sizes of its file and in bytes: a small file could unpack to gigabytes."""

T = TypeVar("T")


class PackEntry(NamedTuple):
    pack: str
    offset: int
    bytes: int


@dataclass
class PackIndex:
    """The combined indexes of one folder. Every name is a path inside the workspace."""

    read: int = 0
    """Number of indexes that were read."""
    texts: dict[str, bytes] = field(default_factory=dict)
    """Records of the packed units."""
    pieces: dict[str, PackEntry] = field(default_factory=dict)
    """Files of the packed units."""
    packs: dict[str, int] = field(default_factory=dict)
    """Sizes of the packs."""

    def add(self, content: Mapping[str, Any]) -> None:
        for path in content["gone"]:
            self.texts.pop(path, None)
            self.pieces.pop(path, None)
        self.texts |= content["texts"]
        self.pieces |= content["pieces"]
        self.packs |= content["packs"]
        self.read += 1


NOT_PACKED = PackIndex()


class PackedStorage:
    """Adds packs, local copies and the quarantine to a backend.

    Packed records take precedence over loose ones, and loose files over packed ones. A path is absent only after new
    indexes were read.
    """

    def __init__(self, inner: StorageBackend) -> None:
        self.inner = inner
        self.root, self.address, self.is_remote = inner.root, inner.address, inner.is_remote
        self._refetched: set[str] = set()
        self._indexes: dict[str, PackIndex] = {}
        self._lock = threading.Lock()
        """Units run in several threads: each index is added once."""

    @cached_property
    def unpacked(self) -> Path:
        return self.root if self.is_remote else cache_folder(self.address)

    # ---- the indexes

    def index(self, folder: str, *, refresh: bool = False) -> PackIndex:
        """`refresh`: also reads indexes that another process has added since."""
        if not may_be_packed(folder):
            return NOT_PACKED
        index = self._indexes.get(folder)
        if index is None or refresh:
            with self._lock:
                index = self._indexes.setdefault(folder, PackIndex())
                self._read_new(folder, index)
        return index

    def _read_new(self, folder: str, index: PackIndex) -> None:
        before = index.read
        while (content := self._read_index(f"{folder}/{FOLDER}/{index.read:06}")) is not None:
            index.add(content)
        if index.read > before:  # the files of missing or damaged packs are removed: their units are computed again
            sizes = self.inner.sizes(list(index.packs))
            lost = {pack for pack, size in index.packs.items() if sizes.get(pack) != size}
            index.pieces = {path: entry for path, entry in index.pieces.items() if entry.pack not in lost}

    def _read_index(self, path: str) -> dict[str, Any] | None:
        """Returns None if no index has this number. A damaged or lost one is read from its copy, else it is empty."""
        names = [f"{path}.gz", f"{path}.copy.gz"]
        texts = self.inner.read(names)
        contents = (_parsed(texts[name]) for name in names if name in texts)
        if not texts:
            return None
        return next((content for content in contents if content is not None), None) or self._rebuilt(path)

    def _rebuilt(self, path: str) -> dict[str, Any]:
        """Returns the content of a lost index from the packs that no other index names."""
        folder, indexed = folder_of(path), set[str]()
        entries = [entry for entry in self.inner.list(folder) if entry.path.startswith(f"{folder}/")]
        for name in [entry.path for entry in entries if entry.path.endswith(".gz")]:
            indexed |= (_parsed(self.inner.read([name]).get(name, b"")) or _content())["packs"].keys()
        content = _content()
        for entry in entries:
            if entry.path.endswith(".pack") and entry.path not in indexed:
                records = self._records_in(entry.path)
                content["texts"] |= records.get("texts", {})
                content["pieces"] |= records.get("pieces", {})
                content["packs"] |= {entry.path: entry.bytes} if records else {}
        return content

    def _records_in(self, pack: str) -> dict[str, Any]:
        """Returns the records at the end of a pack, with the places of their files."""
        path = self.local_path(pack)
        data = path.read_bytes() if path else b""
        size = int.from_bytes(data[-8:], "big")
        if size + 8 > len(data):
            return {}
        return _parsed(data[-8 - size : -8], pack) or {}

    def damaged_indexes(self, folder: str) -> dict[str, tuple[bytes, bool]]:
        """Returns the whole content of damaged indexes and copies, and True if the other one is readable."""
        contents: dict[str, tuple[bytes, bool]] = {}
        paths = {entry.path for entry in self.inner.list(f"{folder}/{FOLDER}") if entry.path.endswith(".gz")}
        for path in sorted({path.removesuffix(".gz").removesuffix(".copy") for path in paths}):
            names = [f"{path}.gz", f"{path}.copy.gz"]
            texts = self.inner.read(names)
            damaged = [name for name in names if name not in texts or _parsed(texts[name]) is None]
            if damaged:
                whole = next((texts[name] for name in names if name not in damaged), None)
                text = whole or _packed(self._rebuilt(path))
                contents |= dict.fromkeys(damaged, (text, whole is not None))
        return contents

    def put_indexes(self, folder: str, contents: Mapping[str, bytes]) -> None:
        """Writes indexes of the folder again."""
        self.inner.put(contents)
        self._indexes.pop(folder, None)

    def add(self, folder: str, **content: Any) -> None:
        """Publishes an index under the next free number."""
        text = _packed(_content(**content))
        while True:
            number = self.index(folder, refresh=True).read
            if self.inner.put_if_absent(f"{folder}/{FOLDER}/{number:06}.gz", text):
                break
        self.inner.put_if_absent(f"{folder}/{FOLDER}/{number:06}.copy.gz", text)
        self.index(folder, refresh=True)

    def _text(self, path: str) -> bytes | None:
        return self.index(folder_of(path)).texts.get(path)

    def _entry(self, path: str, *, refresh: bool = False) -> PackEntry | None:
        return self.index(folder_of(path), refresh=refresh).pieces.get(path)

    # ---- reading

    def trusts(self, path: str) -> bool:
        """Returns whether an index holds the record: the index has a digest of its own."""
        return self._text(path) is not None

    def read(self, paths: Sequence[str]) -> dict[str, bytes]:
        return self._packed_or_loose(paths, self._text, self.inner.read)

    def sizes(self, paths: Sequence[str]) -> dict[str, int]:
        return self._packed_or_loose(paths, self._size, self.inner.sizes)

    def _size(self, path: str) -> int | None:
        text, entry = self._text(path), self._entry(path)
        return len(text) if text is not None else entry.bytes if entry else None

    def _packed_or_loose(
        self, paths: Sequence[str], packed: Callable[[str], T | None], loose: Callable[[Sequence[str]], dict[str, T]]
    ) -> dict[str, T]:
        with_index = {folder for folder in set(map(folder_of, paths)) if self.index(folder).read}
        in_packs = [path for path in paths if folder_of(path) in with_index] if with_index else []
        values = {path: value for path in in_packs if (value := packed(path)) is not None}
        values |= loose([path for path in paths if path not in values] if values else paths)
        rest = [path for path in paths if path not in values]
        for folder in {folder_of(path) for path in rest}:
            self.index(folder, refresh=True)
        return values | {path: value for path in rest if (value := packed(path)) is not None}

    def local_path(self, path: str) -> Path | None:
        """Returns where this machine can read the file, copied or unpacked if necessary; None if it does not exist."""
        entry = self._entry(path)
        if regular(self.root, path) or (entry is None and self.inner.get([path])):
            return self.root / path
        entry = entry or self._entry(path, refresh=True)
        return self._unpack(path, entry) if entry else None

    def _unpack(self, path: str, entry: PackEntry) -> Path | None:
        target = inside(self.unpacked, path)
        pack = None if target.exists() else self.local_path(entry.pack)
        if pack is not None:
            target.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError), pack.open("rb") as file, replacing(target) as temporary:
                file.seek(entry.offset)
                temporary.write_bytes(file.read(entry.bytes))
        return target if target.exists() else None

    def fetch(self, paths: Sequence[str]) -> None:
        """Copies the files that this machine lacks, all at once."""
        if self.is_remote:
            sources = {entry.pack if (entry := self._entry(path)) else path for path in paths}
            self.inner.get([path for path in sorted(sources) if not (self.root / path).exists()])

    def refetch(self, path: str) -> bool:
        """Replaces this machine's copy of a file; returns False if the file is not a copy."""
        entry = self._entry(path)
        if entry is None:
            return bool(self.inner.get([path]))
        inside(self.unpacked, path).unlink(missing_ok=True)
        if entry.pack not in self._refetched:
            self._refetched.add(entry.pack)
            self.inner.get([entry.pack])
        return self._unpack(path, entry) is not None

    def unequal_loose(self, path: str) -> Path | None:
        """Returns the loose file if it differs from the packed one."""
        entry, loose = self._entry(path), regular(self.root, path)
        unpacked = self._unpack(path, entry) if entry and loose else None
        if unpacked is None or loose is None or unpacked == loose or loose.read_bytes() == unpacked.read_bytes():
            return None
        return loose

    def keep_loose(self, path: str, record: str) -> None:
        """Removes a unit from the index whose packed file is damaged; its loose file and its record stay."""
        text = self._text(record)
        if text is not None:
            self.inner.put({record: text})
        self._forget([record, path])

    def names(self, folder: str) -> list[str]:
        """Returns the names of the files and folders in a folder, sorted."""
        names = self.inner.names(folder) - {FOLDER}
        index = self.index(folder, refresh=True)
        return sorted(names | {PurePosixPath(path).name for path in (*index.texts, *index.pieces)})

    def list(self, folder: str = "") -> Iterator[FileInfo]:
        """Yields packed units at their own paths, and indexes and packs with their sizes."""
        loose = {entry.path: entry for entry in self.inner.list(folder)}
        yield from loose.values()
        firsts = [path for path in loose if path.endswith((f"/{FOLDER}/000000.gz", f"/{FOLDER}/000000.copy.gz"))]
        for parent, first in {str(PurePosixPath(path).parents[1]): path for path in firsts}.items():
            index = self.index(parent, refresh=True)
            packed = {path: (len(text), first) for path, text in index.texts.items()}
            packed |= {path: (entry.bytes, entry.pack) for path, entry in index.pieces.items()}
            for path, (size, source) in packed.items():
                if path not in loose:
                    modified = loose[source].modified if source in loose else 0.0
                    yield FileInfo(path, size, modified, packed=True)

    # ---- writing

    def check(self) -> None:
        self.inner.check()

    def is_empty(self) -> bool:
        """Returns whether the workspace has no file but unfinished ones of amalgam."""
        paths = (entry.path for entry in self.inner.list())
        return all(path == PROBE or temporary_part(path.split("/")) is not None for path in paths)

    def put_if_absent(self, path: str, content: bytes) -> bool:
        if self._text(path) is not None or not self.inner.put_if_absent(path, content):
            return False
        self.index(folder_of(path), refresh=True)
        if self._text(path) is None:
            return True
        self.inner.delete([path])  # another process wrote and packed it after the index was read
        return False

    def change(self, path: str, edit: Callable[[bytes | None], bytes | None]) -> None:
        self.inner.change(path, edit)

    def put(self, files: Mapping[str, bytes | Path]) -> None:
        self.inner.put(files)

    def delete(self, paths: Sequence[str]) -> None:
        self._forget(paths)
        self.inner.delete(paths)

    def quarantine(self, paths: Sequence[str]) -> None:
        """Moves files to the quarantine folder, where a person can inspect them."""
        for path in paths:
            content, entry = self._text(path), self._entry(path)
            if content is None and entry is not None:
                unpacked = self._unpack(path, entry)
                content = unpacked.read_bytes() if unpacked else None
            if content is not None:
                self.inner.put({_quarantined(path): content})
                inside(self.unpacked, path).unlink(missing_ok=True)
        self._forget(paths)
        self.quarantine_loose(paths)

    def quarantine_loose(self, paths: Sequence[str]) -> None:
        """Moves files, links and pipes; a file behind a link out of the workspace stays."""
        ours = [path for path in map(check_path, paths) if is_below(folder_of(path), self.root)]
        self.inner.get([path for path in ours if not os.path.lexists(self.root / path)])
        for path in ours:
            if os.path.lexists(self.root / path):
                with contextlib.suppress(OSError):
                    os.utime(self.root / path, follow_symlinks=False)  # its time in quarantine starts now
                with contextlib.suppress(FileNotFoundError):  # another process was faster
                    self.inner.put({_quarantined(path): self.root / path})
        if self.is_remote:
            self.inner.delete(ours)

    def _forget(self, paths: Sequence[str]) -> None:
        """Removes packed files from the index."""
        packed = [path for path in paths if self._text(path) is not None or self._entry(path)]
        for path in packed:
            if self.unpacked != self.root:
                inside(self.unpacked, path).unlink(missing_ok=True)
        for folder, gone in groupby(sorted(packed), key=folder_of):
            self.add(folder, gone=list(gone))


def may_be_packed(folder: str) -> bool:
    """Returns whether a folder can have thousands of units; other folders have no index."""
    return folder.endswith("/units") or (folder.startswith(f"{CACHED_TOKENS}/") and folder.count("/") == 1)


def cache_folder(address: str) -> Path:
    """Returns the local folder for copies of a workspace's files; it may be deleted while no command runs."""
    configured = os.environ.get("AMALGAM_CACHE")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "amalgam"
    key = fingerprint([address, endpoint(address)])[:8]
    return ((Path(configured) if configured else cache) / f"{PurePosixPath(address).name}-{key}").absolute()


def endpoint(address: str) -> str | None:
    """Returns the server that the environment names for the address's scheme."""
    return next((os.environ.get(name) for scheme, name in ENDPOINTS.items() if address.startswith(scheme)), None)


def _quarantined(path: str) -> str:
    return f"{QUARANTINE}/{uuid.uuid4().hex[:8]}-{PurePosixPath(path).name[-100:]}"


def _content(**content: Any) -> dict[str, Any]:
    return {"texts": {}, "pieces": {}, "packs": {}, "gone": [], **content}


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode()


def _packed(content: Mapping[str, Any]) -> bytes:
    """Returns an index as its file has it."""
    texts = {path: text.decode() if isinstance(text, bytes) else text for path, text in content["texts"].items()}
    body = json.dumps({**content, "texts": texts}, ensure_ascii=False).encode()
    return gzip.compress(_digest(body) + b"\n" + body, mtime=0)


def pack_end(texts: Mapping[str, str], places: Mapping[str, tuple[int, int]]) -> bytes:
    """Returns the end of a pack: its records and the places of their files, from which a lost index is rebuilt."""
    pieces = {path: ("-", *place) for path, place in places.items()}
    records = _packed(_content(texts=texts, pieces=pieces))
    return records + len(records).to_bytes(8, "big")


def _parsed(text: bytes, pack: str | None = None) -> dict[str, Any] | None:
    """Returns None if the index is damaged, or names a path outside the workspace; `pack` is that of its entries."""
    try:
        digest, _, body = _unpacked(text).partition(b"\n")
        content = json.loads(body) if _digest(body) == digest else {}
        pieces = {
            check_path(path): PackEntry(pack or entry[0], *entry[1:]) for path, entry in content["pieces"].items()
        }
        return {
            "texts": {check_path(path): text.encode() for path, text in content["texts"].items()},
            "pieces": {path: _checked(entry) for path, entry in pieces.items()},
            "packs": {check_path(pack): int(size) for pack, size in content["packs"].items()},
            "gone": [check_path(path) for path in content["gone"]],
        }
    except UNREADABLE:
        return None


def _unpacked(text: bytes) -> bytes:
    unpack = zlib.decompressobj(zlib.MAX_WBITS | 16)  # with the header of gzip
    return unpack.decompress(text, max(LEAST_LIMIT, MOST_TIMES * len(text)))  # the digest shows whether it is all


def _checked(entry: PackEntry) -> PackEntry:
    if not (0 <= int(entry.offset) < LARGEST and 0 <= int(entry.bytes) < LARGEST):
        raise ValueError("an entry is outside its pack")
    return PackEntry(check_path(entry.pack), int(entry.offset), int(entry.bytes))
