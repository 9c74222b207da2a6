"""Several processes, or parts of a whole, give the results of one process."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from amalgam.pipeline.errors import InterruptedRunError
from amalgam.pipeline.execution import ranks as rank_inputs
from amalgam.pipeline.execution.ranks import RankInputs
from amalgam.pipeline.execution.stage import WorkerShare
from amalgam.tests import interruptible
from amalgam.tests.pipeline.toy_stages import toy_base, toy_run, toy_stages
from amalgam.tests.workspaces import (
    CommandResult,
    Workspace,
    build_once,
    finish,
    free_port,
    ranks,
    run_ranks,
    shift_weights,
    torchrun,
    until,
)


@pytest.fixture(scope="module")
def by_two(built: Workspace, shared: Path) -> tuple[Workspace, str]:
    """An experiment that two processes ran, each with a launcher of its own, as on two nodes; and their messages."""
    folder = shared / "two"
    workspace = build_once(folder, lambda unfinished: run_by_two(built.without_artifacts(unfinished), folder / "err"))
    return workspace, (folder / "err").read_text()


def run_by_two(workspace: Workspace, messages: Path) -> Workspace:
    meeting = f"127.0.0.1:{free_port()}"
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


def test_a_process_without_work_does_not_hang(workspace: Workspace) -> None:
    """Build-targets has one unit and two processes; a run of current stages has none."""
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


def test_parts_make_the_whole_though_train_and_test_share_texts(fresh: Workspace) -> None:
    fresh.write([*fresh.texts("test"), *fresh.texts()[:7]], "test")
    for part in ("0/2", "1/2"):
        result = fresh("cache-teachers", "--part", part)
    assert "cache-teachers: done" in result.err


def test_one_part_of_a_report_has_no_report_to_print_or_to_fail_by(workspace: Workspace) -> None:
    """Only the first part writes the page, so another part would find that of an earlier run."""
    for requirement in (["--json"], ["--fail-under", "0"]):
        refused = workspace.attempt("report", "cache.passes=6", "--part", "1/2", *requirement)
        assert (refused.code, refused.out) == (2, "")
        assert "--json and --fail-... need the whole report" in refused.err


def test_a_killed_rank_is_named_and_what_the_others_committed_stays(fresh: Workspace, built: Workspace) -> None:
    process = torchrun(fresh, "cache-teachers", module=interruptible.MODULE)
    until(lambda: fresh.digests("cache-teachers"))
    os.kill(rank_of(process.pid, 1), signal.SIGKILL)
    result = finish(process)
    assert result.code != 0
    assert "rank" in result.err
    assert "exitcode  : -9" in result.err
    kept = fresh.digests("cache-teachers")
    assert kept
    fresh("cache-teachers")
    assert kept <= fresh.digests("cache-teachers")
    assert len(fresh.digests("cache-teachers")) == len(built.digests("cache-teachers"))  # not a file without a record


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


# ---- machines with different inputs


def change_texts(machine: Workspace) -> None:
    machine.write(machine.texts()[:-1])


def change_teacher(machine: Workspace) -> None:
    shift_weights(machine.folder / "models/second", {"classifier.bias": 0.5})


def change_experiment(machine: Workspace) -> None:
    machine.edit("epochs: 1", "epochs: 2")


def add_stage(machine: Workspace) -> None:
    machine.edit("student:\n", "student:\n  method: amalgam\n")
    machine.edit("targets:\n  mode: soft\n", "")


def use_other_disk(machine: Workspace) -> None:
    machine.edit("workspace: ../shared", "workspace: ./own")


OTHER_INPUTS: dict[Callable[[Workspace], None], tuple[str, str]] = {
    change_texts: ("where: read-corpus", "process 0: content of corpus.train: "),
    change_teacher: ("where: cache-teachers", "process 0: model files of teacher second: "),
    change_experiment: ("where: the experiment", "experiment.student.epochs: 1 -> 2"),
    add_stage: ("where: the experiment", "(+4 more)"),
    use_other_disk: ("where: the experiment", "workspace: "),
}


def as_two_machines(fresh: Workspace, *arguments: str) -> CommandResult:
    """Runs the command as two ranks, each with the inputs of a machine of its own, and one workspace."""
    machines = [fresh, Workspace(fresh.folder.with_name("machine"))]
    return run_ranks(lambda rank: machines[int(rank["RANK"])].process(*arguments, **rank))


@pytest.mark.parametrize("change", OTHER_INPUTS)
def test_processes_with_different_inputs_end_with_the_difference(
    fresh: Workspace, change: Callable[[Workspace], None]
) -> None:
    with fresh.config.open("a") as file:
        file.write("execution:\n  workspace: ../shared\n")
    change(fresh.copy(fresh.folder.with_name("machine")))
    result = as_two_machines(fresh, "run")  # which kills processes that wait
    assert result.code == 2, result.err
    where, difference = OTHER_INPUTS[change]
    assert "process 1 on " in result.err
    assert "has other inputs than process 0: " in result.err
    assert where in result.err
    assert difference in result.err
    assert "fault of amalgam" not in result.err
    assert not fresh.units()


def test_the_process_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal ends the waiting."""
    run, notes = toy_run(toy_base(tmp_path)), list[str]()
    monkeypatch.setattr(rank_inputs, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(rank_inputs, "_connect", lambda *_: SimpleNamespace(check=lambda _: False))

    def interrupt(text: str) -> None:
        notes.append(text)
        run.signals.arrived = signal.SIGTERM

    monkeypatch.setattr(run.console, "note", interrupt)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    run.share = WorkerShare(0, 2, "torchrun")
    with pytest.raises(InterruptedRunError):
        RankInputs(run).compare_settings(toy_stages())
    assert notes == ["waiting for process 1, which reads its inputs"]


def test_a_student_trained_by_two_has_the_labels_of_the_union(by_two: tuple[Workspace, str], built: Workspace) -> None:
    configs = [
        json.loads((workspace.folder / "students/student/config.json").read_text())["id2label"]
        for workspace in (by_two[0], built)
    ]
    assert configs[0] == configs[1]


def test_the_states_of_unknown_texts_belong_to_the_weights_that_two_trained(by_two: tuple[Workspace, str]) -> None:
    [entry] = by_two[0]("predict", "the chef fried the onion", "--unknown", "--json").json
    assert entry["unknown"]["source"] == "states"
