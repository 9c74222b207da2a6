"""Three toy stages over a text file, in which only the work is a toy: one unit per first letter, their sum, a folder.

Each process appends the units that it computes to calls.log next to the workspace.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from amalgam.pipeline.config.schema import ExperimentConfig
from amalgam.pipeline.console import Console
from amalgam.pipeline.execution.runner import update
from amalgam.pipeline.execution.stage import Identity, Run, Stage, Unit, WorkerShare
from amalgam.pipeline.input_files import file_digest
from amalgam.pipeline.storage.store import Record, open_store

LINES = "apple\navocado\nbanana\ncherry\n"
SIGNAL = "signal"
PATIENCE_SECONDS = 60.0
YAML = "corpus: {train: source.txt}\nteachers: [{name: a, model: a}]\n"
Before = Callable[[Run, Unit], None]


class Toy(Stage):
    """Calls a test's hook before each unit; the base of the toy stages."""

    VERSION = 1
    unit_label = "things"

    def __init__(self, before: Before | None = None) -> None:
        self._before = before

    def begin(self, run: Run, unit: Unit) -> None:
        with (run.base / "calls.log").open("a") as log:
            log.write(f"{unit.name}\n")
        if self._before:
            self._before(run, unit)

    def finish(self, run: Run, records: Sequence[Record]) -> dict[str, Any]:
        return {"lines": sum(record.facts["lines"] for record in records)}


def _source(run: Run) -> Path:
    assert run.experiment.corpus.train
    return run.base / run.experiment.corpus.train[0]


class Letters(Toy):
    """One file per first letter of the source's lines."""

    name = "letters"
    parallelism = "units"

    def identity(self, run: Run) -> Identity:
        source = _source(run)
        return Identity({"cache": {"seed": run.experiment.cache.seed}}, {"source": run.digest_of(source)})

    def units(self, run: Run, folder: Path) -> Sequence[Unit]:
        lines = _source(run).read_text().split()
        groups = {line[0]: [other for other in lines if other[0] == line[0]] for line in lines}
        return [Unit(letter, folder, len(group), group) for letter, group in sorted(groups.items())]

    def run_unit(self, run: Run, unit: Unit) -> None:
        self.begin(run, unit)
        with run.store.draft(unit.folder, unit.name, ".txt") as draft:
            shouted = [f"{line.upper()} {run.experiment.cache.seed}" for line in unit.payload]
            (draft.folder / "group.txt").write_text("\n".join(shouted))
            draft.facts = {"lines": len(unit.payload)}


class Joined(Toy):
    """All letters in one file."""

    name = "joined"
    parallelism = "single"

    def needs(self, experiment: ExperimentConfig) -> tuple[str, ...]:
        return ("letters",)

    def identity(self, run: Run) -> Identity:
        temperature = run.experiment.targets.temperature
        return Identity({"targets": {"temperature": temperature}}, {}, {"letters": run.fingerprint("letters")})

    def units(self, run: Run, folder: Path) -> Sequence[Unit]:
        return [Unit("joined", folder)]

    def run_unit(self, run: Run, unit: Unit) -> None:
        self.begin(run, unit)
        texts = [run.store.verified_path(file).read_text() for file in run.result("letters").files]
        with run.store.draft(unit.folder, unit.name, ".txt") as draft:
            whole = "\n".join([*texts, str(run.experiment.targets.temperature)])
            (draft.folder / "joined.txt").write_text(whole)
            draft.facts = {"lines": whole.count("\n")}


class Pair(Toy):
    """A unit of several files, one of them in a folder of its own."""

    name = "pair"
    parallelism = "single"

    def needs(self, experiment: ExperimentConfig) -> tuple[str, ...]:
        return ("joined",)

    def identity(self, run: Run) -> Identity:
        return Identity({}, {}, {"joined": run.fingerprint("joined")})

    def units(self, run: Run, folder: Path) -> Sequence[Unit]:
        return [Unit("pair", folder)]

    def run_unit(self, run: Run, unit: Unit) -> None:
        self.begin(run, unit)
        text = run.store.verified_path(run.result("joined").files[0]).read_text()
        with run.store.draft(unit.folder, unit.name) as draft:
            (draft.folder / "deep").mkdir()
            (draft.folder / "deep" / "text.txt").write_text(text)
            (draft.folder / "length.txt").write_text(str(len(text)))
            draft.facts = {"lines": text.count("\n")}


def toy_stages(before: Before | None = None) -> tuple[Stage, ...]:
    return Letters(before), Joined(before), Pair(before)


def toy_base(base: Path, lines: str = LINES) -> Path:
    """A folder with an experiment file and a source."""
    base.mkdir(parents=True, exist_ok=True)
    (base / "source.txt").write_text(lines)
    (base / "amalgam.yaml").write_text(YAML)
    return base


def toy_run(base: Path, *, share: WorkerShare | None = None, err: io.StringIO | None = None, **sections: Any) -> Run:
    settings = {"corpus": {"train": "source.txt"}, "teachers": [{"name": "a", "model": "a"}], **sections}
    console = Console(err=err or io.StringIO(), out=io.StringIO())
    experiment = ExperimentConfig.model_validate(settings)
    store = open_store(experiment.execution.workspace, base)
    return Run(experiment, base, store, console, share or WorkerShare(), file_digest)


def built_toy(base: Path, before: Before | None = None, /, **more: Any) -> Run:
    """Runs all stages."""
    run = toy_run(base, **more)
    update(toy_stages(before), run)
    return run


def calls(base: Path) -> list[str]:
    """The units worked on so far, in order."""
    log = base / "calls.log"
    return log.read_text().split() if log.exists() else []


def outcome(run: Run) -> dict[str, Any]:
    """Returns every stage's result as bytes and facts, by HEAD; asserts that its digests are those written."""
    head = run.store.head()
    bytes_by_name: dict[str, Any] = {}
    for stage, entry in head.items():
        manifest = run.store.manifest(stage, entry["fingerprint"])
        assert manifest is not None
        assert [fault for file in manifest.files if (fault := run.store.check_file(file))] == []
        contents = {file.path: run.store.path(file).read_bytes() for file in manifest.files}
        bytes_by_name[stage] = (entry["fingerprint"], contents, manifest.facts, manifest.identity)
    return bytes_by_name


def wait_for_signal(run: Run, unit: Unit) -> None:
    """Hold unit b until a signal has arrived, on a machine of any speed."""
    began = time.monotonic()
    while unit.name == "b" and not run.signals.requested() and time.monotonic() - began < PATIENCE_SECONDS:
        time.sleep(0.01)


def main(seconds: str, *arguments: str) -> None:
    """Run the real command over the toy stages, for tests in which the process matters.

    Each unit takes so many seconds, or with `signal` the second one waits for a signal.
    """
    from amalgam import cli
    from amalgam.stages.app import api as experiment
    from amalgam.stages.app import commands, runs

    before: Before = wait_for_signal if seconds == SIGNAL else lambda *_: time.sleep(float(seconds))
    for module in (commands, experiment, runs):
        vars(module)["STAGES"] = toy_stages(before)
    sys.argv = ["amalgam", *arguments]
    cli.main()


if __name__ == "__main__":
    main(*sys.argv[1:])
