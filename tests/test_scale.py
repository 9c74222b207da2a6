"""Planning accepts the workspaces of the benchmark of scale, and opens only changed files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from amalgam.benchmarks.synthetic_workspace import (
    Experiments,
    Shape,
    changed_buckets,
    half_of,
    lacking,
    quiet_run,
    write_answers,
    write_corpora,
    write_experiments,
    write_targets,
)
from amalgam.pipeline.execution.plan import StageState, plan
from amalgam.pipeline.execution.runner import update
from amalgam.stages.common.cached.load import KEPT_UNITS, families_of, unit_keys, units_of
from amalgam.stages.registry import STAGES
from amalgam.tests.workspaces import flip_bit

SHAPE = Shape(texts=2000, teachers=2)


@pytest.fixture
def made(tmp_path: Path) -> Experiments:
    experiments = write_experiments(tmp_path / "scale", SHAPE)
    write_corpora(experiments, SHAPE)
    return experiments


def states(config: Path) -> dict[str, StageState]:
    return {state.stage: state for state in plan(STAGES, quiet_run(config))}


def test_all_that_is_made_is_current_and_one_missing_unit_is_found(made: Experiments) -> None:
    units = lacking(made.first)
    write_answers(made.first, units[1:], SHAPE)
    stages = states(made.first)["cache-teachers"]
    assert (stages.state, stages.done, stages.total) == ("partial", len(units) - 1, len(units))
    assert [unit.name for unit in lacking(made.first)] == [units[0].name]
    write_answers(made.first, units[:1], SHAPE)
    update(STAGES, quiet_run(made.first), target="cache-teachers")
    write_targets(made.first)
    current = {name for name, state in states(made.first).items() if state.state == "current"}
    assert current == {"read-corpus", "cache-teachers", "build-targets"}


def test_half_a_teacher_a_new_one_and_appended_texts_are_planned_as_what_they_are(made: Experiments) -> None:
    units = lacking(made.first)
    late = half_of(units, "teacher-1")
    write_answers(made.first, [unit for unit in units if unit not in late], SHAPE)
    assert states(made.first)["cache-teachers"].done == len(units) - len(late)
    write_answers(made.first, late, SHAPE)
    new = states(made.new_teacher)["cache-teachers"]
    assert (new.done, new.total) == (len(units), len(units) + len(units) // 2)
    appended = states(made.appended)["cache-teachers"]
    assert (appended.done, appended.total) == (len(units), len(units) + 2 * changed_buckets(made))


def test_neither_texts_nor_answers_about_them_are_opened_where_none_changed(made: Experiments) -> None:
    """An opened file would fail its digest and be quarantined. The test part is one bucket, "all"."""
    units = lacking(made.first)
    write_answers(made.first, units[1:], SHAPE)
    artifacts = made.first.parent / "artifacts"
    shards = sorted(artifacts.glob("cache-teachers/*/units/[01]*.parquet"))
    texts = [path for path in artifacts.glob("read-corpus/part-*/train-*/[01]*.parquet") if path.stem != "00"]
    for path in [*shards, *texts]:
        flip_bit(path)
    assert (len(shards), len(texts), units[0].payload.prefix) == (7, 6, "00")
    assert states(made.first)["cache-teachers"].done == len(units) - 1
    assert states(made.new_teacher)["cache-teachers"].state == "partial"
    assert not (artifacts / "quarantine").exists()
    states(made.appended)
    assert (artifacts / "quarantine").exists()


def test_the_keys_of_a_few_units_alone_stay_in_memory(made: Experiments, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amalgam.stages.common.cached.load.KEPT_UNITS", 2)
    write_answers(made.first, lacking(made.first), SHAPE)
    run = quiet_run(made.first)
    update(STAGES, run, target="read-corpus")
    units = units_of(run, "cache-teachers", next(iter(families_of(run).values()))).entries
    assert KEPT_UNITS > 2
    keys_of: Any = unit_keys(run)
    keys = [keys_of(unit).tobytes() for unit in units]
    assert len(units) > 2
    assert keys_of.cache_info().currsize == 2
    assert [keys_of(unit).tobytes() for unit in units] == keys


def test_whole_answers_hold_every_column_that_stage_1_writes(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    shape = Shape(texts=1000, teachers=1, whole=True)
    experiments = write_experiments(tmp_path / "whole", shape)
    write_corpora(experiments, shape)
    write_answers(experiments.first, lacking(experiments.first), shape)
    update(STAGES, quiet_run(experiments.first), target="build-targets")
    shards = sorted(experiments.first.parent.glob("artifacts/build-targets/*/units/*.parquet"))
    assert sum(pq.read_metadata(path).num_rows for path in shards) == 1000


def test_texts_that_are_damaged_are_read_again_and_what_needs_them_waits(made: Experiments) -> None:
    """The manifest of read-corpus was trusted when cache-teachers met the damage."""
    units = lacking(made.first)
    write_answers(made.first, units[1:], SHAPE)
    for path in made.first.parent.glob("artifacts/read-corpus/part-*/train-*/00.parquet"):
        flip_bit(path)
    stages = states(made.first)
    assert (stages["read-corpus"].state, stages["read-corpus"].done, stages["cache-teachers"].done) == (
        "partial",
        1,
        None,
    )
