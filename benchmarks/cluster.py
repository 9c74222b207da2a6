"""The demo on two nodes of a Ray cluster, one of them killed in the middle, beside one process; and a unit's overhead.

python benchmarks/cluster.py [--kill-after 8] [--units 10000] [--json] [student.epochs=1 ...]; needs the extra `ray`
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from amalgam.benchmarks.protocol import peak_rss_mb, row, show
from amalgam.pipeline.stage import Identity, Run, Unit, UnitByUnit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amalgam.pipeline.experiment import ExperimentFile
    from amalgam.pipeline.store import Record

KILLED_IN = "cache-teachers"
POLL_SECONDS = 0.02
IN_HAND_SECONDS = 0.4
"""After a unit was seen to be there: the next one is begun by then."""
ACCURACY_APART = 0.005
"""Of 1,000 test texts, five."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("overrides", nargs="*", help="of the demo's experiment, such as student.epochs=1")
    parser.add_argument("--kill-after", type=int, default=8, help=f"units of {KILLED_IN} that are there by then")
    parser.add_argument("--units", type=int, default=10_000, help="tiny ones, for the overhead; 0: none")
    parser.add_argument("--folder", type=Path, help="where demos are made; one that is there goes on")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("RAY_worker_niceness", "0")
    with tempfile.TemporaryDirectory() as scratch:
        folder: Path = options.folder or Path(scratch)
        nodes = Nodes(2)
        try:
            rows = _demo(folder, nodes, options)
            if options.units:
                rows.append(_overhead(Path(scratch) / "units", nodes, options.units))
        finally:
            nodes.end()
    show(rows, as_json=options.json)


class Nodes:
    """Of one CPU each, on this machine; the head has none, as a cluster's login node."""

    def __init__(self, count: int) -> None:
        from ray.cluster_utils import Cluster

        self._inner = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self._nodes = [self._inner.add_node(num_cpus=1) for _ in range(count)]
        self._inner.wait_for_nodes()
        self.address = str(self._inner.address)

    def kill_one(self) -> None:
        """A machine that vanishes takes its workers with it at once; Ray alone would let them end their units."""
        node = self._nodes.pop()
        [raylet] = node.all_processes["raylet"]
        for child in _children(raylet.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        self._inner.remove_node(node, allow_graceful=False)

    def add_one(self) -> None:
        self._nodes.append(self._inner.add_node(num_cpus=1))
        self._inner.wait_for_nodes()

    def end(self) -> None:
        import ray

        ray.shutdown()
        self._inner.shutdown()


def _children(parent: int) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1]) == parent:
                    found.append(int(folder.name))
    return found


# ---- the demo


def _demo(folder: Path, nodes: Nodes, options: argparse.Namespace) -> list[dict[str, Any]]:
    from amalgam.stages.demo import write_demo

    alone, spread = folder / "alone", folder / "spread"
    for demo in (alone, spread):
        write_demo(demo)
    began = time.perf_counter()
    _finish(_command(alone, options.overrides))
    seconds = time.perf_counter() - began
    killed = _with_a_killed_node(spread, nodes, options)
    accuracy, there = _accuracy(alone), _accuracy(spread)
    if any(abs(accuracy[name] - there[name]) > ACCURACY_APART for name in accuracy | there):
        raise SystemExit(f"the cluster's evaluation is another than that of one process: {there}, {accuracy}")
    apart = _apart(alone, spread)
    return [
        row("cluster", "one process", seconds=round(seconds, 1), units=len(_manifest(alone)["files"]), **accuracy),
        row("cluster", "two nodes, one killed", **killed, **there, **apart),
    ]


def _with_a_killed_node(demo: Path, nodes: Nodes, options: argparse.Namespace) -> dict[str, Any]:
    """What was there when the node was killed, and what the driver handed to others."""
    began = time.perf_counter()
    driver = _command(demo, [*options.overrides, "execution.engine=ray", f"execution.address={nodes.address}"])
    while len(_units(demo)) < options.kill_after:
        if driver.poll() is not None:
            _finish(driver)
            raise SystemExit(f"the run ended before {options.kill_after} units were there")
        time.sleep(POLL_SECONDS)
    time.sleep(IN_HAND_SECONDS)
    there = _units(demo)
    nodes.kill_one()
    said = _finish(driver)
    seconds = time.perf_counter() - began
    nodes.add_one()
    kept = {path: _units(demo).get(path) for path in there}
    again = [int(count) for count in re.findall(r"a worker was lost \([^)]+\); (\d+) unit", said)]
    if not again and "is gone; " not in said:
        raise SystemExit("no node was missed: kill it earlier")
    return {
        "seconds": round(seconds, 1),
        "units": len(_manifest(demo)["files"]),
        "there_at_the_kill": len(there),
        "of_these_made_again": sum(there[path] != mark for path, mark in kept.items()),
        "tasks_lost": len(again),
        "begun_again": sum(again),
        "drafts_left": len(list((demo / "artifacts").rglob(".tmp-*"))),
    }


def _command(demo: Path, overrides: Sequence[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "amalgam.cli", "run", *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=demo, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
                            text=True)  # fmt: skip


def _finish(command: subprocess.Popen[str]) -> str:
    _, said = command.communicate()
    if command.returncode:
        raise SystemExit(said)
    return said


def _units(demo: Path) -> dict[str, tuple[int, int]]:
    """The units that the cluster was at when a node was killed: record -> what tells that it was written again."""
    found = {}
    for path in (demo / "artifacts" / KILLED_IN).glob("*/units/*.json"):
        stat = path.stat()
        found[str(path)] = stat.st_ino, stat.st_mtime_ns
    return found


def _apart(one: Path, other: Path) -> dict[str, Any]:
    """Of the teachers' answers, text by text: a launch of other texts may turn a float's last bit, and no more."""
    import numpy as np
    import polars as pl

    found = []
    for demo in (one, other):
        files = [demo / "artifacts" / file["path"] for file in _manifest(demo)["files"]]
        frames = [pl.read_parquet(path).select("key", pl.col("logits").arr.to_list(), of=pl.lit(path.parts[-3]))
                  for path in files]  # fmt: skip
        found.append(pl.concat(frames).filter(pl.col("logits").is_not_null()).sort("of", "key"))
    if not found[0].select("of", "key").equals(found[1].select("of", "key")):
        raise SystemExit("the cluster asked about other texts than one process")
    sides = [frame["logits"].explode().to_numpy() for frame in found]
    return {"answers": len(found[0]), "logits_apart": float(np.abs(sides[0] - sides[1]).max())}


def _manifest(demo: Path) -> dict[str, Any]:
    [path] = (demo / "artifacts" / KILLED_IN).glob("*/MANIFEST.json")
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return found


def _accuracy(demo: Path) -> dict[str, float]:
    found = json.loads((demo / "reports/student.json").read_text("utf-8"))["evaluation"]["systems"]
    return {name: round(system["accuracy"], 4) for name, system in found.items()}


# ---- a unit's overhead


class Nothing(UnitByUnit):
    """Units that are no work."""

    name: ClassVar[str] = "nothing"
    VERSION: ClassVar[int] = 1
    spread: ClassVar[Literal["units", "together", "alone"]] = "units"
    measure: ClassVar[str] = "units"

    def wanted(self, experiment: ExperimentFile) -> bool:  # noqa: ARG002 - the contract
        return True

    def prepare(self, run: Run) -> None: ...

    def identity(self, run: Run) -> Identity:  # noqa: ARG002 - the contract
        return Identity({})

    def units(self, run: Run, folder: Path) -> Sequence[Unit]:  # noqa: ARG002 - the contract
        return ()

    def finish(self, run: Run, folder: Path, records: Sequence[Record]) -> dict[str, Any]:  # noqa: ARG002
        return {}

    def deliver(self, run: Run, manifest: Record, *, fresh: bool) -> None: ...

    def run_unit(self, run: Run, unit: Unit) -> None:
        with run.store.draft(unit.folder, unit.name, ".txt") as draft:
            (draft.folder / "done.txt").write_text(unit.name)


def _overhead(folder: Path, nodes: Nodes, count: int) -> dict[str, Any]:
    """Wall seconds hold what the workers do, two of them; the driver's own seconds are of its processor."""
    from amalgam.pipeline.console import Console
    from amalgam.pipeline.engines import Share, run_units
    from amalgam.pipeline.experiment import ExperimentFile
    from amalgam.pipeline.store import Store

    (folder / "artifacts").mkdir(parents=True)
    execution = {"engine": "ray", "address": nodes.address}
    said = {"corpus": {"train": "x.csv"}, "teachers": [{"name": "a", "model": "./a"}], "execution": execution}
    store = Store(folder / "artifacts")
    run = Run(ExperimentFile.model_validate(said), folder, store, Console(quiet=True), Share(), lambda _: "")
    run_units(Nothing(), run, [Unit(f"warm-{number}", store.folder("nothing", "all")) for number in range(100)])
    units = [Unit(f"unit-{number}", store.folder("nothing", "all")) for number in range(count)]
    memory, began, busy = peak_rss_mb(), time.perf_counter(), _own_seconds()
    run_units(Nothing(), run, units)
    wall, driver = time.perf_counter() - began, _own_seconds() - busy
    return row(
        "cluster",
        f"{count:,} tiny units",
        ms_a_unit=round(1000 * wall / count, 2),
        driver_ms_a_unit=round(1000 * driver / count, 2),
        driver_grew_mb=round(peak_rss_mb() - memory, 1),
    )


def _own_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
