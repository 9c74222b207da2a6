"""The bill of `amalgam plan`: counted work times rates that were measured once; no test here looks at a clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from amalgam.stages.app.cost.rates import MachineRates
from amalgam.stages.app.cost.survey import FIRST_ROWS, sample, survey
from amalgam.stages.app.cost.trials import starting
from amalgam.stages.app.session import open_run
from amalgam.tests.workspaces import PASSES, TEST, TRAIN, Workspace

FIGURES = ("seconds", "memory_mb", "disk_mb")


STARTED: dict[str, str] = {}


@pytest.fixture(scope="module", autouse=True)
def _started(built: Workspace, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What starting takes is measured once for all tests: it is a process that loads every library."""
    workspace = built.without_artifacts(tmp_path_factory.mktemp("bill") / "workspace")
    _, run = open_run(workspace.config, [])
    MachineRates(run, measure=True).of("starting", None, starting)
    STARTED["rates.json"] = (workspace.artifacts / "rates.json").read_text()


def _measured(workspace: Workspace, *arguments: str) -> dict[str, Any]:
    """The bill, after this machine was tried."""
    if not (workspace.artifacts / "rates.json").exists():
        workspace.artifacts.mkdir(exist_ok=True)
        (workspace.artifacts / "rates.json").write_text(STARTED["rates.json"])
    return _bill(workspace, "--estimate", *arguments)


def _bill(workspace: Workspace, *arguments: str) -> dict[str, Any]:
    result: dict[str, Any] = workspace("plan", "--json", *arguments).json["cost"]
    return result


def _kept(workspace: Workspace) -> dict[str, dict[str, float]]:
    entries = json.loads((workspace.artifacts / "rates.json").read_text()).values()
    return {entry["kind"]: entry["figures"] for entry in entries}


def test_without_measured_rates_the_costs_are_unknown_and_the_way_to_know_them_is_said(fresh: Workspace) -> None:
    result = fresh("plan")
    assert "memory  disk" not in result.out
    assert "`amalgam plan --estimate`" in " ".join(result.out.split())
    assert not (fresh.artifacts / "rates.json").exists()
    assert _bill(fresh)["total"] is None


def test_measured_once_the_costs_of_every_missing_stage_are_known_from_then_on(fresh: Workspace) -> None:
    result = fresh("plan", "--estimate")
    assert "first" in result.err
    assert "in all about " in result.out
    bill = _bill(fresh)
    assert set(bill["stages"]) == {"read-corpus", "cache-teachers", "build-targets", "train-student", "report"}
    assert all(cost[figure] > 0 for cost in bill["stages"].values() for figure in FIGURES)
    total = bill["starting_seconds"] + sum(cost["seconds"] for cost in bill["stages"].values())
    assert bill["total"]["seconds"] == pytest.approx(total)
    assert bill["total"]["memory_mb"] == max(cost["memory_mb"] for cost in bill["stages"].values())
    again = fresh("plan", "--estimate")
    assert "measuring" not in again.err
    assert again.out == result.out


def test_what_is_current_costs_nothing(workspace: Workspace) -> None:
    assert _bill(workspace, "--estimate") == {"stages": {}, "starting_seconds": 0.0, "total": None, "notes": {}}
    assert not (workspace.artifacts / "rates.json").exists()


def test_the_bill_of_stage_1_is_its_missing_passes_times_the_rate(workspace: Workspace) -> None:
    """K from 4 to 6 with 4 cached: 2 passes of the training texts, none of the test texts, for each of two teachers."""
    cost = _measured(workspace, "cache.passes=6")["stages"]["cache-teachers"]
    rates = _kept(workspace)
    asked = [rates["asking first"], rates["asking second"]]
    expected = sum(one["setup_seconds"] + 2 * TRAIN * one["seconds_per_pass"] for one in asked)
    assert cost["seconds"] == pytest.approx(expected)


def test_before_the_texts_are_read_the_whole_of_stage_1_is_on_the_bill(fresh: Workspace) -> None:
    cost = _measured(fresh)["stages"]["cache-teachers"]
    rates = _kept(fresh)
    rows = TRAIN * (PASSES + 1) + TEST
    asked = [rates["asking first"], rates["asking second"]]
    assert cost["seconds"] == pytest.approx(sum(one["setup_seconds"] + rows * one["seconds_per_pass"] for one in asked))


def test_the_bill_of_the_student_counts_its_steps_and_its_looks_at_what_was_held_out(fresh: Workspace) -> None:
    cost = _measured(fresh, "student.epochs=3", "student.evaluate_every=5")["stages"]["train-student"]
    rates = next(figures for kind, figures in _kept(fresh).items() if kind.startswith("training"))
    steps = 3 * -(-int(TRAIN * 0.95) // 32)
    looks = -(-steps // 5)
    seconds = steps * rates["seconds_per_step"] + looks * 0.05 * TRAIN * rates["seconds_per_read"]
    assert cost["seconds"] == pytest.approx(rates["setup_seconds"] + seconds)


def test_teachers_that_are_to_be_trained_are_on_the_bill_and_measured_as_what_they_will_be(fresh: Workspace) -> None:
    text = fresh.config.read_text()
    start, end = text.index("teachers:"), text.index("cache:")
    trained = "train_teachers:\n  encoder: ./models/encoder\n  groups: 2\n  epochs: 2\n  max_tokens: 32\n"
    fresh.config.write_text(text[:start] + trained + text[end:])
    bill = _measured(fresh)
    assert bill["notes"] == {}
    assert bill["stages"]["train-teachers"]["seconds"] > 0
    assert "asking ./models/encoder" in _kept(fresh)


def test_a_model_that_must_be_fetched_leaves_its_cost_unknown_and_the_rest_known(fresh: Workspace) -> None:
    bill = _measured(fresh, "student.encoder=someone/some-encoder")
    assert bill["stages"]["train-student"] is None
    assert bill["notes"]["train-student"] == "after someone/some-encoder"
    assert bill["stages"]["cache-teachers"]["seconds"] > 0
    assert bill["total"] is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"a": 1}', '{"a": {"figures": {"seconds": "x"}}}'])
def test_a_damaged_file_of_rates_is_measured_anew(fresh: Workspace, content: str) -> None:
    fresh.artifacts.mkdir()
    (fresh.artifacts / "rates.json").write_text(content)
    _, run = open_run(fresh.config, [])
    assert MachineRates(run, measure=True).of("a", 1, lambda: {"seconds": 2.0}) == {"seconds": 2.0}
    assert MachineRates(run, measure=False).of("a", 1, dict) == {"seconds": 2.0}


# ---- counting texts that are not read yet


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_texts_are_counted_in_their_files(fresh: Workspace, suffix: str) -> None:
    rows = fresh.texts()
    fresh.write([*rows, ("a text of\ntwo lines", rows[0][1])], suffix=suffix)
    _, run = open_run(fresh.config, [f"corpus.train=texts/train.{suffix}"])
    counts = survey(run, "train", MachineRates(run, measure=True))
    assert counts.texts == TRAIN + 1
    assert sum(counts.labels.values()) == TRAIN + 1
    assert {text for (text,) in sample(run, "train")} == {text for text, _ in rows} | {"a text of\ntwo lines"}


def test_a_long_csv_is_counted_by_its_lines_and_a_limit_is_kept_to(tmp_path: Path) -> None:
    count = 3 * FIRST_ROWS
    lines = "".join(f'"text {row}\nof two lines"\n' for row in range(count))
    (tmp_path / "train.csv").write_text(f"text\n{lines}")
    (tmp_path / "amalgam.yaml").write_text("corpus: {train: train.csv}\nteachers: [{name: a, model: ./a}]\n")
    _, run = open_run(tmp_path / "amalgam.yaml", [])
    assert survey(run, "train", MachineRates(run, measure=True)).texts == pytest.approx(count, rel=0.01)
    _, run = open_run(tmp_path / "amalgam.yaml", ["corpus.limit=100"])
    assert survey(run, "train", MachineRates(run, measure=True)).texts == 100


# ---- methods that look at teachers' states

DFA = ("student.method=dfa", "targets.mode=vanilla-kd")


def test_states_that_are_missing_are_on_the_bill_by_text_and_teacher(workspace: Workspace) -> None:
    bill = _measured(workspace, *DFA)
    assert bill["notes"] == {}
    cost, rates = bill["stages"]["cache-features"], _kept(workspace)
    asked = [rates["states of first"], rates["states of second"]]
    assert cost["seconds"] == pytest.approx(
        sum(one["setup_seconds"] + TRAIN * one["seconds_per_text"] for one in asked)
    )
    assert cost["disk_mb"] == pytest.approx(sum(TRAIN * one["mb_per_text"] for one in asked))
    workspace("train-student", *DFA)
    rows = workspace.texts()
    workspace.write([*rows, *((f"{text} again", label) for text, label in rows[:7])])
    workspace("read-corpus")
    cost = _measured(workspace, *DFA)["stages"]["cache-features"]
    assert cost["seconds"] == pytest.approx(sum(one["setup_seconds"] + 7 * one["seconds_per_text"] for one in asked))


def test_states_by_token_take_the_tokens_times_the_blocks_times_the_width_on_the_disk(workspace: Workspace) -> None:
    """The figure of the bill is what then lies there."""
    cost = _measured(workspace, *DFA, "objective.states=tokens")["stages"]["cache-features"]
    workspace("train-student", *DFA, "objective.states=tokens")
    existing = sum(path.stat().st_size for path in (workspace.artifacts / "cache-teachers").glob("*/units/*/*")) / 1e6
    assert cost["disk_mb"] == pytest.approx(existing, rel=0.02)


def test_the_students_steps_are_measured_with_what_it_looks_at_phase_by_phase(workspace: Workspace) -> None:
    settings = ("student.method=layerwise", "targets.mode=scores")
    assert _measured(workspace, *settings)["stages"]["train-student"]["seconds"] > 0
    assert next(figures for kind, figures in _kept(workspace).items() if kind.startswith("training"))["phases"] == 2


def test_states_of_teachers_that_are_to_be_trained_are_on_the_bill(fresh: Workspace) -> None:
    text = fresh.config.read_text()
    start, end = text.index("teachers:"), text.index("cache:")
    trained = "train_teachers:\n  encoder: ./models/encoder\n  groups: 2\n  epochs: 2\n  max_tokens: 32\n"
    fresh.config.write_text(text[:start] + trained + text[end:])
    bill = _measured(fresh, *DFA)
    assert bill["notes"] == {}
    assert bill["stages"]["cache-features"]["seconds"] > 0
    assert "states of ./models/encoder" in _kept(fresh)
