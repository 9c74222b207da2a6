"""A training log: its entries, resuming after an interruption, and trackers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import accelerate.tracking
import pytest

from amalgam.stages.common.training.checkpoint_files import LOGS, damaged_logs, log_digest
from amalgam.stages.common.training.loop import TrainingSettings
from amalgam.stages.common.training.run import TrainingLog
from amalgam.tests.workspaces import TRAIN, Workspace


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def journal_of(workspace: Workspace) -> Path:
    [path] = (workspace.artifacts / "training-logs").glob("train-student-*.jsonl")
    return path


def training(**changed: Any) -> TrainingSettings:
    settings = {"epochs": 1, "learning_rate": 0.5, "batch_size": 8, "accumulate": 1, "warmup": 0.0}
    return TrainingSettings(**{**settings, "weight_decay": 0.0, "evaluate_every": 5, "seed": 0, **changed})


def test_a_training_leaves_its_metrics_and_the_score_that_chose_the_student(built: Workspace) -> None:
    entries = lines(journal_of(built))
    steps, scores = ([line for line in entries if key in line] for key in ("loss", "score"))
    facts = built.manifest("train-student")["facts"]
    assert [line["score"] for line in scores] == [entry["score"] for entry in facts["history"]]
    assert steps[-1]["loss"] == pytest.approx(facts["history"][-1]["loss"])
    assert {line["of"] for line in entries} == {facts["steps"]}
    assert set(steps[0]) == {"step", "of", "seconds", "loss", "learning_rate", "steps_per_second"}
    assert facts["texts"] <= TRAIN


def test_every_ten_steps_are_one_line_and_a_step_without_a_loss_counts_for_none(tmp_path: Path) -> None:
    journal = TrainingLog(tmp_path / "one.jsonl", training(), [])
    for step in range(1, 26):
        journal.on_step(step, 25, float("nan") if step == 3 else step)
    journal.on_score(0.75)
    journal.close()
    entries = lines(tmp_path / "one.jsonl")
    assert [line["step"] for line in entries] == [10, 20, 25, 25]
    assert entries[0]["loss"] == pytest.approx((sum(range(1, 11)) - 3) / 9)
    assert entries[0]["learning_rate"] == pytest.approx(0.5 * (25 - 9) / 25)
    assert entries[-1].pop("seconds") >= 0
    assert entries[-1] == {"step": 25, "of": 25, "score": 0.75}


def test_a_resumed_training_appends_to_its_log_and_a_new_one_replaces_it(tmp_path: Path) -> None:
    for first in (1, 11, 1):
        journal = TrainingLog(tmp_path / "one.jsonl", training(), [])
        for step in range(first, first + 10):
            journal.on_step(step, 30, 1.0)
        assert not log_digest(tmp_path / "one.jsonl").exists()  # the log still grows
        journal.close()
        assert log_digest(tmp_path / "one.jsonl").exists()
        assert [line["step"] for line in lines(tmp_path / "one.jsonl")] == ([10, 20] if first == 11 else [10])


def test_two_runs_of_one_training_leave_the_log_of_the_later_one_with_its_digest(tmp_path: Path) -> None:
    path = tmp_path / LOGS / "train-student-one.jsonl"
    first, second = (TrainingLog(path, training(), []) for _ in range(2))
    for journal in (first, second):
        journal.on_step(1, 20, 1.0)
    for step in range(2, 21):
        first.on_step(step, 20, 1.0)
        second.on_step(step, 20, 1.0)
    first.close()
    assert not log_digest(path).exists()
    second.on_score(0.5)
    second.close()
    assert [line["step"] for line in lines(path)] == [10, 20, 20]
    assert log_digest(path).exists()
    assert list(damaged_logs(tmp_path)) == []


def test_a_log_that_is_deleted_during_the_training_fails_nothing(tmp_path: Path) -> None:
    path = tmp_path / LOGS / "train-student-one.jsonl"
    journal = TrainingLog(path, training(), [])
    journal.on_step(1, 20, 1.0)
    shutil.rmtree(path.parent)
    journal.on_score(0.5)
    journal.close()
    assert list(tmp_path.iterdir()) == []


def test_trackers_get_the_metrics_and_nothing_else(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []

    class RecordingTracker(accelerate.tracking.GeneralTracker):  # type: ignore[misc]  # Accelerate has no types
        name, requires_logging_directory, tracker = "tensorboard", True, None

        def __init__(self, *given: Any) -> None:
            super().__init__()
            events.append(given)

        def start(self) -> None:
            events.append("start")

        def store_init_configuration(self, values: Any) -> None:
            events.append(values)

        def log(self, values: Any, step: Any = None, **_: Any) -> None:
            events.append((step, set(values)))

        def finish(self) -> None:
            events.append("finish")

    monkeypatch.setitem(accelerate.tracking.LOGGER_TYPE_TO_CLASS, "tensorboard", RecordingTracker)
    monkeypatch.setattr(accelerate.tracking, "_available_trackers", ["tensorboard"])
    workspace("run", "student.seed=1", "student.evaluate_every=100", "execution.trackers=[tensorboard]")
    [journal] = [path for path in (workspace.artifacts / "training-logs").iterdir() if path.stem == events[0][0]]
    assert events == [
        (journal.stem, str(workspace.artifacts / "training-logs")),
        "start",
        (4, {"loss", "learning_rate", "steps_per_second"}),
        (4, {"score"}),
        "finish",
    ]
    assert workspace.stale("student.seed=1", "student.evaluate_every=100") == set()


def test_a_tracker_that_does_not_start_is_an_error_with_its_name(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Offline(accelerate.tracking.GeneralTracker):  # type: ignore[misc]  # Accelerate has no types
        name, requires_logging_directory, tracker = "wandb", False, None

        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__()

        def start(self) -> None:
            raise ImportError("cannot import name 'service'")

    monkeypatch.setitem(accelerate.tracking.LOGGER_TYPE_TO_CLASS, "wandb", Offline)
    monkeypatch.setattr(accelerate.tracking, "_available_trackers", ["wandb"])
    refused = workspace.attempt("run", "student.seed=1", "execution.trackers=[wandb]")
    assert (refused.code, "Traceback" in refused.err) == (2, False)
    assert "wandb" in refused.err
