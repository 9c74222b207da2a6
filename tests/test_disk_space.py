"""Free space is compared with the least need of the missing results, before a model loads."""

from __future__ import annotations

import errno
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from amalgam.pipeline.errors import DiskFullError, ExperimentError
from amalgam.pipeline.execution import disk_space
from amalgam.pipeline.storage import local
from amalgam.pipeline.storage.local import write_new
from amalgam.pipeline.user_paths import writing
from amalgam.stages.common import deliveries
from amalgam.stages.common.models import loading
from amalgam.stages.common.models.hub import HubModel, fetch
from amalgam.stages.common.models.model_folder import count_parameters
from amalgam.tests.full_disks import Disk, fault_of, mounted
from amalgam.tests.fuzz.experiments import OURS, Outcome
from amalgam.tests.pipeline.crashing import fork, wait
from amalgam.tests.test_bad_input import assert_three_lines
from amalgam.tests.test_errors import raising
from amalgam.tests.workspaces import PASSES, TEACHER_LABELS, TEST, TRAIN, Workspace, amalgam


@pytest.fixture
def leave(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that sets the number of free bytes."""

    def free(count: int) -> None:
        monkeypatch.setattr(
            disk_space, "shutil", SimpleNamespace(disk_usage=lambda _: SimpleNamespace(total=1 << 40, free=count))
        )

    return free


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(loading, "_load", refuse)


def student_bytes(workspace: Workspace) -> int:
    """Return the size of the student in the workspace and of its copy."""
    return 2 * 4 * (count_parameters(workspace.folder / "models/encoder") or 0)


PREDICTIONS = (TRAIN * (1 + PASSES) + TEST) * len(TEACHER_LABELS) * len(TEACHER_LABELS["first"])


def test_a_finished_experiment_needs_no_disk(workspace: Workspace) -> None:
    row = next(row for row in workspace("doctor", "--json").json if row["check"] == "disk")
    assert row["result"].endswith(f" free in {workspace.artifacts}")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="only Linux has /proc")
def test_a_workspace_that_cannot_be_made_is_no_full_disk(fresh: Workspace) -> None:
    refused = fresh.attempt("run", "execution.workspace=/proc/x")
    assert (refused.code, refused.err.splitlines()[0]) == (
        2,
        "error: the workspace cannot be made: No such file or directory",
    )
    assert "too little space" not in fresh.attempt("plan", "execution.workspace=/proc/x").err


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("command", ["plan", "doctor", "run"])
def test_a_disk_without_room_for_the_student_is_an_error_before_any_work(
    fresh: Workspace, leave: Callable[[int], None], command: str
) -> None:
    leave(student_bytes(fresh) - 1)
    result = fresh.attempt(command)
    assert result.code == (2 if command == "doctor" else 1), result.err
    assert "too little space" in result.err + result.out
    assert "train-student" in result.err + result.out
    if command != "doctor":
        assert_three_lines(result.err)
    assert not list(fresh.artifacts.glob("read-corpus"))


@pytest.mark.usefixtures("no_model")
def test_a_disk_without_room_for_the_predictions_is_an_error_before_a_model_loads(
    fresh: Workspace, leave: Callable[[int], None]
) -> None:
    leave(student_bytes(fresh) + PREDICTIONS - 1)
    err = fresh.refusal(1, "run")
    assert_three_lines("\n".join(err.splitlines()[-3:]))
    assert "cache-teachers" in err.splitlines()[-3]
    assert not fresh.units()


def test_the_least_need_is_less_than_the_space_that_is_used(
    fresh: Workspace, built: Workspace, leave: Callable[[int], None]
) -> None:
    leave(student_bytes(fresh) + PREDICTIONS)
    fresh("run")
    used = sum(path.stat().st_size for path in fresh.units())
    assert used >= PREDICTIONS
    weights = [fresh.folder / "students/student/model.safetensors", *fresh.artifacts.glob("*/*/*/model.safetensors")]
    assert student_bytes(fresh) <= sum(path.stat().st_size for path in weights)
    assert built.digests("cache-teachers") == fresh.digests("cache-teachers")


@pytest.mark.parametrize("file", ["model.safetensors", "student.html"])
def test_a_disk_that_is_full_when_a_result_is_copied_is_an_error_with_the_need(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    folder = "reports" if file.endswith(".html") else "students"
    shutil.rmtree(workspace.folder / folder)

    def full(*arguments: object, **options: object) -> object:
        raise OSError(28, "No space left on device")

    if folder == "students":
        monkeypatch.setattr(shutil, "copyfile", full)
    else:
        monkeypatch.setattr(deliveries, "atomic_write", full)
    err = workspace.refusal(1, "run")
    assert_three_lines("\n".join(err.splitlines()[-3:]))
    assert "the disk is full" in err
    assert folder == "reports" or "this copy needs at least" in err  # a page is small
    assert str(workspace.folder) in err
    assert not list(workspace.folder.rglob(".tmp-*"))
    monkeypatch.undo()
    workspace("run")
    assert list((workspace.folder / folder).rglob(file))


def test_current_results_need_no_space(workspace: Workspace, leave: Callable[[int], None]) -> None:
    leave(0)
    workspace("run")
    workspace("plan")
    shutil.rmtree(workspace.artifacts / "report")  # a report is small
    workspace("run")
    assert workspace.attempt("plan", "cache.seed=5").code == 1


# ---- real disks; `make check-disk` has 60 sizes on two file systems


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    try:
        with mounted("tmpfs", tmp_path, 16 << 20) as disk:
            yield disk
    except (subprocess.CalledProcessError, FileNotFoundError):
        pytest.skip("this user may not mount a disk")


@pytest.mark.parametrize("share", [0.0, 0.6])
def test_a_disk_that_another_program_fills_is_named_and_the_next_run_ends_well(
    disk: Disk, fresh: Workspace, built: Workspace, leave: Callable[[int], None], share: float
) -> None:
    leave(1 << 60)  # the check before the work
    workspace, words = fresh.copy(disk.folder / "experiment"), ("run",)
    files = [path for name in OURS for path in (built.folder / name).rglob("*") if path.is_file()]
    disk.leave(int(share * sum(path.stat().st_size for path in files)))
    result = workspace.attempt(*words)
    assert result.code == 1, result.err
    assert fault_of(Outcome(words, result.code, result.err)) is None, result.err
    assert "the disk is full" in result.err
    assert str(disk.folder) in result.err
    assert not list(disk.folder.rglob(".tmp-*"))
    disk.release()
    workspace(*words)
    for stage in ("cache-teachers", "build-targets"):
        assert workspace.digests(stage) == built.digests(stage)
    assert workspace("verify", "--json").json["damaged"] == []


@pytest.mark.parametrize("call", ["mkdir", "touch"])
def test_a_disk_without_a_block_for_the_workspace_is_full(
    fresh: Workspace, leave: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """On ext4, a new folder needs a block."""
    leave(1 << 60)
    monkeypatch.setattr(Path, call, raising(OSError(28, "No space left on device")))
    err = fresh.refusal(1, "run")
    assert_three_lines(err)
    assert "the disk is full" in err
    assert "the missing results need at least" in err
    assert "amalgam gc" in err


@pytest.mark.parametrize("words", [("init", "there"), ("predict", "--input", "texts/test.csv", "--out", "there/x.csv")])
def test_a_full_disk_under_a_file_of_the_user_is_named_and_keeps_no_part(
    workspace: Workspace, words: tuple[str, ...]
) -> None:
    (workspace.folder / "there").mkdir()
    limit, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
        result = workspace.attempt(*words)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    assert result.code == 1, result.err
    assert_three_lines("\n".join(result.err.splitlines()[-3:]))
    assert "cannot be written: a file is larger than the system allows" in result.err
    assert f"where: {workspace.folder}/there\nfix: raise this limit" in result.err
    assert list((workspace.folder / "there").iterdir()) == []
    workspace(*words)


@pytest.mark.parametrize(
    ("number", "reason"), [(errno.ENOSPC, "the disk is full"), (errno.EDQUOT, "your disk quota is used up")]
)
def test_a_quota_is_no_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, reason: str) -> None:
    error = OSError(number, "refused")
    with (
        pytest.raises(DiskFullError, match=f"^x.csv cannot be written: {reason}\n") as raised,
        writing(tmp_path / "x.csv"),
    ):
        raise error
    assert raised.value.where == str(tmp_path)
    assert str(raised.value.fix).startswith("free some space there")
    monkeypatch.setattr("huggingface_hub.snapshot_download", raising(error))
    with pytest.raises(DiskFullError, match=f"^org/news cannot be downloaded: {reason}\n") as raised:
        fetch(HubModel("org/news", "0" * 40, ()), ["config.json"], where="teacher news")
    assert str(raised.value.fix).startswith("free some space")


def test_a_new_text_file_is_whole_or_absent_after_a_kill(tmp_path: Path) -> None:
    """A part of it would refuse the next try, because files of labels are never replaced."""
    path, text = tmp_path / "labels.csv", "key,text,label\n" * 100

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # it kills the process within its write
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        write_new(path, text)

    assert wait(fork(work)) == -signal.SIGXFSZ
    assert not path.exists()
    write_new(path, text)
    assert path.read_text("utf-8") == text
    with pytest.raises(ExperimentError, match=r"labels\.csv exists"):
        write_new(path, "other")


def test_a_new_text_file_replaces_none_that_appears_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "labels.csv"
    monkeypatch.setattr(local, "make_folder", lambda _: path.write_text("mine", "utf-8"))
    with pytest.raises(ExperimentError, match=r"labels\.csv exists"):
        write_new(path, "other")
    assert [file.read_text("utf-8") for file in tmp_path.iterdir()] == ["mine"]


def test_a_link_to_no_file_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "amalgam.yaml").symlink_to(tmp_path / "missing.yaml")
    refused = amalgam("init", folder=tmp_path)
    assert (refused.code, "amalgam.yaml exists" in refused.err) == (2, True), refused.err
