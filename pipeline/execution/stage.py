"""The contract between the pipeline and its stages.

A stage defines the inputs of its result (identity), its pieces of work (units and run_units), and the facts of its
manifest (finish). The runner decides which units are missing.
"""

from __future__ import annotations

import os
import re
import shlex
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial, wraps
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, Concatenate, Literal, NamedTuple, ParamSpec, TypeVar

from amalgam.pipeline.config.proposals import file_option, written
from amalgam.pipeline.config.schema import ExperimentConfig
from amalgam.pipeline.console import Console
from amalgam.pipeline.errors import ExperimentError
from amalgam.pipeline.execution.faults import with_retries
from amalgam.pipeline.input_files import InputFile
from amalgam.pipeline.signals import InterruptHandler
from amalgam.pipeline.storage.facts import DECLARED, FactTypes
from amalgam.pipeline.storage.fingerprint import library_versions
from amalgam.pipeline.storage.store import Record, Store
from amalgam.pipeline.user_paths import check_writable

T = TypeVar("T")
P = ParamSpec("P")


class PendingDependencyError(Exception):
    """Names an input of an identity that does not exist yet: a stage's result, a model, a pinned choice."""


class Slot(NamedTuple):
    """The position of a unit in a group of units, such as those of a bucket; it decides which process runs the unit."""

    group: str
    number: int
    total: int
    """The number of slots of the group."""


@dataclass(frozen=True)
class Unit:
    """The smallest piece of work that is committed; its record is folder/name.json."""

    name: str
    folder: Path
    size: int = 1
    """Amount of work for the progress line, in the stage's unit_label."""
    payload: Any = None
    """Data of the stage for this unit."""
    is_complete: bool = False
    """The unit was complete when the units were listed."""
    is_read_by_others: bool = False
    """Later units of the stage read its result; with `--part`, each part runs it if it is missing."""
    slot: Slot | None = None
    """None: the unit is one of a fixed list."""

    @property
    def record_path(self) -> Path:
        return self.folder / f"{self.name}.json"


@dataclass(frozen=True)
class Identity:
    """The inputs of a stage's result, as plain data that `explain` shows."""

    config: Mapping[str, Any]
    inputs: Mapping[str, Any] = field(default_factory=dict)
    upstream: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class WorkerShare:
    """Selects this process's part of the units."""

    index: int = 0
    count: int = 1
    kind: Literal["alone", "torchrun", "part"] = "alone"

    @property
    def is_leader(self) -> bool:
        return self.index == 0

    @property
    def finishes(self) -> bool:
        """Returns whether this process writes and publishes a result when all its units are complete."""
        return self.is_leader or self.kind == "part"

    def select(self, units: Sequence[Unit]) -> list[Unit]:
        """Returns every n-th unit, counted by slots: the units of a group can change as others are completed."""
        first, total = dict[str, int](), 0
        slots = [unit.slot or Slot(str(unit.record_path), 0, 1) for unit in units]
        for slot in slots:
            if slot.group not in first:
                first[slot.group] = total
                total += slot.total
        pairs = zip(units, slots, strict=True)
        return [unit for unit, slot in pairs if (first[slot.group] + slot.number) % self.count == self.index]


def share_of(part: str | None) -> WorkerShare:
    share, world = WorkerShare() if part is None else _parse_part(part), _launched("WORLD_SIZE", "1")
    if world > 1:
        if part is not None:
            raise ExperimentError("--part and torchrun were both given", fix="use one of them")
        share = WorkerShare(_launched("RANK"), world, "torchrun")
    return share


def _launched(name: str, default: str | None = None) -> int:
    """Returns a number that torchrun sets in the environment."""
    value = os.environ.get(name, default)
    if value is None or not value.isdecimal():
        what = f"{name} is not set, but WORLD_SIZE is" if value is None else f"{name} is {value!r}, not a number"
        fix = "start the processes with torchrun; for a single one, run `unset WORLD_SIZE`"
        raise ExperimentError(what, where=name, fix=fix)
    return int(value)


def check_processes(share: WorkerShare, processes: int | None) -> None:
    """Raises if other than the expected number of processes run; a part needs no other process."""
    if processes is not None and share.kind != "part" and processes != share.count:
        what = f"expected {processes} processes, got {share.count}"
        fix = f"torchrun --nproc_per_node {processes} -m amalgam.cli ... (on CPUs after ACCELERATE_USE_CPU=1)"
        raise ExperimentError(what, where="execution.processes", fix=fix)


def _parse_part(part: str) -> WorkerShare:
    if part == "auto":
        return _scheduled()
    index, slash, count = part.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        fix = "use --part 0/4 for the first of four parts, 3/4 for the last, or --part auto in a job array"
        raise ExperimentError(f"--part {part} is not a share", fix=fix)
    return WorkerShare(int(index), int(count), "part")


def _scheduled() -> WorkerShare:
    """Returns the share of this task of a SLURM array or an indexed Kubernetes job."""
    environment = os.environ
    try:
        if "SLURM_ARRAY_TASK_ID" in environment:
            first, step = int(environment["SLURM_ARRAY_TASK_MIN"]), int(environment.get("SLURM_ARRAY_TASK_STEP") or 1)
            index, rest = divmod(int(environment["SLURM_ARRAY_TASK_ID"]) - first, step)
            count = int(environment["SLURM_ARRAY_TASK_COUNT"])
        else:
            index, rest, count = int(environment["JOB_COMPLETION_INDEX"]), 0, int(environment["JOB_COMPLETIONS"])
    except (KeyError, ValueError) as error:
        reason = f"{error.args[0]} is not set" if isinstance(error, KeyError) else str(error)
        fix = "start it in a SLURM array or in an indexed Kubernetes job with JOB_COMPLETIONS, or use --part 0/4"
        raise ExperimentError(f"--part auto: {reason}", fix=fix) from None
    if rest or not 0 <= index < count:
        what = f"--part auto: task {index} of an array of {count} with gaps"
        fix = "use an array without gaps, such as --array=0-7, or --part $SLURM_ARRAY_TASK_ID/8"
        raise ExperimentError(what, where="SLURM_ARRAY_TASK_ID", fix=fix)
    return WorkerShare(index, count, "part")


@dataclass
class Run:
    """The objects that all stages of one command share."""

    experiment: ExperimentConfig
    base: Path
    store: Store
    console: Console
    share: WorkerShare
    digest_of: Callable[[Path], str]
    """Returns the sha256 of a file outside the workspace."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    file: InputFile | None = None
    """The experiment file; None for an experiment without one."""
    places: Mapping[str, str] = field(default_factory=dict)
    """Field -> its line of the file, or "command line"."""
    rival: str | None = None
    """Name of the system that the report must compare with; one of students/ is measured if no report did it."""
    previous: Callable[[], Mapping[str, str]] = dict
    """Returns by stage the results of the student of this name, if the last results are another student's."""
    signals: InterruptHandler = field(default_factory=InterruptHandler)
    """Stages call `signals.check()` between batches, steps and units."""
    results: dict[str, tuple[str, Record]] = field(default_factory=dict)
    """The current stages: name -> (fingerprint, manifest)."""
    descriptions: dict[str, str] = field(default_factory=dict)
    """Stage -> its line about its result, for the report."""
    notes: dict[str, list[str]] = field(default_factory=dict)
    """Stage -> its notes about its result, for the report."""
    needs: dict[str, list[str]] = field(default_factory=dict)
    """Stage -> the stages of this run whose results it reads, for the report."""
    executed: set[str] = field(default_factory=set)
    """The stages with missing units in this run."""
    cache: dict[Any, Any] = field(default_factory=dict)
    """Values of functions with the decorator `once`; a repair clears it."""

    def place_of(self, name: str) -> str:
        """Returns a field with its line, for messages."""
        return ", ".join(filter(None, [self.places.get(name), name]))

    @property
    def file_name(self) -> str:
        """Returns the experiment file as a path from the workspace; both can be moved together."""
        if self.file is None:
            return ""
        path = self.file.path
        return path.name if self.store.backend.is_remote else os.path.relpath(path, self.store.root)

    @property
    def file_option(self) -> str:
        return file_option(Path(os.path.relpath(self.file.path)) if self.file else None)

    @property
    def options(self) -> str:
        """Returns the overrides and the file for a command that repeats them, with a space before each."""
        return "".join(f" {shlex.quote(override)}" for override in written(self.overrides)) + self.file_option

    @property
    def versions(self) -> dict[str, dict[str, str]]:
        """Returns the libraries' versions for an identity; empty unless execution.on_version_change is strict."""
        is_strict = self.experiment.execution.on_version_change == "strict"
        return {"libraries": library_versions()} if is_strict else {}

    def result(self, stage: str) -> Record:
        """Returns the manifest of a current stage; raises PendingDependencyError if the stage is not current."""
        if stage not in self.results:
            raise PendingDependencyError(stage)
        return self.results[stage][1]

    def last(self, stage: str) -> str | None:
        """Returns the last result of the stage for the student of this name, else for any student."""
        return self.previous().get(stage) or self.store.last(stage)

    def fingerprint(self, stage: str) -> str:
        self.result(stage)  # raises if the stage is not current
        return self.results[stage][0]


def once(work: Callable[Concatenate[Run, P], T]) -> Callable[Concatenate[Run, P], T]:
    """Caches the function's value in the run by its arguments, such as a loaded teacher that units share."""

    @wraps(work)
    def cached(run: Run, /, *args: P.args, **kwargs: P.kwargs) -> T:
        key = (work, args, *kwargs.items())
        if key not in run.cache:
            run.cache[key] = work(run, *args, **kwargs)
        return run.cache[key]

    return cached


class Stage:
    """Defines one stage: its place in the command line, its identity, its units and the work on each.

    A stage overrides `identity`, `units`, and `run_unit` or `run_units`; with several units `finish`, too.
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
    sections: ClassVar[tuple[str, ...]] = ()
    """Sections of the experiment whose overrides a later stage command repeats."""
    reads: ClassVar[tuple[str, ...]] = ()
    """The value of `needs` where it is the same for every experiment."""
    enabled_by: ClassVar[str] = ""
    """The setting that adds the stage to an experiment; empty for stages without such a setting."""
    on_lost_record: ClassVar[tuple[str, str] | None] = None
    """For `amalgam verify`: what a complete result lacks without the record of its unit, and the command for it."""
    facts: ClassVar[FactTypes] = FactTypes()
    """Types of the records; a record of another type counts as damaged."""
    input_names: ClassVar[Mapping[str, str]] = {}
    """Regular expression of an input's path in the identity -> its name for a reader: a field, or plain words."""

    def __init_subclass__(cls) -> None:
        if "facts" in vars(cls):
            DECLARED[cls.name] = cls.facts

    def is_needed(self, experiment: ExperimentConfig) -> bool:
        """Returns whether the experiment has this stage."""
        return True

    def needs(self, experiment: ExperimentConfig) -> tuple[str, ...]:
        """Returns the stages whose results this stage reads, in any order; those not in the experiment are ignored."""
        return self.reads

    def resolve_inputs(self, run: Run) -> None:
        """Fetches inputs that identity depends on, such as a remote file or a Hub commit; `plan` never calls it."""

    def check_folders(self, run: Run) -> None:
        """Raises ExperimentError, before any stage runs, if results could not be written; changes nothing."""
        folder = run.store.root / self.name
        if not run.store.backend.is_remote and folder.is_dir():
            check_writable(folder, "change its permissions, or set execution.workspace=DIR")
        self.check_output(run)

    def check_output(self, run: Run) -> None:
        """Raises ExperimentError, before any stage runs, if `publish` could not write; changes nothing."""

    def identity(self, run: Run) -> Identity:
        """Returns the inputs of the result; raises PendingDependencyError while one of them is missing."""
        raise NotImplementedError

    def input_name(self, path: str) -> str:
        """Returns the name of an input by its path in the identity; a path of a setting is the field itself."""
        inside = re.sub(r"^(config|inputs|libraries|upstream)\.", "", path)
        matches = ((re.fullmatch(pattern, inside), name) for pattern, name in self.input_names.items())
        return next((match.expand(name) for match, name in matches if match), inside)

    def chosen(self, run: Run) -> Mapping[str, Any]:
        """Returns the values by field that the stage chose because the experiment leaves them to auto."""
        return {}

    def units(self, run: Run, folder: Path) -> Sequence[Unit]:
        """Returns the known units, committed ones included."""
        raise NotImplementedError

    def run_units(self, run: Run, units: Sequence[Unit]) -> None:
        """Runs the units in any order; each is committed as soon as it is done. After a failure none is begun."""
        failed = threading.Event()

        def work(unit: Unit) -> None:
            if failed.is_set():
                return
            try:
                run.signals.check()
                with_retries(partial(self.run_unit, run, unit), f"{self.name} {unit.name}", run.store, run.console)
            except BaseException:
                failed.set()
                raise

        with ThreadPoolExecutor(self.at_once) as workers:
            done = map(work, units) if self.at_once == 1 else workers.map(work, units)
            for unit, _ in zip(units, done, strict=True):
                run.console.advance(unit.size)

    def run_unit(self, run: Run, unit: Unit) -> None:
        """Runs and commits one unit."""
        raise NotImplementedError

    def more_units(self, run: Run, folder: Path) -> Sequence[Unit]:
        """Returns the full list of units again if finished units revealed new ones, else an empty list."""
        return ()

    def workload(self, run: Run, units: Sequence[Unit] | None) -> float | None:
        """Returns a number to which the time of the units is proportional; `units` is None before they are known.

        None means that the number is not known; the cost estimate then repeats that of the last build.
        """
        return None if units is None else float(sum(unit.size for unit in units))

    def later_workload(self, run: Run) -> float:
        """Returns the expected workload of units that finished units will reveal."""
        return 0.0

    def least_bytes(self, run: Run, units: Sequence[Unit] | None) -> tuple[int, int]:
        """Returns the least size of the units' files in the workspace, and of their copies next to the experiment file.

        `units` is None before they are known. Files that are small next to models and predictions do not count.
        """
        return 0, 0

    def resumes(self, run: Run, unit: Unit) -> tuple[str, float]:
        """Returns the checkpoint from which a missing unit resumes, in words, and the finished share of the unit."""
        return "", 0.0

    def text_keys(self, run: Run, unit: Unit) -> list[str]:
        """Returns the keys of the unit's texts, for the report of a unit that fails."""
        return []

    def finish(self, run: Run, records: Sequence[Record]) -> Mapping[str, object]:
        """Returns the manifest's facts, computed from the units' records; by default those of a single unit."""
        return dict(records[0].facts)

    def summary(self, run: Run, manifest: Record) -> Iterable[str]:
        """Returns lines about a result that this run built; the runner prints them before it publishes."""
        return ()

    def skipped(self, run: Run, manifest: Record) -> Iterable[str]:
        """Returns lines on inputs that a result of this run leaves out; the runner prints them with --quiet too."""
        return ()

    def publish(self, run: Run, manifest: Record) -> None:
        """Copies the result to its public folder, after every run."""

    def notes(self, run: Run, manifest: Record) -> Iterable[str]:
        """Returns remarks for the user on the result; the runner prints them once, the report repeats them."""
        return ()

    def recomputed(self, unit: Record | None, teacher: str) -> str:
        """Returns how a damaged unit is replaced, for `amalgam verify`; None: its record cannot be read."""
        return "computed again"

    def describe(self, manifest: Record) -> str:
        """Returns the line about the result in `amalgam status`."""
        return ""


def pending_units(run: Run, units: Sequence[Unit]) -> list[Unit]:
    return [unit for unit, record in zip(units, records_of(run, units), strict=True) if record is None]


def records_of(run: Run, units: Sequence[Unit]) -> list[Record | None]:
    """Returns the records of complete units; one request per folder, which is fast in an object store."""
    records: list[Record | None] = []
    for folder, in_folder in groupby(units, key=lambda unit: unit.folder):
        names = [unit.name for unit in in_folder]
        complete = run.store.units(folder, names)
        records += [complete.get(name) for name in names]
    return records
