"""Updates stages: runs the missing units, and prints which stages were reused and why the others ran."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from amalgam.pipeline.errors import AmalgamError, DamagedError, ExperimentError
from amalgam.pipeline.execution.plan import StageState, identity_of, stage_state
from amalgam.pipeline.execution.retry import disk_full, is_disk_full
from amalgam.pipeline.execution.stage import PendingDependencyError, Run, Stage, Unit, pending_units
from amalgam.pipeline.execution.workers import run_units, wait_until
from amalgam.pipeline.storage.fingerprint import library_versions
from amalgam.pipeline.storage.store import MANIFEST, Record

TIMING = "timing.json"

MAX_REPAIRS = 8
"""Number of damaged files that one run recomputes before it fails."""


class PartialRunDoneError(Exception):
    """This part of a stage is done, other parts are not: no fault, but later stages cannot run."""

    def __init__(self, state: StageState) -> None:
        super().__init__(state.stage)
        self.state = state


def update(
    stages: Sequence[Stage], run: Run, *, target: str | None = None, only: bool = False, force: bool = False
) -> list[StageState]:
    """Runs the stages up to `target` (or all) that are not current; returns their states before the run."""
    run.store.backend.check()  # before any model loads
    for repair in range(MAX_REPAIRS + 1):
        try:
            return _once(_up_to(stages, run, target), run, target=target, only=only, force=force and not repair)
        except DamagedError as damage:
            if repair == MAX_REPAIRS:
                raise
            run.results.clear()
            run.cache.clear()
            run.console.note(f"{damage.what}; quarantined, recomputing the missing units")
    raise AssertionError  # the loop returns or raises


def _up_to(stages: Sequence[Stage], run: Run, target: str | None) -> list[Stage]:
    needed = [stage for stage in stages if stage.is_needed(run.experiment)]
    names = [stage.name for stage in needed]
    if target is not None and target not in names:
        raise ExperimentError(f"this experiment has no stage {target}", fix=f"its stages: {', '.join(names)}")
    return needed if target is None else needed[: names.index(target) + 1]


def _once(stages: list[Stage], run: Run, *, target: str | None, only: bool, force: bool) -> list[StageState]:
    states = []
    waiting = _prepared(stages, run)
    for stage in stages:
        ours = stage.name == target or target is None
        if stage.name in waiting:
            stage.resolve_inputs(run)
        state = stage_state(stage, run)
        if force and ours:
            state = _forced(stage, run, state)
        states.append(state)
        if state.state == "current":
            run.console.stage_reused(stage.name)
            _say_warnings(run, state)
        elif only and not ours:
            raise ExperimentError(
                f"{stage.name} is not up to date ({state.why})",
                fix=f"run `amalgam {stage.name}` first, or leave --no-upstream out",
            )
        else:
            _run_stage(stage, run, state)
        if run.share.is_leader:
            run.store.move_head(stage.name, run.fingerprint(stage.name), run.overrides)
            stage.publish(run, run.result(stage.name), fresh=state.state != "current")
    return states


def _prepared(stages: list[Stage], run: Run) -> set[str]:
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


def _run_stage(stage: Stage, run: Run, state: StageState) -> None:
    name = state.fingerprint
    if name is None:
        raise AssertionError(f"{stage.name} was reached before the stages that it needs")  # STAGES are in order
    folder = run.store.folder(stage.name, name)
    _quarantine_damaged(stage, run, name)
    units = list(stage.units(run, folder))
    reused = {unit.record_path for unit in units} - {unit.record_path for unit in state.missing}
    units_done = f", {state.done} of {state.total} units there" if state.done else ""
    run.console.stage_started(stage.name, f"{state.why}{units_done}")
    run.executed.add(stage.name)
    began = time.monotonic()
    try:
        while True:
            if not run_units(stage, run, units):
                done = len(units) - len(pending_units(run, units))
                raise PartialRunDoneError(replace(state, done=done, total=len(units)))
            more = list(stage.more_units(run, folder))
            units = more or units
            if not more or not pending_units(run, more):
                break
        if run.share.is_leader or run.share.kind == "part":
            seconds, records = time.monotonic() - began, list(_committed(stage, run, units))
            executed = {unit.record_path for unit in units} - reused
            _record_timing(stage, run, folder, seconds, units, records, executed)
            _finish(stage, run, name, records)
        else:
            wait_until(lambda: _complete(run, stage, name), stage, run, units)
    except OSError as error:
        raise _storage_error(run, stage, error) from error
    manifest = run.store.manifest(stage.name, name)
    if manifest is None:
        raise DamagedError(f"{stage.name}/{name}/{MANIFEST} cannot be read back", path=str(folder / MANIFEST))
    run.results[stage.name] = (name, manifest)
    run.console.finished(stage.name, time.monotonic() - began, run.store.where(folder))


def _record_timing(  # noqa: PLR0913 - the facts of one build
    stage: Stage,
    run: Run,
    folder: Path,
    seconds: float,
    units: Sequence[Unit],
    records: Sequence[Record],
    executed: set[Path],
) -> None:
    """Records the cost of a build next to its manifest, of which it is no part.

    It is written before the manifest, so that an interrupted run has it; the first record of a result stays.
    """
    work = [(unit, record) for unit, record in zip(units, records, strict=True) if unit.record_path in executed]
    whole = run.share.kind != "part"  # the seconds of one part are not those of all units
    facts = {
        "seconds": round(seconds, 3),
        "units": len(units),
        "found": len(units) - len(work),
        "workload": (stage.workload(run, [unit for unit, _ in work]) or 0.0) if whole else 0.0,
        "bytes": sum(file.bytes for _, record in work for file in record.files),
    }
    run.store.commit(folder / TIMING, Record("timing", (), facts))


def _quarantine_damaged(stage: Stage, run: Run, name: str) -> None:
    """Quarantines files of the wrong size; their units run again."""
    manifest = run.store.manifest(stage.name, name) if run.share.is_leader else None
    for file, fault in run.store.missing_files(manifest) if manifest else []:
        if fault != "missing":
            run.store.quarantine(run.store.path(file))
            run.console.note(f"{file.path} is {fault}; quarantined")


def _committed(stage: Stage, run: Run, units: Sequence[Unit]) -> Iterator[Record]:
    """Yields the units' records; raises if one is missing, so that the manifest is never incomplete."""
    for folder, group in groupby(units, key=lambda unit: unit.folder):
        names = [unit.name for unit in group]
        records = run.store.units(folder, names)
        for name in names:
            if name not in records:
                raise DamagedError(f"{stage.name} {name} is missing", path=str(folder / f"{name}.json"))
            yield records[name]


def _complete(run: Run, stage: Stage, name: str) -> bool:
    manifest = run.store.manifest(stage.name, name)
    return manifest is not None and not run.store.missing_files(manifest)


def _finish(stage: Stage, run: Run, name: str, records: list[Record]) -> None:
    folder = run.store.folder(stage.name, name)
    facts = {**stage.finish(run, folder, records), "units": len(records)}
    files = tuple(file for record in records for file in record.files)
    made = {"libraries": library_versions()}
    run.store.commit(folder / MANIFEST, Record(stage.name, files, facts, made, identity_of(stage, run)))


def _forced(stage: Stage, run: Run, state: StageState) -> StageState:
    """Quarantines the current result, so that it is computed again."""
    if state.fingerprint is None:
        return state
    folder = run.store.folder(stage.name, state.fingerprint)
    run.store.quarantine(*(unit.record_path for unit in stage.units(run, folder)), folder / MANIFEST)
    run.results.pop(stage.name, None)
    fresh = stage_state(stage, run)
    return replace(fresh, reason="forced", detail="--force")


def _say_warnings(run: Run, state: StageState) -> None:
    for warning in state.warnings:
        run.console.note(f"{state.stage}: {warning} (execution.on_version_change=strict recomputes it)")


def _storage_error(run: Run, stage: Stage, error: OSError) -> AmalgamError:
    if is_disk_full(error):
        return disk_full(run, stage.name)
    return AmalgamError(
        f"{stage.name}: {error.strerror or error}",
        where=str(error.filename or run.store.root),
        fix="repair it and run the same command again: committed units stay",
    )
