"""Damage, deletion, moves, signals and rivals at a real workspace: only lost results are made again, and are equal."""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from amalgam.data.parquet import matrix
from amalgam.pipeline.errors import InterruptedRunError
from amalgam.pipeline.execution.stage import Unit
from amalgam.pipeline.signals import InterruptHandler, stopping
from amalgam.stages.app import runs
from amalgam.stages.app.runs import open_run, working
from amalgam.stages.cache_teachers.ask import record_conflict
from amalgam.stages.common import load
from amalgam.stages.common.training.run import TrainingLog
from amalgam.tests import interruptible
from amalgam.tests.forking import Forked
from amalgam.tests.test_errors import permissions, without_privileges
from amalgam.tests.workspaces import (
    TOLERANCE,
    TRAIN,
    Workspace,
    build_once,
    finish,
    flip_bit,
    largest_difference,
    quiet_environment,
    record_of,
    until,
)


def train_unit(workspace: Workspace) -> Path:
    """A unit with passes; others have test texts alone."""
    return next(path for path in workspace.units() if "passes" in pq.read_schema(path).names)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def other_in_its_place(path: Path) -> None:
    other = next(unit for unit in path.parent.glob("*.parquet") if unit != path)
    shutil.copyfile(other, path)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "cut to half": cut,
    "one bit flipped": flip_bit,
    "another unit in its place": other_in_its_place,
    "deleted": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_shard_alone_is_reported_and_recomputed(workspace: Workspace, damage: str) -> None:
    path, before = train_unit(workspace), workspace.targets()
    whole = path.read_bytes()
    DAMAGE[damage](path)
    with workspace.counting() as asked:
        result = workspace("build-targets", "--force")
    assert (asked[0].units, asked[0].passes) == (1, TRAIN * 4)
    assert path.name in result.err
    assert "missing" in result.err if damage == "deleted" else "damaged" in result.err
    assert path.read_bytes() == whole
    assert largest_difference(workspace.targets(), before) == 0
    assert workspace.stale() <= {"train-student", "report"}
    with workspace.counting() as asked:
        workspace("run")
    assert asked[0].units == 0


@pytest.mark.parametrize("content", [None, b"{garbage"])
def test_a_lost_or_senseless_record_means_not_committed(workspace: Workspace, content: bytes | None) -> None:
    path, before = train_unit(workspace), workspace.targets()
    record, whole = record_of(path), path.read_bytes()
    record.unlink() if content is None else record.write_bytes(content)
    workspace("build-targets", "--force")  # the manifest still names the file, and the file verifies
    assert largest_difference(workspace.targets(), before) == 0
    with workspace.counting() as asked:
        workspace("cache-teachers", "--force")
    assert asked[0].units == 4
    assert path.read_bytes() == whole
    assert json.loads(record.read_text())["facts"]["rows"] == TRAIN


def test_more_passes_after_a_lost_record_ask_those_texts_again(workspace: Workspace, tmp_path: Path) -> None:
    record_of(train_unit(workspace)).unlink()
    with workspace.counting() as asked:
        workspace("build-targets", "cache.passes=6")
    assert asked[0].passes == TRAIN * 6 + TRAIN * 2
    other = workspace.without_artifacts(tmp_path / "other")
    other("build-targets", "cache.passes=6")
    assert largest_difference(workspace.targets(), other.targets()) < TOLERANCE


@pytest.mark.parametrize(
    ("stage", "content"),
    [
        *((stage, None) for stage in ("read-corpus", "cache-teachers", "build-targets", "train-student", "report")),
        ("build-targets", b"{garbage"),
    ],
)
def test_a_lost_manifest_is_written_again_and_nothing_is_recomputed(
    workspace: Workspace, stage: str, content: bytes | None
) -> None:
    head = workspace.head(stage)
    manifest = workspace.artifacts / stage / head / "MANIFEST.json"
    before = json.loads(manifest.read_text())
    manifest.unlink() if content is None else manifest.write_bytes(content)
    reason = "missing" if content is None else "damaged"
    state = workspace.plan()[stage]
    assert (state["state"], state["reason"]) == ("partial", reason)
    assert state["units"]["done"] == state["units"]["total"]
    made = {path: path.stat().st_mtime_ns for path in workspace.artifacts.rglob("*.*") if stage in str(path)}
    workspace("run")
    assert json.loads(manifest.read_text()) == before
    assert all(path.stat().st_mtime_ns == when for path, when in made.items() if path != manifest)


@permissions
def test_all_damage_of_a_workspace_that_cannot_be_written_is_reported(workspace: Workspace) -> None:
    unit = train_unit(workspace)
    family, mark = unit.parents[1] / "family.json", next((workspace.folder / "students/student").glob("*amalgam*.json"))
    paths = [unit, family, mark, workspace.folder / "students/student/model.safetensors"]
    for path in paths:
        flip_bit(path)
    damaged, results = {path: path.read_bytes() for path in paths}, []
    for path in [workspace.folder, *workspace.folder.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    with without_privileges():
        results = [workspace.attempt("verify", *options) for options in ((), ("--json",), ("--json", "--repair"))]
    for path in [workspace.folder, *workspace.folder.rglob("*")]:
        path.chmod(0o755)
    assert {path: path.read_bytes() for path in paths} == damaged
    places = {str(path.relative_to(workspace.folder)).removeprefix("artifacts/") for path in paths}
    for result in results[1:]:
        assert (result.code, {damage["path"] for damage in result.json["damaged"]}) == (1, places), result.err
    assert results[0].out.count("to mend: it stays there (Permission denied): give your user access") == 3
    assert "quarantine" not in results[0].err
    assert {damage["path"] for damage in workspace.attempt("verify", "--json").json["damaged"]} == places


def test_a_damaged_student_is_trained_again_from_the_same_targets(workspace: Workspace) -> None:
    [weights] = (workspace.artifacts / "train-student").glob("*/student-*/model.safetensors")
    flip_bit(weights)
    with workspace.counting() as asked:
        result = workspace("run", "report.calibration_bins=11")
    assert "model.safetensors is damaged" in result.err
    assert "train-student: running" in result.err
    assert "build-targets: reused" in result.err
    assert asked[0].units == 0


def test_a_moved_experiment_is_up_to_date_where_it_went(workspace: Workspace, tmp_path: Path) -> None:
    moved = Workspace(tmp_path / "elsewhere/deep/inside")
    moved.folder.parent.mkdir(parents=True)
    workspace.folder.rename(moved.folder)
    assert moved.stale() == set()
    with moved.counting() as asked:
        moved("run")
    assert asked[0].units == 0


def test_two_runs_at_once_both_end_well_and_equal_one(fresh: Workspace, built: Workspace) -> None:
    rivals = [fresh.process("run"), fresh.process("run")]
    results = [finish(process) for process in rivals]
    assert [one.code for one in results] == [0, 0], results[0].err + results[1].err
    assert fresh.digests("cache-teachers") == built.digests("cache-teachers")
    assert fresh.digests("build-targets") == built.digests("build-targets")
    assert fresh.stale() == set()
    assert fresh("verify", "--json").json["damaged"] == []


# ---- signals. More passes than the tests use elsewhere, so that a killed process has work left.

MANY = ("cache.passes=64", "execution.batch_tokens=2048")


def interrupted(workspace: Workspace, number: signal.Signals) -> tuple[int, str]:
    """cache-teachers, stopped as soon as one unit is committed."""
    process = Forked(("cache-teachers", *MANY), workspace.folder, quiet_environment(), interruptible.MODULE)
    until(lambda: list((workspace.artifacts / "cache-teachers").glob("*/units/*.json")), process)
    process.send_signal(number)
    result = finish(process)
    return result.code, result.err


@pytest.fixture(scope="module")
def uninterrupted(built: Workspace, shared: Path) -> Workspace:
    def build(folder: Path) -> Workspace:
        workspace = built.without_artifacts(folder)
        workspace("build-targets", *MANY)
        return workspace

    return build_once(shared / "uninterrupted", build)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_work_keeps_committed_units_and_gives_the_fix(
    fresh: Workspace, uninterrupted: Workspace, number: signal.Signals, code: int
) -> None:
    status, err = interrupted(fresh, number)
    assert status == code, err
    assert "Traceback" not in err
    assert number.name in err
    assert "fix: " in err
    kept = fresh.digests("cache-teachers")
    assert 0 < len(kept) < 4
    assert not list(fresh.artifacts.rglob(".tmp-*"))
    with fresh.counting() as asked:
        fresh("build-targets", *MANY)
    assert asked[0].units == 4 - len(kept)
    assert kept < fresh.digests("cache-teachers")
    assert largest_difference(fresh.targets(), uninterrupted.targets()) < TOLERANCE


def test_an_interrupted_training_names_its_checkpoint_and_the_next_run_resumes_from_it(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned() -> tuple[str, float]:
        plan = workspace("plan", "--json", "student.epochs=3").json
        [stage] = [stage for stage in plan["stages"] if stage["stage"] == "train-student"]
        return stage["detail"], plan["cost"]["stages"]["train-student"]["seconds"]

    write_step = TrainingLog.on_step

    def on_step(log: TrainingLog, step: int, total: int, loss: float) -> None:
        write_step(log, step, total, loss)
        if step == 3:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(TrainingLog, "on_step", on_step)
        _, of_all_steps = planned()
        stopped = workspace.attempt("train-student", "student.epochs=3")
    detail, of_the_rest = planned()
    status = workspace("status").out
    resumed = workspace("train-student", "student.epochs=3")
    assert stopped.code == 130
    step = re.search(r"stopped after step (\d); a checkpoint is saved", stopped.err)
    assert step, stopped.err
    assert f"resumed from step {step[1]} of 12" in resumed.err
    assert detail == f"student.epochs: 1 -> 3; resumes from step {step[1]} of 12"
    assert of_the_rest < of_all_steps
    assert f"an interrupted training, which resumes from step {step[1]} of 12\n" in status
    assert "resumed" not in stopped.err


INTERRUPTED: dict[str, tuple[str, ...]] = {
    "train-student": ("train-student", "student.epochs=20"),
    "run": ("run", "cache.passes=9", "student.epochs=3"),
    "sweep": ("sweep", "student.seed=3,4"),
    "export": ("export", "--onnx"),
}


@pytest.mark.parametrize(
    ("command", "number"),
    [*((command, signal.SIGTERM) for command in INTERRUPTED), ("run", signal.SIGINT)],
)
def test_a_signal_at_any_time_ends_a_command_without_files_or_traces_left(
    workspace: Workspace, command: str, number: signal.Signals
) -> None:
    process = workspace.process(*INTERRUPTED[command])
    time.sleep(0.1 + 0.15 * list(INTERRUPTED).index(command))
    process.send_signal(number)
    ended = finish(process)
    assert ended.code in {0, 128 + number, -number}, ended.err  # 0 or killed: it had ended, or was about to
    assert ended.code != 128 + number or f"stopped by {number.name}" in ended.err
    assert "Traceback" not in ended.err
    assert not [path for path in workspace.folder.rglob(".tmp-*") if path.exists()]
    workspace("run")
    assert workspace("verify", "--json").json["damaged"] == []
    assert workspace.stale() == set()


def test_a_fault_after_fetched_texts_were_read_is_not_taken_for_damage_of_them(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have the columns of their source, not those of amalgam's own tables."""
    source, run = "s3://texts/train.parquet", open_run(workspace.config, [])
    table = pa.table({"body": ["a text"]})
    monkeypatch.setattr(load, "fetch_remote", lambda _, folder: pq.write_table(table, folder / "train.parquet"))
    load.fetch(run, [source])
    [path] = load.local_files(run, source)
    with pytest.raises(ZeroDivisionError), working(run):
        raise ZeroDivisionError
    assert path.exists()


def test_an_interrupt_that_a_library_notices_first_has_the_message_too(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Polars raises KeyboardInterrupt during a query, and Typer ends the command for it without a message."""

    def query(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "plan", query)
    ended = workspace.attempt("plan")
    assert (ended.code, ended.out) == (130, "")
    assert ended.err.startswith("error: stopped by SIGINT; committed units stay")


def test_a_signal_to_a_finished_run_reaches_the_work_around_it() -> None:
    """The last stage of one student of a sweep ends before it looks for signals; the next student must not begin."""
    around, inside = InterruptHandler(), InterruptHandler()
    with around.listening():
        with inside.listening():
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(InterruptedRunError):
            around.check()
        around.arrived = None


def test_ctrl_c_in_a_program_is_a_keyboard_interrupt(workspace: Workspace) -> None:
    run, before = open_run(workspace.config, []), signal.signal(signal.SIGINT, signal.default_int_handler)
    run.signals.arrived = signal.SIGINT
    try:
        with pytest.raises(KeyboardInterrupt, match="committed units stay"), working(run):
            run.signals.check()
        with pytest.raises(InterruptedRunError), stopping(), working(run):  # of the command line
            run.signals.check()
    finally:
        signal.signal(signal.SIGINT, before)


def kill_after_a_unit(workspace: Workspace) -> None:
    process, before = workspace.process("cache-teachers", *MANY), workspace.digests("cache-teachers")
    until(lambda: process.poll() is not None or workspace.digests("cache-teachers") != before)
    process.kill()
    finish(process)


def test_killed_three_times_it_ends_where_an_uninterrupted_run_does(fresh: Workspace, uninterrupted: Workspace) -> None:
    for _ in range(3):
        kill_after_a_unit(fresh)
    fresh("build-targets", *MANY)
    assert fresh.digests("cache-teachers") == uninterrupted.digests("cache-teachers")
    assert largest_difference(fresh.targets(), uninterrupted.targets()) < TOLERANCE


def test_a_unit_computed_twice_with_other_bytes_keeps_the_first_and_records_how_far_they_differ(
    workspace: Workspace,
) -> None:
    run = open_run(workspace.config, [])
    path = record_of(train_unit(workspace))
    standing = run.store.record(path)
    assert standing is not None
    table = pq.read_table(run.store.path(standing.files[0]))
    shifted = (matrix(table.column("logits")) + 0.25).reshape(-1)
    logits = pa.FixedSizeListArray.from_arrays(pa.array(shifted), table.schema.field("logits").type.list_size)
    with run.store.draft(path.parent, path.stem, ".parquet") as draft:
        place = table.schema.get_field_index("logits")
        pq.write_table(table.set_column(place, table.schema.field(place), logits), draft.folder / "unit.parquet")
        draft.facts = standing.facts
    assert draft.rival == standing
    record_conflict(run.store, run.console, Unit(path.stem, path.parent), draft.files[0], draft.rival)
    [note] = (workspace.artifacts / "divergence").glob("*.json")
    assert json.loads(note.read_text())["max_abs_difference"]["logits"] == pytest.approx(0.25)
    assert run.store.record(path) == standing
    assert not run.store.path(draft.files[0]).exists()
