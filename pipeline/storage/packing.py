"""Small units of one folder, packed: their files in a few large ones, their records in one index.

Beside the units stands packs/000000.gz, then 000001.gz and so on, each put only if absent: what an index says is added
to those before it, or is gone. So no listing is needed, and nothing is ever overwritten. Packed units keep their paths:
whoever asks for one is given its text, its size, or a copy of its file on this machine.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any

from amalgam.pipeline.storage.backend import QUARANTINE, FileInfo, StorageBackend
from amalgam.pipeline.storage.local import temporary_path
from amalgam.pipeline.storage.object_store import cache_folder

FOLDER = "packs"


@dataclass(frozen=True)
class PackEntry:
    pack: str
    offset: int
    bytes: int


@dataclass
class PackIndex:
    """What the indexes of one folder say together. Every name is a path inside the workspace."""

    read: int = 0
    texts: dict[str, str] = field(default_factory=dict)
    pieces: dict[str, PackEntry] = field(default_factory=dict)
    packs: dict[str, int] = field(default_factory=dict)
    """Their sizes."""

    def add(self, said: Mapping[str, Any]) -> None:
        for inside in said["gone"]:
            self.texts.pop(inside, None)
            self.pieces.pop(inside, None)
        self.texts |= said["texts"]
        self.packs |= said["packs"]
        self.pieces |= {inside: PackEntry(str(p), int(o), int(b)) for inside, (p, o, b) in said["pieces"].items()}

    def lose(self, packs: Iterable[str]) -> None:
        """Packs that are not there as they were written: what is in them must be made again."""
        lost = set(packs)
        self.pieces = {inside: piece for inside, piece in self.pieces.items() if piece.pack not in lost}


class PackedStorage:
    """A place, and what is packed in it."""

    def __init__(self, inner: StorageBackend) -> None:
        self.inner = inner
        self.root, self.address, self.far = inner.root, inner.address, inner.far
        self._renewed: set[str] = set()
        self._known: dict[str, PackIndex] = {}
        self._lock = threading.Lock()
        """Units are worked on by several threads: an index is counted once."""

    @cached_property
    def unpacked(self) -> Path:
        return self.root if self.far else cache_folder(self.address)

    # ---- the indexes

    def index(self, folder: str, *, anew: bool = False) -> PackIndex:
        """`anew`: another process may have packed since; then a look at the next number is taken."""
        known = self._known.get(folder)
        if known is None or anew:
            with self._lock:
                known = self._known.setdefault(folder, PackIndex())
                self._read_on(folder, known)
        return known

    def _read_on(self, folder: str, known: PackIndex) -> None:
        before = known.read
        while (said := self._read_index(f"{folder}/{FOLDER}/{known.read:06}")) is not None:
            known.add(said)
            known.read += 1
        if known.read > before:
            sizes = self.inner.sizes(list(known.packs))
            known.lose(pack for pack, size in known.packs.items() if sizes.get(pack) != size)

    def _read_index(self, path: str) -> dict[str, Any] | None:
        """None: there is no index of this number. One that is damaged has a copy; if that is too, it says nothing."""
        text = self.inner.read(f"{path}.gz")
        if text is None:
            return None
        return _parsed(text) or _parsed(self.inner.read(f"{path}.copy.gz") or b"") or _said()

    def add(self, folder: str, **said: Any) -> None:
        """Under the next number that is free."""
        text = gzip.compress(_signed(_said(**said)), mtime=0)
        while True:
            number = self.index(folder, anew=True).read
            if self.inner.create(f"{folder}/{FOLDER}/{number:06}.gz", text):
                break
        self.inner.create(f"{folder}/{FOLDER}/{number:06}.copy.gz", text)
        self.index(folder, anew=True)

    def _of(self, inside: str, *, anew: bool = False) -> PackIndex | None:
        folder = inside.rpartition("/")[0]
        return self.index(folder, anew=anew) if may_be_packed(folder) else None

    def _text(self, inside: str, *, anew: bool = False) -> bytes | None:
        index = self._of(inside, anew=anew)
        text = index.texts.get(inside) if index else None
        return None if text is None else text.encode()

    def _piece(self, inside: str, *, anew: bool = False) -> PackEntry | None:
        index = self._of(inside, anew=anew)
        return index.pieces.get(inside) if index else None

    # ---- reading: what is packed stands first; what is neither packed nor loose may have been packed meanwhile

    def read(self, inside: str) -> bytes | None:
        return self._text(inside) or self.inner.read(inside) or self._text(inside, anew=True)

    def trusts(self, inside: str) -> bool:
        """Whether the text there stands in an index, which holds a digest of all that it says."""
        index = self._of(inside)
        return index is not None and inside in index.texts

    def texts(self, insides: Sequence[str]) -> dict[str, bytes]:
        return self._together(insides, self._text, self.inner.texts)

    def sizes(self, insides: Sequence[str]) -> dict[str, int]:
        return self._together(insides, self._size, self.inner.sizes)

    def _size(self, inside: str) -> int | None:
        index = self._of(inside)
        if index is None:
            return None
        text, piece = index.texts.get(inside), index.pieces.get(inside)
        return len(text.encode()) if text is not None else piece.bytes if piece else None

    def _together(self, insides: Sequence[str], packed: Any, loose: Any) -> dict[str, Any]:
        found = {inside: one for inside in insides if (one := packed(inside)) is not None}
        rest = [inside for inside in insides if inside not in found]
        found |= loose(rest)
        rest = [inside for inside in rest if inside not in found]
        for folder in {inside.rpartition("/")[0] for inside in rest}:
            if may_be_packed(folder):
                self.index(folder, anew=True)
        return found | {inside: one for inside in rest if (one := packed(inside)) is not None}

    def local_path(self, inside: str) -> Path | None:
        here = self.root / inside
        if here.exists():
            return here
        piece, path = self._piece(inside), None
        if piece is None:
            path = self.inner.local_path(inside)
            if path is not None and path.exists():
                return path
            piece = self._piece(inside, anew=True)
        return self._unpack(inside, piece) if piece else path

    def _unpack(self, inside: str, piece: PackEntry) -> Path | None:
        target = self.unpacked / inside
        pack = None if target.exists() else self.inner.local_path(piece.pack)
        if pack is not None:
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = temporary_path(target.parent)
            try:
                with pack.open("rb") as file:
                    file.seek(piece.offset)
                    temporary.write_bytes(file.read(piece.bytes))
                temporary.replace(target)
            except FileNotFoundError:
                return None
            finally:
                temporary.unlink(missing_ok=True)
        return target if target.exists() else None

    def fetch(self, insides: Sequence[str]) -> None:
        packed = {inside: piece.pack for inside in insides if (piece := self._piece(inside))}
        self.inner.fetch([*(inside for inside in insides if inside not in packed), *sorted(set(packed.values()))])

    def refetch(self, inside: str) -> bool:
        piece = self._piece(inside)
        if piece is None:
            return self.inner.refetch(inside)
        (self.unpacked / inside).unlink(missing_ok=True)
        if piece.pack not in self._renewed:
            self._renewed.add(piece.pack)
            self.inner.refetch(piece.pack)
        path, loose = self._unpack(inside, piece), self.root / inside
        if path and path != loose and loose.exists() and loose.read_bytes() != path.read_bytes():
            self.inner.quarantine([inside])
        return path is not None

    def names(self, folder: str) -> list[str]:
        names = set(self.inner.names(folder)) - {FOLDER}
        if may_be_packed(folder):
            index = self.index(folder, anew=True)
            names |= {inside.rpartition("/")[2] for inside in (*index.texts, *index.pieces)}
        return sorted(names)

    def walk(self, folder: str = "") -> Iterator[FileInfo]:
        """Packed units as if they stood there; indexes and packs themselves, too, with the bytes that they add."""
        loose = {entry.inside: entry for entry in self.inner.walk(folder)}
        yield from loose.values()
        for first in [inside for inside in loose if inside.endswith(f"/{FOLDER}/000000.gz")]:
            index = self.index(str(PurePosixPath(first).parents[1]), anew=True)
            when = {pack: loose[pack].changed for pack in index.packs if pack in loose}
            for inside, text in index.texts.items():
                if inside not in loose:
                    yield FileInfo(inside, len(text.encode()), loose[first].changed, packed=True)
            for inside, piece in index.pieces.items():
                if inside not in loose:
                    yield FileInfo(inside, piece.bytes, when.get(piece.pack, 0.0), packed=True)

    # ---- writing

    def create(self, inside: str, text: str | bytes) -> bool:
        return self._text(inside) is None and self.inner.create(inside, text)

    def quarantine(self, insides: Iterable[str]) -> None:
        named = list(insides)
        for inside in named:
            text, piece = self._text(inside), self._piece(inside)
            kept = f"{QUARANTINE}/{uuid.uuid4().hex[:8]}-{PurePosixPath(inside).name}"
            path = self._unpack(inside, piece) if piece else None
            if text is not None:
                self.inner.create(kept, text)
            elif path is not None:
                copy = temporary_path(self.unpacked)
                shutil.copyfile(path, copy)
                self.inner.publish({copy: kept}, QUARANTINE)
        self._forget(named)
        self.inner.quarantine(named)

    def remove(self, insides: Iterable[str]) -> None:
        named = list(insides)
        self._forget(named)
        self.inner.remove(named)

    def _forget(self, insides: Sequence[str]) -> None:
        packed = [inside for inside in insides if self._text(inside) is not None or self._piece(inside)]
        for inside in packed:
            if self.unpacked != self.root:
                (self.unpacked / inside).unlink(missing_ok=True)
        for folder, gone in groupby(sorted(packed), key=lambda inside: inside.rpartition("/")[0]):
            self.add(folder, gone=list(gone))

    # ---- as the place itself does it

    def check(self) -> None:
        self.inner.check()

    def publish(self, places: Mapping[Path, str], folder: str) -> None:
        self.inner.publish(places, folder)

    def replace(self, inside: str, text: str) -> None:
        self.inner.replace(inside, text)

    def tidy(self) -> None:
        self.inner.tidy()


def may_be_packed(folder: str) -> bool:
    """Where units stand by the thousand; elsewhere nobody need look for an index."""
    return folder.endswith("/units") or (folder.startswith("tokens/") and folder.count("/") == 1)


def _said(**said: Any) -> dict[str, Any]:
    return {"texts": {}, "pieces": {}, "packs": {}, "gone": [], **said}


def _signed(said: Mapping[str, Any]) -> bytes:
    body = json.dumps(said, ensure_ascii=False).encode()
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def _parsed(text: bytes) -> dict[str, Any] | None:
    try:
        digest, _, body = gzip.decompress(text).partition(b"\n")
    except (OSError, EOFError, ValueError):
        return None
    if hashlib.sha256(body).hexdigest().encode() != digest:
        return None
    found: dict[str, Any] = json.loads(body)
    return found
