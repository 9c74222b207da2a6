"""`amalgam.Experiment`: an experiment file with its workspace, to plan, run and look into from Python.

Results are Polars lazy frames.
"""

from __future__ import annotations

import difflib
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from amalgam.pipeline.config import schema as sections
from amalgam.pipeline.config.load import LoadedExperiment, load_experiment
from amalgam.pipeline.console import Console
from amalgam.pipeline.errors import ExperimentError
from amalgam.pipeline.execution.plan import StageState, identity_of, plan
from amalgam.pipeline.execution.runner import PartialRunDoneError, update
from amalgam.pipeline.execution.stage import PendingDependencyError, Run, Stage
from amalgam.pipeline.storage.fingerprint import differences
from amalgam.pipeline.storage.store import open_store
from amalgam.stages.app.cost import CostEstimate, estimate_cost
from amalgam.stages.app.in_memory_texts import keep
from amalgam.stages.app.maintenance import find_garbage, list_artifacts, pack, packable, remove, verify
from amalgam.stages.app.session import open_run, working
from amalgam.stages.methods import PRESETS
from amalgam.stages.registry import STAGES
from amalgam.stages.report.blocks import AuditBlock
from amalgam.stages.report.html import FOLDER, page_name
from amalgam.stages.report.stage import audit

if TYPE_CHECKING:
    import polars as pl


Overrides = Mapping[str, Any] | Iterable[str]

PARTS = ("train", "validation", "test")


class Experiment:
    """Offers the commands as methods: running again resumes, and current stages never run again.

    `experiment.run()`, then `experiment.targets`, `.answers("a-teacher")`, `.texts("test")`, `.evaluation`.
    """

    def __init__(self, path: Path, overrides: Sequence[str], console: Console, part: str | None = None) -> None:
        self._path, self._overrides, self._console, self._part = path, overrides, console, part
        self._loaded, self._run = self._open()

    @classmethod
    def load(
        cls,
        path: str | Path = "amalgam.yaml",
        overrides: Overrides = (),
        *,
        texts: Mapping[str, Any] | None = None,
        quiet: bool = False,
    ) -> Self:
        """`overrides`: {"targets.temperature": 0.5}, or ["targets.temperature=0.5"] as on the command line.

        `quiet`: neither progress nor the report's table is shown.
        `texts`: {"train": ..., "test": ...}, instead of the file's own: a datasets.Dataset, a frame of Polars or
        pandas, an Arrow table. Each is written once as Parquet into the workspace, under a name made of its content.
        """
        assignments = _spelled(overrides)
        if texts:
            assignments += _written(Path(path), assignments, texts)
        return cls(Path(path), assignments, Console(quiet=True, out=io.StringIO()) if quiet else Console())

    @property
    def said(self) -> sections.ExperimentConfig:
        """Returns the configuration from the file and the overrides, defaults included."""
        return self._loaded.experiment

    @property
    def workspace(self) -> Path:
        return self._run.store.root

    @property
    def student(self) -> Path:
        """The folder of the finished student: a plain Hugging Face folder."""
        folder = self._loaded.base / "students" / self.said.student.name
        if not folder.is_dir():
            raise ExperimentError("there is no student yet", where=str(folder), fix="experiment.run()")
        return folder

    @property
    def report(self) -> Path:
        """The report's page; a JSON file next to it has the numbers."""
        return self._loaded.base / FOLDER / f"{page_name(self._run.experiment)}.html"

    def plan(self) -> list[StageState]:
        """Every stage's state, and the reason where it would run. Nothing runs."""
        self._loaded, self._run = self._open()
        with working(self._run):
            return plan(STAGES, self._run)

    def estimate_cost(self, states: Sequence[StageState], *, measure: bool = False) -> CostEstimate:
        """Returns time, memory and disk of the planned stages; `measure` runs one unit where no time is recorded."""
        with working(self._run):
            return estimate_cost(self._run, states, measure=measure)

    def run(self, until: str | None = None, *, only: bool = False, force: bool = False) -> list[StageState]:
        """Updates every stage, or all up to stage `until`; returns the states that the stages had before.

        `only`: refuse to run earlier stages; `force`: run current stages again.
        """
        self._loaded, self._run = self._open()
        with working(self._run):
            try:
                return update(STAGES, self._run, target=until, only=only, force=force)
            except PartialRunDoneError as done:
                state = done.state
                self._run.console.say(
                    f"{state.stage}: this part is done; {state.done} of {state.total} units are there. "
                    "The last part, or a later run, continues."
                )
                return []

    def explain(self, stage: str) -> dict[str, Any]:
        """Returns why a stage would run: the fields that differ from its last result."""
        the_stage = _stage_named(stage)
        states = {state.stage: state for state in self.plan()}
        with working(self._run):
            return _explained(the_stage, self._run, states.get(stage))

    def audit(self) -> AuditBlock:
        """Counts from the cache how often each teacher wins, is missed, and contradicts another."""
        states = self.plan()
        with working(self._run):
            return audit(self._run, states)

    def compare_targets(self, oracle: Path) -> None:
        """Shows how far the targets are from the predictions of the model in this folder."""
        from amalgam.stages.app.oracle import show_divergence

        with working(self._run):
            show_divergence(self._run, oracle)

    # ---- the workspace

    def status(self) -> dict[str, Any]:
        """Returns every result in the workspace, and marks the last one of each stage."""
        return list_artifacts(self._run)

    def verify(self) -> dict[str, Any]:
        """Verifies every stored file against its digest, and quarantines damaged ones."""
        return verify(self._run)

    def find_garbage(self, *, unused: bool = False, delete: bool = False) -> list[dict[str, Any]]:
        """Leftovers; `unused`: also results that the last builds do not use. Nothing goes without `delete`."""
        garbage = find_garbage(self._run, unused=unused)
        if delete:
            remove(self._run, garbage)
        return garbage

    def compact(self, *, write: bool = False) -> dict[str, Any]:
        """Returns the small units to pack, and packs them with `write`; `loose`: their files stay for a day."""
        candidates = packable(self._run)
        units = pack(self._run, candidates) if write else sum(len(loose.new) for loose in candidates)
        folders = [loose.folder for loose in candidates]
        return {"units": units, "folders": folders, "loose": not self._run.store.backend.is_remote}

    @property
    def quarantine(self) -> str:
        """The folder of damaged files."""
        return self._run.store.where(self._run.store.root / "quarantine")

    # ---- results of current stages

    def texts(self, part: str = "train") -> pl.LazyFrame:
        """key, text, text_2, id, label: each distinct text once."""
        from amalgam.stages.app import frames

        return frames.texts(self._current("read-corpus"), part)

    def answers(self, teacher: str) -> pl.LazyFrame:
        """key, tokens, cut, logits of every text with dropout off, by the teacher's own labels."""
        from amalgam.stages.app import frames

        return frames.answers(self._current("cache-teachers"), teacher)

    def passes(self, teacher: str) -> pl.LazyFrame:
        """key, first, last, passes (the logits of each pass), and their mean probability, entropy and confidence."""
        from amalgam.stages.app import frames

        return frames.passes(self._current("cache-teachers"), teacher)

    @property
    def targets(self) -> pl.LazyFrame:
        """key, target (over `labels`), weight, teacher, margin, confidence."""
        from amalgam.stages.app import frames

        return frames.targets(self._current("build-targets"))

    @property
    def labels(self) -> list[str]:
        """The union of all teachers' labels, in the order of targets and of the student's outputs."""
        labels: list[str] = self._current("build-targets").result("build-targets").facts["labels"]
        return list(labels)

    @property
    def evaluation(self) -> pl.LazyFrame:
        """system, accuracy, macro_f1, nll_nats, ece, and on_GROUP: accuracy on the labels of each teacher."""
        from amalgam.stages.app import frames

        return frames.evaluation(self._current("report"))

    def predict(self, texts: Sequence[str | tuple[str, str]], *, top: int = 1, explain: bool = False) -> pl.LazyFrame:
        """The student's labels and probabilities; `explain`: also mass_TEACHER, the probability of its labels."""
        from amalgam.stages.app import frames
        from amalgam.stages.app.predict import Student, finished_in

        finished = replace(finished_in(self.student), device=self.said.execution.device)
        return frames.predictions(Student(finished, top=top, explain=explain), texts)

    # ----

    def _open(self) -> tuple[LoadedExperiment, Run]:
        return open_run(self._path, self._overrides, part=self._part, console=self._console)

    def _current(self, stage: str) -> Run:
        """Returns the run with the stage's result; raises if the stage is not current."""
        if stage not in self._run.results:
            states = {state.stage: state for state in self.plan()}
            if stage not in states:
                what = f"this experiment has no stage {stage}"
                raise ExperimentError(what, where=str(self._path), fix=f"its stages: {', '.join(states)}")
            if stage not in self._run.results:
                state = states[stage]
                why = state.why
                raise ExperimentError(
                    f"{stage} is not up to date ({why})", where=str(self._path), fix=f"experiment.run(until={stage!r})"
                )
        return self._run

    def __repr__(self) -> str:
        return f"amalgam.Experiment({str(self._path)!r}, {list(self._overrides)!r})"


def _stage_named(name: str) -> Stage:
    names = [stage.name for stage in STAGES]
    if name not in names:
        close = [one for one in names if one.startswith(name)] or difflib.get_close_matches(name, names, 1)
        fix = f"did you mean {' or '.join(close)}?" if close else f"the stages: {', '.join(names)}"
        raise ExperimentError(f"no stage {name!r}", fix=fix)
    return STAGES[names.index(name)]


def _explained(stage: Stage, run: Run, state: StageState | None) -> dict[str, Any]:
    last = run.store.head().get(stage.name, {}).get("fingerprint")
    old = run.store.manifest(stage.name, last) if last else None
    try:
        identity = identity_of(stage, run) if state else None
    except PendingDependencyError:
        identity = None
    changes = list(differences(old.identity, identity)) if old and identity else []
    return {
        "stage": stage.name,
        "state": state.state if state else "not part of this experiment",
        "reason": state.reason if state else None,
        "detail": state.detail if state else "",
        "fingerprint": state.fingerprint if state else None,
        "last": last,
        "changes": [{"field": field, "change": change} for field, change in changes],
        "identity": identity,
    }


def _spelled(overrides: Overrides) -> list[str]:
    if isinstance(overrides, str):
        raise ExperimentError("overrides are a mapping or a list", where=overrides, fix=f"[{overrides!r}]")
    if isinstance(overrides, Mapping):
        return [f"{field}={json.dumps(value, ensure_ascii=False)}" for field, value in overrides.items()]
    return list(overrides)


def _written(path: Path, overrides: list[str], texts: Mapping[str, Any]) -> list[str]:
    """Writes the texts as files into the workspace and returns the overrides that name them."""
    strange = [part for part in texts if part not in PARTS]
    if strange:
        raise ExperimentError(f"no part of a corpus is named {strange[0]!r}", where="texts", fix=", ".join(PARTS))
    loaded = load_experiment(path, [*overrides, *(f"corpus.{part}=given" for part in texts)], presets=PRESETS)
    folder = open_store(loaded.experiment.execution.workspace, loaded.base).root / "given"
    kept = {part: keep(given, loaded.experiment.corpus, folder, part) for part, given in texts.items()}
    return [f"corpus.{part}={json.dumps(str(file), ensure_ascii=False)}" for part, file in kept.items()]
