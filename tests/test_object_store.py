"""A workspace in an object store: the same results as on a disk, and nothing half done or lost."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from pathlib import Path

import obstore
import pytest
from obstore.exceptions import GenericError

from amalgam.pipeline.console import Console
from amalgam.pipeline.errors import ExperimentError
from amalgam.pipeline.execution.plan import plan
from amalgam.pipeline.execution.runner import update
from amalgam.pipeline.storage.aws_profile import profile_options
from amalgam.pipeline.storage.store import MANIFEST, Store
from amalgam.stages.app import maintenance
from amalgam.stages.app.maintenance import find_garbage
from amalgam.stages.app.runs import open_run
from amalgam.stages.build_targets.stage import read_targets
from amalgam.stages.common.corpus import tables
from amalgam.stages.common.deliveries import EXPORT, Mark, write_mark, written_files
from amalgam.stages.common.load import train_part
from amalgam.stages.registry import STAGES
from amalgam.tests.forking import LIGHT, Forked
from amalgam.tests.other_stores import SPOKEN
from amalgam.tests.pipeline.crashing import changing
from amalgam.tests.pipeline.toy_stages import calls, outcome, toy_base, toy_run, toy_stages
from amalgam.tests.s3_server import S3, Request
from amalgam.tests.workspaces import TIMEOUT, Workspace, age, finish, flip_bit, objects, opened

ADDRESS = "s3://bucket/some where/prefix"
TEXT = bytes(range(256)) * 3


def test_a_store_that_does_not_put_if_absent_is_refused_before_any_work(server: S3, fresh: Workspace) -> None:
    server.puts_if_absent = False
    err = fresh.refusal(2, "run", f"execution.workspace={ADDRESS}")
    assert "If-None-Match" in err
    assert f"where: {ADDRESS}" in err
    assert len(server.objects) == 1


def test_texts_and_targets_are_fetched_at_once(built: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = set[str]()
    run = open_run(built.folder / "amalgam.yaml", [], console=Console(quiet=True))
    plan(STAGES, run)
    monkeypatch.setattr(run.store.backend, "fetch", fetched.update)
    next(iter(read_targets(run)))
    assert fetched == {file.path for file in run.result("build-targets").files}
    fetched.clear()
    next(iter(tables(run.store, train_part(run))))
    assert fetched == {bucket.file.path for bucket in train_part(run).buckets}


def test_the_keys_are_those_of_the_profile(server: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signatures: list[str] = []

    class Signed(Request):
        def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
            signatures.append(self.headers["Authorization"])
            super().answer(status, body, **headers)

    server.RequestHandlerClass = Signed
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_PROFILE", "work")
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text("[work]\naws_access_key_id = w1\naws_secret_access_key = secret\n")
    (tmp_path / ".aws/config").write_text("[profile work]\nregion = eu-west-1\n")
    assert objects(ADDRESS) == []
    assert signatures
    assert all("Credential=w1/" in signature and "/eu-west-1/" in signature for signature in signatures)
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))  # that of a pod's role
    assert profile_options(ADDRESS) is None
    monkeypatch.delenv("AWS_WEB_IDENTITY_TOKEN_FILE")
    monkeypatch.setenv("AWS_PROFILE", "sso user")
    with pytest.raises(ExperimentError, match="profile sso user has no access key") as caught:
        objects(ADDRESS)
    assert "export-credentials --profile 'sso user' --format env" in str(caught.value.fix)
    assert "boto3" not in str(caught.value.fix)


def test_doctor_names_missing_keys_in_the_row_of_the_workspace(
    fresh: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise GenericError("Error performing PUT http://169.254.169.254/latest/api/token in 1 ms")

    monkeypatch.setattr(obstore, "get", refuse)
    *_, row = fresh.attempt("doctor", "--json", "execution.workspace=s3://bucket/x").json
    assert (row["check"], row["result"]) == ("workspace", "there are no S3 keys")
    assert "AWS_ACCESS_KEY_ID" in row["fix"]


# ---- killed


def test_killed_before_every_change_a_run_resumes_and_ends_as_on_a_disk(
    server: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = toy_run(toy_base(tmp_path / "alone"))
    update(toy_stages(), alone)
    points, only_manifest_missing = 0, 0
    while True:
        base = toy_base(tmp_path / f"base{points}")
        workspace = {"workspace": f"s3://bucket/{points}"}
        first = toy_run(base, execution=workspace)
        with monkeypatch.context() as patch:
            if not changing(points + 1, lambda run=first: update(toy_stages(), run), patch):  # type: ignore[misc]
                break
        points += 1
        run = toy_run(base, execution=workspace)
        standing = [Path(name).stem for name in objects(workspace["workspace"]) if name.count("/") == 2]
        standing = [name for name in standing if name in {"a", "b", "c", "joined", "pair"}]
        only_manifest_missing += len(standing) > 0 and MANIFEST not in str(objects(workspace["workspace"]))
        (base / "calls.log").unlink(missing_ok=True)
        update(toy_stages(), run)
        assert outcome(run) == outcome(alone)
        assert calls(base) == [unit for unit in ("a", "b", "c", "joined", "pair") if unit not in standing]
    assert points >= 20
    assert only_manifest_missing >= 1


def test_three_parts_at_once_one_of_them_killed_end_where_one_run_does(address: str, tmp_path: Path) -> None:
    alone, base = toy_run(toy_base(tmp_path / "alone")), toy_base(tmp_path / "base")
    update(toy_stages(), alone)
    words = ["run", f"execution.workspace={address}", "--part"]
    parts = [
        Forked([seconds, *words, f"{n}/3"], base, os.environ, "amalgam.tests.pipeline.toy_stages", LIGHT)
        for n, seconds in enumerate(("0.5", str(TIMEOUT), "0.5"))
    ]
    while "b" not in calls(base):
        assert parts[1].poll() is None
        time.sleep(0.02)
    parts[1].kill()
    assert [finish(part).code for part in parts] == [0, -9, 0]
    assert "b.json" not in str(objects(address))
    run = toy_run(base, execution={"workspace": address})
    update(toy_stages(), run)
    assert outcome(run) == outcome(alone)
    assert sorted(calls(base)) == ["a", "b", "b", "c", "joined", "pair"]


def test_gc_cleans_the_local_cache_of_a_remote_workspace(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "STAGES", toy_stages())
    run = toy_run(toy_base(tmp_path / "base"), execution={"workspace": address})
    update(toy_stages(), run)
    copies = [path for path in run.store.root.rglob("*-????????*") if path.is_file()]
    assert copies
    half = run.store.root / "letters/.tmp-4711-0123456789ab/half.txt"
    mine = run.store.root / "letters/mine.txt"
    half.parent.mkdir(parents=True)
    deleted = run.store.root / "letters/0123456789abcdef0123/a-01234567.parquet"
    deleted.parent.mkdir(parents=True)
    for path in (half, mine, deleted):
        path.write_text("left")
    assert find_garbage(run, unused=False) == ([], 0)
    age(run.store.root)
    garbage, _ = find_garbage(run, unused=False, delete=True)
    assert {(row["path"], row["kind"]) for row in garbage} == {(str(half), "temporary"), (str(deleted), "copy")}
    assert not half.exists()
    assert not deleted.exists()
    assert mine.exists()
    assert all(path.exists() for path in copies)


# ---- the whole pipeline


@pytest.fixture
def far(fresh: Workspace, address: str) -> Workspace:
    with fresh.config.open("a") as file:
        file.write(f"execution:\n  workspace: {address}\n")
    return fresh


def head_digests(store: Store) -> dict[str, list[tuple[str, str]]]:
    """Returns every stage's last files by their name within it, and their digests."""
    digests = {}
    for stage, entry in store.head().items():
        manifest = store.manifest(stage, entry["fingerprint"])
        assert manifest is not None
        digests[stage] = [(file.path, file.sha256) for file in manifest.files]
    return digests


@pytest.mark.parametrize("scheme", SPOKEN)
def test_the_pipeline_gives_the_same_digests_on_a_disk_and_in_an_object_store(
    far: Workspace, built: Workspace, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = far("run")
    here, digests = head_digests(Store(built.artifacts)), head_digests(opened(address))
    assert {stage: files for stage, files in digests.items() if stage != "report"} == {
        stage: files for stage, files in here.items() if stage != "report"
    }
    assert not far.artifacts.exists()
    assert f"-> {address}/cache-teachers/" in result.err
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
    assert far("gc", "--unused", "--json").json["items"] == []
    doctor = {row["check"]: row["result"] for row in far("doctor", "--json").json}
    assert doctor["workspace"].startswith(f"{address}: ")
    remote = b"".join(
        opened(address).backend.read([name for name in objects(address) if name.endswith(".json")]).values()
    )
    assert b"canary-4711" not in remote + result.err.encode()


def test_damaged_units_in_the_store_alone_are_recomputed(
    far: Workspace, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far("build-targets")
    store = opened(address)
    before = head_digests(store)
    path = before["cache-teachers"][0][0]
    store.backend.put({str(path): b"short"})
    monkeypatch.setenv("AMALGAM_CACHE", str(tmp_path / "other"))
    assert far.plan()["cache-teachers"]["units"] == {"done": 3, "total": 4}
    result = far("build-targets")
    assert re.search(f"{re.escape(str(path))} .*size 5, expected", result.err)
    assert head_digests(opened(address)) == before


def test_the_cache_may_be_deleted_at_any_time(far: Workspace, tmp_path: Path) -> None:
    far("build-targets")
    shutil.rmtree(tmp_path / "cache")
    assert "build-targets: done" in far("build-targets", "targets.mode=hard").err
    assert json.loads(far("plan", "--json").out)["stages"][0]["state"] == "current"


# ---- deliveries, which are on the local disk


def export_by_hand(folder: Path) -> None:
    """Writes an export without the minutes of a real one."""
    folder.mkdir()
    (folder / "model.onnx").write_bytes(TEXT)
    write_mark(folder, Mark("0" * 20, written_files(folder), {}, EXPORT))


def test_damaged_deliveries_of_a_remote_workspace_are_found_refused_and_mended(far: Workspace) -> None:
    far("run")
    export_by_hand(far.folder / "students/student-onnx")
    assert far("verify", "--json").json["damaged"] == []
    for name, (damage, is_model) in {
        "students/student/model.safetensors": (flip_bit, True),
        "students/student/config.json": (Path.unlink, True),
        "reports/student.html": (flip_bit, False),
    }.items():
        path = far.folder / name
        before = path.read_bytes()
        for mending in ("run", "verify --repair"):
            damage(path)
            verified = far.attempt("verify")
            assert (verified.code, name in verified.out) == (1, True), verified.err
            refused = far.attempt("predict", "a text")
            assert (refused.code, path.name in refused.err) == ((2, True) if is_model else (0, False)), refused.err
            mended = far.attempt(*(mending.split() if is_model else ["run"]))
            assert mended.code == 0, mended.err
            assert path.read_bytes() == before
    assert far("verify", "--json").json["damaged"] == []
    flip_bit(far.folder / "students/student-onnx/model.onnx")
    [row] = far.attempt("verify", "--repair", "--json").json["damaged"]
    assert (row["path"], row["mended"]) == ("students/student-onnx/model.onnx", False)
    assert "amalgam export --onnx --force" in row["repair"]


def test_a_damaged_stored_student_is_copied_from_its_delivery(
    far: Workspace, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far("run")
    store = opened(address)
    [stored] = [name for name in objects(address) if re.match("train-student/.*/model.safetensors$", name)]
    before = store.backend.read([stored])[stored]
    store.backend.put({stored: before[:-1]})
    monkeypatch.setenv("AMALGAM_CACHE", str(tmp_path / "other"))
    [row] = far("verify", "--repair", "--json").json["damaged"]
    assert (row["path"], row["repair"], row["mended"]) == (stored, "copied from the delivered folder", True)
    assert opened(address).backend.read([stored])[stored] == before
    assert "train-student: reused" in far("run").err
