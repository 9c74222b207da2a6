"""`amalgam.Experiment`: an experiment with its workspace, to plan, run and look into from Python.

Small results are Polars frames, and large ones lazy frames.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypedDict

from amalgam.data.arrays import is_whole
from amalgam.data.keys import label_notes
from amalgam.data.lazy import pl
from amalgam.pipeline.config.load import GIVEN, ExperimentSource, GivenExperiment
from amalgam.pipeline.config.proposals import as_flow_yaml
from amalgam.pipeline.config.schema import FROM_CORPUS, ExperimentConfig
from amalgam.pipeline.console import Console
from amalgam.pipeline.errors import AmalgamError, ExperimentError, all_of, is_disk_full, nearest
from amalgam.pipeline.execution.faults import storage_error
from amalgam.pipeline.execution.plan import IdentityJson, StageState, StateJson, identity_of
from amalgam.pipeline.execution.runner import PartialRunDoneError, update
from amalgam.pipeline.execution.stage import PendingDependencyError, Run, Stage
from amalgam.pipeline.notebook import Printed, console_of_python
from amalgam.pipeline.storage.fingerprint import differences
from amalgam.pipeline.user_paths import user_path
from amalgam.stages.app import arguments, frames, maintenance
from amalgam.stages.app import verify as verification
from amalgam.stages.app.checks import problems_of, remarks_of
from amalgam.stages.app.comparison import ComparedReports, compare_students
from amalgam.stages.app.cost import CostEstimate, estimate_cost
from amalgam.stages.app.in_memory_texts import check_stored, store_labels, store_texts
from amalgam.stages.app.label import LabelEffect, check_takes_labels, label_effect, texts_to_label
from amalgam.stages.app.oracle import show_divergence
from amalgam.stages.app.results import Audit, Plan, RunResult, run_result
from amalgam.stages.app.runs import check_requirements, open_run, planned, working
from amalgam.stages.app.student import Student, StudentFolder, changes_since, finished_in
from amalgam.stages.app.sweep import Sweep, combinations, train_students
from amalgam.stages.build_targets.stage import target_facts
from amalgam.stages.common.deliveries import REPORTS, STUDENTS, delivered_students, page_mark
from amalgam.stages.common.load import labels_by_teacher
from amalgam.stages.common.load_labels import check_labels
from amalgam.stages.methods import method_name
from amalgam.stages.registry import STAGE_NAMED, STAGES
from amalgam.stages.report.publish import page_name
from amalgam.stages.report.stage import audit


class Experiment(Printed):
    """Distils teachers into a student; offers the commands as methods. Running again resumes.

    `experiment = Experiment(teachers=["./models/a", "org/b"], texts=frame)`, then `experiment.run()`,
    `experiment.student`, `.evaluation`, `.targets`, `.predict(["a text"])`. `Experiment.load` reads a file instead.
    """

    _part: str | None = None
    _rival: str | None = None

    def __init__(  # noqa: PLR0913 - the parts of an experiment
        self,
        teachers: Sequence[str | Path | Mapping[str, Any]] = (),
        texts: Any = None,
        *,
        test: Any = None,
        validation: Any = None,
        labels: Any = None,
        workspace: str | Path = "artifacts",
        quiet: bool = False,
        **sections: Mapping[str, Any] | None,
    ) -> None:
        """Needs no file. Relative paths start from the current folder, in which students/ and reports/ are written.

        `teachers`: folders, Hub ids, or {"name": ..., "model": ..., "labels": [...]}.
        `texts`: a list of texts, a frame of Polars or pandas, a datasets.Dataset, an Arrow table, or a path.
        `test`, `validation`: the same with labels, in column `label` or the one that `corpus={"label": ...}` names.
        `labels`: gold labels of a few texts: a file, the filled frame of `Experiment.label`, or "corpus" (in `texts`).
        `workspace`: the folder or address of all results.
        `sections`: fields by section, such as student={"method": "uhc", "epochs": 5} or corpus={"text": "body"}.
        """
        parts = {"train": texts, "validation": validation, "test": test}
        given = {part: value for part, value in parts.items() if value is not None}
        source, in_memory = arguments.experiment_of(teachers, given, workspace, sections)
        if isinstance(labels, str | Path):
            source = arguments.with_labels(source, labels)
        self._start(source, [], console_of_python(quiet=quiet))
        problems = problems_of(self._run, [])
        if problems:
            raise all_of(problems)
        if in_memory:
            source = arguments.with_texts(source, in_memory)
        if labels is not None and not isinstance(labels, str | Path):
            source = arguments.with_labels(source, labels)
        if source is not self._source:
            self._start(source, [], self._console)

    @classmethod
    def load(
        cls,
        path: str | Path = "amalgam.yaml",
        overrides: Mapping[str, Any] | Iterable[str] = (),
        *,
        texts: Mapping[str, Any] | None = None,
        quiet: bool = False,
    ) -> Self:
        """`overrides`: {"targets.temperature": 0.5}, or ["targets.temperature=0.5"] as on the command line.

        `quiet`: neither progress nor the report's table is shown.
        `texts`: {"train": ..., "test": ...}, instead of the file's own, as in `Experiment(texts=...)`. Each is written
        once as Parquet into the workspace, under a name made of its content.
        """
        if not isinstance(path, str | Path):
            fix = 'write Experiment(teachers=[...], texts=...), or Experiment.load("amalgam.yaml")'
            raise ExperimentError(f"path is a {type(path).__name__}, not the path of a file", where="path", fix=fix)
        assignments = arguments.assignments_of(overrides)
        if texts is not None and not isinstance(texts, Mapping):
            fix = 'texts={"train": ..., "test": ...}'
            raise ExperimentError(f"texts is a mapping of parts, not a {type(texts).__name__}", where="texts", fix=fix)
        try:
            if texts:
                stored = store_texts(Path(path), assignments, texts)
                assignments += arguments.assignments_of({f"corpus.{part}": str(file) for part, file in stored.items()})
            return cls.open(Path(path), assignments, console_of_python(quiet=quiet))
        except ExperimentError as error:
            raise arguments.in_python(error) from error.__cause__

    @classmethod
    def open(
        cls,
        source: ExperimentSource,
        overrides: Sequence[str],
        console: Console,
        part: str | None = None,
        rival: str | None = None,
    ) -> Self:
        """Opens an experiment as the commands do; `rival` is that of `Run`."""
        experiment = cls.__new__(cls)
        experiment._part, experiment._rival = part, rival  # noqa: SLF001 - the other way to make an instance
        experiment._start(source, overrides, console)  # noqa: SLF001
        return experiment

    def _start(self, source: ExperimentSource, overrides: Sequence[str], console: Console) -> None:
        self._source, self._overrides, self._console = source, overrides, console
        self._run = self._open()
        if isinstance(source, Path):  # a program may change its folder later
            self._source = source.absolute()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the settings alone, without streams and locks; a copy opens the same workspace."""
        return _reopened, (type(self), self._source, self._overrides, self._console.is_quiet, self._part)

    def write(self, path: str | Path = "amalgam.yaml") -> Path:
        """Writes the file of an experiment that was made without one; the command line continues with its results."""
        if isinstance(self._source, Path):
            command = f"amalgam run targets.temperature=0.5{self._run.file_option}"
            fix = f"copy it; give overrides on the command line: {command}"
            raise ExperimentError("this experiment has a file", where=str(self._source), fix=fix)
        return arguments.write_file(self._source, Path(path))

    @property
    def config(self) -> ExperimentConfig:
        """Returns the configuration from the file and the overrides, defaults included."""
        return self._run.experiment

    @property
    def workspace(self) -> Path:
        return self._run.store.root

    @property
    def student(self) -> Path:
        """The folder of the finished student: a plain Hugging Face folder."""
        return self._finished().folder

    def _finished(self) -> StudentFolder:
        """Returns the delivered student; raises if it is not that of this experiment."""
        if not self.config.student.learns:
            what = f"student.method {self.config.student.method} trains no student"
            fix = "choose another student.method; experiment.evaluation has its figures"
            raise ExperimentError(what, where=self._name, fix=fix)
        folder = self._run.base / STUDENTS / self.config.student.name
        if not folder.is_dir():
            raise ExperimentError("there is no student yet", where=str(folder), fix="experiment.run()")
        finished = finished_in(folder, file_option=self._run.file_option)
        changes = changes_since(self.config, finished)
        if not changes and finished.fingerprint != self._current("train-student").fingerprint("train-student"):
            changes = ["other texts, labels, teachers or encoder"]
        if changes:
            what = f"this folder has the student of another experiment: {'; '.join(changes)}"
            fix = "experiment.run() writes this one; student={'name': ...} gives each experiment a folder of its own"
            raise ExperimentError(what, where=str(folder), fix=fix)
        return finished

    @property
    def report(self) -> Path:
        """The report's page; a JSON file next to it has the numbers."""
        made, name = self._current("report").fingerprint("report"), page_name(self.config)
        page, mark = self._run.base / REPORTS / f"{name}.html", page_mark(self._run.base, name)
        if mark is None or mark.fingerprint != made:
            what = "this page is the report of another experiment" if mark else "the page of this report is not written"
            fix = "run the experiment, which writes it; a student.name of its own gives each experiment its own page"
            raise ExperimentError(what, where=str(page), fix=fix)
        return page

    def plan(self) -> Plan:
        """Every stage's state, and the reason where it would run. Nothing runs. One error lists all problems."""
        return Plan(self._planned()[1], self.check)

    def _planned(self) -> tuple[Run, list[StageState]]:
        """Returns a run of this call and its plan: threads may share an experiment."""
        run = self._run = self._open()
        with working(run):
            return run, planned(run)

    def check(self, states: Sequence[StageState] | None = None) -> tuple[list[str], list[AmalgamError]]:
        """Returns remarks on the experiment, and the errors that `run` would end in; reads headers only."""
        run, states = self._planned() if states is None else (self._run, states)
        with working(run):
            return list(remarks_of(run, states)), problems_of(run, states)

    def estimate_cost(self, states: Sequence[StageState] | None = None, *, measure: bool = False) -> CostEstimate:
        """Returns time, memory and disk of the planned stages; `measure` runs one unit where no time is recorded."""
        run, states = self._planned() if states is None else (self._run, states)
        with working(run):
            return estimate_cost(run, states, measure=measure)

    def run(self, until: str | None = None, *, only: bool = False, force: bool = False) -> RunResult:
        """Updates every stage, or all up to stage `until`; returns each stage's outcome and the places of results.

        `only`: refuse to run stages before `until`; `force`: run `until` again, without it all stages.
        """
        check_requirements(self._run, self._source, self._overrides, until, force=force)  # before --force
        run = self._run = self._open()
        with working(run):
            try:
                before = update(STAGES, run, target=until, only=only, force=force)
            except PartialRunDoneError as done:
                state = done.state
                rest = f"{state.done} of {state.total} units are there. The last part, or a later run, continues."
                run.console.say(f"{state.stage}: this part is done; {rest}")
                before = [state]
            return run_result(run, before)

    def sweep(self, fields: Mapping[str, Iterable[Any]]) -> Sweep:
        """Trains a student for each combination of the values, such as {"student.seed": [0, 1, 2]}; resumes.

        Each student has the name of its values, with its own folder and report; `.experiments[name]` opens it.
        """
        swept = arguments.swept_fields(fields)
        self._run = self._open()  # names deleted texts
        fixed = [override for override in self._overrides if override.partition("=")[0] not in swept]
        console = console_of_python(quiet=self._console.is_quiet, tables=False)
        try:
            runs = combinations(self._source, fixed, swept)
        except ExperimentError as error:
            raise arguments.in_python(error, "experiment.sweep(...)") from error.__cause__
        sweep = train_students(self._source, runs, console)
        for note in sweep.notes:
            console.note(note)
        opened = {run.name: self.open(self._source, run.overrides, self._console) for run in runs}
        return replace(sweep, experiments=opened)

    def compare(self, *students: str) -> ComparedReports:
        """Compares finished students of this folder text by text with the first one, by their names."""
        return compare_students(self._run.base, students, self._console.note)

    def explain(self, stage: str) -> Explanation:
        """Returns why a stage would run: the fields that differ from its last result."""
        if stage not in STAGE_NAMED:
            close = [name for name in STAGE_NAMED if name.startswith(stage)] or nearest(stage, STAGE_NAMED)
            fix = f"did you mean {' or '.join(close)}?" if close else f"name one of {', '.join(STAGE_NAMED)}"
            raise ExperimentError(f"no stage {stage!r}", fix=fix)
        run, states = self._planned()
        state = next((state for state in states if state.stage == stage), None)
        with working(run):
            return _explanation(STAGE_NAMED[stage], run, state)

    def audit(self) -> Audit:
        """Counts from the cache how often each teacher wins, is missed, and contradicts another."""
        run, states = self._planned()
        with working(run):
            for note in label_notes(labels_by_teacher(run)):
                self._console.note(note)
            return Audit(audit(run, states))

    def label(self, count: int = 50, *, seed: int = 0) -> pl.DataFrame:
        """Returns random training texts to label: key, text, label (empty), hint_1 and so on, why.

        Fill the column label, and give the frame to `compare_labels` or as `labels`; a file of it will do too.
        The texts of the experiment's own labels come first, with their labels.
        """
        for name, value, least in (("count", count, 1), ("seed", seed, 0)):
            if not is_whole(value, least):
                raise ExperimentError(f"{name} is {value!r}", where="label", fix=f"give a whole number from {least} on")
        check_takes_labels(self.config)
        check_requirements(self._run, self._source, self._overrides, "build-targets")
        run = self._run = self._open()
        with working(run):
            update(STAGES, run, target="build-targets", keep_overrides=False)
            return texts_to_label(run, int(count), int(seed))

    def compare_labels(self, labels: Any) -> LabelEffect:
        """Builds the targets with the experiment's labels, if any, and with those of a file or frame instead.

        `labels`: "corpus" takes those in the column corpus.label, as in the experiment.
        """
        check_takes_labels(self.config)
        is_path = isinstance(labels, str | Path)
        source = labels if is_path else store_labels(self._source, self._overrides, labels)
        path = user_path(str(source)).absolute()
        local = source if source == FROM_CORPUS else arguments.local_path(path, self._run.base)
        earlier = self.config.labels
        places = [self._run.base / source for source in (earlier, local) if source and source != FROM_CORPUS]
        is_same = earlier == local or (len(places) == 2 and places[0].resolve() == places[1].resolve())
        compared = [as_flow_yaml(source) for source in (None if is_same else earlier, local)]
        for given in map(self._with_labels, compared):
            with working(given):
                check_labels(given)  # before any stage runs
        order = compared if is_same else compared[::-1]  # the last build is that of the experiment's own labels
        built = {source: self._targets_with(source) for source in order}
        before, using = (built[source] for source in compared)
        with working(using):
            return label_effect(before, using)

    def _with_labels(self, labels: str) -> Run:
        return open_run(self._source, [*self._overrides, f"labels={labels}"], part=self._part, console=self._console)

    def _targets_with(self, labels: str) -> Run:
        """Builds the targets with other labels; later commands do not repeat the override."""
        run = self._with_labels(labels)
        with working(run):
            update(STAGES, run, target="build-targets", keep_overrides=False)
        return run

    def compare_targets(self, oracle: str | Path) -> None:
        """Shows how far the targets are from the predictions of the model in this folder."""
        with working(self._run):
            show_divergence(self._current("build-targets"), Path(oracle))

    # ---- the workspace

    def status(self) -> maintenance.Status:
        """Returns every result in the workspace, and marks the last one of each stage."""
        return maintenance.list_artifacts(self._run)

    def verify(self, *, repair: bool = False) -> verification.Verification:
        """Verifies every file that amalgam wrote; damaged results go to quarantine.

        `repair` copies delivered files again from the workspace.
        """
        try:
            return verification.verify(self._run, repair=repair)
        except OSError as error:
            if not is_disk_full(error):
                raise
            raise storage_error(error, "a damaged file cannot be mended", self._run.base) from error

    def find_garbage(self, *, unused: bool = False, delete: bool = False) -> list[maintenance.Garbage]:
        """Leftovers; `unused`: also results that the last builds do not use. Nothing goes without `delete`."""
        return maintenance.find_garbage(self._run, unused=unused, delete=delete)[0]

    def young_quarantine(self) -> maintenance.YoungQuarantine:
        """Returns number, bytes and date of the quarantined files that `find_garbage` keeps for a day."""
        return maintenance.young_quarantine(self._run)

    def compact(self, *, write: bool = False) -> maintenance.Packing:
        """Returns the small units to pack, and packs them with `write`; `loose`: their files stay for a day."""
        return maintenance.compact(self._run, write=write)

    # ---- results of current stages

    def texts(self, part: str = "train") -> pl.LazyFrame:
        """key, text, text_2, id, label: each distinct text once."""
        return frames.texts(self._current("read-corpus"), part)

    def logits(self, teacher: str) -> pl.LazyFrame:
        """key, tokens, cut, logits of every text with dropout off, by the teacher's own labels."""
        return frames.logits(self._current("cache-teachers"), teacher)

    def passes(self, teacher: str) -> pl.LazyFrame:
        """key, first, last, passes (the logits of each pass), and their mean probability, entropy and confidence."""
        return frames.passes(self._current("cache-teachers"), teacher)

    @property
    def targets(self) -> pl.LazyFrame:
        """key, target (over `labels`), weight, teacher, margin, confidence."""
        return frames.targets(self._current("build-targets"))

    @property
    def labels(self) -> list[str]:
        """The union of all teachers' labels, in the order of targets and of the student's outputs."""
        return target_facts(self._current("build-targets"))["labels"]

    @property
    def evaluation(self) -> pl.DataFrame:
        """system, n, accuracy, macro_f1, nll_nats, ece, accuracy_low and accuracy_high: the 95 % interval, on_GROUP.

        on_GROUP is the accuracy on the labels of each teacher.
        """
        return frames.evaluation(self._current("report"))

    @property
    def evaluation_by_label(self) -> pl.DataFrame:
        """system, label, n (texts of the label), predicted, right, f1: null for a label that is in neither."""
        return frames.evaluation_by_label(self._current("report"))

    def predict(
        self, texts: Sequence[str | tuple[str, str]], *, top: int = 1, explain: bool = False, unknown: bool = False
    ) -> pl.DataFrame:
        """The student's labels and probabilities.

        `explain`: also mass_TEACHER, the probability of its labels. `unknown`: also unknown and unknown_score.
        """
        finished = replace(self._finished(), device=self.config.execution.device)
        return frames.predictions(Student(finished, top=top, explain=explain, unknown=unknown), texts)

    # ----

    def _open(self) -> Run:
        run = open_run(self._source, self._overrides, part=self._part, console=self._console)
        run.rival = self._rival
        if isinstance(self._source, GivenExperiment):
            check_stored(run.experiment, run.base, run.store.root)
        return run

    def _current(self, stage: str) -> Run:
        """Plans again, because an input may have changed; returns the run, or raises if the stage is not current."""
        run, planned_states = self._planned()
        if stage in run.results:
            return run
        states = {state.stage: state for state in planned_states}
        what, fix = f"this experiment has no stage {stage}", f"its stages: {', '.join(states)}"
        if stage in states:
            what, fix = f"{stage} is not up to date ({states[stage].why})", f"experiment.run(until={stage!r})"
        raise ExperimentError(what, where=self._name, fix=fix)

    @property
    def _name(self) -> str:
        return str(self._source) if isinstance(self._source, Path) else GIVEN

    def print_to(self, console: Console) -> None:
        """Prints the parts of the experiment, without planning it."""
        config, student = self.config, self.config.student
        trained = set(config.teacher_names) - {teacher.name for teacher in config.teachers}
        rows = [[f"teacher {name}", "trained by this experiment"] for name in config.teacher_names if name in trained]
        rows += [[f"teacher {teacher.name}", teacher.model] for teacher in config.teachers]
        parts = {"train": config.corpus.train, "validation": config.corpus.validation, "test": config.corpus.test}
        rows += [[f"{part} texts", ", ".join(sources)] for part, sources in parts.items() if sources]
        if config.generate:
            rows.append(["train texts", f"generated ({config.generate.source})"])
        encoder = f", encoder {student.encoder}" if student.learns else ""
        rows.append(["student", f"{student.name}: {method_name(config)}{encoder}"])
        rows.append(["workspace", config.execution.workspace])
        rows += [["overrides", ", ".join(self._overrides)]] if self._overrides else []
        console.table("", ("experiment", self._name), rows)


class Change(TypedDict):
    field: str
    change: str


class Explanation(StateJson):
    """A stage's state, as in the plan, and the changes since its last result."""

    last: str | None
    student: str | None
    """The student that the last result belongs to, if it is known."""
    changes: list[Change]
    identity: IdentityJson | None


def _explanation(stage: Stage, run: Run, state: StageState | None) -> Explanation:
    last, identity = run.last(stage.name), None
    old = run.store.identity(stage.name, last) if last else None
    with suppress(PendingDependencyError):
        identity = identity_of(stage, run) if state else None
    differing = differences(old, identity) if old and identity else ()
    changes = [Change(field=field, change=change) for field, change in differing]
    state = state or StageState(stage.name, "not part of this experiment", None, "", None, None, None)
    own = run.experiment.student.name if stage.name in run.previous() else None
    student = own or delivered_students(run.base).get(last or "")
    return {**state.to_json(), "last": last, "student": student, "changes": changes, "identity": identity}


def _reopened(
    kind: type[Experiment], source: ExperimentSource, overrides: Sequence[str], quiet: bool, part: str | None
) -> Experiment:
    return kind.open(source, overrides, console_of_python(quiet=quiet), part)
