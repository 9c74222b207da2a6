"""A workspace from a stranger: valid digests of other content, and links that replace folders."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from amalgam.pipeline.storage.store import Store
from amalgam.tests.test_own_files import tree
from amalgam.tests.workspaces import TOLERANCE, Workspace, age, finish, flip_bit, largest_difference, rewrite

# ---- links


def test_a_link_in_the_place_of_a_stage_is_not_followed(workspace: Workspace) -> None:
    outside = workspace.folder / "outside"
    (workspace.artifacts / "cache-teachers").rename(outside)
    (workspace.artifacts / "cache-teachers").symlink_to(outside)
    before = tree(outside)
    flip_bit(next(outside.glob("*/units/*.parquet")))
    changed = tree(outside)
    age(outside)
    for command in (("verify",), ("gc", "--yes"), ("run",), ("gc", "--unused", "--yes")):
        result = workspace.attempt(*command)
        assert "Traceback" not in result.err
        assert tree(outside) == changed != before
    assert workspace.attempt("verify").code == 1
    assert "link" in workspace.refusal(1, "run")


@pytest.mark.parametrize(
    "name", ["tokens", "train-student", "training-logs", "build-targets", "students", "reports", "reports/.amalgam"]
)
def test_nothing_is_written_behind_a_link(workspace: Workspace, tmp_path: Path, name: str) -> None:
    folder = (workspace.folder if name.startswith(("students", "reports")) else workspace.artifacts) / name
    if folder.exists():
        folder.rename(tmp_path / "away")
    outside = tmp_path / "outside"
    outside.mkdir()
    folder.symlink_to(outside)
    for command in (("train-student", "--force"), ("run", "targets.temperature=0.5"), ("verify", "--repair")):
        result = workspace.attempt(*command)
        assert "Traceback" not in result.err
        assert not list(outside.iterdir())
    assert workspace.attempt("verify").code == (0 if name == "reports/.amalgam" else 1)
    folder.unlink()
    workspace("run")
    assert workspace("verify", "--json").json["damaged"] == []


@pytest.mark.parametrize("name", ["students", "reports", "students/student"])
def test_a_link_to_itself_is_named(workspace: Workspace, name: str) -> None:
    folder = workspace.folder / name
    shutil.rmtree(folder)
    folder.symlink_to(folder)
    for command in ("run", "train-student --force", "report --force", "verify", "plan", "gc --yes", "predict hello"):
        result = workspace.attempt(*command.split())
        assert result.code in {0, 1, 2}
        assert "fault of amalgam" not in result.err
    assert f"{name} is a link" in workspace.attempt("run").err


@pytest.mark.parametrize("name", ["\x00", "../outside", "a/b", ".", "x" * 300])
def test_a_head_that_names_no_folder_has_no_entry(workspace: Workspace, name: str) -> None:
    store = Store(workspace.artifacts)
    for stage in ("report", "build-targets"):
        store.replace(store.root / "HEAD.json", {**store.head(), stage: {"fingerprint": name, "overrides": {}}})
        assert stage not in store.head()
    for command in ("verify", "status", "plan", "gc --yes", "run"):
        assert "fault of amalgam" not in workspace.attempt(*command.split()).err
    assert store.head().keys() >= {"report", "build-targets"}


@pytest.mark.parametrize(
    ("name", "content"),
    [("findings.json", "{}"), ("evaluation.json", '{"n": 1}'), ("evaluation.json", "[" * 100_000)],
    ids=["no field", "one field", "too deep"],
)
def test_signed_json_with_other_fields_is_made_again(workspace: Workspace, name: str, content: str) -> None:
    [path] = workspace.artifacts.glob(f"report/*/*/{name}")
    before = json.loads(path.read_text())
    path.write_text(content)
    workspace.sign(path)
    result = workspace("run")
    assert f"{name} has other content than amalgam writes and was quarantined" in result.err
    assert json.loads(path.read_text()) == before


@pytest.mark.parametrize("how", ["pipe", "link", "folder"])
def test_a_training_log_that_is_no_regular_file_is_refused(workspace: Workspace, tmp_path: Path, how: str) -> None:
    [log] = workspace.artifacts.glob("training-logs/train-student-*.jsonl")
    outside = tmp_path / "outside"
    outside.write_text("mine")
    log.unlink()
    if how == "pipe":
        os.mkfifo(log)
    elif how == "link":
        log.symlink_to(outside)
    else:
        log.mkdir()
    result = finish(workspace.process("train-student", "--force"))
    assert result.code == 2
    assert f"{log.name} is no regular file" in result.err
    assert outside.read_text() == "mine"


@pytest.mark.parametrize("how", ["pipe", "file"])
@pytest.mark.parametrize("name", ["checkpoint", "checkpoint/step-000001"])
def test_a_checkpoint_folder_that_is_none_is_named(workspace: Workspace, name: str, how: str) -> None:
    [manifest] = workspace.artifacts.glob("train-student/*/MANIFEST.json")
    shutil.rmtree(manifest.parent)
    path = manifest.parent / name
    path.parent.mkdir(parents=True)
    if how == "pipe":
        os.mkfifo(path)
    else:
        path.write_text("mine")
    result = finish(workspace.process("run"))
    assert result.code in ({1} if name == "checkpoint" else {0, 1})
    assert "fault of amalgam" not in result.err
    assert name == "checkpoint" or result.code == 0 or "step-000001" in result.err
    assert name != "checkpoint" or "checkpoint is no folder" in result.err


# ---- signed content


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"PAR1 and no footer PAR1", None], ids=["empty", "other", "footer", "page"]
)
def test_a_signed_unit_without_readable_content_is_named_and_computed_again(
    workspace: Workspace, content: bytes | None
) -> None:
    """Anyone who hands a workspace on can give a record the digest of any content."""
    before = workspace.targets()
    for unit in workspace.units():
        unit.write_bytes((2**62).to_bytes(8, "little") + unit.read_bytes()[8:] if content is None else content)
        workspace.sign(unit)
    err = workspace.refusal(1, "build-targets", "--force")
    assert "cannot be read" in err
    assert workspace.units()[0].name in err or "quarantined" in err
    for _ in range(4):
        result = workspace.attempt("build-targets", "--force")
        assert result.code in {0, 1}
    assert result.code == 0, result.err
    assert largest_difference(workspace.targets(), before) < TOLERANCE


def test_a_signed_table_of_another_stage_is_named_and_computed_again(workspace: Workspace) -> None:
    [similarities] = workspace.artifacts.glob("report/zero-shot-*/*.parquet")
    before = similarities.read_bytes()
    [targets] = workspace.artifacts.glob("build-targets/*/units/*.parquet")
    shutil.copy(targets, similarities)
    workspace.sign(similarities)
    err = workspace.refusal(1, "run", "targets.temperature=0.5")
    assert "cannot be read" in err
    assert similarities.name in err
    workspace("run", "targets.temperature=0.5")
    assert similarities.read_bytes() == before


@pytest.mark.parametrize("facts", [{"labels": ["a"] * 1000}, {"objective": "restricted"}, {"columns": [[0]]}], ids=list)
def test_a_signed_manifest_of_other_labels_is_named_and_made_again(
    workspace: Workspace, facts: dict[str, object]
) -> None:
    [manifest] = (workspace.artifacts / "build-targets").glob("*/MANIFEST.json")
    before = manifest.read_text()
    rewrite(manifest, lambda old: replace(old, facts={**old.facts, **facts}))
    result = workspace.attempt("run", "student.seed=5")
    assert result.code == 0
    assert f"has other {next(iter(facts))} than the experiment and was quarantined" in result.err
    assert manifest.read_text() == before


def test_a_signed_range_of_passes_with_four_ends_is_made_again(workspace: Workspace) -> None:
    [manifest] = (workspace.artifacts / "cache-teachers").glob("*/MANIFEST.json")
    before = manifest.read_text()
    rewrite(
        manifest, lambda old: replace(old, facts={**old.facts, "ranges": dict.fromkeys(old.facts["ranges"], [0] * 4)})
    )
    assert workspace.attempt("report", "--force").code in {0, 1}
    workspace("run")
    assert manifest.read_text() == before


@pytest.mark.parametrize(
    "facts", [{}, {"seconds": {}}, {"seconds": -1.0, "units": 1, "found": 0, "workload": 0, "bytes": 0}]
)
def test_a_timing_that_is_no_number_is_damaged(workspace: Workspace, facts: dict[str, object]) -> None:
    paths = list(workspace.artifacts.glob("*/*/timing.json"))
    assert {path.parts[-3] for path in paths} >= {"cache-teachers", "report"}
    for path in paths:
        rewrite(path, lambda old: replace(old, facts=facts))
        assert Store(workspace.artifacts).record(path) is None
    for words in (("report", "--force"), ("plan", "--estimate"), ("verify",), ("run",)):
        assert workspace.attempt(*words).code in {0, 1}
