"""Two commands in one workspace at once: both end well, no result is lost, and no unfinished file stays."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from amalgam.pipeline.storage.backend import FileInfo
from amalgam.pipeline.storage.local import LocalStorage
from amalgam.tests.workspaces import CommandResult, Workspace, age, finish, flip_bit

UNUSED = ("gc", "--unused", "--yes")


def at_once(workspace: Workspace, *commands: tuple[str, ...]) -> list[CommandResult]:
    """Start the commands together and return their results."""
    processes = [workspace.process(*words) for words in commands]
    results = [finish(process) for process in processes]
    for words, result in zip(commands, results, strict=True):
        assert "fault of amalgam" not in result.err, f"{words}\n{result.err}"
        assert "Traceback" not in result.err
    return results


def codes(results: list[CommandResult]) -> list[int]:
    return [result.code for result in results]


def assert_sound(workspace: Workspace, *overrides: str) -> None:
    """The experiment is current, no file is damaged, and no unfinished file or folder is left."""
    workspace("run", *overrides)
    assert workspace.stale(*overrides) == set()
    assert workspace("verify", "--json").json["damaged"] == []
    assert not [path for path in workspace.folder.rglob(".tmp-*") if "-nonce-" not in path.name]


def students(workspace: Workspace) -> set[str]:
    return {path.name for path in (workspace.folder / "students").iterdir()}


def test_runs_of_two_students_deliver_both(workspace: Workspace) -> None:
    results = at_once(
        workspace, ("run", "student.seed=1", "student.name=a"), ("run", "student.seed=2", "student.name=b")
    )
    assert codes(results) == [0, 0], results[0].err + results[1].err
    assert students(workspace) == {"student", "a", "b"}
    last = workspace("status", "--json").json["head"]["train-student"]["fingerprint"]
    delivered = {
        json.loads((workspace.folder / f"students/{name}/.amalgam.json").read_text())["fingerprint"] for name in "ab"
    }
    assert last in delivered
    assert_sound(workspace)


def test_two_students_of_one_name_are_delivered_whole(workspace: Workspace) -> None:
    results = at_once(workspace, ("run", "student.seed=1"), ("run", "student.seed=2"), ("run", "student.seed=3"))
    assert codes(results) == [0, 0, 0], "".join(result.err for result in results)
    assert students(workspace) == {"student"}
    folder = workspace.folder / "students/student"
    name = json.loads((folder / ".amalgam.json").read_text())["fingerprint"]
    manifest = json.loads((workspace.artifacts / "train-student" / name / "MANIFEST.json").read_text())
    for file in manifest["files"]:
        stored = workspace.artifacts / file["path"]
        assert (folder / stored.name).read_bytes() == stored.read_bytes()
    assert_sound(workspace)


@pytest.mark.parametrize("words", [UNUSED, ("gc", "--yes"), ("gc", "--compact", "--yes"), ("verify", "--repair")])
def test_maintenance_during_a_run_loses_no_result(workspace: Workspace, words: tuple[str, ...]) -> None:
    age(workspace.artifacts)
    before = workspace.targets()
    override = "targets.temperature=0.5"
    results = at_once(workspace, ("run", override), words, words)
    assert codes(results) == [0, 0, 0], "".join(result.err for result in results)
    assert_sound(workspace)
    assert workspace.targets() == before
    assert_sound(workspace, override)


def test_verify_and_run_mend_one_damaged_unit(workspace: Workspace, built: Workspace) -> None:
    unit = workspace.units()[0]
    flip_bit(unit)
    for path in (workspace.artifacts / "build-targets").glob("*/MANIFEST.json"):
        path.unlink()
    run, verify = at_once(workspace, ("run", "--force"), ("verify",))
    assert run.code == 0, run.err
    assert verify.code in {0, 1}, verify.err
    assert_sound(workspace)
    assert workspace.digests("cache-teachers") == built.digests("cache-teachers")


def test_two_collections_delete_the_same_list(workspace: Workspace) -> None:
    workspace("build-targets", "targets.temperature=0.5")
    workspace("build-targets")
    (workspace.artifacts / "train-student/.tmp-4711-0123456789ab").mkdir()
    (workspace.artifacts / "train-student/.tmp-4711-0123456789ab/half").write_text("half")
    age(workspace.artifacts)
    results = at_once(workspace, UNUSED, UNUSED, ("gc", "--yes"))
    assert codes(results) == [0, 0, 0], "".join(result.err for result in results)
    assert_sound(workspace)


def test_two_sweeps_share_their_students(workspace: Workspace) -> None:
    fields = ("sweep", "targets.temperature=0.3,0.6")
    results = at_once(workspace, fields, fields)
    assert codes(results) == [0, 0], results[0].err + results[1].err
    assert students(workspace) == {"student", "temperature-0.3", "temperature-0.6"}
    assert_sound(workspace)


def test_two_runs_begin_a_workspace(fresh: Workspace) -> None:
    results = at_once(fresh, ("run",), ("build-targets",), ("verify",))
    assert codes(results) == [0, 0, 0], "".join(result.err for result in results)
    assert Path(fresh.artifacts / "WORKSPACE.json").exists()
    assert_sound(fresh)


def test_a_record_that_is_written_after_verify_listed_the_files_is_sound(
    fresh: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process wrote the unit's file before the listing and its record after it."""
    fresh("cache-teachers")
    listing = LocalStorage.list

    def without_records(self: LocalStorage, *arguments: str) -> list[FileInfo]:
        entries = list(listing(self, *arguments))
        return [entry for entry in entries if not re.search(r"cache-teachers/.+/.+\.json", entry.path)]

    monkeypatch.setattr(LocalStorage, "list", without_records)
    fresh("verify")
    monkeypatch.undo()
    assert fresh.plan()["cache-teachers"]["state"] == "current"
