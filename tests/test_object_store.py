"""A workspace in an object store: the same results as on a disk, and nothing half done, lost or taken on trust."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from amalgam.pipeline.bucket import Bucket
from amalgam.pipeline.errors import AmalgamError, DamagedError, ExperimentError
from amalgam.pipeline.runner import bring_up_to_date
from amalgam.pipeline.store import MANIFEST, Record, Store, StoredFile, open_store
from amalgam.tests.pipeline.toy_stages import calls, outcome, toy_base, toy_run, toy_stages
from amalgam.tests.s3_server import S3, serving
from amalgam.tests.workshop import Shop, flip

KEYS = {"AWS_ACCESS_KEY_ID": "who", "AWS_SECRET_ACCESS_KEY": "canary-4711", "AWS_REGION": "us-east-1"}
ADDRESS = "s3://bucket/some where/prefix"
TEXT = bytes(range(256)) * 3


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    """Ours, which can be told to fail."""
    with serving() as s3:
        for name, value in {**KEYS, "AWS_ENDPOINT_URL": s3.url, "AMALGAM_CACHE": str(tmp_path / "cache")}.items():
            monkeypatch.setenv(name, value)
        yield s3


@pytest.fixture
def address(server: S3, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a workspace on our server; on the one that AMALGAM_TEST_S3 names, in the bucket `bucket`, where it is set."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", os.environ.get("AMALGAM_TEST_S3", server.url))
    return f"s3://bucket/tests/{time.time_ns()}"


def opened(address: str = ADDRESS) -> Store:
    return open_store(address, Path("/nowhere"))


def elsewhere(address: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """The same workspace as another machine sees it, whose cache is empty."""
    monkeypatch.setenv("AMALGAM_CACHE", str(folder))
    return opened(address)


def put(store: Store, name: str, data: bytes = TEXT) -> Record:
    with store.draft(store.root / "stage/abc", name, ".bin") as draft:
        (draft.folder / "data.bin").write_bytes(data)
    found = store.record(store.root / f"stage/abc/{name}.json")
    assert found is not None
    return found


def objects(address: str) -> list[str]:
    return [entry.inside for entry in opened(address).place.walk()]


# ---- what is published


def test_a_unit_is_read_on_another_machine_as_it_was_written(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = put(opened(address), "one")
    there = elsewhere(address, tmp_path / "other", monkeypatch)
    assert there.record(there.root / "stage/abc/one.json") == record
    assert there.absent(record) == []
    path = there.checked(record.files[0])
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
    there = elsewhere(address, tmp_path / "other", monkeypatch)
    record = there.record(there.root / "stage/abc/model.json")
    assert record is not None
    folder = there.checked_folder(record.files)
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
    server: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULTS 14. Without obstore's patience, which is of minutes."""
    store = opened()
    impatient(store, monkeypatch)
    server.breaks_puts_of = ".bin"
    with pytest.raises(AmalgamError, match="the object store does not do what is asked"):
        put(store, "one")
    assert server.objects == {}
    server.breaks_puts_of = ""
    assert store.absent(put(store, "one")) == []


def impatient(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from obstore.store import from_url

    client = from_url(ADDRESS, client_options={"allow_http": True}, retry_config={"max_retries": 0})
    monkeypatch.setitem(store.place.__dict__, "_client", client)


def test_killed_between_data_and_record_the_unit_is_not_there(server: S3) -> None:
    """FAULTS 2, on an object store."""
    dying = (
        "import os; from pathlib import Path; from amalgam.pipeline.bucket import Bucket\n"
        "from amalgam.tests.test_object_store import opened, put\n"
        "Bucket.create = lambda *_: os._exit(137)\n"
        "put(opened(), 'one')"
    )
    assert subprocess.run([sys.executable, "-c", dying], check=False).returncode == 137
    assert [key.rpartition(".")[2] for key in server.objects] == ["bin"]
    store = opened()
    assert store.records([store.root / "stage/abc/one.json"]) == {}
    assert store.absent(put(store, "one")) == []


# ---- two writers


def test_of_two_writers_the_first_record_stands_and_the_second_is_told(address: str) -> None:
    """FAULTS 15."""
    first = put(opened(address), "one", TEXT)
    store = opened(address)
    with store.draft(store.root / "stage/abc", "one", ".bin") as draft:
        (draft.folder / "data.bin").write_bytes(TEXT[::-1])
    assert draft.rival == first
    assert store.checked(first.files[0]).read_bytes() == TEXT


def test_a_manifest_is_written_once(address: str) -> None:
    one, other = opened(address), opened(address)
    path = one.root / "stage/abc" / MANIFEST
    assert one.commit(path, Record("stage", (), {"by": "one"})).facts == {"by": "one"}
    assert other.commit(path, Record("stage", (), {"by": "other"})).facts == {"by": "one"}
    assert not other.place.create(f"stage/abc/{MANIFEST}", "whatever")


def test_a_store_that_does_not_put_if_absent_is_refused_before_any_work(server: S3, fresh: Shop) -> None:
    server.puts_if_absent = False
    said = fresh.tries("run", f"execution.workspace={ADDRESS}")
    assert said.code == 2
    assert "does not put if absent (If-None-Match: *)" in said.err
    assert f"where: {ADDRESS}" in said.err
    assert len(server.objects) == 1


# ---- damage


def test_a_damaged_copy_is_fetched_again(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(address)
    file = put(store, "one").files[0]
    flip(store.path(file))
    again = opened(address)
    assert again.checked(file).read_bytes() == TEXT
    assert objects(address) == [file.path, "stage/abc/one.json"]


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda data: data[:-1], "size 767, expected 768"),
        (lambda data: data[:400] + bytes([data[400] ^ 1]) + data[401:], "its content is not what was written"),
    ],
)
def test_a_damaged_object_is_named_set_aside_and_may_be_written_again(
    server: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: Callable[[bytes], bytes], said: str
) -> None:
    file = put(opened(), "one").files[0]
    [key] = [key for key in server.objects if key.endswith(".bin")]
    server.objects[key] = harm(TEXT), 0
    there = elsewhere(ADDRESS, tmp_path / "other", monkeypatch)
    with pytest.raises(DamagedError) as raised:
        there.checked(file)
    assert raised.value.what == f"{file.path} is damaged ({said})"
    assert raised.value.where == f"{ADDRESS}/{file.path}"
    assert key not in server.objects
    assert [data for name, (data, _) in server.objects.items() if "/quarantine/" in name] == [harm(TEXT)]
    assert there.checked(put(there, "one").files[0]).read_bytes() == TEXT


def test_a_store_that_does_not_answer_is_not_an_empty_one(monkeypatch: pytest.MonkeyPatch, server: S3) -> None:
    store = opened()
    impatient(store, monkeypatch)
    server.shutdown()
    server.server_close()
    with pytest.raises(AmalgamError, match="the object store does not do what is asked") as raised:
        store.manifest("stage", "abc")
    assert "canary" not in str(raised.value)


@pytest.mark.parametrize("address", ["s3://", "s3://key:secret@bucket/x", "s3://bucket/x?versionId=3"])
def test_an_address_that_is_none_or_holds_keys_is_refused(address: str) -> None:
    with pytest.raises(ExperimentError, match="is not BUCKET/PREFIX"):
        opened(address)


def test_a_library_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ExperimentError, match=r"needs obstore\nwhere: gs://bucket/x\nfix: pip install 'amalgam\[gs\]'"):
        opened("gs://bucket/x")


@pytest.mark.parametrize("address", ["gs://bucket/prefix", "az://container/prefix"])
def test_other_stores_are_understood_by_their_addresses(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"AZURE_STORAGE_ACCOUNT_NAME": "a", "AZURE_STORAGE_ACCOUNT_KEY": "a2V5"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
    place = Bucket(address)
    assert type(place._client).__name__ == {"g": "GCSStore", "a": "AzureStore"}[address[0]]  # noqa: SLF001


# ---- what is asked of many at once


def test_many_records_cost_a_listing_and_a_request_each_and_missing_ones_nothing(server: S3) -> None:
    store = opened()
    records = {store.root / f"stage/abc/u{n}.json": put(store, f"u{n}", bytes([n])) for n in range(40)}
    server.asked.clear()
    wanted = [*records, *(store.root / f"stage/abc/none{n}.json" for n in range(500))]
    assert opened().records(wanted) == records
    assert server.asked["GET"] == 40
    assert server.asked["HEAD"] == 0
    assert server.asked["LIST"] <= 2


def test_what_a_listing_does_not_show_is_asked_for_by_name(server: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened()
    files = [put(store, f"u{n}", bytes([n])).files[0] for n in range(20)]
    monkeypatch.setattr(Bucket, "_under", lambda *_: [])
    assert store.absent(Record("all", (*files, StoredFile("stage/abc/no", 1, "0" * 64)))) == [
        (StoredFile("stage/abc/no", 1, "0" * 64), "missing")
    ]


# ---- killed


class KilledError(BaseException):
    """Nothing of ours catches it, as nothing of ours sees SIGKILL; what is tidied on the way is on this machine."""


def test_killed_before_every_change_a_run_resumes_and_ends_as_on_a_disk(
    server: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = toy_run(toy_base(tmp_path / "alone"))
    bring_up_to_date(toy_stages(), alone)
    points, only_manifest_missing = 0, 0
    while True:
        base = toy_base(tmp_path / f"base{points}")
        workspace = {"workspace": f"s3://bucket/{points}"}
        first = toy_run(base, execution=workspace)
        with monkeypatch.context() as patch:
            if not changing(points + 1, lambda run=first: bring_up_to_date(toy_stages(), run), patch):  # type: ignore[misc]
                break
        points += 1
        run = toy_run(base, execution=workspace)
        standing = [Path(name).stem for name in objects(workspace["workspace"]) if name.count("/") == 2]
        standing = [name for name in standing if name in {"a", "b", "c", "joined", "pair"}]
        only_manifest_missing += len(standing) > 0 and MANIFEST not in str(objects(workspace["workspace"]))
        (base / "calls.log").unlink(missing_ok=True)
        bring_up_to_date(toy_stages(), run)
        assert outcome(run) == outcome(alone)
        assert calls(base) == [unit for unit in ("a", "b", "c", "joined", "pair") if unit not in standing]
    assert points >= 20
    assert only_manifest_missing >= 1


def changing(number: int, work: Callable[[], object], patch: pytest.MonkeyPatch) -> bool:
    """True if the work ended before its n-th change to the store."""
    left = number
    for name in ("_put", "create", "replace", "remove"):
        inner = getattr(Bucket, name)

        def dying(*said: object, inner: Callable[..., object] = inner) -> object:
            nonlocal left
            left -= 1
            if left <= 0:
                raise KilledError
            return inner(*said)

        patch.setattr(Bucket, name, dying)
    try:
        work()
    except KilledError:
        return True
    return False


def test_three_parts_at_once_one_of_them_killed_end_where_one_run_does(address: str, tmp_path: Path) -> None:
    alone, base = toy_run(toy_base(tmp_path / "alone")), toy_base(tmp_path / "base")
    bring_up_to_date(toy_stages(), alone)
    child = "import sys; from amalgam.tests.pipeline.toy_stages import main; main(0.5, *sys.argv[1:])"
    said = [sys.executable, "-c", child, "run", f"execution.workspace={address}", "--part"]
    parts = [subprocess.Popen([*said, f"{n}/3"], cwd=base, stderr=subprocess.DEVNULL) for n in range(3)]
    while "b" not in calls(base):
        assert parts[1].poll() is None
        time.sleep(0.02)
    parts[1].kill()
    assert [part.wait(60) for part in parts] == [0, -9, 0]
    assert "b.json" not in str(objects(address))
    run = toy_run(base, execution={"workspace": address})
    bring_up_to_date(toy_stages(), run)
    assert outcome(run) == outcome(alone)
    assert sorted(calls(base)) == ["a", "b", "b", "c", "joined", "pair"]


# ---- the whole pipeline


@pytest.fixture
def far(fresh: Shop, address: str) -> Shop:
    with fresh.config.open("a") as file:
        file.write(f"execution:\n  workspace: {address}\n")
    return fresh


def head_digests(store: Store) -> dict[str, list[tuple[str, str]]]:
    """What every stage built last: files by their name within it, and their digests."""
    found = {}
    for stage, entry in store.head().items():
        manifest = store.manifest(stage, entry["fingerprint"])
        assert manifest is not None
        found[stage] = [(file.path, file.sha256) for file in manifest.files]
    return found


def test_the_pipeline_gives_the_same_digests_on_a_disk_and_in_an_object_store(
    far: Shop, built: Shop, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = far("run")
    here, there = head_digests(Store(built.artifacts)), head_digests(opened(address))
    assert {stage: files for stage, files in there.items() if stage != "report"} == {
        stage: files for stage, files in here.items() if stage != "report"
    }
    assert not far.artifacts.exists()
    assert f"-> {address}/cache-teachers/" in said.err
    assert (far.folder / "students/student/model.safetensors").exists()
    assert (far.folder / "reports/student.html").exists()
    # another machine, whose cache is empty
    monkeypatch.setenv("AMALGAM_CACHE", str(tmp_path / "other"))
    assert far.stale() == set()
    assert far("run").err.count(": reused") == 5
    status = far("status", "--json").json
    assert status["workspace"] == address
    assert {row["stage"] for row in status["artifacts"] if row["head"]} == set(here)
    assert far("verify", "--json").json["damaged"] == []
    assert far("gc", "--json").json["items"] == []
    unused = far("gc", "--unused", "--json").json["items"]
    assert all(row["path"].startswith("report/") for row in unused)  # pages, which can be drawn again
    doctor = {row["what"]: row["found"] for row in far("doctor", "--json").json}
    assert doctor["workspace"] == f"{address}: reached, puts if absent"
    remote = b"".join(opened(address).place.read(name) or b"" for name in objects(address) if name.endswith(".json"))
    assert b"canary-4711" not in remote + said.err.encode()


def test_what_is_damaged_in_the_store_is_computed_again_and_nothing_else(
    far: Shop, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far("build-targets")
    store = opened(address)
    before = head_digests(store)
    path = before["cache-teachers"][0][0]
    (tmp_path / "short").write_bytes(b"short")
    store.place.publish({tmp_path / "short": path}, str(Path(path).parent))
    monkeypatch.setenv("AMALGAM_CACHE", str(tmp_path / "other"))
    assert far.plan()["cache-teachers"]["units"] == {"done": 3, "total": 4}
    said = far("build-targets")
    assert f"{path} is damaged (size 5, expected" in said.err
    assert head_digests(opened(address)) == before


def test_the_cache_may_be_deleted_at_any_time(far: Shop, tmp_path: Path) -> None:
    far("build-targets")
    shutil.rmtree(tmp_path / "cache")
    assert "build-targets: done" in far("build-targets", "targets.mode=hard").err
    assert json.loads(far("plan", "--json").out)["stages"][0]["state"] == "current"
