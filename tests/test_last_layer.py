"""cache.dropout: last-layer in a workspace: a family of its own, resumed and extended like the default's."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import polars as pl
import pytest

from amalgam.stages.cache_teachers import ask
from amalgam.stages.common.inference.batches import run_passes
from amalgam.tests.workspaces import TEACHER_LABELS, TEST, TRAIN, Workspace, word_list, write_model

LAST = "cache.dropout=last-layer"
PASSES = 4


@pytest.fixture
def deep(fresh: Workspace) -> Workspace:
    """A workspace whose teachers have two layers, so that one is before the last."""
    for seed, (name, labels) in enumerate(TEACHER_LABELS.items()):
        folder = fresh.folder / "models" / name
        write_model(folder, words=word_list(fresh), seed=seed, labels=labels, num_hidden_layers=2)
    return fresh


def families(workspace: Workspace) -> dict[str, str]:
    content = workspace.manifest("cache-teachers")
    return dict(content["facts"]["families"])


def answers(workspace: Workspace, column: str) -> dict[tuple[bytes, int], Any]:
    """Return a column of the first teacher by text and first pass."""
    values = dict[tuple[bytes, int], Any]()
    for record in (workspace.artifacts / "cache-teachers" / families(workspace)["first"] / "units").glob("*.json"):
        content = json.loads(record.read_text())
        frame = pl.read_parquet(workspace.artifacts / content["files"][0]["path"])
        if column in frame.columns:
            for key, value in frame.select("key", column).iter_rows():
                values[key, content["facts"]["first"]] = np.array(value)
    return values


def test_both_modes_are_in_one_workspace_and_share_no_prediction(deep: Workspace) -> None:
    deep("cache-teachers")
    whole, passes, logits = families(deep), answers(deep, "passes"), answers(deep, "logits")
    with deep.counting() as asked:
        assert "K = 4 in the last layer" in deep("cache-teachers", LAST).err + deep("status", LAST).out
    assert (asked[0].logits, asked[0].passes) == (2 * (TRAIN + TEST), 2 * PASSES * TRAIN)
    assert not set(families(deep).values()) & set(whole.values())
    ours = answers(deep, "passes")
    assert ours.keys() == passes.keys()
    assert np.mean([np.abs(ours[key] - passes[key]).mean() for key in ours]) > 0.05
    for key, value in answers(deep, "logits").items():
        assert value == pytest.approx(logits[key], abs=1e-4)
    with deep.counting() as asked:
        deep("cache-teachers")
        deep("cache-teachers", LAST)
    assert asked[0].units == 0


def test_more_passes_and_texts_cost_the_difference(deep: Workspace) -> None:
    deep("cache-teachers", LAST)
    with deep.counting() as asked:
        deep("cache-teachers", LAST, "cache.passes=6")
    assert (asked[0].logits, asked[0].passes) == (0, 2 * 2 * TRAIN)
    deep.write([*deep.texts(), *((f"one more text, number {row}", deep.texts()[0][1]) for row in range(3))])
    with deep.counting() as asked:
        deep("cache-teachers", LAST, "cache.passes=6")
    assert (asked[0].logits, asked[0].passes) == (2 * 3, 2 * 3 * 6)
    stepwise = answers(deep, "passes")
    other = deep.without_artifacts(deep.folder.parent / "other")
    other("cache-teachers", LAST, "cache.passes=6")
    for (key, _), value in answers(other, "passes").items():
        parts = [stepwise[key, first] for first in (0, PASSES) if (key, first) in stepwise]
        assert np.concatenate(parts) == pytest.approx(value, abs=2e-2)


def test_an_interrupted_stage_resumes(deep: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(teacher: Any, *arguments: Any, **options: Any) -> Any:
        if teacher.name == "second":
            raise KeyboardInterrupt
        return run_passes(teacher, *arguments, **options)

    monkeypatch.setattr(ask, "run_passes", stopped)
    assert deep.attempt("cache-teachers", LAST).code != 0
    monkeypatch.undo()
    with deep.counting() as asked:
        deep("cache-teachers", LAST)
    assert (asked[0].logits, asked[0].passes) == (TRAIN + TEST, PASSES * TRAIN)


def test_what_does_not_go_together_is_refused_with_a_way_out(fresh: Workspace) -> None:
    assert "did you mean 'last-layer'" in fresh.refusal(2, "cache-teachers", "cache.dropout=last_layer")
    assert "set cache.adaptive: false" in fresh.refusal(2, "cache-teachers", LAST, "cache.adaptive=true")


def test_auto_without_passes_is_remarked(deep: Workspace) -> None:
    deep.edit("targets:\n  mode: soft\n", "")
    deep("read-corpus")
    plan = " ".join(deep("plan", LAST, "cache.passes=auto", "student.method=amalgam").err.split())
    assert "cache.dropout=last-layer is for dropout passes" in plan
    plan = " ".join(deep("plan", "cache.adaptive=true", "cache.passes=auto", "student.method=amalgam").err.split())
    assert "cache.adaptive=true is for dropout passes" in plan
    plan = " ".join(deep("plan", "cache.adaptive=true", "cache.passes=16", "student.method=muka-soft").err.split())
    assert "cache.adaptive=true has no effect: it needs" in plan
