"""`amalgam.Experiment`: an experiment file with its workspace, to plan, run and look into from Python.

What the file says is `experiment.said`, of the class that pipeline/experiment.py defines; results are lazy frames.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from amalgam.pipeline.console import Console
from amalgam.pipeline.errors import ExperimentError
from amalgam.pipeline.experiment_file import LoadedExperiment, load_experiment
from amalgam.pipeline.plan import StageState, plan
from amalgam.pipeline.runner import bring_up_to_date
from amalgam.pipeline.stage import Run
from amalgam.pipeline.store import open_store
from amalgam.stages.commands import open_run, working
from amalgam.stages.methods import PRESETS
from amalgam.stages.order import STAGES

if TYPE_CHECKING:
    import polars as pl

    from amalgam.pipeline import experiment as sections

Overrides = Mapping[str, Any] | Iterable[str]
PARTS = ("train", "validation", "test")


class Experiment:
    """As `amalgam.yaml` and the commands have it: running again is resuming, and what is current never runs again.

    `experiment.run()`, then `experiment.targets`, `.answers("a-teacher")`, `.texts("test")`, `.evaluation`.
    """

    def __init__(self, path: Path, overrides: Sequence[str], *, quiet: bool) -> None:
        self._path, self._overrides, self._quiet = path, overrides, quiet
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
        `texts`: {"train": ..., "test": ...}, in the place of the file's own: a datasets.Dataset, a frame of Polars or
        pandas, an Arrow table. Each is written once as Parquet into the workspace, under a name made of its content.
        """
        said = _spelled(overrides)
        if texts:
            said += _written(Path(path), said, texts)
        return cls(Path(path), said, quiet=quiet)

    @property
    def said(self) -> sections.Experiment:
        """What the file and the overrides say, defaults included."""
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

    def plan(self) -> list[StageState]:
        """Every stage's state, and the reason where it would run. Nothing runs."""
        self._loaded, self._run = self._open()
        with working(self._run):
            return plan(STAGES, self._run)

    def run(self, until: str | None = None, *, force: bool = False) -> list[StageState]:
        """Bring everything, or all up to stage `until`, up to date; the states that were found on arrival."""
        self._loaded, self._run = self._open()
        with working(self._run):
            return bring_up_to_date(STAGES, self._run, target=until, force=force)

    # ---- results, of what is current

    def texts(self, part: str = "train") -> pl.LazyFrame:
        """key, text, text_2, id, label: each distinct text once."""
        from amalgam.stages.library import frames

        return frames.texts(self._current("read-corpus"), part)

    def answers(self, teacher: str) -> pl.LazyFrame:
        """key, tokens, cut, logits of every text with dropout off, by the teacher's own labels."""
        from amalgam.stages.library import frames

        return frames.answers(self._current("cache-teachers"), teacher)

    def passes(self, teacher: str) -> pl.LazyFrame:
        """key, first, last, passes (pass by pass, its logits), and what they say: mean probability, confidence."""
        from amalgam.stages.library import frames

        return frames.passes(self._current("cache-teachers"), teacher)

    @property
    def targets(self) -> pl.LazyFrame:
        """key, target (over `labels`), weight, teacher, margin, confidence."""
        from amalgam.stages.library import frames

        return frames.targets(self._current("build-targets"))

    @property
    def labels(self) -> list[str]:
        """The union of all teachers' labels, in the order of targets and of the student's outputs."""
        found: list[str] = self._current("build-targets").result("build-targets").facts["labels"]
        return list(found)

    @property
    def evaluation(self) -> pl.LazyFrame:
        """system, accuracy, macro_f1, nll_nats, ece, and on_GROUP: accuracy on the labels of each teacher."""
        from amalgam.stages.library import frames

        return frames.evaluation(self._current("report"))

    def predict(self, texts: Sequence[str | tuple[str, str]], *, top: int = 1, explain: bool = False) -> pl.LazyFrame:
        """The student's labels and probabilities; `explain`: also mass_TEACHER, what each teacher's labels hold."""
        from amalgam.stages.finished.predict import Student, Wanted
        from amalgam.stages.finished.student import finished_in
        from amalgam.stages.library import frames

        finished = finished_in(self.student, device=self.said.execution.device)
        return frames.predictions(Student(finished, Wanted(top, explain)), texts)

    # ----

    def _open(self) -> tuple[LoadedExperiment, Run]:
        console = Console(quiet=True, out=io.StringIO()) if self._quiet else Console()
        return open_run(self._path, list(self._overrides), console=console)

    def _current(self, stage: str) -> Run:
        """The run that knows the stage's result; what is not current is told, never shown."""
        if stage not in self._run.results:
            states = {state.stage: state for state in self.plan()}
            if stage not in states:
                what = f"this experiment has no stage {stage}"
                raise ExperimentError(what, where=str(self._path), fix=f"its stages: {', '.join(states)}")
            if stage not in self._run.results:
                state = states[stage]
                why = f"{state.reason}{': ' + state.detail if state.detail else ''}"
                raise ExperimentError(
                    f"{stage} is not up to date ({why})", where=str(self._path), fix=f"experiment.run(until={stage!r})"
                )
        return self._run

    def __repr__(self) -> str:
        return f"amalgam.Experiment({str(self._path)!r}, {list(self._overrides)!r})"


def _spelled(overrides: Overrides) -> list[str]:
    if isinstance(overrides, str):
        raise ExperimentError("overrides are a mapping or a list", where=overrides, fix=f"[{overrides!r}]")
    if isinstance(overrides, Mapping):
        return [f"{field}={json.dumps(value, ensure_ascii=False)}" for field, value in overrides.items()]
    return list(overrides)


def _written(path: Path, said: list[str], texts: Mapping[str, Any]) -> list[str]:
    """The texts as files in the workspace, and the overrides that name them."""
    from amalgam.stages.library.given_texts import keep

    strange = [part for part in texts if part not in PARTS]
    if strange:
        raise ExperimentError(f"no part of a corpus is named {strange[0]!r}", where="texts", fix=", ".join(PARTS))
    loaded = load_experiment(path, [*said, *(f"corpus.{part}=given" for part in texts)], presets=PRESETS)
    folder = open_store(loaded.experiment.execution.workspace, loaded.base).root / "given"
    kept = {part: keep(given, loaded.experiment.corpus, folder, part) for part, given in texts.items()}
    return [f"corpus.{part}={json.dumps(str(file), ensure_ascii=False)}" for part, file in kept.items()]
