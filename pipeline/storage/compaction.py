"""Packs many small units into few files: a folder of an object store answers one request instead of thousands."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from amalgam.pipeline.storage.backend import FileInfo
from amalgam.pipeline.storage.packing import FOLDER, PackIndex, may_be_packed, pack_end
from amalgam.pipeline.storage.store import Record, Store, StoredFile, parsed_record

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
        records, places = {path: text.decode() for path, text, _, _ in group}, _places(group)
        content = b"".join([*(data for _, _, _, data in group), pack_end(records, places)])
        pack = f"{folder}/{FOLDER}/{hashlib.sha256(content).hexdigest()[:20]}.pack"
        store.backend.put({pack: content})
        texts |= records
        pieces |= {path: (pack, *place) for path, place in places.items()}
        packs[pack] = len(content)
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
        records = {path: record for path, text in texts.items() if (record := parsed_record(path, text)) is not None}
        files = {path: record.files[0] for path, record in records.items() if len(record.files) == 1}
        files = {path: file for path, file in files.items() if file.bytes <= SMALL}
        store.backend.fetch([file.path for file in files.values()])
        for path, file in files.items():
            if store.check_file(file) is None:
                yield path, texts[path], file, store.path(file).read_bytes()


def _places(group: Sequence[SmallUnit]) -> dict[str, tuple[int, int]]:
    """Returns the offset and the length of each file in its pack, which begins with the files."""
    ends = list(accumulate(len(data) for _, _, _, data in group))
    return {file.path: (end - len(data), len(data)) for (_, _, file, data), end in zip(group, ends, strict=True)}


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
