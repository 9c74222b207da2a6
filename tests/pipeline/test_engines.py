"""The share of the work of a process: given, or read from a job's scheduler."""

from __future__ import annotations

import pytest

from amalgam.pipeline.errors import ExperimentError
from amalgam.pipeline.execution.stage import WorkerShare, share_of

SLURM = {"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_MIN": "3", "SLURM_ARRAY_TASK_COUNT": "5"}


@pytest.fixture(autouse=True)
def no_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*SLURM, "SLURM_ARRAY_TASK_STEP", "JOB_COMPLETION_INDEX", "JOB_COMPLETIONS", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("environment", "share"),
    [
        (SLURM, (4, 5)),
        (SLURM | {"SLURM_ARRAY_TASK_STEP": "2"}, (2, 5)),
        ({"JOB_COMPLETION_INDEX": "0", "JOB_COMPLETIONS": "8"}, (0, 8)),
    ],
)
def test_the_part_comes_from_the_job_array(
    environment: dict[str, str], share: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert share_of("auto") == WorkerShare(*share, "part")


@pytest.mark.parametrize(
    ("environment", "piece"),
    [
        ({}, "JOB_COMPLETION_INDEX"),
        ({"JOB_COMPLETION_INDEX": "0"}, "JOB_COMPLETIONS"),
        (SLURM | {"SLURM_ARRAY_TASK_ID": "9"}, "SLURM_ARRAY_TASK"),
        (SLURM | {"SLURM_ARRAY_TASK_STEP": "3"}, "SLURM_ARRAY_TASK"),
        (SLURM | {"SLURM_ARRAY_TASK_COUNT": "many"}, "many"),
    ],
)
def test_an_unclear_array_job_is_refused(
    environment: dict[str, str], piece: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ExperimentError, match=piece):
        share_of("auto")


@pytest.mark.parametrize(
    ("environment", "piece"),
    [
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"WORLD_SIZE": "2", "RANK": "first"}, "RANK is 'first'"),
        ({"WORLD_SIZE": "two", "RANK": "0"}, "WORLD_SIZE is 'two'"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE is ''"),
    ],
)
def test_an_unclear_launcher_is_refused_with_a_fix(
    environment: dict[str, str], piece: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ExperimentError, match=piece) as refused:
        share_of(None)
    assert "torchrun" in str(refused.value.fix)
