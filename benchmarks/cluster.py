"""Runs the demo on two Ray nodes with one killed, compares it with one process, and measures overhead per unit.

python benchmarks/cluster.py [--kill-after 8] [--units 10000] [--json] [student.epochs=1 ...]

Install the extra `ray`.
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
from amalgam.pipeline.execution.stage import Identity, Run, Stage, Unit

if TYPE_CHECKING:
    from collections.abc import Sequence

KILLED_IN = "cache-teachers"
POLL_SECONDS = 0.02
IN_HAND_SECONDS = 0.4
"""Wait after a committed unit. The next unit has started by then."""
ACCURACY_APART = 0.005
"""Equals five of 1,000 test texts."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("overrides", nargs="*", help="overrides of the demo's experiment, such as student.epochs=1")
    parser.add_argument("--kill-after", type=int, default=8, help=f"number of units of {KILLED_IN} before the kill")
    parser.add_argument("--units", type=int, default=10_000, help="number of tiny units for the overhead; 0 skips it")
    parser.add_argument("--folder", type=Path, help="folder of the demos; an existing demo resumes")
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
    """Starts a local cluster with one CPU per node and none on the head node."""

    def __init__(self, count: int) -> None:
        from ray.cluster_utils import Cluster

        self._inner = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self._nodes = [self._inner.add_node(num_cpus=1) for _ in range(count)]
        self._inner.wait_for_nodes()
        self.address = str(self._inner.address)

    def kill_one(self) -> None:
        """Kills a node and its workers at once. Ray alone would let the workers complete their units."""
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
    children = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1]) == parent:
                    children.append(int(folder.name))
    return children


# ---- the demo


def _demo(folder: Path, nodes: Nodes, options: argparse.Namespace) -> list[dict[str, Any]]:
    from amalgam.stages.app.demo import write_demo

    alone, spread = folder / "alone", folder / "spread"
    for demo in (alone, spread):
        write_demo(demo)
    began = time.perf_counter()
    _finish(_command(alone, options.overrides))
    seconds = time.perf_counter() - began
    killed = _with_a_killed_node(spread, nodes, options)
    accuracy, on_cluster = _accuracy(alone), _accuracy(spread)
    if any(abs(accuracy[name] - on_cluster[name]) > ACCURACY_APART for name in accuracy | on_cluster):
        raise SystemExit(f"the cluster and one process have different accuracies: {on_cluster}, {accuracy}")
    apart = _apart(alone, spread)
    return [
        row("cluster", "one process", seconds=round(seconds, 1), units=len(_manifest(alone)["files"]), **accuracy),
        row("cluster", "two nodes, one killed", **killed, **on_cluster, **apart),
    ]


def _with_a_killed_node(demo: Path, nodes: Nodes, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the units before the kill, and the units that the driver moved to other workers."""
    began = time.perf_counter()
    driver = _command(demo, [*options.overrides, "execution.engine=ray", f"execution.ray.address={nodes.address}"])
    while len(_units(demo)) < options.kill_after:
        if driver.poll() is not None:
            _finish(driver)
            raise SystemExit(f"the run ended before {options.kill_after} units: set a smaller --kill-after")
        time.sleep(POLL_SECONDS)
    time.sleep(IN_HAND_SECONDS)
    before = _units(demo)
    nodes.kill_one()
    log = _finish(driver)
    seconds = time.perf_counter() - began
    nodes.add_one()
    kept = {path: _units(demo).get(path) for path in before}
    again = [int(count) for count in re.findall(r"a worker was lost \([^)]+\); (\d+) unit", log)]
    if not again and "is lost; " not in log:
        raise SystemExit("no work was lost: set a smaller --kill-after")
    return {
        "seconds": round(seconds, 1),
        "units": len(_manifest(demo)["files"]),
        "units_at_the_kill": len(before),
        "repeated_units": sum(before[path] != stamp for path, stamp in kept.items()),
        "tasks_lost": len(again),
        "restarted_units": sum(again),
        "drafts_left": len(list((demo / "artifacts").rglob(".tmp-*"))),
    }


def _command(demo: Path, overrides: Sequence[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "amalgam.cli", "run", *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=demo, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
                            text=True)  # fmt: skip


def _finish(command: subprocess.Popen[str]) -> str:
    _, log = command.communicate()
    if command.returncode:
        raise SystemExit(log)
    return log


def _units(demo: Path) -> dict[str, tuple[int, int]]:
    """Returns inode and time of each unit's record, which change when the record is written again."""
    stamps = {}
    for path in (demo / "artifacts" / KILLED_IN).glob("*/units/*.json"):
        stat = path.stat()
        stamps[str(path)] = stat.st_ino, stat.st_mtime_ns
    return stamps


def _apart(first: Path, second: Path) -> dict[str, Any]:
    """Returns the largest difference of the teachers' logits. Other batches may change the last bit of a float."""
    import numpy as np
    import polars as pl

    tables = []
    for demo in (first, second):
        files = [demo / "artifacts" / file["path"] for file in _manifest(demo)["files"]]
        frames = [pl.read_parquet(path).select("key", pl.col("logits").arr.to_list(), of=pl.lit(path.parts[-3]))
                  for path in files]  # fmt: skip
        tables.append(pl.concat(frames).filter(pl.col("logits").is_not_null()).sort("of", "key"))
    if not tables[0].select("of", "key").equals(tables[1].select("of", "key")):
        raise SystemExit("the cluster and one process have answers for different texts")
    sides = [frame["logits"].explode().to_numpy() for frame in tables]
    return {"answers": len(tables[0]), "logits_apart": float(np.abs(sides[0] - sides[1]).max())}


def _manifest(demo: Path) -> dict[str, Any]:
    [path] = (demo / "artifacts" / KILLED_IN).glob("*/MANIFEST.json")
    return json.loads(path.read_text("utf-8"))


def _accuracy(demo: Path) -> dict[str, float]:
    systems = json.loads((demo / "reports/student.json").read_text("utf-8"))["evaluation"]["systems"]
    return {name: round(system["accuracy"], 4) for name, system in systems.items()}


# ---- a unit's overhead


class Nothing(Stage):
    """Implements a stage whose units do no work."""

    name: ClassVar[str] = "nothing"
    VERSION: ClassVar[int] = 1
    parallelism: ClassVar[Literal["units", "collective", "single"]] = "units"
    unit_label: ClassVar[str] = "units"

    def identity(self, run: Run) -> Identity:  # noqa: ARG002 - part of the interface
        return Identity({})

    def units(self, run: Run, folder: Path) -> Sequence[Unit]:  # noqa: ARG002 - part of the interface
        return ()

    def run_unit(self, run: Run, unit: Unit) -> None:
        with run.store.draft(unit.folder, unit.name, ".txt") as draft:
            (draft.folder / "done.txt").write_text(unit.name)


def _overhead(folder: Path, nodes: Nodes, count: int) -> dict[str, Any]:
    """Measures wall seconds with two workers, and the driver's processor seconds."""
    from amalgam.pipeline.config.schema import ExperimentConfig
    from amalgam.pipeline.console import Console
    from amalgam.pipeline.execution.runner import run_units
    from amalgam.pipeline.execution.stage import WorkerShare
    from amalgam.pipeline.storage.store import Store

    (folder / "artifacts").mkdir(parents=True)
    execution = {"engine": "ray", "ray": {"address": nodes.address}}
    config = {"corpus": {"train": "x.csv"}, "teachers": [{"name": "a", "model": "./a"}], "execution": execution}
    store = Store(folder / "artifacts")
    run = Run(ExperimentConfig.model_validate(config), folder, store, Console(quiet=True), WorkerShare(), lambda _: "")
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
