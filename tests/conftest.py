"""Fixtures: one tiny experiment is run once for all workers of pytest-xdist; tests work on copies of it."""

from __future__ import annotations

import dataclasses
import gc
import os
import shutil
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer.main
from hypothesis import HealthCheck, settings

from amalgam.stages.common.models.resolve import ResolvedTeacher
from amalgam.tests.other_stores import SPOKEN, environment
from amalgam.tests.s3_server import S3, serving
from amalgam.tests.stages.fake_hub import FakeHub
from amalgam.tests.workspaces import Workspace, build_once, new_generating_workspace, new_workspace, up_to_date

if TYPE_CHECKING:
    from amalgam.stages.common.inference.teacher import Teacher, TeacherLoader

MOST_TEACHERS = 16

MEMORY, ROOM = Path("/dev/shm"), 8 << 30  # noqa: S108 - pytest makes a folder of its own in it
if (
    MEMORY.is_dir()
    and shutil.disk_usage(MEMORY).free >= ROOM
    and not os.statvfs(MEMORY).f_flag & os.ST_NOEXEC  # as containers mount it; tests write scripts and run them
):
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))  # a file in memory costs half of one on a disk

# Set before torch is loaded, and inherited by every process that a test starts. With one thread, sums are rounded alike
# on any machine, and workers that share its cores do not wait for each other's threads.
assert "torch" not in sys.modules
os.environ["OMP_NUM_THREADS"] = "1"

PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
CALLERS = ("AWS_", "AZURE_", "GOOGLE_", "HF_")
for name in list(os.environ):  # all servers of the tests are on this machine, and have keys of their own
    if name.lower() in PROXIES or name.startswith(CALLERS):
        del os.environ[name]
os.environ["TERM"] = "xterm"  # "dumb" shows no progress

# By itself, an example may take 200 ms, and the first ten less than a second: a busy machine takes longer.
settings.register_profile("amalgam", deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("amalgam")


def pytest_collection_finish() -> None:
    """Keep a million objects of modules and tests from being traversed by each garbage collection."""
    gc.freeze()


CRASHED = list[str]()
"""The test during which a worker of pytest-xdist crashed."""


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, report: pytest.TestReport, sched: Any) -> None:
    """Run the test again after the first crash of a worker; a second crash fails.

    Polars and obstore have threads of their own in the worker. In two of about twelve runs, one of these threads ended
    the worker by a segmentation fault, in tests that pass otherwise. A test that crashes by itself does so again.
    """
    if not CRASHED:
        CRASHED.append(crashitem)
        report.outcome = "rerun"  # type: ignore[assignment]  # as in the documentation of pytest-xdist
        sched.mark_test_pending(crashitem)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the test that ran again."""
    for test in CRASHED:
        terminalreporter.line(f"A worker crashed during {test}, which then ran again in another.", yellow=True)


@pytest.fixture(scope="session", autouse=True)
def _environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Set a cache of the tests, and unset COLUMNS, which pytest-xdist sets to 80 in its workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AMALGAM_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("COLUMNS", raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_the_disk() -> Iterator[None]:
    """Skip fsync in this process: tests kill processes, not machines, and the kernel keeps written data."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", id)
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_command_tree() -> Iterator[None]:
    """Build the command tree once: Typer builds it for every call, half of the time of `amalgam plan`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", cache(typer.main.get_command))
        yield


@pytest.fixture(scope="session", autouse=True)
def teachers_stay_loaded() -> Iterator[Callable[..., Teacher]]:
    """Keep the latest teachers for later commands of this process: to load and to check one takes most of a command.

    The value is the loader's own method.
    """
    from amalgam.stages.common.inference.teacher import TeacherLoader

    latest: OrderedDict[object, tuple[Teacher, tuple[str, ...]]] = OrderedDict()
    load = TeacherLoader.load

    def load_once(self: TeacherLoader, resolved: ResolvedTeacher, dtype: str, *, passes: int) -> Teacher:
        settings = dataclasses.replace(resolved, files=None, outputs=len(resolved.outputs))  # type: ignore[arg-type]
        if not passes:  # make-embeddings computes gradients, which a model no longer allows once it ran for inference
            return load(self, resolved, dtype, passes=passes)
        key = (settings, resolved.files.digest, dtype, self.seed, self.device, self.last_layer)
        if key not in latest:
            teacher = load(self, resolved, dtype, passes=passes)
            latest[key] = teacher, teacher.notes
        latest.move_to_end(key)
        if len(latest) > MOST_TEACHERS:
            latest.popitem(last=False)
        teacher, teacher.notes = latest[key]
        self.log_notes(teacher)
        return teacher

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TeacherLoader, "load", load_once)
        yield load


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of this run of pytest that all its workers see."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session")
def built(shared: Path) -> Workspace:
    """Never to be changed: `shop` is a copy."""
    return build_once(shared / "built", lambda folder: up_to_date(new_workspace(folder)))


@pytest.fixture
def workspace(built: Workspace, tmp_path: Path) -> Workspace:
    """Return a copy of an experiment that is up to date."""
    return built.copy(tmp_path / "workspace")


@pytest.fixture(scope="module")
def desk(built: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Return a copy that the tests of a module share, because they change no result in it."""
    return built.copy(tmp_path_factory.mktemp("desk") / "workspace")


@pytest.fixture(scope="session")
def generated(shared: Path) -> Workspace:
    """Return an experiment without texts that is up to date; tests never change it."""
    return build_once(shared / "generated", lambda folder: up_to_date(new_generating_workspace(folder)))


@pytest.fixture
def fresh(built: Workspace, tmp_path: Path) -> Workspace:
    """Return a copy of the experiment before any run."""
    return built.without_artifacts(tmp_path / "workspace")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Serve a Hub to this process."""
    with FakeHub() as running:
        running.answer_this_process(monkeypatch, tmp_path)
        yield running


@pytest.fixture
def scheme() -> str:
    """Return the scheme of the object store; tests of guarantees run with the others too."""
    return "s3"


@pytest.fixture
def server(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    """Serve an object store that tests can make fail."""
    with serving(SPOKEN[scheme]) as running:
        settings = environment(scheme, running.url, tmp_path)
        for name, value in {**settings, "AMALGAM_CACHE": str(tmp_path / "cache")}.items():
            monkeypatch.setenv(name, value)
        yield running


@pytest.fixture
def address(scheme: str, server: S3, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the address of a workspace on our server, or on the one of AMALGAM_TEST_S3, in the bucket `bucket`."""
    if scheme == "s3":
        monkeypatch.setenv("AWS_ENDPOINT_URL", os.environ.get("AMALGAM_TEST_S3", server.url))
    return f"{scheme}://bucket/tests/{time.time_ns()}"
