"""Several processes, or parts of a whole, give the results of one process."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest

from amalgam.tests.workspaces import TIMEOUT, Workspace, build_once, finish, ranks, torchrun


@pytest.fixture(scope="module")
def by_two(built: Workspace, shared: Path) -> tuple[Workspace, str]:
    """An experiment that two processes ran, each with a launcher of its own, as on two nodes; and their messages."""
    folder = shared / "two"
    workspace = build_once(folder, lambda unfinished: run_by_two(built.without_artifacts(unfinished), folder / "err"))
    return workspace, (folder / "err").read_text()


def run_by_two(workspace: Workspace, messages: Path) -> Workspace:
    with socket.create_server(("127.0.0.1", 0)) as free:
        meeting = f"127.0.0.1:{free.getsockname()[1]}"
    nodes = [torchrun(workspace, "run", "execution.processes=2", processes=1, meeting=meeting) for _ in range(2)]
    results = [finish(node) for node in nodes]
    assert [result.code for result in results] == [0, 0], results[0].err + results[1].err
    messages.write_text(results[0].err + results[1].err)
    return workspace


@pytest.mark.parametrize("stage", ["cache-teachers", "build-targets"])
def test_two_processes_write_the_very_files_of_one(by_two: tuple[Workspace, str], built: Workspace, stage: str) -> None:
    assert by_two[0].digests(stage) == built.digests(stage)


def test_two_processes_train_one_student_and_everything_is_current(
    by_two: tuple[Workspace, str], built: Workspace
) -> None:
    workspace, _ = by_two
    assert (workspace.folder / "students/student/model.safetensors").exists()
    assert workspace.stale() == set()
    assert [stage["fingerprint"] for stage in workspace.plan().values()] == [
        stage["fingerprint"] for stage in built.plan().values()
    ]


def test_rank_0_alone_prints_and_the_process_group_is_destroyed(by_two: tuple[Workspace, str]) -> None:
    _, err = by_two
    assert err.count("train-student: done") == 1
    assert "destroy_process_group" not in err
    assert "Traceback" not in err


def test_a_process_without_work_does_not_hang(by_two: tuple[Workspace, str]) -> None:
    """Build-targets has one unit and two processes; a run of current stages has none."""
    workspace, _ = by_two
    result = ranks(workspace, "run", "targets.temperature=0.5")
    assert result.code == 0, result.err
    assert "cache-teachers: reused" in result.err
    again = ranks(workspace, "run", "targets.temperature=0.5")
    assert again.code == 0, again.err
    assert again.err.count(": reused") == 5


def test_an_error_ends_both_processes_with_its_message(fresh: Workspace) -> None:
    fresh.write([("the boat left the harbour", "sailing")], "test")
    result = ranks(fresh, "run")
    assert result.code != 0
    assert "sailing" in result.err


def test_parts_together_make_the_whole(fresh: Workspace, built: Workspace) -> None:
    result = fresh("run", "--part", "1/2")
    assert re.search("cache-teachers: .*2 of 4 units", result.err)
    half = fresh.digests("cache-teachers")
    assert half < built.digests("cache-teachers")
    fresh("run", "--part", "0/2")
    assert fresh.digests("cache-teachers") == built.digests("cache-teachers")
    fresh("run")
    assert fresh.digests("build-targets") == built.digests("build-targets")
    assert fresh.stale() == set()


def test_a_killed_rank_is_named_and_what_the_others_committed_stays(fresh: Workspace, built: Workspace) -> None:
    process = torchrun(fresh, "cache-teachers", "cache.passes=96", "execution.batch_tokens=256")
    deadline = time.monotonic() + TIMEOUT
    while not fresh.digests("cache-teachers") and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(rank_of(process.pid, 1), signal.SIGKILL)
    result = finish(process)
    assert result.code != 0
    assert "rank" in result.err
    assert "exitcode  : -9" in result.err
    kept = fresh.digests("cache-teachers")
    assert kept
    fresh("cache-teachers", "cache.passes=96")
    assert kept <= fresh.digests("cache-teachers")
    assert len(fresh.units()) == len(built.units())


def rank_of(launcher: int, rank: int) -> int:
    """The process id of a launcher's child by its rank: it starts them in order."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return sorted(map(int, children))[rank]


def test_a_part_costs_no_more_than_its_share(fresh: Workspace) -> None:
    with fresh.counting() as asked:
        fresh("cache-teachers", "--part", "0/2")
    assert asked[0].units == 2
    with fresh.counting() as asked:
        fresh("cache-teachers", "--part", "0/2")
    assert asked[0].units == 0


@pytest.mark.parametrize("part", ["2/2", "1", "a/b", "-1/2", "1/0"])
def test_a_part_that_is_none_is_refused(fresh: Workspace, part: str) -> None:
    result = fresh.attempt("run", f"--part={part}")
    assert result.code == 2
    assert f"--part {part}" in result.err


def test_a_student_trained_by_two_has_the_labels_of_the_union(by_two: tuple[Workspace, str], built: Workspace) -> None:
    configs = [
        json.loads((workspace.folder / "students/student/config.json").read_text())["id2label"]
        for workspace in (by_two[0], built)
    ]
    assert configs[0] == configs[1]
