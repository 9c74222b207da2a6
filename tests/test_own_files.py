"""No command deletes, moves or trusts a file that amalgam did not write."""

from __future__ import annotations

import json
import os
import pwd
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from amalgam.pipeline.execution.runner import update
from amalgam.pipeline.execution.stage import Run, Unit
from amalgam.pipeline.input_files import file_digest
from amalgam.pipeline.storage.facts import DECLARED
from amalgam.pipeline.storage.fingerprint import fingerprint
from amalgam.pipeline.storage.paths import CACHED_TOKENS
from amalgam.pipeline.storage.store import Record, Store, StoredFile, canonical_record
from amalgam.stages.app import maintenance
from amalgam.stages.app.maintenance import Garbage, find_garbage
from amalgam.stages.common.training import checkpoint_files
from amalgam.stages.registry import STAGES
from amalgam.tests.pipeline.toy_stages import toy_base, toy_run, toy_stages
from amalgam.tests.test_bad_input import assert_three_lines
from amalgam.tests.test_errors import denied, mode, permissions
from amalgam.tests.workspaces import Workspace, age, flip_bit, record_of, rewrite

THEIRS = (
    *("thesis/ch1/fig/a.svg", ".git/objects/ab/cd01", "models/x/y/model.safetensors", "a/b/c.parquet"),
    *("cache-teachers/notes/mine/c.parquet", "train-student/model.safetensors", "quarantine/mine.txt", "notes.tmp"),
    *("thesis/HEAD.json", "cache-teachers/mine/HEAD.json", "cache-teachers/mine/family.json", "pins/x/rates.json"),
    *("cache-teachers/mine/.tmp-1-0123456789ab/x", "pins/mine/.tmp-1-0123456789ab", "thesis/.tmp-1-0123456789ab"),
    *("units/packs/mine.pack", "pins/mine.txt", ".tmp-mine", "tokens/a/b/c.parquet", "training-logs/x/y/z.bin"),
)


MINE = "my own text"
SPARSE = 6 << 30
"""Bytes of a file without content."""


def add_files_of_a_user(folder: Path) -> dict[str, bytes | None]:
    for name in THEIRS:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (folder / "thesis/empty").mkdir()
    (folder / "thesis/link").symlink_to(folder.parent / "models")
    return tree(folder)


def tree(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
        if not path.is_symlink() or path.readlink()
    }


def beside(folder: Path) -> dict[str, bytes | None]:
    """Returns a user's files in a workspace."""
    names = {*THEIRS, "thesis/empty", "thesis/link"}
    return {name: content for name, content in tree(folder).items() if name in names}


# ---- garbage


def test_gc_keeps_every_file_of_a_user_in_the_workspace(workspace: Workspace) -> None:
    add_files_of_a_user(workspace.artifacts)
    before = beside(workspace.artifacts)
    age(workspace.artifacts)
    assert len(before) == len(THEIRS) + 2
    for words in (("gc", "--yes"), ("gc", "--unused", "--yes"), ("gc", "--compact", "--yes"), ("verify",), ("run",)):
        workspace(*words)
        assert beside(workspace.artifacts) == before


@pytest.mark.parametrize("command", [("run",), ("plan",), ("gc", "--yes"), ("verify",), ("status",)])
def test_a_folder_with_other_files_is_no_workspace(fresh: Workspace, command: tuple[str, ...]) -> None:
    (fresh.folder / "mine/thesis").mkdir(parents=True)
    (fresh.folder / "mine/thesis/a.svg").write_text("<svg/>")
    err = fresh.refusal(2, *command, "execution.workspace=mine")
    assert str(fresh.folder / "mine") in err
    assert "fix: " in err
    assert "execution.workspace" in err
    assert sorted(tree(fresh.folder / "mine")) == ["thesis", "thesis/a.svg"]


def test_leftovers_of_a_killed_process_go_after_a_day(workspace: Workspace) -> None:
    name = ".tmp-4711-0123456789ab"
    folders = [workspace.folder / room / name for room in ("students", "teachers", "reports")]
    folders.append(workspace.artifacts / "train-student/0123456789abcdef0123" / name)
    for folder in folders:
        (folder / "deep").mkdir(parents=True)
        (folder / "deep/model.safetensors").write_text("half")
    (workspace.folder / "students/.tmp-notes").write_text("mine")
    assert workspace("gc", "--json").json["items"] == []
    age(workspace.folder)
    result = workspace("gc", "--yes", "--json").json
    assert {item["kind"] for item in result["items"]} == {"temporary"}
    assert not any(folder.exists() for folder in folders)
    assert (workspace.folder / "students/.tmp-notes").exists()
    assert (workspace.folder / "students/student/model.safetensors").exists()


def test_gc_of_a_local_workspace_reads_no_cache(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace("read-corpus")
    monkeypatch.setenv("AMALGAM_CACHE", "long" * 100)  # no file system has such a name: lstat fails for every user
    assert workspace("gc").code == 0
    monkeypatch.delenv("AMALGAM_CACHE")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # as in a container: the user has no home folder
    assert workspace("gc").code == 0


def test_gc_prints_kinds_with_count_and_bytes(workspace: Workspace) -> None:
    workspace("build-targets", "targets.temperature=0.5")
    age(workspace.artifacts)
    result = workspace("gc", "--unused", "targets.temperature=0.5")
    assert len(result.out.splitlines()) < 5
    items = workspace("gc", "--unused", "--json", "targets.temperature=0.5").json["items"]
    assert f"{len(items)} file" in result.out
    assert "amalgam gc --unused --yes" in result.out


# ---- unused results


@pytest.mark.parametrize("content", ["{garbage", None])
def test_without_head_no_result_is_unused(workspace: Workspace, content: str | None) -> None:
    age(workspace.artifacts)
    for path in workspace.artifacts.glob("HEAD*.json"):
        path.write_text(content) if content else path.unlink()
    before = tree(workspace.artifacts)
    err = workspace.refusal(1, "gc", "--unused", "--yes", "targets.temperature=0.5")
    assert "HEAD.json" in err
    assert "amalgam run" in err
    assert {name for name in before if name.endswith((".parquet", ".safetensors"))} <= tree(workspace.artifacts).keys()


def test_a_head_that_names_an_absent_result_makes_no_result_unused(workspace: Workspace) -> None:
    age(workspace.artifacts)
    [manifest] = (workspace.artifacts / "train-student").glob("*/MANIFEST.json")
    manifest.unlink()
    assert "train-student" in workspace.refusal(1, "gc", "--unused", "--yes", "targets.temperature=0.5")


def test_units_of_an_unfinished_stage_are_in_use(workspace: Workspace) -> None:
    for manifest in (workspace.artifacts / "cache-teachers").glob("*/MANIFEST.json"):
        shutil.rmtree(manifest.parent)
    record = record_of(workspace.units()[0])
    record.unlink()
    head = workspace.artifacts / "HEAD.json"
    for path in workspace.artifacts.glob("HEAD*.json"):
        path.unlink()
    for stage in ("cache-teachers", "build-targets", "train-student", "report", "read-corpus"):
        for manifest in (workspace.artifacts / stage).glob("*/MANIFEST.json"):
            manifest.unlink()  # as before the end of the first run
    age(workspace.artifacts)
    assert not head.exists()
    before = workspace.units()
    workspace("read-corpus")
    workspace("gc", "--unused", "--yes")
    assert set(before) - set(workspace.units()) <= {before[0]}  # only the file without a record


def test_unused_results_stay_for_a_day(workspace: Workspace) -> None:
    workspace("build-targets", "targets.temperature=0.5")
    words = ("gc", "--unused", "--json", "targets.temperature=0.5")
    assert workspace(*words).json["items"] == []
    age(workspace.artifacts)
    assert {item["path"].split("/")[0] for item in workspace(*words).json["items"]} == {"build-targets"}


def test_a_result_that_another_command_computes_for_days_keeps_its_first_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "STAGES", toy_stages())
    base, garbage = toy_base(tmp_path / "base"), list[Garbage]()
    update(toy_stages(), toy_run(base))

    def collect_before_the_last(run: Run, unit: Unit) -> None:
        if unit.name == "b":
            age(base / "artifacts")
        if unit.name == "c":
            garbage.extend(find_garbage(toy_run(base), unused=True)[0])

    update(toy_stages(collect_before_the_last), toy_run(base, cache={"seed": 5}))
    assert garbage == []
    update(toy_stages(), toy_run(base))
    assert find_garbage(toy_run(base), unused=True) == ([], 3)


def test_the_description_of_a_family_without_units_is_garbage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "STAGES", toy_stages())
    run = toy_run(toy_base(tmp_path / "base"))
    update(toy_stages(), run)
    empty, name = f"letters/{'0' * 20}", run.store.last("letters")
    for folder in (empty, f"letters/{name}"):
        run.store.replace(run.store.root / folder / "family.json", {"teacher": "a"}, copy=True)
    age(run.store.root)
    garbage, _ = find_garbage(run, unused=False)
    assert [row["path"] for row in garbage] == [f"{empty}/family.copy.json", f"{empty}/family.json"]


# ---- records of strangers


def add_hostile_records(workspace: Workspace, path: str) -> list[Path]:
    """Signs a unit's record and a manifest, as anyone can who hands a workspace on, that name a file outside."""
    unit = record_of(workspace.units()[0])
    [manifest] = (workspace.artifacts / "cache-teachers").glob("*/MANIFEST.json")
    for record in (unit, manifest):
        rewrite(record, lambda old: replace(old, files=(StoredFile(path, len(MINE), "0" * 64), *old.files[1:])))
    return [unit, manifest]


@pytest.mark.parametrize("path_of", [str, lambda mine: f"link/{mine.name}"], ids=["absolute", "link"])
@pytest.mark.parametrize("command", [("verify",), ("run",), ("build-targets", "--force"), ("gc", "--unused", "--yes")])
def test_a_record_that_names_a_file_outside_is_damaged(
    workspace: Workspace, command: tuple[str, ...], path_of: Callable[[Path], str]
) -> None:
    mine = workspace.folder / "mine.parquet"
    mine.write_text(MINE)
    (workspace.artifacts / "link").symlink_to(workspace.folder)
    records = add_hostile_records(workspace, path_of(mine))
    age(workspace.folder)
    result = workspace.attempt(*command)
    assert mine.read_text() == MINE
    assert "Traceback" not in result.err
    if command == ("verify",):
        assert result.code == 1
        assert str(records[0].relative_to(workspace.artifacts)) in result.out
        workspace("run")
        assert workspace("verify").code == 0


def without(facts: Mapping[str, object], name: str) -> dict[str, object]:
    return {field: value for field, value in facts.items() if field != name}


FACTS: list[Mapping[str, object]] = [{"last": None}, {"rows": "12"}, {"first": -1}, {"rows": 2**70}, {"prefix": {}}]
OTHERS = [("run",), ("status",), ("report", "--force")]


@pytest.mark.parametrize(
    ("facts", "command"), [*((one, ("verify",)) for one in FACTS), *((FACTS[1], one) for one in OTHERS)]
)
def test_a_signed_record_whose_facts_have_another_type_is_damaged(
    workspace: Workspace, facts: Mapping[str, object], command: tuple[str, ...]
) -> None:
    unit = record_of(workspace.units()[0])
    [name], inside = facts, str(unit.relative_to(workspace.artifacts))
    rewrite(unit, lambda old: replace(old, facts={**without(old.facts, name), **(facts if facts[name] else {})}))
    for manifest in workspace.artifacts.glob("cache-teachers/*/MANIFEST.json"):
        manifest.unlink()  # the stage reads the unit's facts to write it again
    result = workspace.attempt(*command)
    assert result.code == (1 if command == ("verify",) else 0), result.err
    if command == ("verify",):
        assert inside in result.out
        assert "predicted again" in result.out
    workspace("run")
    assert workspace("verify", "--json").json["damaged"] == []


def test_each_fact_of_another_type_is_damage_in_every_record(workspace: Workspace) -> None:
    store = Store(workspace.artifacts)
    paths = [path for path in workspace.artifacts.glob("*/*/**/*.json") if store.record(path) is not None]
    assert {path.parts[len(workspace.artifacts.parts)] for path in paths} >= {*workspace.plan(), "tokens"}
    for path in paths:
        before = path.read_bytes()
        record = Record.from_json(before)
        for name in record.facts:
            path.write_text(canonical_record(replace(record, facts={**record.facts, name: [{"a": None}]})))
            assert store.record(path) is None, (path, name)
            path.write_bytes(before)


def test_every_stage_declares_the_types_of_its_facts() -> None:
    assert DECLARED.keys() == {*(stage.name for stage in STAGES), CACHED_TOKENS}
    assert not any(kinds.unit is Any for kinds in DECLARED.values())
    assert not any(DECLARED[stage.name].manifest is Any for stage in STAGES)


def test_verify_opens_regular_files_only(workspace: Workspace) -> None:
    unit = workspace.units()[0]
    unit.unlink()
    os.mkfifo(unit)
    os.mkfifo(workspace.artifacts / "cache-teachers/pipe.json")
    record = record_of(workspace.units()[1])
    record.unlink()
    os.mkfifo(record)
    process = workspace.process("verify", "--json")
    out, err = process.communicate(timeout=60)
    assert process.wait() == 1, err
    damaged = {fault["path"] for fault in json.loads(out)["damaged"]}
    assert str(unit.relative_to(workspace.artifacts)) in damaged


@pytest.mark.parametrize("how", ["pipe", "folder", "link"])
def test_a_record_that_is_no_regular_file_is_damaged(workspace: Workspace, how: str) -> None:
    record = record_of(workspace.units()[0])
    record.unlink()
    {"pipe": os.mkfifo, "folder": os.mkdir, "link": lambda path: path.symlink_to("/dev/zero")}[how](record)
    result = workspace.attempt("verify")
    assert result.code == 1
    assert str(record.relative_to(workspace.artifacts)) in result.out
    assert "no regular file" in result.out
    workspace("run")
    assert workspace("verify", "--json").json["damaged"] == []


def test_notes_and_logs_have_digests(workspace: Workspace) -> None:
    """No result depends on them: verify moves a damaged one to quarantine, and no run is needed."""
    store = Store(workspace.artifacts)
    notes = [store.root / "failed-units/cache-teachers-x.json", store.root / "divergence/x-01234567.json"]
    for path in notes:
        store.replace(path, {"unit": "x"})
    mine = store.root / "training-logs/mine.jsonl"
    mine.write_text("mine")
    assert workspace("verify", "--json").json["damaged"] == []
    [log] = (workspace.artifacts / "training-logs").glob("train-student-*.jsonl")
    paths = [*notes, log]
    for path in paths:
        flip_bit(path, -10)
    damages = workspace.attempt("verify", "--json").json["damaged"]
    assert {row["path"] for row in damages} == {str(path.relative_to(store.root)) for path in paths}
    assert all(row["mended"] and "no result depends on it" in row["repair"] for row in damages)
    assert workspace("verify", "--json").json["damaged"] == []
    assert workspace.stale() == set()
    assert mine.read_text() == "mine"


def test_a_log_of_gigabytes_is_damaged_and_not_read(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    [log] = (workspace.artifacts / "training-logs").glob("train-student-*.jsonl")
    os.truncate(log, SPARSE)
    monkeypatch.setattr(checkpoint_files, "file_digest", pytest.fail)
    [row] = workspace.attempt("verify", "--json").json["damaged"]
    assert row["path"] == f"training-logs/{log.name}"


def test_tensors_of_gigabytes_are_damaged_and_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({"a": np.zeros(3)}, path)
    assert checkpoint_files.has_content(path, file_digest(path))
    assert not checkpoint_files.has_content(path, "0" * 64)
    monkeypatch.setattr(checkpoint_files, "file_digest", pytest.fail)
    for content in (path.read_bytes(), b"\0" * 8, (2**62).to_bytes(8, "little"), b"\x02" + b"\0" * 7 + b"[]"):
        path.write_bytes(content)
        os.truncate(path, SPARSE)
        assert not checkpoint_files.has_content(path, "0" * 64)


def test_a_single_json_file_of_a_unit_is_no_record(workspace: Workspace) -> None:
    store = Store(workspace.artifacts)
    with store.draft(store.folder("report", "0123456789abcdef0123"), "words", ".json") as draft:
        (draft.folder / "words.json").write_text("3")
    assert workspace("verify", "--json").json["damaged"] == []
    assert store.path(draft.files[0]).read_text() == "3"


def test_verify_restores_small_files_and_names_them(workspace: Workspace) -> None:
    paths = [workspace.artifacts / "HEAD.json", next(workspace.artifacts.glob("cache-teachers/*/family.copy.json"))]
    before = [path.read_bytes() for path in paths]
    for path in paths:
        flip_bit(path, len(path.read_bytes()) // 2)
    assert "HEAD.json" in workspace.refusal(1, "verify", "--json")
    assert [path.read_bytes() for path in paths] == before
    assert workspace("verify", "--json").json["damaged"] == []


# ---- checkpoints


def add_checkpoint(workspace: Workspace, result: str, other: str = "") -> Path:
    """Writes a checkpoint as a training does that was killed; `other` is the name of another file in it."""
    folder = workspace.artifacts / "train-student" / result / "checkpoint" / "step-000002"
    folder.mkdir(parents=True)
    save_file({"a": np.zeros(3)}, folder / "weights.safetensors")
    digests = {"weights": file_digest(folder / "weights.safetensors"), **({other: "0" * 64} if other else {})}
    body = {"format": 2, "step": 2, "files": digests, "state": {}}
    (folder / "state.json").write_text(json.dumps({"fingerprint": fingerprint(body), "checkpoint": body}))
    return folder


def test_checkpoints_of_abandoned_trainings_go_after_a_day(workspace: Workspace) -> None:
    head = workspace.head("train-student")
    abandoned, complete = add_checkpoint(workspace, "f" * 20), add_checkpoint(workspace, head)
    (abandoned / "mine.txt").write_text("mine")
    own = add_checkpoint(workspace, workspace.plan("student.seed=5")["train-student"]["fingerprint"])
    assert workspace("gc", "--json", "student.seed=5").json["items"] == []
    age(workspace.artifacts)
    items = workspace("gc", "--yes", "--json", "student.seed=5").json["items"]
    assert {item["kind"] for item in items} == {"checkpoint"}
    assert [path.name for path in abandoned.iterdir()] == ["mine.txt"]
    assert not complete.exists()
    assert {path.name for path in own.iterdir()} == {"state.json", "weights.safetensors"}


def test_gc_leaves_a_checkpoint_that_a_training_replaces_meanwhile(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = add_checkpoint(workspace, "f" * 20)
    age(workspace.artifacts)

    def replaced_meanwhile(folder: Path) -> list[Path]:
        files = checkpoint_files.files_of(folder)
        shutil.rmtree(files[0].parent)
        return files

    monkeypatch.setattr(maintenance, "files_of", replaced_meanwhile)
    assert workspace("gc", "--json").json["items"] == []
    assert not folder.exists()


def test_no_link_and_no_name_in_a_checkpoint_leads_to_a_file_outside(workspace: Workspace, tmp_path: Path) -> None:
    step, outside = add_checkpoint(workspace, "f" * 20), tmp_path / "outside"
    folder, given, logs = step.parent, workspace.artifacts / "given", workspace.artifacts / "training-logs"
    given.mkdir(exist_ok=True)
    outside.mkdir()
    (given / f"{'0' * 20}.parquet").write_text(MINE)
    for path in (*logs.glob("*.digest.json"), step / "state.json"):
        flip_bit(path, 5)
    for number, path in enumerate((step, add_checkpoint(workspace, "e" * 20).parent, given, logs)):
        shutil.move(path, outside / str(number))
        path.symlink_to(outside / str(number))
    (outside / "model.safetensors").write_text(MINE)
    add_checkpoint(workspace, "d" * 20, f"{outside}/model")
    before = {path: path.read_bytes() for path in outside.rglob("*") if path.is_file()}
    age(tmp_path)
    for words in (("verify",), ("gc", "--yes"), ("run",), ("gc", "--unused", "--yes")):
        workspace.attempt(*words)
    assert {path: path.read_bytes() for path in outside.rglob("*") if path.is_file()} == before
    assert folder.is_dir()


@pytest.mark.parametrize("name", ["state.json", "weights.safetensors"])
def test_verify_finds_damaged_checkpoints(workspace: Workspace, name: str) -> None:
    folder = add_checkpoint(workspace, "f" * 20)
    assert workspace("verify", "--json").json["damaged"] == []
    flip_bit(folder / name, 5)
    [damage] = workspace.attempt("verify", "--json").json["damaged"]
    assert damage["path"] == f"train-student/{'f' * 20}/checkpoint/step-000002/{name}"
    assert not (folder / name).exists()
    workspace("verify")


# ---- verify


def test_a_manifest_that_a_failed_force_quarantined_is_no_damage(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from amalgam.pipeline.errors import WorkError
    from amalgam.stages.build_targets.stage import BuildTargets

    def fail(*_: object) -> None:
        raise WorkError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(BuildTargets, "run_unit", fail)
        assert workspace.attempt("build-targets", "--force").code == 1
    assert not list((workspace.artifacts / "build-targets").glob("*/MANIFEST.json"))
    assert workspace("verify", "--json").json["damaged"] == []
    workspace("build-targets")
    [manifest] = (workspace.artifacts / "build-targets").glob("*/MANIFEST.json")
    manifest.unlink()
    assert workspace.attempt("verify").code == 1


def test_verify_names_the_cost_of_each_damage(workspace: Workspace) -> None:
    shutil.rmtree(workspace.folder / "students")  # otherwise the student is copied from there
    paths = {
        next(workspace.artifacts.glob("cache-teachers/*/units/*.parquet")): "predicted again: ",
        next(workspace.artifacts.glob("train-student/*/*/model.safetensors")): "trained again, about ",
        next(workspace.artifacts.glob("build-targets/*/MANIFEST.json")): "written again; no unit is computed",
        next(workspace.artifacts.glob("read-corpus/part-*/train-*/*.parquet")): "read again: part train",
        workspace.artifacts / "HEAD.json": "restored from its copy",
    }
    for path in paths:
        flip_bit(path)
    damaged = {row["path"]: row for row in workspace.attempt("verify", "--json").json["damaged"]}
    for path, repair in paths.items():
        assert damaged[str(path.relative_to(workspace.artifacts))]["repair"].startswith(repair)
    assert [row["path"] for row in damaged.values() if row["mended"]] == ["HEAD.json"]


def test_texts_from_python_are_verified(workspace: Workspace) -> None:
    folder = workspace.artifacts / "given"
    folder.mkdir()
    source = workspace.units()[0]
    from amalgam.pipeline.input_files import file_digest

    path = folder / f"{file_digest(source)[:20]}.parquet"
    shutil.copy(source, path)
    (folder / "mine.parquet").write_text("mine")
    assert workspace("verify", "--json").json["damaged"] == []
    flip_bit(path)
    [damage] = workspace.attempt("verify", "--json").json["damaged"]
    assert damage["path"] == f"given/{path.name}"
    assert "Python" in damage["repair"]


# ---- permissions


LOOKING = ("plan", "run", "verify", "gc --unused --yes")


@permissions
@pytest.mark.parametrize("name", ["HEAD.json", "build-targets/*/MANIFEST.json", "cache-teachers/*/units/*.json"])
def test_a_record_without_permission_is_not_lost(workspace: Workspace, name: str) -> None:
    path = next(workspace.artifacts.glob(name))
    before = path.read_bytes()
    for command in (*LOOKING, "build-targets --force"):
        code, err = denied(workspace, mode(str(path.relative_to(workspace.folder)), 0), *command.split())
        if command not in LOOKING[2:] and "units" in name:  # a result is current without it
            assert code == 0, err
            continue
        assert code == 1, err
        assert_three_lines(err)
        assert path.name in err
        assert "chmod" in err
        assert path.read_bytes() == before


@permissions
@pytest.mark.parametrize("stage", ["build-targets", "train-student"])
def test_a_stage_folder_without_permission_is_not_lost(workspace: Workspace, stage: str) -> None:
    for command, bits in ((command, bits) for command in LOOKING for bits in (0, 0o111)):
        code, err = denied(workspace, mode(f"artifacts/{stage}", bits), *command.split())
        assert "missing" not in err
        assert "damaged" not in err
        if code or not bits:  # current results need no list of a folder
            assert code == 1, err
            assert_three_lines(err)
            assert (f"artifacts/{stage}" in err, "chmod" in err) == (True, True), err
    assert workspace.stale() == set()
    assert workspace("verify", "--json").json["damaged"] == []


@pytest.mark.parametrize("pattern", ["build-targets/*/units/*.parquet", "train-student/*/*/model.safetensors"])
def test_damage_of_an_earlier_result_is_reported_once(workspace: Workspace, pattern: str) -> None:
    """No run computes it again: verify takes it out with its records."""
    before = set(workspace.artifacts.glob(pattern))
    workspace("run", "targets.temperature=0.5")
    [earlier] = before & set(workspace.artifacts.glob(pattern))
    flip_bit(earlier)
    damaged = workspace.attempt("verify", "--json").json["damaged"]
    assert [row["path"] for row in damaged] == [str(earlier.relative_to(workspace.artifacts))]
    assert workspace.attempt("verify", "--json").json["damaged"] == []
    workspace("run")
    assert workspace("verify", "--json").json["damaged"] == []


def test_damage_of_cached_tokens_is_reported_once(workspace: Workspace) -> None:
    flip_bit(next(workspace.artifacts.glob("tokens/*/*.parquet")))
    assert len(workspace.attempt("verify", "--json").json["damaged"]) == 1
    assert workspace("verify", "--json").json["damaged"] == []
    assert workspace.stale() == set()


@permissions
def test_a_current_report_is_read_where_the_workspace_cannot_be_written(workspace: Workspace) -> None:
    def read_only(copy: Workspace) -> None:
        for path in [copy.folder, *copy.folder.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)

    code, err = denied(workspace, read_only, "report", "--fail-under", "0")
    assert (code, "report: reports/student.html" in err) == (0, True), err
    code, err = denied(workspace, read_only, "report", "student.seed=5")
    assert (code, "the workspace cannot be written" in err) == (2, True), err
    workspace("report", "student.seed=5")
    workspace("run", "student.name=b", "student.seed=9")  # a rival, which the first student's page lacks
    code, err = denied(workspace, read_only, "run", "student.seed=5")
    assert (code, "reports/student.html is not updated: Permission denied" in err) == (0, True), err
    code, err = denied(workspace, read_only, "report", "student", "b")
    assert (code, "reports/comparison.html is not updated: Permission denied" in err) == (0, True), err
    (workspace.folder / "reports/student.html").unlink()
    code, err = denied(workspace, read_only, "run", "student.seed=5")
    assert (code, "its result cannot be copied" in err) == (1, True), err
    code, err = denied(workspace, mode("artifacts", 0o555), "report", "student.seed=0")
    assert (code, "report: reports/student.html" in err) == (0, True), err
