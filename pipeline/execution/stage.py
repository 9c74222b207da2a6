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
from typing import Any, ClassVar, Literal, Protocol

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
    accessed: set[str] = field(default_factory=set)
    """The stages whose results were asked for, since whoever wants to know cleared it."""

    def result(self, stage: str) -> Record:
        return self._result(stage)[1]

    def fingerprint(self, stage: str) -> str:
        return self._result(stage)[0]

    def _result(self, stage: str) -> tuple[str, Record]:
        self.accessed.add(stage)
        if stage not in self.results:
            raise PendingDependencyError(stage)
        return self.results[stage]


class SequentialStage:
    """For a stage whose units have nothing to share while they are being done."""

    name: ClassVar[str]
    at_once: ClassVar[int] = 1
    """Units that are worked on at the same time, by a thread each."""

    def run_units(self, run: Run, units: Sequence[Unit]) -> None:
        def work(unit: Unit) -> None:
            run.signals.check()
            with_retries(partial(self.run_unit, run, unit), run, f"{self.name} {unit.name}")

        with ThreadPoolExecutor(self.at_once) as workers:
            done = map(work, units) if self.at_once == 1 else workers.map(work, units)
            for unit, _ in zip(units, done, strict=True):
                run.console.advance(unit.size)

    def run_unit(self, run: Run, unit: Unit) -> None:
        raise NotImplementedError

    def more_units(self, run: Run, folder: Path) -> Sequence[Unit]:  # noqa: ARG002  all was known at the start
        return ()

    def texts(self, run: Run, unit: Unit) -> list[str]:  # noqa: ARG002  a unit need not be about texts
        return []


class Stage(Protocol):
    name: ClassVar[str]
    VERSION: ClassVar[int]
    """Raised whenever the same inputs give another result."""
    parallelism: ClassVar[Literal["units", "collective", "single"]]
    """With several processes: units are shared out; all work on each unit together; or one process does it all."""
    unit_label: ClassVar[str]
    """What a unit's size counts, for the progress line: "text-passes"."""

    def is_needed(self, experiment: ExperimentConfig) -> bool: ...

    def resolve_inputs(self, run: Run) -> None:
        """Settle what identity must know and only work can tell: a remote file, a Hub commit. `plan` never does."""

    def identity(self, run: Run) -> Identity:
        """Raises NotKnownYetError while something it depends on is not there."""
        ...

    def units(self, run: Run, folder: Path) -> Sequence[Unit]: ...

    def run_units(self, run: Run, units: Sequence[Unit]) -> None:
        """Do them, in any order; each is committed as soon as it is done."""

    def more_units(self, run: Run, folder: Path) -> Sequence[Unit]:
        """All units, anew, once those that were known are done: some may only be known now. Empty: there are none."""
        ...

    def texts(self, run: Run, unit: Unit) -> list[str]:
        """The keys of the texts that a unit is about: told of one that cannot be done."""
        ...

    def finish(self, run: Run, folder: Path, records: Sequence[Record]) -> dict[str, Any]:
        """Facts for the manifest, from the units' records."""
        ...

    def publish(self, run: Run, manifest: Record, *, fresh: bool) -> None:
        """Show the result and put it where the user looks for it; `fresh`: it was built just now, not reused."""


def pending_units(run: Run, units: Sequence[Unit]) -> list[Unit]:
    """Those that are not committed or not whole: asked of all at once, which an object store answers sooner."""
    found = []
    for folder, mine in groupby(units, key=lambda unit: unit.folder):
        alike = list(mine)
        there = run.store.units(folder, [unit.name for unit in alike])
        found += [unit for unit in alike if unit.name not in there]
    return found
