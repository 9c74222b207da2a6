"""The same experiment as tasks of a Ray cluster, with nodes that vanish: only where the extra `ray` is installed."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from amalgam.pipeline.config.schema import ExperimentConfig
from amalgam.pipeline.console import Console
from amalgam.pipeline.errors import DataError, ExperimentError, InputChangedError, ModelError, WorkError
from amalgam.pipeline.execution.runner import run_units
from amalgam.pipeline.execution.stage import Identity, Run, Stage, Unit, WorkerShare
from amalgam.pipeline.storage.fingerprint import library_versions
from amalgam.pipeline.storage.store import Record, Store
from amalgam.tests.stages.tiny_models import tiny
from amalgam.tests.workspaces import Workspace, finish, until

ray = pytest.importorskip("ray", reason="pip install amalgam-distill[ray]")

pytestmark = pytest.mark.filterwarnings("ignore::Warning")  # Ray's own, of many kinds


def started(start: Callable[[], Any]) -> Any:
    """Start a node, up to three times: Ray gives it 30 seconds, which are too few on a busy machine."""
    for _ in range(2):
        try:
            return start()
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
    return start()


class Cluster:
    """Nodes of one CPU each on this machine; the head has none, as a cluster's login node."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        os.environ.setdefault("RAY_worker_niceness", "0")  # 15 by itself: long waits on a machine with other work
        head = {"num_cpus": 0, "include_dashboard": False}
        self.inner = started(lambda: Cluster(initialize_head=True, head_node_args=head))
        self.nodes = [started(lambda: self.inner.add_node(num_cpus=1)) for _ in range(2)]
        self.inner.wait_for_nodes()
        self.options = {"engine": "ray", "address": self.inner.address}

    def overrides(self) -> list[str]:
        return ["execution.engine=ray", f"execution.ray.address={self.inner.address}"]

    def kill_a_node(self) -> None:
        self.inner.remove_node(self.nodes.pop(), allow_graceful=False)

    def replace_the_node(self) -> None:
        """Runs in the main thread alone: no other may set the handler of SIGTERM, and Ray does."""
        self.nodes.append(started(lambda: self.inner.add_node(num_cpus=1)))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    running = Cluster()
    yield running
    ray.shutdown()
    running.inner.shutdown()


class Errands(Stage):
    """Each unit does the action in its name, then commits.

    `meets` waits until two workers have begun a unit, and `waits` until the file `go` exists.
    """

    name = "errands"
    VERSION = 1
    parallelism = "units"
    unit_label = "errands"

    def identity(self, run: Run) -> Identity:
        return Identity({})

    def units(self, run: Run, folder: Path) -> Sequence[Unit]:
        return ()

    def finish(self, run: Run, records: Sequence[Record]) -> dict[str, Any]:
        return {}

    def run_unit(self, run: Run, unit: Unit) -> None:
        if unit.name.startswith("kills"):
            os.kill(os.getpid(), signal.SIGKILL)
        if unit.name.startswith("refuses"):
            raise DataError("these texts are none", where="texts.csv:3", fix="look at them")
        if unit.name.startswith("misreads"):
            model, _ = tiny()
            model.name_or_path = "models/first"
            model(input_ids=torch.full((1, 4), 1000))
        if unit.name.startswith("cannot"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "texts.csv")
        with (run.base / "begun").open("a") as begun:
            begun.write(f"{unit.name}\n")
        if unit.name.startswith("meets"):
            (run.base / f"worker-{os.getpid()}").touch()
            until(lambda: len(list(run.base.glob("worker-*"))) == 2)
        if unit.name.startswith("waits"):
            until((run.base / "go").exists)
        time.sleep(unit.payload or 0)
        with run.store.draft(unit.folder, unit.name, ".txt") as draft:
            (draft.folder / "done.txt").write_text(unit.name)
            draft.made = {"pid": os.getpid(), "node": ray.get_runtime_context().get_node_id()}

    def text_keys(self, run: Run, unit: Unit) -> list[str]:
        return [f"key of {unit.name}"]


def new_run(folder: Path, **execution: Any) -> Run:
    ray = {name: execution.pop(name) for name in ("address", "cpus", "gpus") if name in execution}
    execution = {**execution, "ray": ray}
    settings = {"corpus": {"train": "x.csv"}, "teachers": [{"name": "a", "model": "./a"}], "execution": execution}
    experiment = ExperimentConfig.model_validate(settings)
    (folder / "artifacts").mkdir(exist_ok=True)  # as the runner finds it
    return Run(experiment, folder, Store(folder / "artifacts"), Console(), WorkerShare(), lambda _: "")


def errands(run: Run, *names: str, seconds: float = 0) -> list[Unit]:
    folder = run.store.folder("errands", "all")
    return [Unit(name, folder, payload=seconds) for name in names]


def begun(run: Run) -> Counter[str]:
    """Returns how often each unit was begun, by any worker."""
    return Counter((run.base / "begun").read_text().split())


def committed(units: Sequence[Unit]) -> list[str]:
    return [unit.name for unit in units if unit.record_path.exists()]


def held(run: Run, count: int) -> list[Unit]:
    """Return a task of units, and units that take some time once the file `go` exists."""
    from amalgam.pipeline.execution.ray_backend import TASK_UNITS

    quick = errands(run, *(f"unit-{n}" for n in range(TASK_UNITS)))
    return quick + errands(run, *(f"waits-{n}" for n in range(TASK_UNITS, count)), seconds=0.25)


def have_begun(folder: Path, count: int) -> bool:
    """Return whether so many units wait for the file `go`."""
    path = folder / "begun"
    return path.exists() and path.read_text().count("waits") == count


def test_units_are_done_by_the_workers_and_once(tmp_path: Path, cluster: Cluster) -> None:
    run = new_run(tmp_path, **cluster.options)
    units = errands(run, *(f"meets-{n}" for n in range(40)))
    assert run_units(Errands(), run, units)
    records = [run.store.record(unit.record_path) for unit in units]
    workers = {record.made["pid"] for record in records if record is not None}
    assert None not in records
    assert len(workers) == 2
    assert os.getpid() not in workers
    again = {unit.name: unit.record_path.stat().st_mtime_ns for unit in units}
    assert run_units(Errands(), run, units)
    assert again == {unit.name: unit.record_path.stat().st_mtime_ns for unit in units}


@pytest.mark.parametrize("replaced", [True, False])
def test_a_node_that_vanishes_takes_no_unit_with_it(
    tmp_path: Path,
    cluster: Cluster,
    capsys: pytest.CaptureFixture[str],
    *,
    replaced: bool,
) -> None:
    run = new_run(tmp_path, **cluster.options)
    units = held(run, 40)
    with ThreadPoolExecutor(1) as driver:
        working = driver.submit(run_units, Errands(), run, units)
        until(lambda: have_begun(tmp_path, 2))
        cluster.kill_a_node()
        if replaced:
            cluster.replace_the_node()
        (tmp_path / "go").touch()
        assert working.result()
    if not replaced:
        cluster.replace_the_node()
    assert len(committed(units)) == 40
    assert begun(run).total() <= 41  # the one that the lost node had in hand was begun once more, and no other
    output = capsys.readouterr().err
    assert re.search(r"\w+ on node \S+, \w{8}\).* [1-8] unit", output), output


DRIVER = "import sys; from amalgam.tests import test_ray; test_ray.drive(*sys.argv[1:])"


def drive(folder: str, address: str) -> None:
    """Runs the work of a driver that is to be killed."""
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    run = new_run(Path(folder), engine="ray", address=address)
    run_units(Errands(), run, held(run, 40))


def test_after_a_killed_driver_only_what_was_in_flight_is_done_again(tmp_path: Path, cluster: Cluster) -> None:
    run = new_run(tmp_path, **cluster.options)
    units = held(run, 40)
    with subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path), cluster.options["address"]]) as driver:
        until(lambda: have_begun(tmp_path, 2))
        driver.kill()
    kept = committed(units)
    assert {name.partition("-")[0] for name in kept} == {"unit"}
    (tmp_path / "go").touch()
    assert run_units(Errands(), run, units)
    assert len(committed(units)) == 40
    assert {name: begun(run)[name] for name in kept} == dict.fromkeys(kept, 1)
    assert begun(run).total() <= 40 + len(cluster.nodes)


def test_a_unit_that_kills_its_workers_is_recorded_and_the_others_continue(tmp_path: Path, cluster: Cluster) -> None:
    run = new_run(tmp_path, **cluster.options)
    units = errands(run, "first", "kills", "second", "third")
    with pytest.raises(WorkError, match=r"kills") as refused:
        run_units(Errands(), run, units)
    assert [unit.name for unit in units if unit.record_path.exists()] == ["first", "second", "third"]
    [path] = Path(str(refused.value.where)).glob("errands-kills-*.json")
    written = json.loads(path.read_text())
    assert written["texts"] == ["key of kills"]
    assert written["record"] == "errands/all/kills.json"


def test_workers_killed_by_units_of_one_name_are_counted_for_each(
    tmp_path: Path, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run(tmp_path, **cluster.options)
    units = [Unit("kills", run.store.folder(f"errands/{teacher}", "units")) for teacher in ("one", "two")]
    with pytest.raises(WorkError, match=r"2 unit\(s\) killed 3 workers") as refused:
        run_units(Errands(), run, units)
    assert capsys.readouterr().err.count("a worker was lost") == 6
    written = [json.loads(path.read_text())["record"] for path in Path(str(refused.value.where)).iterdir()]
    assert sorted(written) == ["errands/one/units/kills.json", "errands/two/units/kills.json"]


def test_an_error_of_a_worker_arrives_whole(tmp_path: Path, cluster: Cluster) -> None:
    run = new_run(tmp_path, **cluster.options)
    with pytest.raises(DataError) as refused:
        run_units(Errands(), run, errands(run, "refuses"))
    assert str(refused.value) == "these texts are none\nwhere: texts.csv:3\nfix: look at them"


def test_an_error_of_a_models_code_or_of_the_system_has_its_place_and_fix(tmp_path: Path, cluster: Cluster) -> None:
    run = new_run(tmp_path, **cluster.options)
    with pytest.raises(ModelError, match="BertForSequenceClassification fails in its own code: IndexError") as refused:
        run_units(Errands(), run, errands(run, "misreads"))
    assert refused.value.where == "models/first"
    assert "lower max_tokens" in str(refused.value.fix)
    assert "in forward" in refused.value.__notes__[0]  # --debug prints it
    with pytest.raises(WorkError, match=r"texts\.csv: Permission denied"):
        run_units(Errands(), run, errands(run, "cannot"))


class OtherInputs(Errands):
    """Its inputs differ between processes, as a file that is written meanwhile does."""

    def identity(self, run: Run) -> Identity:
        return Identity({}, {"content": os.getpid()})


def test_a_worker_with_other_inputs_than_the_driver_commits_nothing(tmp_path: Path, cluster: Cluster) -> None:
    run = new_run(tmp_path, **cluster.options)
    units = errands(run, "unit")
    with pytest.raises(InputChangedError, match="inputs of errands"):
        run_units(OtherInputs(), run, units)
    assert committed(units) == []


def test_a_driver_ends_on_sigterm_and_gives_the_fix(fresh: Workspace, cluster: Cluster) -> None:
    fresh.edit("  test: texts/test.csv\n", "")  # its units have no passes
    driver = fresh.new_process("cache-teachers", "cache.passes=2048", *cluster.overrides())
    until(lambda: any(fresh.artifacts.glob("cache-teachers/*/family.json")) or driver.poll() is not None)
    driver.send_signal(signal.SIGTERM)
    result = finish(driver)
    assert result.code == 143, result.err
    assert "SIGTERM" in result.err
    assert "Traceback" not in result.err
    assert fresh.digests("cache-teachers") == set(), "no task goes on for its 2,048 passes"


def test_resources_that_no_node_has_are_an_error(tmp_path: Path, cluster: Cluster) -> None:
    run = new_run(tmp_path, **cluster.options, gpus=1)
    with pytest.raises(ExperimentError, match=r"1 CPU.*1 GPU"):
        run_units(Errands(), run, errands(run, "one"))


def test_two_tasks_share_a_gpu_and_nodes_without_one_are_let_be(tmp_path: Path, cluster: Cluster) -> None:
    """The GPU is pretended: the test is about the placement of tasks."""
    node = cluster.inner.add_node(num_cpus=3, num_gpus=1)
    cluster.inner.wait_for_nodes()
    run = new_run(tmp_path, **cluster.options, gpus=0.5)
    units = errands(run, *(f"meets-{n}" for n in range(8)))
    try:
        assert run_units(Errands(), run, units)
    finally:
        cluster.inner.remove_node(node)
    made_by = [record.made for unit in units if (record := run.store.record(unit.record_path))]
    assert {made["node"] for made in made_by} == {node.node_id}
    assert len({made["pid"] for made in made_by}) == 2


def test_a_node_with_other_versions_is_named(tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    here = library_versions()
    monkeypatch.setattr("amalgam.pipeline.execution.ray_backend.library_versions", lambda: here | {"torch": "1.0"})
    run = new_run(tmp_path, **cluster.options)
    with pytest.raises(ExperimentError, match=rf"node \S+ .*torch {re.escape(here['torch'])}.* 1\.0"):
        run_units(Errands(), run, errands(run, "one"))


def test_a_node_that_does_not_see_the_workspace_is_named(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(tmp_path, **cluster.options)

    monkeypatch.setattr("amalgam.pipeline.storage.local.LocalStorage.put", lambda *_: None)
    with pytest.raises(ExperimentError, match=r"node \S+ .*workspace"):
        run_units(Errands(), run, errands(run, "one"))


def test_the_marker_of_a_long_run_is_written_again_so_that_gc_keeps_it(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("amalgam.pipeline.execution.ray_backend.MARK_SECONDS", -1.0)
    run, written = new_run(tmp_path, **cluster.options), list[str]()
    put = run.store.backend.put

    def recorded(files: Mapping[str, bytes | Path]) -> None:
        written.extend(files)
        put(files)

    monkeypatch.setattr(run.store.backend, "put", recorded)
    run_units(Errands(), run, errands(run, "one"))
    assert written[0].startswith(".tmp-nonce-")
    assert len(written) > 1
    assert len(set(written)) == 1


def test_a_node_that_joins_later_with_other_versions_is_named(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("amalgam.pipeline.execution.ray_backend.LOOK_SECONDS", 0.5)
    other = tmp_path / "other" / "torch-0.1.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 0.1\n")
    path = os.pathsep.join([str(other.parent), os.environ.get("PYTHONPATH", "")])
    run = new_run(tmp_path, **cluster.options)
    units = held(run, 400)
    with ThreadPoolExecutor(1) as driver:
        working = driver.submit(run_units, Errands(), run, units)
        until(lambda: committed(units))
        odd = cluster.inner.add_node(num_cpus=1, env_vars={"PYTHONPATH": path})
        with pytest.raises(ExperimentError, match=r"node \S+ .*torch 0\.1"):
            working.result()
    cluster.inner.remove_node(odd)
    assert len(committed(units)) < 400
    assert not list(run.store.root.glob(".tmp-nonce-*"))


def made(workspace: Workspace, stage: str) -> dict[str, list[tuple[str, str]]]:
    """Every result of a stage: its files and their digests."""
    results = {}
    for path in (workspace.artifacts / stage).glob("*/MANIFEST.json"):
        files = json.loads(path.read_text())["files"]
        results[path.parent.name] = [(file["path"], file["sha256"]) for file in files]
    return results


def by_tasks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The stages whose units became tasks."""
    from amalgam.pipeline.execution import ray_backend as ray_engine

    items: list[str] = []
    really = ray_engine.run_on_ray

    def noted(stage: Any, run: Run, units: Sequence[Unit]) -> None:
        items.append(stage.name)
        really(stage, run, units)

    monkeypatch.setattr(ray_engine, "run_on_ray", noted)
    return items


def test_a_cluster_makes_what_one_process_makes(
    fresh: Workspace, built: Workspace, tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two methods together need every stage that works on texts."""
    spread = by_tasks(monkeypatch)
    on_ray = cluster.overrides()
    alone = built.copy(tmp_path / "alone")
    for method in ("amalgam", "stratanet"):
        alone("run", f"student.method={method}")
        result = fresh("run", f"student.method={method}", *on_ray)
        assert "train-student: done" in result.err
        assert fresh.stale(f"student.method={method}") == set()
    stages = ["cache-teachers", "cache-features", "fit-statistics", "weigh-teachers", "build-targets", "train-student"]
    assert sorted(set(spread)) == sorted(stages)
    for stage in stages:
        assert made(fresh, stage).items() <= made(alone, stage).items(), stage


def test_students_of_a_sweep_are_tasks_at_once_and_those_of_one_process(
    built: Workspace, tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, remote = built.copy(tmp_path / "alone"), built.copy(tmp_path / "there")
    swept = ("sweep", "student.seed=1,2", "targets.temperature=0.2,0.5", "--json")
    result = alone(*swept)
    spread = by_tasks(monkeypatch)
    on_ray = remote(*swept, *cluster.overrides())
    assert Counter(spread) == {"build-targets": 1, "train-student": 4}
    assert made(remote, "train-student") == made(alone, "train-student")
    scores = [[(one["name"], one["scores"]) for one in options.json["students"]] for options in (result, on_ray)]
    assert scores[0] == scores[1]
    assert remote.stale("student.seed=2", "targets.temperature=0.5", "student.name=other") == set()


def test_texts_are_written_by_a_cluster_as_by_one_process(
    generated: Workspace, tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    spread = by_tasks(monkeypatch)
    fresh = generated.without_artifacts(tmp_path / "workspace")
    fresh("generate", *cluster.overrides())
    assert set(spread) == {"generate"}
    assert len(made(fresh, "generate")) == 1
    assert made(fresh, "generate") == made(generated, "generate")


def test_pseudo_embeddings_are_guessed_by_a_cluster_as_by_one_process(
    built: Workspace, tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    spread = by_tasks(monkeypatch)
    small = [
        "student.method=as-dfd",
        "pseudo_embeddings.count=8",
        "pseudo_embeddings.tokens=4",
        "pseudo_embeddings.steps=10",
    ]
    alone, remote = built.copy(tmp_path / "alone"), built.copy(tmp_path / "there")
    for workspace in (alone, remote):
        workspace.edit("targets:\n  mode: soft\n", "")
    alone("make-embeddings", *small)
    remote("make-embeddings", *small, *cluster.overrides())
    assert "make-embeddings" in spread
    assert made(remote, "make-embeddings") == made(alone, "make-embeddings")


def test_a_missing_cluster_is_an_error(tmp_path: Path) -> None:
    ray.shutdown()
    run = new_run(tmp_path, engine="ray", address="127.0.0.1:1")
    with pytest.raises(ExperimentError, match=r"127\.0\.0\.1:1"):
        run_units(Errands(), run, errands(run, "one"))
