"""The bill where there are no texts yet: what writing them costs, or guessing what stands in their place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from amalgam.pipeline.execution.plan import plan
from amalgam.stages.app.cost.job import Cost, StageEstimate
from amalgam.stages.app.cost.rates import MachineRates
from amalgam.stages.app.cost.stages import COSTS
from amalgam.stages.app.cost.trials import Trial
from amalgam.stages.app.session import open_run
from amalgam.stages.generate.requests import BLOCK
from amalgam.stages.registry import STAGES
from amalgam.tests.workspaces import TEACHER_LABELS, TEST, Workspace

TEXTS = 12
"""Of each class in the experiment that generates."""


def _costs(workspace: Workspace, overrides: list[str], *stages: str) -> list[Cost]:
    """Of these stages alone, so that no other is tried."""
    _, run = open_run(workspace.config, overrides)
    states = {state.stage: state for state in plan(STAGES, run)}
    rates = MachineRates(run, measure=True)
    return [COSTS[stage](StageEstimate(run, rates, states[stage])) for stage in stages]


def _kept(workspace: Workspace) -> dict[str, dict[str, float]]:
    entries = json.loads((workspace.artifacts / "rates.json").read_text()).values()
    return {entry["kind"]: entry["figures"] for entry in entries}


def test_the_first_texts_are_on_the_bill_teacher_by_teacher(generated: Workspace, tmp_path: Path) -> None:
    fresh = generated.without_artifacts(tmp_path / "workspace")
    [cost] = _costs(fresh, [], "generate")
    rates = {teacher: _kept(fresh)[f"writing for {teacher}"] for teacher in TEACHER_LABELS}
    texts = {teacher: BLOCK * len(labels) for teacher, labels in TEACHER_LABELS.items()}
    expected = [rates[one]["setup_seconds"] + texts[one] * rates[one]["seconds_per_text"] for one in TEACHER_LABELS]
    assert cost.seconds == pytest.approx(sum(expected))
    assert min(one["tokens_per_text"] for one in rates.values()) > 1
    assert min(cost.memory_mb, cost.disk_mb) > 0
    assert not list((fresh.artifacts / "generate").glob("*/units/*"))


def test_what_comes_after_texts_that_are_still_to_be_written_is_on_the_bill(
    generated: Workspace, tmp_path: Path
) -> None:
    fresh = generated.without_artifacts(tmp_path / "workspace")
    reading, asking = _costs(fresh, ["cache.passes=3", "generate.held_out=0.5"], "read-corpus", "cache-teachers")
    assert reading.seconds > 0
    labels = sum(len(own) for own in TEACHER_LABELS.values())
    rows = 0.5 * TEXTS * labels * (3 + 1) + TEST
    asked = [_kept(fresh)[f"asking {teacher}"] for teacher in TEACHER_LABELS]
    expected = sum(one["setup_seconds"] + rows * one["seconds_per_pass"] for one in asked)
    assert asking.seconds == pytest.approx(expected)


def test_words_without_a_language_model_cost_next_to_nothing(generated: Workspace, tmp_path: Path) -> None:
    fresh = generated.without_artifacts(tmp_path / "workspace")
    [cost] = _costs(fresh, ["generate.source=random-words"], "generate")
    assert 0 < cost.seconds < 1
    assert not (fresh.artifacts / "rates.json").exists()


def test_once_there_are_texts_they_tell_what_more_cost(generated: Workspace, tmp_path: Path) -> None:
    workspace = generated.copy(tmp_path / "workspace")
    [cost] = _costs(workspace, [f"generate.texts={3 * BLOCK}"], "generate")
    records = [json.loads(path.read_text()) for path in (workspace.artifacts / "generate").glob("*/units/*.json")]
    assert cost.seconds == pytest.approx(2 * sum(one["made"]["seconds"] for one in records))
    assert not (workspace.artifacts / "rates.json").exists()


def test_pseudo_embeddings_and_the_student_of_them_are_on_the_bill(built: Workspace, tmp_path: Path) -> None:
    workspace = built.without_artifacts(tmp_path / "workspace")
    settings = [
        "student.method=as-dfd",
        "targets.mode=vanilla-kd",
        "pseudo_embeddings.count=6",
        "pseudo_embeddings.steps=3",
    ]
    [guessing, learning] = _costs(workspace, settings, "make-embeddings", "train-student")
    rates = _kept(workspace)
    expected = [
        rates[f"guessing for {teacher}"]["setup_seconds"]
        + len(labels) * 3 * rates[f"guessing for {teacher}"]["seconds_per_step"]
        for teacher, labels in TEACHER_LABELS.items()
    ]
    assert guessing.seconds == pytest.approx(sum(expected))
    assert learning.seconds > 0
    workspace("make-embeddings", *settings)
    files = (workspace.artifacts / "make-embeddings").rglob("*.safetensors")
    existing = sum(path.stat().st_size for path in files) / 1e6
    assert guessing.disk_mb == pytest.approx(existing, rel=0.05)


# ---- a trial, by hand


def test_texts_that_all_came_to_their_end_are_simply_counted() -> None:
    trial = Trial(2, [(0, 10.0), (2, 11.0), (3, 12.0)], [1, 2])
    assert trial.of_a_text(50) == (1.0, 1.5)


def test_a_trial_that_was_cut_short_goes_on_in_a_straight_line() -> None:
    """Four texts, none of which ended; a first token took a second, a second one two: 1 + 2 + ... + 10 for ten."""
    marks = [(4 * step, float(4 * sum(range(step + 1)))) for step in range(4)]
    seconds, tokens = Trial(4, marks).of_a_text(10)
    assert seconds == pytest.approx(55.0)
    assert tokens == pytest.approx(10.0)


def test_texts_end_later_as_often_as_they_ended_in_the_trial() -> None:
    """One of 20 tokens was an end: a text has (1 - 0.95^100) / 0.05 of them on average, each of a second."""
    marks = [(4 * step, float(4 * step)) for step in range(6)]
    seconds, tokens = Trial(4, marks, [5]).of_a_text(100)
    assert tokens == pytest.approx((1 - 0.95**100) / 0.05)
    assert seconds == pytest.approx(tokens)


def test_what_a_prompt_takes_is_no_token() -> None:
    marks = [(0, 0.0), (0, 3.0), (1, 4.0), (2, 5.0)]
    assert Trial(1, marks).of_a_text(8) == pytest.approx((8.0, 8.0))  # of a fit, which CPUs round differently
