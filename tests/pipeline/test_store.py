"""Units and records: published whole or not at all, read back checked, the first writer wins."""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from amalgam.pipeline.errors import DamagedError, ExperimentError
from amalgam.pipeline.storage import local
from amalgam.pipeline.storage.backend import TEMPORARY
from amalgam.pipeline.storage.facts import DECLARED, FactTypes
from amalgam.pipeline.storage.fingerprint import fingerprint
from amalgam.pipeline.storage.small_files import signed
from amalgam.pipeline.storage.store import LAYOUT, MANIFEST, MARK, Record, Store, StoredFile, canonical_record
from amalgam.tests.pipeline.crashing import fork, wait

TEXT = bytes(range(256)) * 3


def _put(store: Store, name: str, data: bytes, *, folder: str = "stage/abc") -> Record:
    with store.draft(store.root / folder, name, ".bin") as draft:
        (draft.folder / "data.bin").write_bytes(data)
        draft.facts = {"bytes": len(data)}
    record = store.record(store.root / folder / f"{name}.json")
    assert record is not None
    return record


def _files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


# ---- publishing


def test_a_unit_comes_back_as_it_went_in(tmp_path: Path) -> None:
    store = Store(tmp_path)
    record = _put(store, "one", TEXT)
    assert store.verified_path(record.files[0]).read_bytes() == TEXT
    assert record.facts == {"bytes": len(TEXT)}
    assert _files(tmp_path) == [record.files[0].path, "stage/abc/one.json"]


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_all_files_of_a_workspace_have_the_permissions_of_the_umask(tmp_path: Path, umask: int) -> None:
    store, before = Store(tmp_path / "work"), os.umask(umask)
    try:
        with store.draft(store.root / "stage/abc", "model") as draft:
            for name, mode in (("a", 0o600), ("b", 0o644), ("c", 0o400)):
                (draft.folder / name).write_text(name)
                (draft.folder / name).chmod(mode)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in store.root.rglob("*") if path.is_file()}
    assert modes == dict.fromkeys(("a", "b", "c", "model.json"), 0o666 & ~umask)


def test_a_record_without_files_is_no_unit_of_a_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, path = Store(tmp_path), tmp_path / "stage/abc/one.json"
    store.commit(path, Record("one", ()))
    assert store.record(path) is not None
    monkeypatch.setitem(DECLARED, "stage", FactTypes())
    assert store.record(path) is None


def test_a_unit_of_several_files_is_a_folder_and_keeps_their_names(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.draft(tmp_path / "stage/abc", "model") as draft:
        (draft.folder / "deep").mkdir()
        (draft.folder / "deep" / "b.txt").write_text("b")
        (draft.folder / "a.txt").write_text("a")
    record = store.record(tmp_path / "stage/abc/model.json")
    assert record is not None
    folder = store.verified_folder(record.files)
    assert (folder / "a.txt").read_text() == "a"
    assert (folder / "deep" / "b.txt").read_text() == "b"
    assert [Path(file.path).name for file in record.files] == ["a.txt", "b.txt"]


def test_an_exception_while_writing_publishes_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path)

    def write_and_fail() -> None:
        with store.draft(tmp_path / "stage/abc", "one", ".bin") as draft:
            (draft.folder / "data.bin").write_bytes(TEXT)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_and_fail()
    assert _files(tmp_path) == []
    assert list((tmp_path / "stage/abc").iterdir()) == []


def test_files_and_folders_are_on_the_disk_before_the_record_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    sync, link = os.fsync, os.link

    def noting_sync(descriptor: int) -> None:
        path = Path(f"/dev/fd/{descriptor}").readlink()
        events.append(f"sync {path.suffix or path.name}")
        sync(descriptor)

    def noting_link(source: Path, target: Path) -> None:
        events.append(f"link {target.name}")
        link(source, target)

    monkeypatch.setattr(os, "fsync", noting_sync)
    monkeypatch.setattr(os, "link", noting_link)
    _put(Store(tmp_path), "one", TEXT)
    root, stage, file, folder, record, published, folder_again = events
    assert (root, stage) == (f"sync {tmp_path.name}", "sync stage")
    assert (file, published) == ("sync .bin", "link one.json")
    assert [folder, folder_again] == ["sync abc", "sync abc"]
    assert record.startswith("sync")


def test_a_file_is_on_the_disk_before_its_rename_and_the_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, sync, path = list[tuple[bool, bool]](), os.fsync, tmp_path / "a.txt"

    def noting_sync(descriptor: int) -> None:
        events.append((stat.S_ISDIR(os.fstat(descriptor).st_mode), path.exists()))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noting_sync)
    with local.atomic_write(path) as temporary:
        temporary.write_text("a")
    assert events == [(False, False), (True, True)]


def test_without_hard_links_a_record_is_published_by_renaming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    store = Store(tmp_path)
    first = _put(store, "one", TEXT)
    assert _put(store, "one", TEXT[:5]) == first
    assert store.pin("dtype", "auto", "fp32") == store.pin("dtype", "auto", "bf16") == "fp32"
    assert not list(tmp_path.rglob(f"{TEMPORARY}*"))


# ---- damage


def _half(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _flipped(data: bytes) -> bytes:
    return data[:400] + bytes([data[400] ^ 1]) + data[401:]


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda data: data[:0], "size 0, expected 768"),
        (lambda data: data[:3], "size 3, expected 768"),
        (lambda data: data[:100], "size 100, expected 768"),
        (_half, "size 384, expected 768"),
        (lambda data: data[:-1], "size 767, expected 768"),
        (_flipped, "content"),
        (lambda data: data[::-1], "content"),
    ],
)
def test_a_damaged_file_is_named_and_set_aside(tmp_path: Path, damage: Callable[[bytes], bytes], fault: str) -> None:
    file = _put(Store(tmp_path), "one", TEXT).files[0]
    harm = damage(TEXT)
    (tmp_path / file.path).write_bytes(harm)
    store = Store(tmp_path)
    with pytest.raises(DamagedError) as raised:
        store.verified_path(file)
    assert file.path in raised.value.what
    assert fault in raised.value.what
    assert raised.value.path == file.path
    assert not (tmp_path / file.path).exists()
    assert [path.read_bytes() for path in (tmp_path / "quarantine").iterdir()] == [harm]


def test_a_file_of_another_size_makes_its_unit_incomplete_before_it_is_read(tmp_path: Path) -> None:
    store = Store(tmp_path)
    file = _put(store, "one", TEXT).files[0]
    assert set(store.units(tmp_path / "stage/abc")) == {"one"}
    store.path(file).write_bytes(TEXT[1:])
    assert store.units(tmp_path / "stage/abc") == {}


def test_a_file_is_verified_before_its_first_use_in_a_process(tmp_path: Path) -> None:
    store = Store(tmp_path)
    file = _put(store, "one", TEXT).files[0]
    store.verified_path(file)
    store.path(file).write_bytes(_flipped(TEXT))
    assert store.verified_path(file) == store.path(file)
    with pytest.raises(DamagedError):
        Store(tmp_path).verified_path(file)


def test_a_file_with_content_of_another_type_is_set_aside(tmp_path: Path) -> None:
    store = Store(tmp_path)
    file = _put(store, "one", b'{"a": 1}').files[0]
    assert store.content(file, dict[str, int]) == {"a": 1}
    with pytest.raises(DamagedError, match="other content"):
        store.content(file, list[int])
    with pytest.raises(DamagedError, match="is missing"):
        store.verified_path(file)


def test_another_units_file_in_its_place_is_not_taken_for_it(tmp_path: Path) -> None:
    store = Store(tmp_path)
    one, two = _put(store, "one", TEXT).files[0], _put(store, "two", TEXT[::-1]).files[0]
    store.path(one).write_bytes(store.path(two).read_bytes())
    with pytest.raises(DamagedError, match="content"):
        store.verified_path(one)


def test_a_deleted_file_is_missing_and_only_its_unit_is_not_whole(tmp_path: Path) -> None:
    store = Store(tmp_path)
    one, two = _put(store, "one", TEXT), _put(store, "two", TEXT)
    store.path(one.files[0]).unlink()
    assert store.missing_files(one) == [(one.files[0], "missing")]
    assert store.missing_files(two) == []
    with pytest.raises(DamagedError, match="missing"):
        store.verified_path(one.files[0])
    assert _put(store, "one", TEXT) == one
    assert store.missing_files(one) == []


def test_a_file_that_cannot_be_read_today_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    file = _put(store, "one", TEXT).files[0]
    other = Store(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", _failing_mount)
        with pytest.raises(OSError, match="Input/output error"):
            other.verified_path(file)
    assert store.verified_path(file).read_bytes() == TEXT
    assert not (tmp_path / "quarantine").exists()


def _failing_mount(*_: object, **__: object) -> None:
    raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize(
    "garbage",
    [
        *(b"", b"\0" * 300, b"{}", b"[]", b"null", b'{"name": "one"', b"\xff\xfe", b'"files"', b'{"files": [1]}'),
        *(b'{"name":"one","files":[{}],"facts":{},"made":{},"identity":{}}', b"[" * 100_000),
    ],
)
def test_a_record_that_is_garbage_means_not_committed_and_is_replaced(tmp_path: Path, garbage: bytes) -> None:
    store = Store(tmp_path)
    record = _put(store, "one", TEXT)
    path = tmp_path / "stage/abc/one.json"
    path.write_bytes(garbage)
    assert store.record(path) is None
    assert _put(store, "one", TEXT) == record
    assert [quarantined.read_bytes() for quarantined in (tmp_path / "quarantine").iterdir()] == [garbage]


def test_a_record_whose_file_is_gone_gives_way_to_a_new_one(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.path(_put(store, "one", TEXT).files[0]).unlink()
    assert _put(store, "one", TEXT[:7]).facts == {"bytes": 7}


# ---- several writers


def test_the_first_record_wins_and_a_second_with_other_bytes_changes_nothing(tmp_path: Path) -> None:
    first = _put(Store(tmp_path), "one", TEXT)
    second = _put(Store(tmp_path), "one", TEXT[::-1])
    assert second == first
    assert Store(tmp_path).verified_path(first.files[0]).read_bytes() == TEXT


def test_a_record_with_another_digest_for_the_same_file_gives_way(tmp_path: Path) -> None:
    store, path = Store(tmp_path), tmp_path / "stage/abc/one.json"
    record = _put(store, "one", TEXT)
    path.unlink()
    forged = replace(record, files=(replace(record.files[0], sha256="0" * 64),))
    assert store.commit(path, forged) == forged
    assert store.commit(path, record) == record
    assert store.record(path) == record


def _write_all(root: Path, writer: int, *, equal: bool) -> None:
    """Write twenty units, and the record found after each to a file of this writer."""
    store = Store(root)
    seen = []
    for unit in range(20):
        data = (b"" if equal else bytes([writer])) + bytes([unit]) * 50
        seen.append([file.path for file in _put(store, f"u{unit}", data).files])
    (root.parent / f"seen-{writer}.json").write_text(json.dumps(seen))


def _assert_one_winner(root: Path, writers: int, *, equal: bool) -> None:
    store = Store(root)
    for unit in range(20):
        record = store.record(root / "stage/abc" / f"u{unit}.json")
        assert record is not None
        data = store.verified_path(record.files[0]).read_bytes()
        assert data[-50:] == bytes([unit]) * 50
        assert record.facts == {"bytes": len(data)}
        for writer in range(writers):
            seen = json.loads((root.parent / f"seen-{writer}.json").read_text())
            assert seen[unit] == [record.files[0].path]  # every writer read the same winner
    assert not (root / "quarantine").exists()
    assert not list(root.rglob(f"{TEMPORARY}*"))
    assert not equal or len(_files(root)) == 40


@pytest.mark.parametrize("equal", [True, False])
def test_processes_that_write_the_same_units_agree_on_one_winner(tmp_path: Path, equal: bool) -> None:
    root = tmp_path / "artifacts"
    children = [fork(lambda n=n: _write_all(root, n, equal=equal)) for n in range(3)]  # type: ignore[misc]
    assert [wait(child) for child in children] == [0, 0, 0]
    _assert_one_winner(root, 3, equal=equal)


@pytest.mark.parametrize("equal", [True, False])
def test_threads_that_write_the_same_units_agree_on_one_winner(tmp_path: Path, equal: bool) -> None:
    root = tmp_path / "artifacts"
    threads = [threading.Thread(target=_write_all, args=(root, n), kwargs={"equal": equal}) for n in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):  # a reader meanwhile reads complete units only
        for path in root.glob("stage/abc/u*.json"):
            record = Store(root).record(path)
            assert record is not None
            assert Store(root).check_file(record.files[0]) is None
    for thread in threads:
        thread.join()
    _assert_one_winner(root, 3, equal=equal)


class _Overtaken(Store):
    """After this store's first check whether a record exists, another writer publishes the record."""

    def overtake(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        look = Path.exists

        def exists(asked: Path) -> bool:
            seen = look(asked)
            self._once(asked, path)
            return seen

        self.overtaken: Path | None = path
        monkeypatch.setattr(Path, "exists", exists)

    def record(self, path: Path) -> Record | None:
        stored = super().record(path)
        self._once(path, path)
        return stored

    def _once(self, asked: Path, path: Path) -> None:
        if asked == path == self.overtaken:
            self.overtaken = None
            Store(self.root).commit(path, Record("first", ()))


def test_a_writer_overtaken_after_its_first_look_keeps_the_winners_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "stage/abc/one.json"
    store = _Overtaken(tmp_path)
    store.overtake(path, monkeypatch)
    assert store.commit(path, Record("second", ())).name == "first"
    assert not (tmp_path / "quarantine").exists()


def test_a_pin_of_another_process_that_arrives_during_a_look_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, notes = Store(tmp_path), list[str]()
    store.notify = notes.append
    look = store.backend.read

    def overtaken(paths: Sequence[str]) -> dict[str, bytes]:
        seen = look(paths)
        Store(tmp_path).pin("dtype", "auto", "bf16")
        return seen

    with monkeypatch.context() as patched:
        patched.setattr(store.backend, "read", overtaken)
        assert store.pinned("dtype", "auto") is None
    assert store.pinned("dtype", "auto") == "bf16"
    assert notes == []


# ---- files about the workspace


@pytest.mark.parametrize(
    "garbage",
    [
        *("", "{", "[]", "null", "\0\0\0", "[" * 100_000, '{"letters": 5}', '{"letters": {}}'),
        *('{"letters": {"fingerprint": 1, "overrides": {}}}', '{"letters": {"fingerprint": "a", "overrides": []}}'),
    ],
)
def test_a_garbage_head_counts_as_empty_and_is_rewritten(tmp_path: Path, garbage: str) -> None:
    store = Store(tmp_path)
    (tmp_path / "HEAD.json").write_text(garbage)
    assert store.head() == {}
    store.move_head("letters", "abc")
    store.store_overrides({"letters": "abc", "no-result-yet": "abc"}, {"cache.seed": 1}, "../a.yaml")
    store.move_head("letters", "def")
    entry = {"fingerprint": "def", "overrides": {"cache.seed": 1}, "file": "../a.yaml"}
    assert store.head() == {"letters": entry}


def test_a_manifest_is_the_record_of_a_whole_stage(tmp_path: Path) -> None:
    store = Store(tmp_path)
    name = fingerprint({"config": {}})
    assert store.manifest("stage", name) is None
    file = StoredFile("stage/abc/x", 1, "0" * 64)
    record = Record("stage", (file,), {"units": 1}, {}, {"config": {}})
    store.commit(tmp_path / "stage" / name / MANIFEST, record)
    assert store.manifest("stage", name) == record


def test_a_record_in_which_one_digit_changed_is_not_a_record(tmp_path: Path) -> None:
    path = tmp_path / "unit.json"
    path.write_text(canonical_record(Record("unit", (), {"rows": 12})))
    assert Store(tmp_path).record(path) is not None
    path.write_text(path.read_text().replace("12", "13"))
    assert Store(tmp_path).record(path) is None


def refusal(store: Store) -> str:
    with pytest.raises(ExperimentError) as refused:
        store.check_workspace()
    assert "execution.workspace" in (refused.value.fix or "")
    return refused.value.what


def test_a_new_workspace_gets_a_mark_before_its_first_file(tmp_path: Path) -> None:
    store = Store(tmp_path / "artifacts")
    store.check_workspace()
    assert not store.root.exists()
    store.claim()
    assert [path.name for path in store.root.iterdir()] == [MARK]
    mark = store.read_json(store.root / MARK)
    (store.root / "mine.txt").write_text("mine")
    store.claim()
    Store(store.root).check_workspace()
    assert store.read_json(store.root / MARK) == mark


def test_a_pin_may_be_the_first_file_of_a_workspace(tmp_path: Path) -> None:
    Store(tmp_path / "artifacts").pin("digest", "package:encoder", "a" * 64)
    Store(tmp_path / "artifacts").check_workspace()


def test_a_workspace_of_another_layout_is_refused_with_the_way_out(tmp_path: Path) -> None:
    store = Store(tmp_path / "artifacts")
    store.replace(store.root / MARK, {"id": "a", "layout": LAYOUT - 1})
    assert f"layout {LAYOUT - 1}" in refusal(store)


@pytest.mark.parametrize("layout", [{}, {"layout": LAYOUT}])  # the second lacks its digest alone
def test_a_folder_with_other_files_is_refused_and_stays_as_it_is(tmp_path: Path, layout: dict[str, int]) -> None:
    head = {**layout, "read-corpus": {"fingerprint": "f" * 20, "overrides": {}}}
    (tmp_path / "HEAD.json").write_text(json.dumps(head))
    assert "neither empty nor a workspace" in refusal(Store(tmp_path))
    with pytest.raises(ExperimentError):
        Store(tmp_path).claim()
    assert [path.name for path in tmp_path.iterdir()] == ["HEAD.json"]


@pytest.mark.parametrize("content", [None, b"", b"{garbage", b'{"id": "a", "layout": 2, "sha256": "0"}'])
def test_a_workspace_without_a_readable_mark_is_known_by_its_head(tmp_path: Path, content: bytes | None) -> None:
    store = Store(tmp_path)
    entry = {"fingerprint": "f" * 20, "overrides": {}}
    (tmp_path / "HEAD.json").write_bytes(signed({"layout": LAYOUT, "read-corpus": entry}))
    if content is not None:
        (tmp_path / MARK).write_bytes(content)
    store.check_workspace()
    assert store.head() == {"read-corpus": entry}
    assert (store.read_json(tmp_path / MARK) or {})["layout"] == LAYOUT


# ---- damaged small files


def every_flip(path: Path) -> Iterator[bytes]:
    """Yields the file's content with one bit flipped in each byte."""
    content = path.read_bytes()
    for place in range(len(content)):
        yield content[:place] + bytes([content[place] ^ (1 << place % 8)]) + content[place + 1 :]


def test_no_flipped_bit_changes_head(tmp_path: Path) -> None:
    store, notes = Store(tmp_path), list[str]()
    store.notify = notes.append
    store.move_head("letters", "abc")
    store.store_overrides({"letters": "abc"}, {"targets.temperature": 0.5}, "../amalgam.yaml")
    head = store.head()
    for content in every_flip(tmp_path / "HEAD.json"):
        (tmp_path / "HEAD.json").write_bytes(content)
        assert store.head() == head
    assert "HEAD.json" in notes[0]
    assert len(notes) > len((tmp_path / "HEAD.json").read_bytes()) * 0.8  # in white space, a flip may be harmless


def test_no_flipped_bit_changes_a_pin(tmp_path: Path) -> None:
    store, notes = Store(tmp_path), list[str]()
    store.notify = notes.append
    store.pin("dtype", "auto", "bf16")
    path = next(path for path in (tmp_path / "pins").iterdir() if ".copy" not in path.name)
    for content in every_flip(path):
        path.write_bytes(content)
        assert store.pinned("dtype", "auto") == "bf16"
    assert path.name in notes[0]


def test_a_manifest_in_the_folder_of_another_result_does_not_count(tmp_path: Path) -> None:
    store, names = Store(tmp_path), []
    for method in ("muka", "vanilla"):
        names.append(fingerprint({"method": method}))
        store.commit(tmp_path / "stage" / names[-1] / MANIFEST, Record("stage", (), {}, {}, {"method": method}))
    paths = [tmp_path / "stage" / name / MANIFEST for name in names]
    texts = [path.read_bytes() for path in paths]
    for path, text in zip(paths, reversed(texts), strict=True):
        path.write_bytes(text)
    assert [store.manifest("stage", name) for name in names] == [None, None]


def test_a_unit_record_in_the_place_of_another_does_not_count(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for name in ("a", "b"):
        with store.draft(tmp_path / "stage/abc", name, ".txt") as draft:
            (draft.folder / "x").write_text(name)
    a, b = tmp_path / "stage/abc/a.json", tmp_path / "stage/abc/b.json"
    assert store.record(a) is not None
    a.write_bytes(b.read_bytes())
    assert store.record(a) is None


PATHS = ["/etc/hostname", "../x", "a/../../x", "./x", "", "a//b", "a/", "a\0b", "x" * 300]


@pytest.mark.parametrize("path", PATHS)
def test_a_record_with_a_path_outside_is_damaged(tmp_path: Path, path: str) -> None:
    store = Store(tmp_path / "artifacts")
    identity = {"config": 1}
    manifest = store.folder("stage", fingerprint(identity)) / MANIFEST
    manifest.parent.mkdir(parents=True)
    text = canonical_record(Record("stage", (StoredFile(path, 1, "0" * 64),), {}, {}, identity))
    manifest.write_text(text)
    assert store.record(manifest) is None
    with pytest.raises((DamagedError, ValueError)):
        store.backend.delete([path])


def test_processes_that_move_head_at_once_lose_no_entry(tmp_path: Path) -> None:
    """Each process moves a stage of its own many times: a change that another one overwrites would be missing."""
    Store(tmp_path).claim()
    moves = 60

    def move(stage: str) -> None:
        store = Store(tmp_path)
        for number in range(moves):
            store.move_head(stage, f"{number:020}")
            entry = Store(tmp_path).head().get(stage)
            assert entry is not None
            assert entry["fingerprint"] == f"{number:020}"

    children = [fork(partial(move, name)) for name in ("one", "two", "three")]
    assert [wait(child) for child in children] == [0, 0, 0]
    last = {stage: entry["fingerprint"] for stage, entry in Store(tmp_path).head().items()}
    assert last == dict.fromkeys(("one", "two", "three"), f"{moves - 1:020}")


def test_a_lock_that_another_process_keeps_delays_no_change_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "LOCK_SECONDS", 0.05)
    store = Store(tmp_path)
    store.claim()
    with local.alone_in(tmp_path):
        store.move_head("one", "0" * 20)
    assert store.last("one") == "0" * 20
