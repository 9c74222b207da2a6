"""Updates stages: runs the missing units, and prints which stages were reused and why the others ran.

Units run in this process, in the processes of a torchrun, as part i of n, or as tasks of a cluster. Processes divide
the units by position and communicate only through the store.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from amalgam.pipeline import errors
from amalgam.pipeline.errors import AmalgamError, DamagedError, DiskFullError, ExperimentError, InputChangedError
from amalgam.pipeline.execution.disk_space import add_need, check_disk_space
from amalgam.pipeline.execution.faults import storage_error
from amalgam.pipeline.execution.plan import StageState, identity_of, plan, shown_choices, stage_state
from amalgam.pipeline.execution.ranks import RankInputs
from amalgam.pipeline.execution.stage import (
    PendingDependencyError,
    Run,
    Stage,
    Unit,
    check_processes,
    pending_units,
    records_of,
)
from amalgam.pipeline.input_files import changed_error
from amalgam.pipeline.storage.fingerprint import LIBRARIES, library_versions
from amalgam.pipeline.storage.store import MANIFEST, TIMING, TIMING_NAME, Record

MAX_REPAIRS = 8
"""Number of damaged files that one run recomputes before it fails."""

POLL_SECONDS = 0.1

RUNNING = threading.RLock()
"""Held while stages run: threads share the random numbers of torch, so two trainings at once would change both."""


class PartialRunDoneError(Exception):
    """This part of a stage is done, other parts are not: no fault, but later stages cannot run."""

    def __init__(self, state: StageState) -> None:
        super().__init__(state.stage)
        self.state = state


def update(  # noqa: PLR0913 - the options of a command
    stages: Sequence[Stage],
    run: Run,
    *,
    target: str | None = None,
    only: bool = False,
    force: bool = False,
    keep_overrides: bool = True,
) -> list[StageState]:
    """Runs the stages up to `target` (or all) that are not current; returns their states before the run.

    When all are complete, the workspace keeps the run's overrides for later stage commands.
    """
    check_processes(run.share, run.experiment.execution.processes)
    needed = _up_to(stages, run, target)  # refuses an unknown stage before the workspace is written
    if run.file is not None and not run.file.has_content():  # half of it may have been read
        raise changed_error(run.file.path)
    writes = _claim(needed, run, force=force)  # before any model loads
    ranks, repairs, forced = RankInputs(run), 0, set[tuple[str, str | None]]() if force else None
    ranks.compare_settings(needed)
    while True:
        try:
            with _alone(run):
                states = _run_once(needed, run, ranks, target=target, only=only, forced=forced, writes=writes)
            break
        except (DamagedError, InputChangedError) as fault:
            is_input = isinstance(fault, InputChangedError)
            if repairs == MAX_REPAIRS or (is_input and run.share.kind == "torchrun"):  # other processes do not repeat
                raise
            repairs += 1
            run.results.clear()
            run.cache.clear()
            end = f"reading it again ({fault.where})" if is_input else "recomputing the missing units"
            run.console.note(f"{fault.what}; {end}")
    if keep_overrides and writes and run.share.finishes:
        results = {state.stage: run.fingerprint(state.stage) for state in states}
        run.store.store_overrides(results, run.overrides, run.file_name)
    if run.file is not None and not run.file.has_content():
        run.console.note(f"{run.file.path.name} changed during the run; the results are those of the earlier content")
    return states


@contextlib.contextmanager
def _alone(run: Run) -> Iterator[None]:
    """Waits until no other thread of this process runs stages; a signal ends the wait."""
    while not RUNNING.acquire(timeout=POLL_SECONDS):
        run.signals.check()
    try:
        yield
    finally:
        RUNNING.release()


def _claim(stages: Sequence[Stage], run: Run, *, force: bool) -> bool:
    """Checks that the workspace can be written; returns False if it cannot, but all results are current."""
    try:
        with _storage_errors(stages, run, stages[0].name):
            run.store.claim()
    except ExperimentError:
        with contextlib.suppress(AmalgamError, OSError):
            if not force and all(state.state == "current" for state in plan(stages, run)):
                return False
        raise
    return True


@contextlib.contextmanager
def _storage_errors(stages: Sequence[Stage], run: Run, name: str) -> Iterator[None]:
    """Names the stage in an error of the disk, and in that of a full disk the need of this stage and the later ones."""
    try:
        yield
    except OSError as error:
        fault = storage_error(error, name, run.store.root)
        if isinstance(fault, DiskFullError):
            add_need(fault, stages, run, name)
        raise fault from error
    except DiskFullError as error:
        add_need(error, stages, run, name)
        raise


def _up_to(stages: Sequence[Stage], run: Run, target: str | None) -> list[Stage]:
    needed = [stage for stage in stages if stage.is_needed(run.experiment)]
    names = [stage.name for stage in needed]
    if target is not None and target not in names:
        fix = next((stage.enabled_by for stage in stages if stage.name == target), "")
        raise ExperimentError(f"this experiment has no stage {target}", fix=fix or f"its stages: {', '.join(names)}")
    return needed if target is None else needed[: names.index(target) + 1]


def _run_once(  # noqa: PLR0913 - the options of a command
    stages: list[Stage],
    run: Run,
    ranks: RankInputs,
    *,
    target: str | None,
    only: bool,
    forced: set[tuple[str, str | None]] | None,
    writes: bool,
) -> list[StageState]:
    """Runs the stages until the end or a fault.

    `forced`: the results that --force has recomputed so far, which a repair does not recompute again; None without it.
    """
    states = []
    waiting = _resolve_inputs(stages, run)
    _check_outputs(stages, run)
    for stage in stages:
        ours = stage.name == target or target is None
        if stage.name in waiting:
            stage.resolve_inputs(run)
        ranks.compare_identity(stage)
        state = stage_state(stage, run)
        if forced is not None and ours and (stage.name, state.fingerprint) not in forced:
            state = _forced(stage, run, state)
            forced.add((stage.name, state.fingerprint))
        states.append(state)
        if state.state == "current":
            run.console.stage_reused(stage.name)
            for warning in state.warnings:
                run.console.note(f"{stage.name}: {warning} (execution.on_version_change=strict recomputes it)")
        elif only and not ours:
            command, option = f"amalgam {stage.name}{run.options}", "--no-upstream (in Python: only=True)"
            fix = f"run `{command}` first, or leave out {option}"
            raise ExperimentError(f"{stage.name} is not up to date ({state.why})", fix=fix)
        else:
            check_disk_space(stages, run, [state], first=stage.name)
            with _storage_errors(stages, run, stage.name):
                _run_stage(stage, run, state)
        if run.share.finishes:
            with _storage_errors(stages, run, stage.name):
                if writes:
                    run.store.move_head(stage.name, run.fingerprint(stage.name))
                _publish(stage, run, fresh=state.state != "current")
    return states


def _publish(stage: Stage, run: Run, *, fresh: bool) -> None:
    """Publishes a result; its notes are printed once, and the report repeats them."""
    manifest = run.result(stage.name)
    run.descriptions[stage.name], run.notes[stage.name] = stage.describe(manifest), list(stage.notes(run, manifest))
    run.needs[stage.name] = [name for name in stage.needs(run.experiment) if name in run.results]
    for line in stage.summary(run, manifest) if fresh else ():
        run.console.say(f"  {line}")
    for line in stage.skipped(run, manifest) if fresh else ():
        run.console.note(line, always=True)
    try:
        stage.publish(run, manifest)
    except OSError as error:
        what = f"{stage.name}: its result cannot be copied next to the experiment file"
        raise storage_error(error, what, run.base) from error
    for note in run.notes[stage.name] if fresh else ():
        run.console.note(note)


def _resolve_inputs(stages: list[Stage], run: Run) -> set[str]:
    """Resolves inputs before any stage runs, so that a missing model is reported at once.

    Returns the stages whose inputs depend on results that do not exist yet.
    """
    waiting = set()
    for stage in stages:
        try:
            stage.resolve_inputs(run)
        except PendingDependencyError:
            waiting.add(stage.name)
    return waiting


def _check_outputs(stages: list[Stage], run: Run) -> None:
    """Refuses folders of results that cannot be written, unless the results there are current."""
    refused = {}
    for stage in stages:
        try:
            stage.check_folders(run)
        except PendingDependencyError:  # the names of the folders come from an earlier stage
            continue
        except ExperimentError as error:
            refused[stage.name] = error
    current = {state.stage for state in plan(stages, run) if state.state == "current"} if refused else set()
    problems = [error for name, error in refused.items() if name not in current]
    if problems:
        raise errors.all_of(problems)


def _forced(stage: Stage, run: Run, state: StageState) -> StageState:
    """Quarantines this process's share of the current result, so that it is computed again."""
    if state.fingerprint is None:
        return state
    folder = run.store.folder(stage.name, state.fingerprint)
    run.store.mark_rebuilding(stage.name, state.fingerprint)
    ours = _ours(stage, run, stage.units(run, folder))
    run.store.quarantine(*(unit.record_path for unit in ours), folder / MANIFEST)
    run.results.pop(stage.name, None)
    return replace(stage_state(stage, run), reason="forced", detail="--force")


def _run_stage(stage: Stage, run: Run, state: StageState) -> None:
    name = state.fingerprint
    if name is None:
        raise AssertionError(f"{stage.name} was reached before the stages that it needs")  # STAGES are in order
    folder = run.store.folder(stage.name, name)
    if run.share.is_leader:
        _quarantine_damaged(run, folder / MANIFEST)
    units = list(stage.units(run, folder))
    reused = {unit.record_path for unit in units} - {unit.record_path for unit in state.missing}
    units_done = f", {state.done} of {state.total} units there" if state.done else ""
    run.console.stage_started(stage.name, f"{state.why}{units_done}")
    if state.chosen:
        run.console.say(f"  auto: {shown_choices(state.chosen)}")
    run.executed.add(stage.name)
    began = time.monotonic()
    while True:
        if not run_units(stage, run, units):
            done = len(units) - len(pending_units(run, units))
            raise PartialRunDoneError(replace(state, done=done, total=len(units)))
        paths = {unit.record_path for unit in units}
        units = list(stage.more_units(run, folder)) or units
        if paths.issuperset(unit.record_path for unit in units):
            break  # no new units; new ones may be complete already, by another process, and reveal more
    if run.share.finishes:
        _finish(stage, run, folder, units, reused, time.monotonic() - began)
    else:
        _wait_until(lambda: bool(run.store.records([folder / MANIFEST])), stage, run, units)
    manifest = run.store.record(folder / MANIFEST)
    if manifest is None:
        raise DamagedError(f"{stage.name}/{name}/{MANIFEST} cannot be read back", path=str(folder / MANIFEST))
    run.results[stage.name] = (name, manifest)
    run.console.finished(stage.name, time.monotonic() - began, run.store.where(folder))


def _quarantine_damaged(run: Run, manifest_path: Path) -> None:
    """Quarantines files of the wrong size; their units run again."""
    manifest = run.store.record(manifest_path)
    for file, fault in run.store.missing_files(manifest) if manifest else []:
        if fault != "missing":
            run.store.quarantine(run.store.path(file))
            run.console.note(f"{file.path} is {fault}; quarantined")


def _finish(  # noqa: PLR0913 - the facts of one build
    stage: Stage, run: Run, folder: Path, units: Sequence[Unit], reused: set[Path], seconds: float
) -> None:
    """Writes the build's cost and then the manifest, which is never incomplete.

    The cost is no part of the manifest. An interrupted run has it too, and the first record of a result stays.
    """
    records: list[Record] = []
    for unit, record in zip(units, records_of(run, units), strict=True):
        if record is None:
            raise DamagedError(f"{stage.name} {unit.name} is missing", path=str(unit.record_path))
        records.append(record)
    work = [(unit, record) for unit, record in zip(units, records, strict=True) if unit.record_path not in reused]
    whole = run.share.kind != "part"  # the seconds of one part are not those of all units
    timing = {
        "seconds": round(seconds, 3),
        "units": len(units),
        "found": len(units) - len(work),
        "workload": (stage.workload(run, [unit for unit, _ in work]) or 0.0) if whole else 0.0,
        "bytes": sum(file.bytes for _, record in work for file in record.files),
    }
    run.store.commit(folder / TIMING, Record(TIMING_NAME, (), timing))
    facts = {**stage.finish(run, records), "units": len(records)}
    files = tuple(file for record in records for file in record.files)
    made = {"libraries": _versions_of(records)}
    run.store.commit(folder / MANIFEST, Record(stage.name, files, facts, made, identity_of(stage, run)))


def _versions_of(records: Sequence[Record]) -> dict[str, str]:
    """Returns the libraries' versions; an earlier one if a reused unit was made with it, so that `plan` reports it."""
    now = library_versions()
    made = (item for record in records for item in record.made.get("libraries", {}).items())
    return now | {name: version for name, version in made if name in LIBRARIES and version != now.get(name)}


# ---- units of this process


def run_units(stage: Stage, run: Run, units: Sequence[Unit]) -> bool:
    """Runs this process's share of the units; returns True when the units of all processes are complete."""
    ours = _ours(stage, run, units)
    todo = pending_units(run, ours)
    done_before = sum(unit.size for unit in ours) - sum(unit.size for unit in todo)
    with run.console.progress(stage.name, stage.unit_label, sum(unit.size for unit in todo), done_before):
        if run.experiment.execution.engine == "ray" and stage.parallelism != "single":
            from amalgam.pipeline.execution.ray_backend import run_on_ray

            run_on_ray(stage, run, todo)
        else:
            stage.run_units(run, todo)
    if run.share.kind == "part":
        return not pending_units(run, units)
    left = list(units)

    def all_complete() -> bool:
        if not pending_units(run, left[:1]):  # a unit that is complete is not checked again
            left[:] = pending_units(run, left)
        return not left

    _wait_until(all_complete, stage, run, units)
    return True


def _ours(stage: Stage, run: Run, units: Sequence[Unit]) -> list[Unit]:
    share = run.share
    if stage.parallelism == "units":
        by_all = [unit for unit in units if unit.is_read_by_others and share.kind == "part"]
        return by_all + [unit for unit in share.select(units) if unit not in by_all]
    if stage.parallelism == "single" and share.kind == "part":
        return list(units)  # cheap, and no other part to wait for: each part runs it, the first to commit wins
    together = stage.parallelism == "collective" and share.kind == "torchrun"
    return list(units) if share.is_leader or together else []


def _wait_until(ready: Callable[[], bool], stage: Stage, run: Run, units: Sequence[Unit]) -> None:
    """Polls until the other processes of a torchrun are ready; if one dies, torchrun ends all."""
    for poll in itertools.count():
        if ready():
            return
        run.signals.check()
        if poll % 10 == 0:
            _refuse_loss(stage, run, units)
        time.sleep(POLL_SECONDS)


def _refuse_loss(stage: Stage, run: Run, units: Sequence[Unit]) -> None:
    """Raises if another process quarantined a file that only this process recomputes: waiting would never end."""
    for _, record in run.results.values():
        for file, kind in run.store.missing_files(record):
            raise DamagedError(f"{file.path} is {kind}", path=file.path)
    commits = stage.parallelism == "units" or run.share.is_leader  # work done together is committed by the lead
    for unit in pending_units(run, _ours(stage, run, units)) if commits else []:
        raise DamagedError(f"{stage.name} {unit.name} is missing", path=str(unit.record_path))
