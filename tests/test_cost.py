"""The cost estimate of `amalgam plan`: missing work times recorded seconds; no test compares it with a clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from amalgam.pipeline.console import Console
from amalgam.pipeline.execution.runner import update
from amalgam.stages.app.cost import WAITS
from amalgam.stages.app.runs import open_run
from amalgam.stages.cache_features.stage import CacheFeatures
from amalgam.stages.common.load import part_of, train_part
from amalgam.stages.registry import STAGES
from amalgam.tests.workspaces import PASSES, TEST, TRAIN, Workspace, word_list, write_model

FIGURES = ("seconds", "memory_mb", "disk_mb")
AFTER_CHANGED_PASSES = {"cache-teachers", "build-targets", "train-student", "report"}


def cost_of(workspace: Workspace, *arguments: str) -> dict[str, Any]:
    return workspace("plan", "--json", *arguments).json["cost"]


def timing(workspace: Workspace, stage: str) -> dict[str, float]:
    """The recorded cost of the last build."""
    last = workspace.head(stage)
    return json.loads((workspace.artifacts / stage / last / "timing.json").read_text())["facts"]


def logged_seconds(artifacts: Path, stage: str) -> float:
    """The seconds of all trainings by their logs; loading and saving a model take no longer with more epochs."""
    logs = (artifacts / "training-logs").glob(f"{stage}-*.jsonl")
    return float(sum(json.loads(log.read_text().splitlines()[-1])["seconds"] for log in logs))


def test_before_the_first_run_the_cost_is_not_known_and_nothing_is_written(fresh: Workspace) -> None:
    result = fresh("plan")
    assert "memory  disk" not in result.out
    cost = cost_of(fresh)
    assert cost["total"] is None
    assert "amalgam read-corpus" in cost["notes"]["read-corpus"]
    assert cost["notes"]["cache-teachers"] == cost["notes"]["report"] == WAITS
    assert not fresh.artifacts.exists() or not list(fresh.artifacts.rglob("MANIFEST.json"))


def test_a_current_workspace_costs_nothing(workspace: Workspace) -> None:
    assert cost_of(workspace, "--estimate") == {"stages": {}, "total": None, "notes": {}}
    assert not (workspace.artifacts / "rates.json").exists()


def test_after_a_run_the_cost_of_every_missing_stage_is_known(workspace: Workspace) -> None:
    cost = cost_of(workspace, "cache.passes=6")
    assert cost["notes"] == {}
    assert set(cost["stages"]) == AFTER_CHANGED_PASSES
    assert all(stage[figure] > 0 for stage in cost["stages"].values() for figure in FIGURES)
    assert cost["total"]["seconds"] == pytest.approx(sum(stage["seconds"] for stage in cost["stages"].values()))
    assert cost["total"]["memory_mb"] == max(stage["memory_mb"] for stage in cost["stages"].values())
    assert "total: about" in workspace("plan", "cache.passes=6").out


def test_missing_passes_cost_the_recorded_seconds_of_a_text_pass(workspace: Workspace) -> None:
    """K from 4 to 6 with 4 cached: 2 passes of the training texts, none of the test texts, for each of two teachers."""
    recorded = timing(workspace, "cache-teachers")
    assert recorded["workload"] == 2 * (TRAIN * (PASSES + 1) + TEST)
    cost = cost_of(workspace, "cache.passes=6")["stages"]["cache-teachers"]
    share = 2 * 2 * TRAIN / recorded["workload"]
    assert cost["seconds"] == pytest.approx(share * recorded["seconds"])
    assert cost["disk_mb"] == pytest.approx(share * recorded["bytes"] / 1e6)


def test_appended_texts_cost_themselves_once_they_are_read(workspace: Workspace) -> None:
    rows = workspace.texts()
    workspace.write([*rows, *((f"{text} again", label) for text, label in rows[:7])])
    assert cost_of(workspace)["notes"]["cache-teachers"] == WAITS
    workspace("read-corpus")
    cost, recorded = cost_of(workspace)["stages"]["cache-teachers"], timing(workspace, "cache-teachers")
    share = 2 * 7 * (PASSES + 1) / recorded["workload"]
    assert cost["seconds"] == pytest.approx(share * recorded["seconds"])


def test_the_seconds_of_a_few_appended_texts_do_not_price_all_texts(workspace: Workspace) -> None:
    """They are mostly the loading of the teachers, so the rate stays that of the build of all texts."""
    recorded = timing(workspace, "cache-teachers")
    rows = workspace.texts()
    workspace.write([*rows, *((f"{text} again", label) for text, label in rows[:2])])
    workspace("cache-teachers")
    assert timing(workspace, "cache-teachers")["workload"] == 2 * 2 * (PASSES + 1)
    cost = cost_of(workspace, "cache.max_tokens=16")["stages"]["cache-teachers"]
    work = 2 * ((TRAIN + 2) * (PASSES + 1) + TEST)
    assert cost["seconds"] == pytest.approx(work / recorded["workload"] * recorded["seconds"])


@pytest.mark.parametrize("stage", ["train-student", "train-teachers"])
def test_a_training_costs_its_epochs(workspace: Workspace, stage: str) -> None:
    if stage == "train-teachers":
        workspace.train_teachers("max_tokens: 32")
        workspace("train-teachers")
    section = stage.replace("-teachers", "_teachers").replace("train-student", "student")
    recorded = timing(workspace, stage)
    cost = cost_of(workspace, f"{section}.epochs=3")["stages"][stage]
    logged = logged_seconds(workspace.artifacts, stage)
    assert 0 < logged < recorded["seconds"]
    assert cost["seconds"] == pytest.approx(recorded["seconds"] + 2 * logged)
    assert cost["disk_mb"] == pytest.approx(recorded["bytes"] / 1e6)


def test_a_transformer_gives_no_rate_to_a_static_student_and_the_reverse(workspace: Workspace) -> None:
    is_static = "student.encoder=static:./models/encoder"
    assert cost_of(workspace, is_static)["notes"]["train-student"] == "known after the first run"
    transformer = cost_of(workspace, "student.seed=1")["stages"]["train-student"]
    workspace("train-student", is_static, "student.epochs=1")
    assert cost_of(workspace, "student.seed=1")["stages"]["train-student"] == transformer
    static = cost_of(workspace, is_static, "student.epochs=1", "student.seed=1")["stages"]["train-student"]
    assert static["seconds"] == pytest.approx(timing(workspace, "train-student")["seconds"])


def test_another_encoder_is_priced_by_the_size_of_its_layers(workspace: Workspace) -> None:
    def seconds(*overrides: str) -> float:
        cost = cost_of(workspace, f"student.encoder={larger.name}", *overrides)["stages"]["train-student"]
        return float(cost["seconds"])

    larger = workspace.folder / "larger"
    write_model(larger, words=word_list(workspace), seed=9, num_hidden_layers=3)
    logged, recorded = logged_seconds(workspace.artifacts, "train-student"), timing(workspace, "train-student")
    assert seconds() == pytest.approx(recorded["seconds"] + 2 * logged)
    assert seconds("student.layers=1") == pytest.approx(recorded["seconds"])
    workspace("train-student", f"student.encoder={larger.name}")
    own = timing(workspace, "train-student")["seconds"]
    workspace("train-student", "student.encoder=./models/encoder")
    assert seconds("student.seed=1") == pytest.approx(own)


def test_a_report_with_test_texts_is_priced_by_one_without_them(fresh: Workspace) -> None:
    fresh.edit("  test: texts/test.csv\n  label: label\n", "")
    fresh("run")
    recorded = timing(fresh, "report")
    assert recorded["workload"] == TRAIN
    fresh.edit("  train: texts/train.csv\n", "  train: texts/train.csv\n  test: texts/test.csv\n  label: label\n")
    fresh("cache-teachers")
    report = cost_of(fresh)["stages"]["report"]
    assert report["seconds"] == pytest.approx(recorded["seconds"] * 2 * TEST / TRAIN)


def test_without_its_log_a_training_costs_its_examples(workspace: Workspace) -> None:
    recorded = timing(workspace, "train-student")
    for log in (workspace.artifacts / "training-logs").glob("*.jsonl"):
        log.write_text("{\n")
    cost = cost_of(workspace, "student.epochs=3")["stages"]["train-student"]
    assert cost["seconds"] == pytest.approx(3 * recorded["seconds"])


def test_estimate_runs_one_unit_of_each_teacher_and_keeps_its_result(fresh: Workspace) -> None:
    fresh("read-corpus")
    auto = "cache.dtype=auto"
    for dtype in ((), (auto,)):
        assert "plan --estimate" in cost_of(fresh, *dtype)["notes"]["cache-teachers"]
    assert cost_of(fresh, auto)["notes"]["report"] == WAITS
    estimated = fresh("plan", "--json", "--estimate").json
    assert estimated["stages"][1]["units"]["done"] == 2
    cost = estimated["cost"]
    assert all(cost["stages"]["cache-teachers"][figure] > 0 for figure in FIGURES)
    assert cost["notes"]["train-student"] == WAITS
    done = fresh.plan()["cache-teachers"]["units"]
    assert done["done"] == 2
    assert cost_of(fresh)["stages"]["cache-teachers"] == cost["stages"]["cache-teachers"]  # without the measured units
    fresh("run")
    assert timing(fresh, "cache-teachers")["found"] == 2


def test_a_model_that_must_be_fetched_leaves_its_cost_unknown_and_the_rest_known(workspace: Workspace) -> None:
    cost = cost_of(workspace, "student.encoder=someone/some-encoder", "targets.temperature=0.5")
    assert cost["stages"]["train-student"] is None
    assert cost["stages"]["build-targets"]["seconds"] > 0
    assert cost["total"] is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"cache-teachers": {"seconds": "x"}}'])
def test_damaged_rates_are_not_known(fresh: Workspace, content: str) -> None:
    fresh("read-corpus")
    (fresh.artifacts / "rates.json").write_text(content)
    assert cost_of(fresh)["stages"]["cache-teachers"] is None


def test_states_and_statistics_are_priced_by_text(workspace: Workspace) -> None:
    overrides = ("student.method=dfa", "targets.mode=vanilla-kd")
    workspace("cache-features", *overrides)
    recorded = timing(workspace, "cache-features")
    assert recorded["workload"] == 2 * TRAIN
    rows = workspace.texts()
    workspace.write([*rows, *((f"{text} again", label) for text, label in rows[:7])])
    workspace("read-corpus")
    cost = cost_of(workspace, *overrides)["stages"]["cache-features"]
    assert cost["seconds"] == pytest.approx(2 * 7 / recorded["workload"] * recorded["seconds"])


def test_statistics_of_held_out_texts_are_priced_by_these_texts(generated: Workspace, tmp_path: Path) -> None:
    workspace = generated.copy(tmp_path / "workspace")
    overrides = ("student.method=stratanet", "targets.mode=stratanet", "generate.held_out=0.3")
    workspace("fit-statistics", *overrides)
    run = open_run(workspace.config, list(overrides), console=Console(quiet=True))
    update(STAGES, run, target="fit-statistics")
    part = part_of(run, "held-out")
    held_out = part.texts if part else 0
    assert timing(workspace, "fit-statistics")["workload"] == 2 * held_out > 0
    features, both = CacheFeatures(), 2 * (held_out + train_part(run).texts)
    assert features.workload(run, None) == features.workload(run, features.units(run, tmp_path)) == both


def test_more_generated_texts_cost_the_recorded_seconds_of_a_text(generated: Workspace, tmp_path: Any) -> None:
    workspace = generated.copy(tmp_path / "workspace")
    recorded = timing(workspace, "generate")
    cost = cost_of(workspace, "generate.texts=36")["stages"]["generate"]
    assert cost["seconds"] == pytest.approx(2 * 16 * 8 / recorded["workload"] * recorded["seconds"], rel=0.02)
