"""Packs many small units into few large files, reads them back through the index, and only then removes them.

A kill loses nothing: a unit is loose, packed, or both. On a disk the loose files stay for a day, for processes that
are about to read them; readers of an object store have copies.
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
"""Size limit of a packed file."""

PACK_BYTES = 64 << 20
"""Approximate size of a pack."""

LEAST = 16
"""Number of loose units from which a folder is packed."""

AT_ONCE = 256
"""Number of units whose files are fetched together."""


@dataclass(frozen=True)
class PackCandidates:
    """The small units of a folder, by the paths of their records."""

    folder: str
    new: tuple[str, ...]
    packed: tuple[str, ...]
    """Units that are packed already: an earlier run was stopped before it removed their loose files."""


def loose_units(store: Store, entries: Iterable[FileInfo]) -> Iterator[PackCandidates]:
    """Yields the folders with many small units."""
    large: set[str] = set()
    records: dict[str, list[str]] = {}
    for entry in entries:
        folder, _, name = entry.path.rpartition("/")
        if may_be_packed(folder) and not entry.packed:
            if name.endswith(".json"):
                records.setdefault(folder, []).append(entry.path)
            elif entry.bytes > SMALL:
                large.add(entry.path.rpartition("-")[0] + ".json")
    for folder, insides in sorted(records.items()):
        texts = store.backend.index(folder, refresh=True).texts
        packed = tuple(inside for inside in sorted(insides) if inside in texts)
        new = tuple(inside for inside in sorted(insides) if inside not in large and inside not in texts)
        if packed or len(new) >= LEAST:
            yield PackCandidates(folder, new if len(new) >= LEAST else (), packed)


def compact(store: Store, loose: PackCandidates) -> int:
    """Packs the units and returns their number; damaged and incomplete units stay loose."""
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
    """Yields the units of one small file that matches its digest."""
    for start in range(0, len(loose.new), AT_ONCE):
        batch = loose.new[start : start + AT_ONCE]
        texts = store.backend.inner.read(batch)
        records = {
            store.inside(path): record for path, record in store.records([store.root / p for p in batch]).items()
        }
        small = {
            p: record for p, record in records.items() if len(record.files) == 1 and record.files[0].bytes <= SMALL
        }
        store.backend.fetch([record.files[0].path for record in small.values()])
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
        store.backend.put({inside: temporary})
    finally:
        temporary.unlink(missing_ok=True)
    return inside, size


def _remove(store: Store, loose: PackCandidates) -> None:
    """Removes loose records that equal their packed ones, and their files where no other process may read them."""
    index = store.backend.index(loose.folder)
    contents = store.backend.inner.read([path for path in (*loose.packed, *loose.new) if path in index.texts])
    same = [path for path, content in contents.items() if content == index.texts[path].encode()]
    store.backend.inner.delete(same)
    if store.backend.is_remote:
        store.backend.inner.delete(sorted(_files(index.texts[path] for path in same) & index.pieces.keys()))


def _files(texts: Iterable[str]) -> set[str]:
    return {file.path for text in texts for file in Record.from_json(text).files}
