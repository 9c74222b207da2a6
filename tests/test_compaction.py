"""`amalgam gc --compact` leaves few files with the same results; no teacher runs again."""

from __future__ import annotations

from pathlib import Path

import pytest

from amalgam.pipeline.storage import compaction
from amalgam.tests.workspaces import Workspace, age


@pytest.fixture
def packed(workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """Its few units are packed, and the day is over in which their loose files stay."""
    monkeypatch.setenv("AMALGAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compaction, "LEAST", 2)
    place = "execution.workspace=artifacts"
    assert f"packed: amalgam gc --compact --yes {place}" in workspace("gc", "--compact", place).out
    written = workspace("gc", "--compact", "--yes", place).out
    assert "6 units" in written
    assert f"`amalgam gc --yes {place}`" in written
    assert workspace("gc", "--json").json["items"] == []
    assert len(workspace.units()) == 4
    age(workspace.artifacts)
    assert all("packed" in row["why"] for row in workspace("gc", "--yes", "--json").json["items"])
    assert workspace.units() == []
    return workspace


def test_packed_units_are_current_and_later_stages_read_them(packed: Workspace, built: Workspace) -> None:
    assert packed.stale() == set()
    result = packed("run", "targets.mode=hard", "--force")
    assert "cache-teachers: done" in result.err


def test_packed_units_are_used_and_no_teacher_is_asked(packed: Workspace, built: Workspace) -> None:
    with packed.counting() as asked:
        result = packed("build-targets", "targets.temperature=0.5")
        built_too = packed("build-targets", "targets.temperature=0.2")
    assert asked[0].units == 0
    assert "build-targets: done" in result.err
    assert "build-targets: reused" in built_too.err
    assert packed.targets() == built.targets()


def test_packed_units_are_listed_verified_and_not_garbage(packed: Workspace) -> None:
    overrides = {row["stage"]: row["summary"] for row in packed("status", "--json").json["artifacts"] if row["head"]}
    assert overrides["cache-teachers"].endswith("4/4 files")
    content = packed("verify", "--json").json
    assert content["damaged"] == []
    unused = packed("gc", "--unused", "--json").json["items"]
    assert all(row["path"].startswith("report/") for row in unused)
    assert packed("gc", "--compact", "--json").json["units"] == 0
    assert packed("gc", "--compact").out == "there are no small units to pack\n"


def test_with_more_passes_packed_units_are_extended(packed: Workspace) -> None:
    with packed.counting() as asked:
        packed("cache-teachers", "cache.passes=6")
    assert asked[0].logits == 0
    assert asked[0].passes == 2 * 2 * 120  # no passes on the test texts
    assert "0 of" not in packed("plan", "cache.passes=6").out
    assert packed.stale("cache.passes=6") == {"build-targets", "train-student", "report"}


def test_units_that_head_no_longer_uses_go_from_the_index(packed: Workspace) -> None:
    packed("run", "cache.seed=5")
    age(packed.artifacts)
    assert packed("gc", "--unused", "--json").json["items"] == []  # the experiment, without the override, uses them
    unused = ("gc", "--unused", "cache.seed=5")
    before = {row["path"] for row in packed(*unused, "--json").json["items"]}
    assert any(path.startswith("cache-teachers/") and path.endswith(".parquet") for path in before)
    packed(*unused, "--yes")
    left = packed(*unused, "--yes", "--json").json["items"]
    assert {row["kind"] for row in left} == {"orphan", "family"}
    assert {Path(row["path"]).suffix for row in left} == {".pack", ".json"}  # nothing in them is needed any more
    assert packed(*unused, "--json").json["items"] == []
    assert packed.stale("cache.seed=5") == set()
    assert "cache-teachers" in packed.stale()


def test_a_link_in_the_place_of_the_local_copies_is_not_followed(packed: Workspace, tmp_path: Path) -> None:
    packed("build-targets", "targets.temperature=0.5")  # copies units
    [copies] = (tmp_path / "cache").iterdir()
    theirs = tmp_path / "theirs"
    copies.rename(theirs)
    unfinished = theirs / ".tmp-1-0123456789ab" / "x"
    unfinished.parent.mkdir()
    unfinished.write_text("")
    age(theirs)
    copies.symlink_to(theirs)
    packed("gc", "--yes")
    assert unfinished.exists()
    copies.unlink()
    theirs.rename(copies)
    packed("gc", "--yes")
    assert not (copies / unfinished.relative_to(theirs)).exists()
