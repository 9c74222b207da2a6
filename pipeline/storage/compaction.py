"""Many small units become few large files: packed, read back through the index, and only then removed.

Killed anywhere, nothing is lost: a unit stands loose, or packed, or both. On a disk the loose files stay for a day,
for readers that were told of them; of an object store, readers have copies.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from amalgam.pipeline.storage.backend import FileInfo
from amalgam.pipeline.storage.local import temporary_path
from amalgam.pipeline.storage.packing import FOLDER, may_be_packed
from amalgam.pipeline.storage.store import Record, Store

SMALL = 4 << 20
"""Files up to so many bytes are packed,"""

PACK_BYTES = 64 << 20
"""into files of about so many."""

LEAST = 16
"""Loose units that make it worth while."""

AT_ONCE = 256
"""Units whose files are fetched together."""


@dataclass(frozen=True)
class PackCandidates:
    """Small units of a folder, by their records."""

    folder: str
    new: tuple[str, ...]
    packed: tuple[str, ...]
    """These stand in a pack too: whoever packed them was stopped before the end."""


def loose_units(store: Store, entries: Iterable[FileInfo]) -> Iterator[PackCandidates]:
    """Folders in which many small units stand."""
    large: set[str] = set()
    records: dict[str, list[str]] = {}
    for entry in entries:
        folder, _, name = entry.inside.rpartition("/")
        if may_be_packed(folder) and not entry.packed:
            if name.endswith(".json"):
                records.setdefault(folder, []).append(entry.inside)
            elif entry.bytes > SMALL:
                large.add(entry.inside.rpartition("-")[0] + ".json")
    for folder, insides in sorted(records.items()):
        known = store.backend.index(folder, anew=True).texts
        packed = tuple(inside for inside in sorted(insides) if inside in known)
        new = tuple(inside for inside in sorted(insides) if inside not in large and inside not in known)
        if packed or len(new) >= LEAST:
            yield PackCandidates(folder, new if len(new) >= LEAST else (), packed)


def compact(store: Store, loose: PackCandidates) -> int:
    """How many units were packed. Those that are damaged or not whole stay as they are."""
    texts: dict[str, str] = {}
    pieces: dict[str, tuple[str, int, int]] = {}
    packs: dict[str, int] = {}
    for group in _groups(_small_units(store, loose)):
        pack, size = _publish(store, loose.folder, group)
        packs[pack] = size
        offset = 0
        for inside, (record, text) in group.items():
            [file] = record.files
            texts[inside], pieces[file.path] = text, (pack, offset, file.bytes)
            offset += file.bytes
    if texts:
        store.backend.add(loose.folder, texts=texts, pieces=pieces, packs=packs)
    _remove(store, loose)
    return len(texts)


Group = dict[str, tuple[Record, str]]


def _small_units(store: Store, loose: PackCandidates) -> Iterator[tuple[str, Record, str]]:
    """Those of one file that is what was written."""
    for start in range(0, len(loose.new), AT_ONCE):
        some = loose.new[start : start + AT_ONCE]
        texts = store.backend.inner.texts(some)
        found = {store.inside(path): one for path, one in store.records([store.root / name for name in some]).items()}
        small = {name: one for name, one in found.items() if len(one.files) == 1 and one.files[0].bytes <= SMALL}
        store.backend.fetch([one.files[0].path for one in small.values()])
        for name, record in small.items():
            if name in texts and store.check_file(record.files[0]) is None:
                yield name, record, texts[name].decode()


def _groups(units: Iterable[tuple[str, Record, str]]) -> Iterator[Group]:
    group: Group = {}
    size = 0
    for inside, record, text in units:
        group[inside] = record, text
        size += record.files[0].bytes
        if size >= PACK_BYTES:
            yield group
            group, size = {}, 0
    if group:
        yield group


def _publish(store: Store, folder: str, group: Mapping[str, tuple[Record, str]]) -> tuple[str, int]:
    target = f"{folder}/{FOLDER}"
    temporary = temporary_path(store.root / folder)
    temporary.parent.mkdir(parents=True, exist_ok=True)
    digest, size = hashlib.sha256(), 0
    try:
        with temporary.open("wb") as pack:
            for record, _ in group.values():
                content = store.verified_path(record.files[0]).read_bytes()
                digest.update(content)
                size += pack.write(content)
        inside = f"{target}/{digest.hexdigest()[:20]}.pack"
        store.backend.publish({temporary: inside}, target)
    finally:
        temporary.unlink(missing_ok=True)
    return inside, size


def _remove(store: Store, loose: PackCandidates) -> None:
    """Records that say what their packed ones say; and files where no reader holds on to them."""
    index = store.backend.index(loose.folder)
    there = store.backend.inner.texts([inside for inside in (*loose.packed, *loose.new) if inside in index.texts])
    same = [inside for inside, text in there.items() if text == index.texts[inside].encode()]
    store.backend.inner.remove(same)
    if store.backend.far:
        store.backend.inner.remove(sorted(_files(index.texts[inside] for inside in same) & index.pieces.keys()))


def _files(texts: Iterable[str]) -> set[str]:
    return {file.path for text in texts for file in Record.from_json(text).files}
