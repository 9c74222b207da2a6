"""Stages that rerun when the code or a library changes, and the notes about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from amalgam.pipeline.storage.fingerprint import library_versions
from amalgam.stages.objective_inputs import TargetsAlone
from amalgam.stages.target_methods import MukaSoft
from amalgam.tests.workspaces import Workspace, rewrite

CACHE = "cache-teachers"
TARGETS_ON = {"build-targets", "train-student", "report"}


def test_a_raised_version_of_a_target_method_reruns_what_reads_its_targets(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MukaSoft, "version", 2)
    assert workspace.stale() == TARGETS_ON


def test_a_raised_version_of_an_objective_reruns_the_students_that_minimise_it(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TargetsAlone, "version", 2)
    assert workspace.stale() == {"train-student", "report"}


def test_another_library_version_gives_a_warning_and_reruns_only_if_strict(workspace: Workspace) -> None:
    for path in workspace.artifacts.glob("cache-teachers/*/MANIFEST.json"):
        rewrite(path, lambda record: replace(record, made={"libraries": {"transformers": "4.0.0"}}))
    plan = workspace.plan()
    assert {name for name, stage in plan.items() if stage["state"] != "current"} == set()
    [warning] = plan[CACHE]["warnings"]
    assert "transformers 4.0.0" in warning
    result = workspace("plan")
    assert "execution.on_version_change=strict" in result.err
    assert CACHE in workspace.stale("execution.on_version_change=strict")


def test_reused_units_of_another_version_are_reported_after_texts_were_added(workspace: Workspace) -> None:
    for path in workspace.artifacts.glob("cache-teachers/*/units/*.json"):
        rewrite(path, lambda record: replace(record, made={**record.made, "libraries": {"torch": "0.0.1"}}))
    workspace.write([*workspace.texts(), ("a new text about cooking", "cooking")])
    workspace(CACHE)
    [warning] = workspace.plan()[CACHE]["warnings"]
    assert "made with torch 0.0.1" in warning


@pytest.fixture
def update(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Returns a function after which the libraries have other versions."""

    def updated() -> None:
        library_versions.cache_clear()
        monkeypatch.setattr("amalgam.pipeline.storage.fingerprint.version", lambda _: "0.0.1")

    yield updated
    monkeypatch.undo()
    library_versions.cache_clear()


EMBEDDINGS = ("count", "tokens", "steps")
SHARED = {
    "read-corpus": [],
    "cache-teachers": [],
    "cache-features": ["student.method=amalgam"],
    "train-teachers": ["train_teachers={encoder: models/encoder, groups: 2, epochs: 1}", "teachers=[]"],
    "make-embeddings": ["student.method=as-dfd", *(f"pseudo_embeddings.{name}=1" for name in EMBEDDINGS)],
}
"""Stages whose units are shared by experiments, and overrides that add them."""


@pytest.mark.parametrize("stage", SHARED)
def test_strict_computes_shared_units_of_other_versions_again(
    fresh: Workspace, update: Callable[[], None], stage: str
) -> None:
    def files() -> int:
        names = ("*.parquet", "*.npy", "*.safetensors")
        return sum(len(list((fresh.artifacts / stage).rglob(name))) for name in names)

    overrides = [*SHARED[stage], "execution.on_version_change=strict"]
    fresh(stage, *overrides)
    before = files()
    update()
    fresh(stage, *overrides)
    assert files() == 2 * before
