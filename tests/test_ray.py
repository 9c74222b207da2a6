"""The same experiment as tasks of a Ray cluster, with nodes that vanish: only where the extra `ray` is installed."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from amalgam.pipeline.console import Console
from amalgam.pipeline.engines import Share, run_units
from amalgam.pipeline.errors import DataError, ExperimentError, WorkError
from amalgam.pipeline.experiment import Experiment
from amalgam.pipeline.plan import library_versions
from amalgam.pipeline.stage import Identity, Run, Unit, UnitByUnit
from amalgam.pipeline.store import Record, Store
from amalgam.tests.workshop import Shop

ray = pytest.importorskip("ray", reason="pip install amalgam[ray]")

pytestmark = pytest.mark.filterwarnings("ignore::Warning")  # Ray's own, of many kinds


class Cluster:
    """Nodes of one CPU each on this machine; the head has none, as a cluster's login node."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.inner = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self.nodes = [self.inner.add_node(num_cpus=1) for _ in range(2)]
        self.inner.wait_for_nodes()
        self.said = {"engine": "ray", "address": self.inner.address}

    def kill_a_node(self) -> None:
        self.inner.remove_node(self.nodes.pop(), allow_graceful=False)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    found = Cluster()
    yield found
    ray.shutdown()
    found.inner.shutdown()


class Errands(UnitByUnit):
    """Each unit does what its name says, and is committed."""

    name: ClassVar[str] = "errands"
    VERSION: ClassVar[int] = 1
    spread: ClassVar[Literal["units", "together", "alone"]] = "units"
    measure: ClassVar[str] = "errands"

    def wanted(self, experiment: Experiment) -> bool:
        return True

    def prepare(self, run: Run) -> None:
        pass

    def identity(self, run: Run) -> Identity:
        return Identity({})

    def units(self, run: Run, folder: Path) -> Sequence[Unit]:
        return ()

    def finish(self, run: Run, folder: Path, records: Sequence[Record]) -> dict[str, Any]:
        return {}

    def deliver(self, run: Run, manifest: Record, *, fresh: bool) -> None:
        pass

    def run_unit(self, run: Run, unit: Unit) -> None:
        if unit.name.startswith("kills"):
            os.kill(os.getpid(), signal.SIGKILL)
        if unit.name.startswith("refuses"):
            raise DataError("these texts are none", where="texts.csv:3", fix="look at them")
        time.sleep(unit.work or 0)
        with run.store.draft(unit.folder, unit.name, ".txt") as draft:
            (draft.folder / "done.txt").write_text(unit.name)
            draft.made = {"pid": os.getpid()}

    def texts(self, run: Run, unit: Unit) -> list[str]:
        return [f"key of {unit.name}"]


def new_run(folder: Path, **execution: Any) -> Run:
    said = {"corpus": {"train": "x.csv"}, "teachers": [{"name": "a", "model": "./a"}], "execution": execution}
    experiment = Experiment.model_validate(said)
    (folder / "artifacts").mkdir()  # as the runner finds it
    return Run(experiment, folder, Store(folder / "artifacts"), Console(), Share(), lambda _: "")


def errands(run: Run, *names: str, seconds: float = 0) -> list[Unit]:
    folder = run.store.folder("errands", "all")
    return [Unit(name, folder, work=seconds) for name in names]


def test_units_are_done_by_the_workers_and_once(tmp_path: Path, cluster: Cluster) -> None:
    run = new_run(tmp_path, **cluster.said)
    units = errands(run, *(f"unit-{n}" for n in range(40)))
    assert run_units(Errands(), run, units)
    records = [run.store.record(unit.record_path) for unit in units]
    workers = {record.made["pid"] for record in records if record is not None}
    assert None not in records
    assert len(workers) == 2
    assert os.getpid() not in workers
    again = {unit.name: unit.record_path.stat().st_mtime_ns for unit in units}
    assert run_units(Errands(), run, units)
    assert again == {unit.name: unit.record_path.stat().st_mtime_ns for unit in units}


def test_a_node_that_vanishes_takes_no_unit_with_it(
    tmp_path: Path, cluster: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("amalgam.pipeline.ray_cluster.LOOK_SECONDS", 0.5)
    run = new_run(tmp_path, **cluster.said)
    units = errands(run, *(f"unit-{n}" for n in range(40)), seconds=0.25)

    def kill() -> None:
        while not units[0].record_path.exists():
            time.sleep(0.05)
        cluster.kill_a_node()
        cluster.nodes.append(cluster.inner.add_node(num_cpus=1))  # a replacement, as spot machines have it

    killer = threading.Thread(target=kill)
    killer.start()
    assert run_units(Errands(), run, units)
    killer.join()
    assert all(unit.record_path.exists() for unit in units)
    said = capsys.readouterr().err
    assert "is gone; " in said
    assert "a worker was lost" in said


def test_a_unit_that_kills_its_workers_is_written_down_and_the_others_go_on(tmp_path: Path, cluster: Cluster) -> None:
    run = new_run(tmp_path, **cluster.said)
    units = errands(run, "first", "kills", "second", "third")
    with pytest.raises(WorkError, match=r"1 unit\(s\) killed 3 workers each and were left out: kills") as refused:
        run_units(Errands(), run, units)
    assert [unit.name for unit in units if unit.record_path.exists()] == ["first", "second", "third"]
    written = json.loads((Path(str(refused.value.where)) / "errands-kills.json").read_text())
    assert written["texts"] == ["key of kills"]


def test_an_error_of_a_worker_arrives_whole(tmp_path: Path, cluster: Cluster) -> None:
    run = new_run(tmp_path, **cluster.said)
    with pytest.raises(DataError) as refused:
        run_units(Errands(), run, errands(run, "refuses"))
    assert str(refused.value) == "these texts are none\nwhere: texts.csv:3\nfix: look at them"


def test_what_no_node_has_is_not_waited_for(tmp_path: Path, cluster: Cluster) -> None:
    run = new_run(tmp_path, **cluster.said, gpus=1)
    with pytest.raises(ExperimentError, match=r"no node of the cluster has 1 CPU\(s\) and 1 GPU\(s\)"):
        run_units(Errands(), run, errands(run, "one"))


def test_a_node_with_other_versions_is_named(tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    here = library_versions()
    monkeypatch.setattr("amalgam.pipeline.ray_cluster.library_versions", lambda: here | {"torch": "1.0"})
    run = new_run(tmp_path, **cluster.said)
    with pytest.raises(ExperimentError, match=rf"node \S+ has torch {re.escape(here['torch'])} \(here 1\.0\)"):
        run_units(Errands(), run, errands(run, "one"))


def test_a_node_that_does_not_see_the_workspace_is_named(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(tmp_path, **cluster.said)

    monkeypatch.setattr("amalgam.pipeline.disk.Disk.replace", lambda *_: None)  # what is written here arrives nowhere
    with pytest.raises(ExperimentError, match=r"node \S+ does not see this workspace"):
        run_units(Errands(), run, errands(run, "one"))


def test_a_cluster_makes_what_one_process_makes(fresh: Shop, built: Shop, cluster: Cluster) -> None:
    said = fresh("run", *(f"execution.{name}={value}" for name, value in cluster.said.items()))
    assert fresh.digests("cache-teachers") == built.digests("cache-teachers")
    assert fresh.digests("build-targets") == built.digests("build-targets")
    assert (fresh.folder / "students/student/model.safetensors").exists()
    assert "train-student: done" in said.err
    assert fresh.stale() == set()


def test_no_cluster_is_said(tmp_path: Path) -> None:
    ray.shutdown()
    run = new_run(tmp_path, engine="ray", address="127.0.0.1:1")
    with pytest.raises(ExperimentError, match=r"no Ray cluster at 127\.0\.0\.1:1"):
        run_units(Errands(), run, errands(run, "one"))
