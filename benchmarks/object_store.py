"""Measures planning of a large workspace in an object store, on a small S3 server that delays each answer.

python benchmarks/object_store.py --texts 100000 --teachers 10 --latency 0.02 [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amalgam.benchmarks.protocol import median, row, show, spread

if TYPE_CHECKING:
    from collections.abc import Iterator

    from amalgam.tests.s3_server import S3

ADDRESS = "s3://bucket/workspace"
KEYS = {"AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none", "AWS_REGION": "us-east-1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=100_000)
    parser.add_argument("--teachers", type=int, default=10)
    parser.add_argument("--characters", type=int, default=236, help="characters of a text")
    parser.add_argument("--latency", type=float, default=0.02, help="delay of each answer in seconds")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="folder of the temporary workspace")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    show(_rows(options), as_json=options.json)


def _rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    from amalgam.benchmarks import synthetic_workspace as synthetic
    from amalgam.pipeline.execution.runner import update
    from amalgam.stages.registry import STAGES
    from amalgam.tests.s3_server import serving

    synthetic.CHARACTERS = options.characters
    shape = synthetic.Shape(options.texts, options.teachers)
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch, serving() as server:
        experiments = synthetic.write_experiments(Path(scratch) / "scale", shape)
        synthetic.write_corpora(experiments, shape)
        units = synthetic.lacking(experiments.first)
        late = synthetic.half_of(units, f"teacher-{shape.teachers - 1}")
        absent = {unit.record_path for unit in late}
        synthetic.write_answers(experiments.first, [unit for unit in units if unit.record_path not in absent], shape)
        bench = _Bench(server, experiments.first, Path(scratch) / "cache", options)
        yield from bench.states("half of one teacher missing", (len(units) - len(late), len(units)))
        synthetic.write_answers(experiments.first, late, shape)
        update(STAGES, synthetic.quiet_run(experiments.first), target="cache-teachers")
        synthetic.write_targets(experiments.first)
        yield from bench.states("current", (len(units), len(units)))


class _Bench:
    def __init__(self, server: S3, config: Path, cache: Path, options: argparse.Namespace) -> None:
        self._server, self._config, self._cache, self._options = server, config, cache, options

    def states(self, name: str, expected: tuple[int, int]) -> Iterator[dict[str, Any]]:
        """Measures loose and packed units, with an empty cache and later."""
        self._load()
        for how in ("as written", "packed"):
            if how == "packed":
                yield self._row(f"{name}: gc --compact --yes", [self._spent("gc", "--compact", "--yes")])
            self._server.seconds = self._options.latency
            for when in ("an empty cache", "later"):
                cold = when == "an empty cache"
                for command in ("plan", "status"):
                    repeats = 1 if cold else self._options.repeats
                    spent = [self._spent(command, "--json", empty=cold and command == "plan") for _ in range(repeats)]
                    if command == "plan":
                        _check(spent[0]["output"], expected)
                    yield self._row(f"{name}, {how}: {command}, {when}", spent)
            self._server.seconds = 0.0

    def _load(self) -> None:
        """Copies the local workspace into the store."""
        workspace = self._config.parent / "artifacts"
        files = [path for path in workspace.rglob("*") if path.is_file()]
        named = {f"bucket/workspace/{path.relative_to(workspace).as_posix()}": path for path in files}
        self._server.restore({key: (path.read_bytes(), time.time()) for key, path in named.items()})

    def _spent(self, *arguments: str, empty: bool = False) -> dict[str, Any]:
        cache = self._cache
        if empty:
            self._cache = cache = self._cache.with_name(f"cache-{time.monotonic_ns()}")
        around = {**os.environ, **KEYS, "AWS_ENDPOINT_URL": self._server.url, "AMALGAM_CACHE": str(cache)}
        command = [sys.executable, "-m", "amalgam.cli", *arguments, "-c", str(self._config)]
        self._server.asked.clear()
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run(
            [*command, f"execution.workspace={ADDRESS}"], check=False, capture_output=True, text=True, env=around
        )
        seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode:
            raise SystemExit(f"{' '.join(arguments)}: {done.returncode}\n{done.stderr}")
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return {"seconds": seconds, "cpu": cpu, "output": done.stdout, "asked": dict(self._server.asked)}

    def _row(self, name: str, spent: list[dict[str, Any]]) -> dict[str, Any]:
        seconds = [run["seconds"] for run in spent]
        figures = {"seconds": round(median(seconds), 2), "spread": round(spread(seconds), 2)}
        figures["cpu_s"] = round(median([run["cpu"] for run in spent]), 2)
        options = self._options
        shape = {"texts": options.texts, "teachers": options.teachers, "latency_s": options.latency}
        return row("object-store", name, **shape, **figures, requests=spent[-1]["asked"])


def _check(output: str, expected: tuple[int, int]) -> None:
    state = next(state for state in json.loads(output)["stages"] if state["stage"] == "cache-teachers")
    if state["units"] != {"done": expected[0], "total": expected[1]}:
        raise SystemExit(f"plan reports {state['units']} units instead of {expected}")


if __name__ == "__main__":
    main()
