"""The contract between the pipeline and a stage, and what a stage is given to work with.

A stage says what its result is a function of (identity), which pieces of work make it up (units), how they are
done (run_units), and what is to be remembered of the whole (finish). What is already there is the runner's business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, Literal

from amalgam.pipeline.config.schema import ExperimentConfig
from amalgam.pipeline.console import Console
from amalgam.pipeline.execution.interrupts import InterruptHandler
from amalgam.pipeline.execution.retry import with_retries
from amalgam.pipeline.execution.share import WorkerShare
from amalgam.pipeline.storage.store import Record, Store


class PendingDependencyError(Exception):
    """A stage's identity depends on the result of another stage, which is not there yet."""

    def __init__(self, stage: str) -> None:
        super().__init__(stage)
        self.stage = stage


@dataclass(frozen=True)
class Unit:
    """The smallest piece of work that is committed. Its record will stand at folder/name.json."""

    name: str
    folder: Path
    size: int = 1
    """How much work it is, in the stage's own measure: for progress."""
    payload: Any = None
    """What the stage itself needs to know to do it."""
    is_complete: bool = False
    """It was seen to be whole when the units were listed."""

    @property
    def record_path(self) -> Path:
        return self.folder / f"{self.name}.json"


@dataclass(frozen=True)
class Identity:
    """What a stage's result is a function of. Every part is plain data, shown by `explain`."""

    config: Mapping[str, Any]
    inputs: Mapping[str, Any] = field(default_factory=dict)
    upstream: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Run:
    """One experiment being brought up to date: what the stages share."""

    experiment: ExperimentConfig
    base: Path
    store: Store
    console: Console
    share: WorkerShare
    digest_of: Callable[[Path], str]
    """sha256 of a file outside the workspace."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    signals: InterruptHandler = field(default_factory=InterruptHandler)
    """`signals.check()` is called between launches, steps and units."""
    results: dict[str, tuple[str, Record]] = field(default_factory=dict)
    """The stages that are current: name -> (fingerprint, manifest)."""
    executed: set[str] = field(default_factory=set)
    """The stages that had something to do in this run."""
    cache: dict[Any, Any] = field(default_factory=dict)
    """What is worth keeping between units of one process: a loaded teacher, a resolved model."""

    def result(self, stage: str) -> Record:
        return self._result(stage)[1]

    def fingerprint(self, stage: str) -> str:
        return self._result(stage)[0]

    def _result(self, stage: str) -> tuple[str, Record]:
        if stage not in self.results:
            raise PendingDependencyError(stage)
        return self.results[stage]


class Stage:
    """Defines one stage: its place in the command line, its identity, its units and the work on each.

    A stage overrides `identity`, `units`, `finish` and either `run_unit` or `run_units`; the rest has defaults.
    """

    name: ClassVar[str]
    VERSION: ClassVar[int]
    """Raised whenever the same inputs give another result."""
    parallelism: ClassVar[Literal["units", "collective", "single"]]
    """With several processes: units are distributed; all processes work on each unit; or one process runs all."""
    unit_label: ClassVar[str]
    """Names the quantity of a unit's size on the progress line: "text-passes"."""
    at_once: ClassVar[int] = 1
    """Number of units that `run_units` works on at the same time, each in a thread."""
    help: ClassVar[str]
    """Help text of the stage's command."""
    examples: ClassVar[tuple[str, ...]] = ()
    """Command lines shown by --help."""
    sections: ClassVar[tuple[str, ...]] = ()
    """Sections of the experiment whose overrides a later stage command repeats."""
    enabled_by: ClassVar[str] = ""
    """The setting that adds the stage to an experiment; empty for stages without such a setting."""

    def is_needed(self, experiment: ExperimentConfig) -> bool:  # noqa: ARG002 - a default for subclasses
        """Returns whether the experiment has this stage."""
        return True

    def needs(self, experiment: ExperimentConfig) -> tuple[str, ...]:  # noqa: ARG002 - a default for subclasses
        """Returns the names of the stages whose results this stage reads; any order."""
        return ()

    def resolve_inputs(self, run: Run) -> None:
        """Fetches inputs that identity depends on, such as a remote file or a Hub commit; `plan` never calls it."""

    def identity(self, run: Run) -> Identity:
        """Returns the inputs of the result; raises PendingDependencyError while one of them is missing."""
        raise NotImplementedError

    def units(self, run: Run, folder: Path) -> Sequence[Unit]:
        """Returns the known units, committed ones included."""
        raise NotImplementedError

    def run_units(self, run: Run, units: Sequence[Unit]) -> None:
        """Runs the units in any order; each is committed as soon as it is done."""

        def work(unit: Unit) -> None:
            run.signals.check()
            with_retries(partial(self.run_unit, run, unit), run, f"{self.name} {unit.name}")

        with ThreadPoolExecutor(self.at_once) as workers:
            done = map(work, units) if self.at_once == 1 else workers.map(work, units)
            for unit, _ in zip(units, done, strict=True):
                run.console.advance(unit.size)

    def run_unit(self, run: Run, unit: Unit) -> None:
        """Runs and commits one unit."""
        raise NotImplementedError

    def more_units(self, run: Run, folder: Path) -> Sequence[Unit]:  # noqa: ARG002 - a default for subclasses
        """Returns the full list of units again if finished units revealed new ones, else an empty list."""
        return ()

    def workload(self, run: Run, units: Sequence[Unit] | None) -> float | None:  # noqa: ARG002 - a default
        """Returns a number to which the time of the units is proportional; `units` is None before they are known.

        None means that the number is not known; the cost estimate then repeats that of the last build.
        """
        return None if units is None else float(sum(unit.size for unit in units))

    def text_keys(self, run: Run, unit: Unit) -> list[str]:  # noqa: ARG002 - a default for subclasses
        """Returns the keys of the unit's texts, for the report of a unit that fails."""
        return []

    def finish(self, run: Run, folder: Path, records: Sequence[Record]) -> dict[str, Any]:
        """Returns the manifest's facts, computed from the units' records."""
        raise NotImplementedError

    def publish(self, run: Run, manifest: Record, *, fresh: bool) -> None:
        """Prints the result and copies it to its public folder; `fresh`: this run built it."""

    def describe(self, manifest: Record) -> str:  # noqa: ARG002 - a default for subclasses
        """Returns the line about the result in `amalgam status`."""
        return ""


def pending_units(run: Run, units: Sequence[Unit]) -> list[Unit]:
    """Those that are not committed or not whole: asked of all at once, which an object store answers sooner."""
    found = []
    for folder, mine in groupby(units, key=lambda unit: unit.folder):
        alike = list(mine)
        there = run.store.units(folder, [unit.name for unit in alike])
        found += [unit for unit in alike if unit.name not in there]
    return found
