"""Opens an experiment with its workspace, and runs its stages; the commands and `amalgam.Experiment` share this."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path

from amalgam.data.keys import shown
from amalgam.data.lazy import torch
from amalgam.pipeline.config.load import ExperimentSource
from amalgam.pipeline.console import Console
from amalgam.pipeline.errors import AmalgamError, DamagedError, DataError, ExperimentError, all_of
from amalgam.pipeline.execution.plan import StageState, plan
from amalgam.pipeline.execution.runner import update
from amalgam.pipeline.execution.stage import Run, share_of
from amalgam.pipeline.signals import as_keyboard_interrupt
from amalgam.pipeline.storage.fingerprint import FileDigests
from amalgam.pipeline.storage.store import Store, open_store
from amalgam.stages.app import verify as verification
from amalgam.stages.app.checks import execution_checks, problems_of
from amalgam.stages.app.in_memory_texts import name_rows
from amalgam.stages.common.deliveries import delivered_student, page_mark
from amalgam.stages.common.device import ON_EVERY_MACHINE
from amalgam.stages.methods import load_with_methods
from amalgam.stages.registry import STAGES


def open_run(
    source: ExperimentSource, overrides: Sequence[str], *, part: str | None = None, console: Console | None = None
) -> Run:
    loaded = load_with_methods(source, overrides)
    execution = loaded.experiment.execution
    store = open_store(execution.workspace, loaded.base)
    share = share_of(part)
    if share.kind == "torchrun" and not share.is_leader:
        console = Console(quiet=True)  # only the leader prints
    console = console or Console()
    store.notify = console.note
    if not store.backend.is_remote and store.root.exists() and not store.root.is_dir():
        fix = "choose a folder: set execution.workspace=DIR"
        raise ExperimentError(f"{shown(store.root.name)} is a file, not a folder", where=str(store.root), fix=fix)
    store.check_workspace()
    digests = FileDigests(store.root / "digests.json")
    settings = (loaded.overrides, loaded.file, loaded.places)
    previous = cache(partial(_results_of, loaded.experiment.student.name, loaded.base, store))
    return Run(loaded.experiment, loaded.base, store, console, share, digests, *settings, previous=previous)


def _results_of(student: str, base: Path, store: Store) -> dict[str, str]:
    """Returns the results of students/`student`, from its texts to its report, if another was trained after it."""
    page, trained = page_mark(base, student), delivered_student(base, student)
    made = [("train-student", trained), ("report", page.fingerprint if page else None)]
    results = dict[str, str]()
    if trained in {None, store.last("train-student")}:
        return results
    for stage, name in made:  # grows by the results that each was made from
        identity = store.identity(stage, name) if name and stage not in results else None
        if name and identity:
            results[stage] = name
            made.extend(identity.get("upstream", {}).items())
    return results


@contextmanager
def working(run: Run) -> Iterator[None]:
    """Handles signals during the block, and stores new file digests after it if there is a workspace."""
    with as_keyboard_interrupt(), run.signals.listening():
        try:
            yield
            if "torch" in sys.modules and torch.distributed.is_available() and torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()  # of torchrun: torch warns of a leak otherwise
        except Exception as error:
            if isinstance(error, AmalgamError):
                name_rows(error, run.experiment.corpus)
            cause = error.__cause__ or error
            is_of_system = isinstance(cause, OSError) and cause.errno is not None  # pyarrow's on a content have none
            if is_of_system or (isinstance(error, AmalgamError) and not isinstance(cause, OSError)):
                raise
            unreadable = verification.unreadable_files(run.store)
            if not unreadable:
                raise
            run.store.quarantine(*(run.store.root / path for path in unreadable))
            what = f"{', '.join(unreadable)}: the digest matches, but the content cannot be read; quarantined"
            raise DamagedError(what, path=unreadable[0], where=run.store.backend.address) from error
        finally:
            if isinstance(run.digest_of, FileDigests) and run.digest_of.is_changed:
                with suppress(AmalgamError, OSError):  # a workspace that cannot be written
                    if not run.store.backend.is_empty():  # `plan` makes no workspace
                        run.store.claim()
                        run.digest_of.save()


def planned(run: Run) -> list[StageState]:
    """Returns the state of every stage; one error lists all problems of the inputs."""
    try:
        return plan(STAGES, run)
    except (DataError, ExperimentError) as error:
        raise all_of(problems_of(run, []) or [error]) from None


def check_requirements(
    run: Run, source: ExperimentSource, overrides: Sequence[str], target: str | None = None, *, force: bool = False
) -> None:
    """Refuses a device, engine or tracker that this machine lacks, if a stage up to `target` would use it."""
    execution = run.experiment.execution
    if execution.device in ON_EVERY_MACHINE and execution.engine == "local" and not execution.trackers:
        return
    planning = open_run(source, overrides, console=Console(quiet=True))
    with working(planning):
        states = planned(planning)
    names = [state.stage for state in states]
    needed = states[: names.index(target) + 1] if target in names else states
    for check in execution_checks(needed, force=force):
        check(run)


def run_without_tables(
    source: ExperimentSource, overrides: Sequence[str], console: Console, target: str | None = None
) -> Run:
    """Runs an experiment, or its stages up to `target`, as `amalgam run` does; the workspace keeps no overrides."""
    run = open_run(source, overrides, console=console)
    check_requirements(run, source, overrides, target)
    with working(run):
        update(STAGES, run, target=target, keep_overrides=False)
    return run
