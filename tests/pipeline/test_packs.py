"""Many small units become few large files, at any moment, under readers and writers, and on any kind of place."""

from __future__ import annotations

import gzip
import os
import shutil
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from amalgam.pipeline.errors import DamagedError
from amalgam.pipeline.storage import compaction
from amalgam.pipeline.storage.compaction import compact, loose_units
from amalgam.pipeline.storage.store import Record, Store
from amalgam.tests.pipeline.crashing import changing, killed_at
from amalgam.tests.s3_server import serving
from amalgam.tests.workspaces import flip_bit, opened

UNITS = 40
FOLDER = "stage/family/units"


@pytest.fixture(autouse=True)
def _a_cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMALGAM_CACHE", str(tmp_path / "cache"))


@pytest.fixture(params=["disk", "bucket"])
def workspace(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "disk":
        yield str(tmp_path / "artifacts")
        return
    with serving() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", os.environ.get("AMALGAM_TEST_S3", server.url))
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "who")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "what")
        yield f"s3://bucket/packs/{time.time_ns()}"


def content(number: int) -> bytes:
    return bytes([number]) * (100 + number)


def put(store: Store, number: int, data: bytes | None = None) -> Record:
    with store.draft(store.root / FOLDER, f"u{number:02}", ".bin") as draft:
        (draft.folder / "data.bin").write_bytes(content(number) if data is None else data)
    record = store.record(store.root / FOLDER / f"u{number:02}.json")
    assert record is not None
    return record


def filled(workspace: str, units: int = UNITS) -> dict[Path, Record]:
    store = opened(workspace)
    return {store.root / FOLDER / f"u{number:02}.json": put(store, number) for number in range(units)}


def pack_all(workspace: str) -> int:
    store = opened(workspace)
    return sum(compact(store, *folder) for folder in loose_units(store, store.backend.list()).items())


def without_loose_files(store: Store) -> None:
    """As gc leaves a disk when a day has gone by."""
    store.backend.inner.delete(sorted(store.backend.index(FOLDER).pieces))


def assert_whole(store: Store, records: dict[Path, Record]) -> None:
    assert store.records(list(records)) == records
    assert set(store.units_in(store.root / FOLDER)) == set(records)
    for number, record in enumerate(records.values()):
        assert store.missing_files(record) == []
        assert store.verified_path(record.files[0]).read_bytes() == content(number)


# ---- packing


def test_packed_units_are_what_they_were_and_few_files_remain(
    workspace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = filled(workspace)
    assert pack_all(workspace) == UNITS
    without_loose_files(opened(workspace))
    monkeypatch.setenv("AMALGAM_CACHE", str(tmp_path / "another machine"))
    store = opened(workspace)
    assert len(list(store.backend.inner.list())) == 3  # a pack, its index, and a copy of that
    assert {path.name for path in records} == {path.name for path in store.units_in(store.root / FOLDER)}
    assert_whole(store, {store.root / FOLDER / path.name: record for path, record in records.items()})
    assert pack_all(workspace) == 0


def test_later_units_are_packed_into_files_of_their_own(workspace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "PACK_BYTES", 500)
    filled(workspace, 20)
    assert pack_all(workspace) == 20
    records = filled(workspace)
    assert pack_all(workspace) == 20
    store = opened(workspace)
    assert store.backend.index(FOLDER).read == 2
    assert len(store.backend.index(FOLDER).packs) > 4
    assert_whole(store, records)


def test_few_units_large_ones_and_those_of_several_files_stay_as_they_are(
    workspace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(workspace, 10)
    assert pack_all(workspace) == 0
    records = filled(workspace)
    monkeypatch.setattr(compaction, "SMALL", 119)
    store = opened(workspace)
    with store.draft(store.root / FOLDER, "two") as draft:
        (draft.folder / "a").write_bytes(b"a")
        (draft.folder / "b").write_bytes(b"b")
    assert pack_all(workspace) == 20
    two = store.root / FOLDER / "two.json"
    assert set(opened(workspace).records([*records, two])) == {*records, two}


def test_a_damaged_unit_is_not_packed(tmp_path: Path) -> None:
    workspace = str(tmp_path / "artifacts")
    path, record = next(iter(filled(workspace).items()))
    flip_bit(opened(workspace).path(record.files[0]))
    assert pack_all(workspace) == UNITS - 1
    assert path.exists()
    with pytest.raises(DamagedError):
        opened(workspace).verified_path(record.files[0])


def test_a_deleted_unit_leaves_no_unpacked_copy(tmp_path: Path) -> None:
    workspace = str(tmp_path / "artifacts")
    record = next(iter(filled(workspace).values()))
    pack_all(workspace)
    store = opened(workspace)
    without_loose_files(store)
    copy = store.verified_path(record.files[0])
    store.backend.delete([record.files[0].path])
    assert copy.is_relative_to(tmp_path / "cache")
    assert not copy.exists()


def test_a_packed_unit_is_not_written_twice(workspace: str) -> None:
    records = filled(workspace)
    pack_all(workspace)
    store = opened(workspace)
    assert put(store, 3, b"other bytes") == records[store.root / FOLDER / "u03.json"]
    assert_whole(opened(workspace), records)


# ---- damage


def test_a_unit_that_another_process_packed_since_is_not_written_twice(workspace: str) -> None:
    early = opened(workspace)
    assert early.units_in(early.root / FOLDER) == []  # it has read the index
    records = filled(workspace)
    assert pack_all(workspace) == UNITS
    without_loose_files(opened(workspace))
    with early.draft(early.root / FOLDER, "u00", ".bin") as draft:
        (draft.folder / "data.bin").write_bytes(b"of another rounding")
    assert draft.rival is not None
    assert_whole(opened(workspace), records)
    assert pack_all(workspace) == 0


def test_a_flipped_bit_in_a_pack_costs_one_unit(
    workspace: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    records = filled(workspace)
    pack_all(workspace)
    without_loose_files(opened(workspace))
    store = opened(workspace)
    path, record = list(records.items())[7]
    piece = store.backend.index(FOLDER).pieces[record.files[0].path]
    pack = store.backend.local_path(piece.pack)
    assert pack is not None
    flip_bit(pack, piece.offset + 5)
    store.backend.inner.put({piece.pack: pack.read_bytes()})
    monkeypatch.setenv("AMALGAM_CACHE", str(tmp_path / "another machine"))
    other = opened(workspace)
    with pytest.raises(DamagedError, match="content"):
        other.verified_path(record.files[0])
    path = other.root / FOLDER / path.name
    assert other.record(path) == record
    assert other.missing_files(record) == [(record.files[0], "missing")]
    assert [entry.bytes for entry in other.backend.list("quarantine")] == [107]
    put(other, 7)
    assert_whole(opened(workspace), {other.root / FOLDER / one.name: record for one, record in records.items()})


def test_without_its_pack_a_unit_is_not_whole_and_may_be_made_again(workspace: str) -> None:
    records = filled(workspace)
    pack_all(workspace)
    store = opened(workspace)
    without_loose_files(store)
    store.backend.inner.delete(list(store.backend.index(FOLDER).packs))
    shutil.rmtree(store.backend.unpacked, ignore_errors=True)
    assert opened(workspace).records(list(records)) == {}
    assert filled(workspace) == records
    assert_whole(opened(workspace), records)


def test_set_aside_by_hand_packed_units_are_gone(workspace: str) -> None:
    records = filled(workspace)
    pack_all(workspace)
    store = opened(workspace)
    units = list(records)[:3]
    store.quarantine(*units)
    assert set(opened(workspace).records(list(records))) == set(list(records)[3:])
    assert store.backend.index(FOLDER).read == 2  # recorded in one index, not in three


# ---- at any moment


def test_killed_at_every_change_nothing_is_lost(tmp_path: Path) -> None:
    """On a disk: every change to the file system is one."""
    made = tmp_path / "made"
    filled(str(made), 20)
    points = 0
    while True:
        here = tmp_path / str(points)
        shutil.copytree(made, here)
        killed = killed_at(points + 1, here, lambda here=here: pack_all(str(here)))  # type: ignore[misc]
        store = opened(str(here))
        records = {store.root / FOLDER / path.name: one for path, one in _records(made).items()}
        assert_whole(store, records)
        if not killed:
            break
        points += 1
        pack_all(str(here))
        assert_whole(opened(str(here)), records)
        assert not list((here / FOLDER).glob("*.json"))
        shutil.rmtree(here)
    assert points > 25


def _records(root: Path) -> dict[Path, Record]:
    store = Store(root)
    return store.records(store.units_in(root / FOLDER))


def test_killed_before_every_change_to_an_object_store_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "who")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "what")
        filled("s3://bucket/made", 20)
        made, points = dict(server.objects), 0
        while True:
            server.restore(made)
            monkeypatch.setenv("AMALGAM_CACHE", str(tmp_path / f"cache{points}"))
            with monkeypatch.context() as patch:
                killed = changing(points + 1, lambda: pack_all("s3://bucket/made"), patch)
            monkeypatch.setenv("AMALGAM_CACHE", str(tmp_path / f"reader{points}"))
            store = opened("s3://bucket/made")
            records = {path: one for path in store.units_in(store.root / FOLDER) if (one := store.record(path))}
            assert len(records) == 20
            assert_whole(store, records)
            if not killed:
                break
            points += 1
    assert points >= 4


def test_readers_and_a_second_compaction_at_the_same_time_see_every_unit(workspace: str) -> None:
    records = filled(workspace)
    faults: list[Any] = []
    done = threading.Event()

    def read() -> None:
        try:
            while not done.is_set():
                assert_whole(opened(workspace), records)
        except BaseException as error:  # noqa: BLE001  told below
            faults.append(error)

    readers = [threading.Thread(target=read) for _ in range(2)]
    packers = [threading.Thread(target=pack_all, args=(workspace,)) for _ in range(2)]
    for thread in (*readers, *packers):
        thread.start()
    for thread in packers:
        thread.join()
    done.set()
    for thread in readers:
        thread.join()
    assert faults == []
    assert_whole(opened(workspace), records)


def test_a_reader_that_knew_the_units_as_loose_finds_them_packed(workspace: str) -> None:
    records = filled(workspace)
    reader = opened(workspace)
    assert reader.records(list(records)) == records
    pack_all(workspace)
    without_loose_files(opened(workspace))
    shutil.rmtree(reader.root / FOLDER / "copies", ignore_errors=True)
    assert_whole(reader, records)


@pytest.mark.parametrize("lost", [None, b"", b"garbage"])
def test_a_lost_index_is_read_from_its_copy(workspace: str, lost: bytes | None) -> None:
    records = filled(workspace)
    pack_all(workspace)
    store = opened(workspace)
    without_loose_files(store)
    packed = {entry.path for entry in store.backend.list() if entry.packed}
    path = f"{FOLDER}/packs/000000.gz"
    store.backend.inner.delete([path]) if lost is None else store.backend.inner.put({path: lost})
    again = opened(workspace)
    assert_whole(again, records)
    assert {entry.path for entry in again.backend.list() if entry.packed} == packed
    put(again, UNITS)
    assert pack_all(workspace) == 0
    assert_whole(opened(workspace), {**records, again.root / FOLDER / f"u{UNITS:02}.json": put(again, UNITS)})


@pytest.mark.parametrize("path", ["../mine.bin", "/mine.bin", "a/../../mine.bin"])
def test_an_index_that_names_a_path_outside_is_damaged(tmp_path: Path, path: str) -> None:
    store = opened(str(tmp_path / "artifacts"))
    (tmp_path / "mine.bin").write_bytes(b"mine")
    for number, pieces in enumerate(({path: [f"{FOLDER}/packs/a.pack", 0, 1]}, {f"{FOLDER}/a": [path, 0, 1]})):
        store.backend.add(FOLDER, texts={f"{FOLDER}/a.json": "{}"}, pieces=pieces, packs={})
        index = opened(str(tmp_path / "artifacts")).backend.index(FOLDER)
        assert (index.read, index.texts, index.pieces) == (number + 1, {}, {})
    assert (tmp_path / "mine.bin").read_bytes() == b"mine"


@pytest.mark.parametrize("place", [[float("inf"), 1], [0, float("nan")], [0, -1], ["0", {}], [2**70, 1]])
def test_an_index_with_impossible_numbers_is_damaged(tmp_path: Path, place: list[Any]) -> None:
    store = opened(str(tmp_path / "artifacts"))
    pieces = {f"{FOLDER}/a": [f"{FOLDER}/packs/a.pack", *place]}
    store.backend.add(FOLDER, texts={f"{FOLDER}/a.json": "{}"}, pieces=pieces, packs={})
    index = opened(str(tmp_path / "artifacts")).backend.index(FOLDER)
    assert (index.read, index.texts, index.pieces) == (1, {}, {})


def damage(store: Store, *paths: str) -> None:
    for path in paths:
        store.backend.inner.put({path: store.backend.inner.read([path])[path][:-9] + b"\0" * 9})


def mended(store: Store) -> dict[str, bool]:
    """Write damaged indexes again; return whether each is from its copy."""
    damaged = store.backend.damaged_indexes(FOLDER)
    store.backend.put_indexes(FOLDER, {path: text for path, (text, _) in damaged.items()})
    return {path: is_copied for path, (_, is_copied) in damaged.items()}


@pytest.mark.parametrize("lost", ["000000.gz", "000000.copy.gz"])
def test_a_damaged_index_is_restored_from_the_other(workspace: str, lost: str) -> None:
    records = filled(workspace)
    pack_all(workspace)
    path = f"{FOLDER}/packs/{lost}"
    store = opened(workspace)
    before = store.backend.inner.read([path])
    damage(store, path)
    assert mended(store) == {path: True}
    assert store.backend.inner.read([path]) == before
    assert mended(opened(workspace)) == {}
    assert_whole(store, records)


def test_a_lost_index_is_rebuilt_from_its_packs(workspace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "PACK_BYTES", 500)
    filled(workspace, 20)
    pack_all(workspace)
    records = filled(workspace)
    pack_all(workspace)
    without_loose_files(opened(workspace))
    paths = [f"{FOLDER}/packs/000000.gz", f"{FOLDER}/packs/000000.copy.gz"]
    damage(opened(workspace), *paths)
    assert_whole(opened(workspace), records)  # a reader needs no repair
    store = opened(workspace)
    assert mended(store) == dict.fromkeys(paths, False)
    assert_whole(opened(workspace), records)
    assert mended(opened(workspace)) == {}


def test_a_unit_that_is_damaged_in_its_pack_is_taken_from_its_loose_file(tmp_path: Path) -> None:
    workspace = str(tmp_path / "artifacts")
    records = filled(workspace)
    pack_all(workspace)
    [pack] = (tmp_path / "artifacts" / FOLDER / "packs").glob("*.pack")
    flip_bit(pack, 50)
    flip_bit(tmp_path / "artifacts" / records[tmp_path / "artifacts" / FOLDER / "u05.json"].files[0].path, 50)
    store, notes = opened(workspace), list[str]()
    store.notify = notes.append
    assert [store.check_file(record.files[0], refetch=True) for record in records.values()] == [None] * UNITS
    assert len(notes) == 1
    without_loose_files(opened(workspace))
    assert_whole(opened(workspace), records)


def test_a_unit_whose_loose_file_is_damaged_is_read_from_its_pack(tmp_path: Path) -> None:
    """On a disk, loose files stay for a day after they are packed."""
    workspace = str(tmp_path / "artifacts")
    records = filled(workspace)
    pack_all(workspace)
    flip_bit(tmp_path / "artifacts" / next(iter(records.values())).files[0].path)
    assert_whole(opened(workspace), records)


def test_an_index_that_unpacks_to_gigabytes_is_rebuilt_from_its_packs(tmp_path: Path) -> None:
    filled(str(tmp_path / "artifacts"))
    store = opened(str(tmp_path / "artifacts"))
    [(folder, loose)] = loose_units(store, store.backend.list()).items()
    compact(store, folder, loose)
    for path in tmp_path.rglob("000000*.gz"):
        path.write_bytes(gzip.compress(bytes(1 << 26)))
    tracemalloc.start()
    assert len(opened(str(tmp_path / "artifacts")).units(tmp_path / "artifacts" / FOLDER)) == UNITS
    assert tracemalloc.get_traced_memory()[1] < 1 << 25
    tracemalloc.stop()


def test_a_record_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    filled(str(tmp_path / "artifacts"))
    store = opened(str(tmp_path / "artifacts"))
    record = store.root / FOLDER / "u03.json"
    with record.open("r+b") as file:
        file.truncate(1 << 33)
    tracemalloc.start()
    assert len(store.units(store.root / FOLDER)) == UNITS - 1
    assert tracemalloc.get_traced_memory()[1] < 1 << 25
    tracemalloc.stop()
