"""Opens an experiment file with its workspace, and keeps the session of running stages."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from amalgam.pipeline.config.load import LoadedExperiment, load_experiment
from amalgam.pipeline.console import Console
from amalgam.pipeline.execution.stage import Run, share_of
from amalgam.pipeline.storage.fingerprint import FileDigests
from amalgam.pipeline.storage.store import open_store
from amalgam.stages.methods import PRESETS


def open_run(
    config: Path, overrides: Sequence[str], *, part: str | None = None, console: Console | None = None
) -> tuple[LoadedExperiment, Run]:
    loaded = load_experiment(config, overrides, presets=PRESETS)
    execution = loaded.experiment.execution
    store = open_store(execution.workspace, loaded.base)
    store.check_layout()
    share = share_of(part, execution.processes)
    if share.kind == "torchrun" and not share.is_leader:
        console = Console(quiet=True)  # only the leader prints
    run = Run(
        loaded.experiment,
        loaded.base,
        store,
        console or Console(),
        share,
        FileDigests(store.root / "digests.json"),
        loaded.overrides,
    )
    return loaded, run


@contextmanager
def working(run: Run) -> Iterator[None]:
    """Handles signals during the block, and stores new file digests after it."""
    with run.signals.listening():
        try:
            yield
            _leave_group()
        finally:
            if isinstance(run.digest_of, FileDigests):
                run.digest_of.save()


def _leave_group() -> None:
    """Leaves the process group of torchrun, because torch warns of a leak otherwise."""
    if "torch" in sys.modules:
        from torch import distributed

        if distributed.is_available() and distributed.is_initialized():
            distributed.destroy_process_group()
