"""An object store behind the store: files are complete or absent, the first writer wins, and every file is checked."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import obstore
import pytest

from amalgam.pipeline.errors import AmalgamError, DamagedError, ExperimentError
from amalgam.pipeline.storage.fingerprint import fingerprint
from amalgam.pipeline.storage.object_store import ObjectStorage
from amalgam.pipeline.storage.small_files import copy_of, signed
from amalgam.pipeline.storage.store import HEAD, MANIFEST, MARK, Record, Store, StoredFile
from amalgam.tests.other_stores import SPOKEN
from amalgam.tests.s3_server import S3
from amalgam.tests.workspaces import flip_bit, objects, opened

TEXT = bytes(range(256)) * 3


@pytest.fixture(params=SPOKEN)
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def ours(scheme: str, server: S3) -> str:
    """Return an address on the server that tests can make fail."""
    return f"{scheme}://bucket/some where/prefix"


def elsewhere(address: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Opens the same workspace as another machine does, whose cache is empty."""
    monkeypatch.setenv("AMALGAM_CACHE", str(folder))
    return opened(address)


def put(store: Store, name: str, data: bytes = TEXT) -> Record:
    with store.draft(store.root / "stage/abc", name, ".bin") as draft:
        (draft.folder / "data.bin").write_bytes(data)
    record = store.record(store.root / f"stage/abc/{name}.json")
    assert record is not None
    return record


# ---- publishing


def test_a_unit_is_read_on_another_machine_as_it_was_written(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = put(opened(address), "one")
    remote = elsewhere(address, tmp_path / "other", monkeypatch)
    assert remote.record(remote.root / "stage/abc/one.json") == record
    assert remote.missing_files(record) == []
    path = remote.verified_path(record.files[0])
    assert path.read_bytes() == TEXT
    assert path.is_relative_to(tmp_path / "other")
    assert objects(address) == [record.files[0].path, "stage/abc/one.json"]


def test_a_unit_of_several_files_is_a_folder_on_another_machine(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(address)
    with store.draft(store.root / "stage/abc", "model") as draft:
        (draft.folder / "deep").mkdir()
        (draft.folder / "deep/b.txt").write_text("b")
        (draft.folder / "a.txt").write_text("a")
    remote = elsewhere(address, tmp_path / "other", monkeypatch)
    record = remote.record(remote.root / "stage/abc/model.json")
    assert record is not None
    folder = remote.verified_folder(record.files)
    assert {str(path.relative_to(folder)) for path in folder.rglob("*.txt")} == {"a.txt", "deep/b.txt"}


def test_an_exception_while_writing_publishes_nothing(address: str) -> None:
    store = opened(address)

    def write_and_fail() -> None:
        with store.draft(store.root / "stage/abc", "one", ".bin") as draft:
            (draft.folder / "data.bin").write_bytes(TEXT)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_and_fail()
    assert objects(address) == []


def test_an_upload_that_breaks_off_leaves_nothing_and_is_no_silence(
    ours: str, server: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULTS 14. Without obstore's patience, which is of minutes."""
    store = opened(ours)
    impatient(store, ours, monkeypatch)
    server.breaks_puts_of = ".bin"
    with pytest.raises(AmalgamError, match="object store"):
        put(store, "one")
    assert server.objects == {}
    server.breaks_puts_of = ""
    assert store.missing_files(put(store, "one")) == []


def impatient(store: Store, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from obstore.store import from_url

    client = from_url(address, client_options={"allow_http": True}, retry_config={"max_retries": 0})
    monkeypatch.setitem(store.backend.inner.__dict__, "_client", client)


def test_killed_between_data_and_record_the_unit_is_not_there(ours: str, server: S3) -> None:
    """FAULTS 2, on an object store."""
    dying = (
        "import os, sys; from pathlib import Path; from amalgam.pipeline.storage.object_store import ObjectStorage\n"
        "from amalgam.tests.pipeline.test_bucket import opened, put\n"
        "ObjectStorage.put_if_absent = lambda *_: os._exit(137)\n"
        "put(opened(sys.argv[1]), 'one')"
    )
    assert subprocess.run([sys.executable, "-c", dying, ours], check=False).returncode == 137
    assert [key.rpartition(".")[2] for key in server.objects] == ["bin"]
    store = opened(ours)
    assert store.records([store.root / "stage/abc/one.json"]) == {}
    assert store.missing_files(put(store, "one")) == []


# ---- two writers


def test_of_two_writers_the_first_record_wins_and_the_second_gets_it(address: str) -> None:
    """FAULTS 15."""
    first = put(opened(address), "one", TEXT)
    store = opened(address)
    with store.draft(store.root / "stage/abc", "one", ".bin") as draft:
        (draft.folder / "data.bin").write_bytes(TEXT[::-1])
    assert draft.rival == first
    assert store.verified_path(first.files[0]).read_bytes() == TEXT


def test_a_manifest_is_written_once(address: str) -> None:
    one, other = opened(address), opened(address)
    path = one.root / "stage" / fingerprint({}) / MANIFEST
    assert one.commit(path, Record("stage", (), {"by": "one"})).facts == {"by": "one"}
    assert other.commit(path, Record("stage", (), {"by": "other"})).facts == {"by": "one"}
    assert not other.backend.put_if_absent(one.inside(path), b"anything")


def test_head_entries_of_two_machines_at_once_all_stay(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other machine stores its entries after the first has read HEAD.json, and before it writes it."""
    one, other = opened(address), opened(address)
    others = [("b", "2" * 20), ("c", "3" * 20)]

    def late(content: Mapping[str, Any]) -> bytes:
        if others:
            other.move_head(*others.pop())
        return signed(content)

    monkeypatch.setattr("amalgam.pipeline.storage.store.signed", late)
    one.move_head("a", "1" * 20)
    assert {stage: entry["fingerprint"][0] for stage, entry in one.head().items()} == {"a": "1", "b": "2", "c": "3"}
    texts = other.backend.read([HEAD, copy_of(HEAD)])
    assert texts[HEAD] == texts[copy_of(HEAD)]


def test_a_store_that_refuses_every_change_is_named(ours: str, server: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(ours)
    store.move_head("a", "1" * 20)
    numbers = count()
    monkeypatch.setattr(server.RequestHandlerClass, "version", lambda *_: str(next(numbers)))
    monkeypatch.setattr("amalgam.pipeline.storage.object_store.MOST_CONFLICTS", 3)
    with pytest.raises(AmalgamError, match="If-Match"):
        store.move_head("a", "2" * 20)


def test_a_prefix_with_other_objects_is_refused_and_a_new_one_is_marked(address: str) -> None:
    store = opened(address)
    store.check_workspace()
    store.claim()
    mark = store.read_json(store.root / MARK)
    assert mark is not None
    opened(address).claim()
    assert opened(address).read_json(store.root / MARK) == mark
    theirs = opened(f"{address}-theirs")
    theirs.backend.put({"a/b/c.parquet": b"theirs"})
    with pytest.raises(ExperimentError) as refused:
        opened(theirs.backend.address).check_workspace()
    assert "execution.workspace" in (refused.value.fix or "")
    with pytest.raises(ExperimentError):
        opened(theirs.backend.address).claim()
    assert [entry.path for entry in theirs.backend.list()] == ["a/b/c.parquet"]


# ---- damage


def test_a_damaged_copy_is_fetched_again(address: str) -> None:
    store = opened(address)
    file = put(store, "one").files[0]
    flip_bit(store.path(file))
    again = opened(address)
    assert again.verified_path(file).read_bytes() == TEXT
    assert objects(address) == [file.path, "stage/abc/one.json"]


@pytest.mark.parametrize(
    ("harm", "fault"),
    [
        (lambda data: data[:-1], "size 767, expected 768"),
        (lambda data: data[:400] + bytes([data[400] ^ 1]) + data[401:], "content"),
    ],
)
def test_a_damaged_object_is_named_set_aside_and_may_be_written_again(
    ours: str, server: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: Callable[[bytes], bytes], fault: str
) -> None:
    file = put(opened(ours), "one").files[0]
    [key] = [key for key in server.objects if key.endswith(".bin")]
    server.objects[key] = harm(TEXT), 0
    remote = elsewhere(ours, tmp_path / "other", monkeypatch)
    with pytest.raises(DamagedError) as raised:
        remote.verified_path(file)
    assert file.path in raised.value.what
    assert fault in raised.value.what
    assert raised.value.where == f"{ours}/{file.path}"
    assert key not in server.objects
    assert [data for name, (data, _) in server.objects.items() if "/quarantine/" in name] == [harm(TEXT)]
    assert remote.verified_path(put(remote, "one").files[0]).read_bytes() == TEXT


def test_a_store_that_does_not_answer_is_not_an_empty_one(
    ours: str, server: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(ours)
    impatient(store, ours, monkeypatch)
    server.shutdown()
    server.server_close()
    with pytest.raises(AmalgamError, match="object store") as raised:
        store.manifest("stage", "abc")
    assert "canary" not in str(raised.value)


@pytest.mark.parametrize("address", ["s3://", "s3://key:secret@bucket/x", "s3://bucket/x?versionId=3"])
def test_an_address_that_is_none_or_holds_keys_is_refused(address: str) -> None:
    with pytest.raises(ExperimentError, match="BUCKET/PREFIX"):
        opened(address)


def test_a_library_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.delitem(sys.modules, "amalgam.pipeline.storage.object_store")
    with pytest.raises(ExperimentError, match=r"obstore\nwhere: gs://bucket/x\nfix: .*'amalgam-distill\[gs\]'"):
        opened("gs://bucket/x")


# ---- requests for many objects


def test_many_records_cost_a_listing_and_a_request_each_and_missing_ones_nothing(ours: str, server: S3) -> None:
    store = opened(ours)
    records = {store.root / f"stage/abc/u{n}.json": put(store, f"u{n}", bytes([n])) for n in range(40)}
    server.asked.clear()
    wanted = [*records, *(store.root / f"stage/abc/none{n}.json" for n in range(500))]
    assert opened(ours).records(wanted) == records
    assert server.asked["GET"] == 40
    assert server.asked["HEAD"] == 0
    assert server.asked["LIST"] <= 2


def test_many_records_written_after_a_listing_are_read(ours: str) -> None:
    store, writer = opened(ours), opened(ours)
    paths = [store.root / f"stage/abc/u{n}.json" for n in range(40)]
    assert store.records(paths) == {}
    for n in range(40):
        put(store if n % 2 else writer, f"u{n}", bytes([n]))
    assert len(store.records(paths)) == 40


def test_files_missing_from_a_listing_are_requested_by_name(ours: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(ours)
    files = [put(store, f"u{n}", bytes([n])).files[0] for n in range(20)]
    monkeypatch.setattr(ObjectStorage, "files_below", lambda *_: [])
    assert store.missing_files(Record("all", (*files, StoredFile("stage/abc/no", 1, "0" * 64)))) == [
        (StoredFile("stage/abc/no", 1, "0" * 64), "missing")
    ]


# ---- removal


def test_a_removed_file_is_missing_although_this_machine_has_a_copy(address: str) -> None:
    store = opened(address)
    file = put(store, "one").files[0]
    store.backend.delete([file.path])
    assert store.path(file).exists()
    assert opened(address).check_file(file, refetch=True) == "missing"


def test_a_removed_file_is_missing_although_a_listing_had_it(address: str) -> None:
    store = opened(address)
    files = [put(store, f"u{n}", bytes([n])).files[0] for n in range(20)]
    assert store.missing_files(Record("all", tuple(files))) == []
    store.backend.delete([files[7].path])
    assert store.missing_files(Record("all", tuple(files))) == [(files[7], "missing")]


def test_a_removed_file_is_missing_although_another_thread_listed_it_meanwhile(
    ours: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, delete = opened(ours), obstore.delete
    files = [put(store, f"u{n}", bytes([n])).files[0] for n in range(20)]

    def overtaken(client: Any, batch: Sequence[str]) -> None:
        assert store.missing_files(Record("all", tuple(files))) == []
        delete(client, batch)

    monkeypatch.setattr(obstore, "delete", overtaken)
    store.backend.delete([files[7].path])
    assert store.missing_files(Record("all", tuple(files))) == [(files[7], "missing")]


def test_of_many_that_are_removed_some_are_gone_already(address: str) -> None:
    store = opened(address)
    names = [f"stage/abc/some {n}.json" for n in range(300)]
    for name in names[::2]:
        store.backend.put_if_absent(name, b"{}")
    store.backend.put_if_absent("stage/abc/stays.json", b"{}")
    store.backend.delete(names)
    assert objects(address) == ["stage/abc/stays.json"]


def test_a_listing_of_several_pages_is_whole(ours: str, server: S3) -> None:
    prefix = ours.partition("://")[2]
    for number in range(2500):
        server.put(f"{prefix}/stage/abc/u{number:04}.json", b"{}")
    place = opened(ours).backend
    assert len(list(place.list())) == 2500
    assert len(place.names("stage/abc")) == 2500
    assert place.names("stage") == ["abc"]


def test_a_store_that_overwrites_is_refused(ours: str, server: S3) -> None:
    opened(ours).backend.check()
    server.puts_if_absent = False
    with pytest.raises(ExperimentError, match="object store"):
        opened(ours).backend.check()
