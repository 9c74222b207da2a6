"""Trains one student for each combination of the given field values (`amalgam sweep`, `Experiment.sweep`).

Each student has its own identity, name and report; shared results are computed once. Students are trained one after
the other, or in parallel on a Ray cluster.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import shlex
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, TypedDict

import yaml

from amalgam.data.keys import shown
from amalgam.data.lazy import pl
from amalgam.pipeline.config.load import ExperimentSource
from amalgam.pipeline.config.proposals import file_option
from amalgam.pipeline.config.schema import SAFE_NAME
from amalgam.pipeline.console import Console
from amalgam.pipeline.errors import COMMAND_LINE, ExperimentError, InputChangedError
from amalgam.pipeline.execution.plan import stage_state
from amalgam.pipeline.execution.runner import update
from amalgam.pipeline.execution.stage import Run
from amalgam.pipeline.input_files import InputFile
from amalgam.pipeline.notebook import Printed
from amalgam.pipeline.signals import InterruptHandler
from amalgam.stages.app import frames
from amalgam.stages.app.checks import CHECKS, error_of
from amalgam.stages.app.runs import check_requirements, open_run, run_without_tables, working
from amalgam.stages.common.deliveries import STUDENTS, read_metadata
from amalgam.stages.methods import load_with_methods
from amalgam.stages.read_corpus.stage import check_texts
from amalgam.stages.registry import STAGE_NAMED, STAGES
from amalgam.stages.report.json_types import SystemScores, reported_scores
from amalgam.stages.report.stage import evaluation_if_any
from amalgam.stages.report.tables import SCORES, Score, header, measure, row

READ, STUDENT = STAGE_NAMED["read-corpus"], STAGE_NAMED["train-student"]
MOST = 200
"""Largest number of students in a sweep."""


@dataclass(frozen=True)
class SweepRun:
    """One student of a sweep: its name, the values that distinguish it, and all overrides."""

    name: str
    values: dict[str, str]
    overrides: list[str]
    file: InputFile | None
    """The experiment file that all students of the sweep share."""

    def check_file(self) -> None:
        """Refuses an experiment file that was edited during the sweep."""
        if self.file is not None and not self.file.has_content():
            what = f"{self.file.path.name} changed during the sweep; {self.name} and later students are not made"
            fix = "run the sweep again: finished students that the edit does not change are reused"
            raise InputChangedError(what, where=str(self.file.path), fix=fix)


def run_sweep(config: Path, overrides: Sequence[str], *, quiet: bool, as_json: bool) -> None:
    console = Console(quiet=quiet)
    fixed, swept = swept_fields(overrides, config)
    sweep = train_students(config, combinations(config, fixed, swept), Console(quiet=quiet, tables=False))
    if as_json:
        console.json({"students": sweep.students, "over_seeds": list(over_seeds(sweep.students))})
    else:
        sweep.print_to(console)
    for note in sweep.notes:
        console.note(note)


def train_students(source: ExperimentSource, sweep_runs: Sequence[SweepRun], console: Console) -> Sweep:
    """Runs the experiment of each student; the console prints their progress, and no tables."""
    run = open_run(source, sweep_runs[0].overrides, console=console)
    if run.share.kind == "torchrun":
        raise ExperimentError("a sweep runs in one process", fix="omit torchrun, or set execution.engine=ray")
    before = {each.name: read_metadata(run.base / STUDENTS / each.name) or {} for each in sweep_runs}
    _check_students(source, sweep_runs)
    if _read_texts(source, sweep_runs, console):
        _check_students(source, sweep_runs)
    if run.experiment.execution.engine == "ray":
        _train_in_parallel(source, sweep_runs, quiet=console.is_quiet)
    results: list[SweepResult] = []
    for sweep_run in sweep_runs:
        sweep_run.check_file()
        console.say(f"== {sweep_run.name}")
        results.append(_result(sweep_run, run_without_tables(source, sweep_run.overrides, console)))
    return Sweep(results, list(_notes(results, before)), {})


def _notes(results: Sequence[SweepResult], before: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yields notes on replaced students and on equal ones; `before`: the marks of the folders before the sweep."""
    trained = [(result["name"], result["fingerprint"]) for result in results if result["fingerprint"]]
    replaced = [name for name, fingerprint in trained if before[name].get("fingerprint", fingerprint) != fingerprint]
    if replaced:
        names = ", ".join(f"{STUDENTS}/{name}" for name in replaced)
        yield f"students of other settings were replaced: {names}; student.name=PREFIX starts the names of a sweep"
    for equal, fields in equal_students(results):
        yield f"{' and '.join(equal)} have equal scores: {' and '.join(fields)} changed nothing"


def equal_students(results: Iterable[SweepResult]) -> Iterator[tuple[list[str], list[str]]]:
    """Yields the names of students whose scores are all equal, and the fields in which they differ."""
    groups: dict[tuple[float | None, ...], list[SweepResult]] = {}
    for result in results:
        if result["scores"] and result["scores"]["nll_nats"] is not None:
            groups.setdefault(tuple(result["scores"][score] for score in SCORES), []).append(result)
    for group in groups.values():
        fields = [field for field in group[0]["values"] if len({result["values"][field] for result in group}) > 1]
        if fields:
            yield [result["name"] for result in group], fields


def _check_students(source: ExperimentSource, sweep_runs: Sequence[SweepRun]) -> None:
    """Refuses the sweep if one of its students could not be trained and measured."""
    checks = [_check_texts, *(check for stage, check in CHECKS if stage != READ.name)]
    for sweep_run in sweep_runs:
        run = open_run(source, sweep_run.overrides, console=Console(quiet=True))
        check_requirements(run, source, sweep_run.overrides)
        for check in checks:
            error = error_of(check, run)
            if error is not None:
                error.what = f"{sweep_run.name}: {error.what}"
                raise error


def _check_texts(run: Run) -> None:
    if stage_state(READ, run).state != "current":  # adds the result, if it exists
        check_texts(run)


def _read_texts(source: ExperimentSource, sweep_runs: Sequence[SweepRun], console: Console) -> bool:
    """Reads the new texts of all students before the first training; returns whether there were any."""
    are_new = False
    for sweep_run in sweep_runs:
        state = stage_state(READ, open_run(source, sweep_run.overrides, console=Console(quiet=True)))
        if state.fingerprint and state.state != "current":  # else stage generate writes them
            are_new = True
            sweep_run.check_file()
            console.say(f"== {sweep_run.name}: texts")
            run_without_tables(source, sweep_run.overrides, console, READ.name)
    return are_new


# ---- combinations


def swept_fields(overrides: Sequence[str], config: Path) -> tuple[list[str], dict[str, list[str]]]:
    """Returns the overrides with one value, and the fields with several, as the command line gives them."""
    given = Counter(override.partition("=")[0] for override in overrides)
    for field in [field for field, times in given.items() if times > 1]:
        fix = f"give all its values at once: {field}=VALUE,VALUE"
        raise ExperimentError(f"{field} is given {given[field]} times", where=COMMAND_LINE, fix=fix)
    fields = {field: values_of(text) for field, _, text in (override.partition("=") for override in overrides)}
    swept = {field: values for field, values in fields.items() if len(values) > 1}
    if not swept:
        fix = f"separate values by commas, without blanks: amalgam sweep student.seed=0,1,2{file_option(config)}"
        read = f"; given: {shown(shlex.join(overrides))}" if overrides else ""
        raise ExperimentError(f"no field has several values{read}", fix=fix)
    return [override for override in overrides if override.partition("=")[0] not in swept], swept


def combinations(source: ExperimentSource, fixed: Sequence[str], swept: Mapping[str, Sequence[str]]) -> list[SweepRun]:
    """Returns every combination of the values, each validated as an experiment before any work."""
    _check_fields(swept)
    first_values = [f"{field}={values[0]}" for field, values in swept.items()]
    student = load_with_methods(source, [*fixed, *first_values]).experiment.student
    prefix = [student.name] if "name" in student.model_fields_set else []
    sweep_runs: dict[str, SweepRun] = {}
    for combination in itertools.product(*swept.values()):
        values = dict(zip(swept, combination, strict=True))
        name = _shortened("-".join([*prefix, *(_word(field, value) for field, value in values.items())]))
        settings = [*fixed, *(f"{field}={value}" for field, value in values.items()), f'student.name="{name}"']
        file = load_with_methods(source, settings).file
        if name in sweep_runs:
            earlier, later = (shlex.join(map("=".join, run.items())) for run in (sweep_runs[name].values, values))
            what, fix = f"two students have the name {name}: {earlier} and {later}", "name each value once"
            if earlier != later:
                option = file_option(source) if isinstance(source, Path) else ""
                alone = f"amalgam run {shlex.join(settings[:-1])} student.name=NAME{option}"
                fix = f"leave the second out, and run it alone: {alone}"
            raise ExperimentError(what, fix=fix)
        sweep_runs[name] = SweepRun(name, values, settings, file)
    return list(sweep_runs.values())


def values_of(text: str) -> list[str]:
    """Returns the values between commas, unparsed; commas inside brackets and quotes do not separate."""
    flow = f"[{text}]"
    try:
        node = yaml.compose(flow, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return [text]
    items = node.value if isinstance(node, yaml.SequenceNode) and node.end_mark.index == len(flow) else []
    return [flow[item.start_mark.index : item.end_mark.index] for item in items] or [text]


def _check_fields(swept: Mapping[str, Sequence[str]]) -> None:
    for field_name in swept:
        if field_name.startswith("execution.") or field_name == "student.name":
            raise ExperimentError(f"{field_name} does not distinguish students", fix=f"give {field_name} one value")
    count = math.prod(map(len, swept.values()))
    if count > MOST:
        raise ExperimentError(f"{count:,} students exceed the limit of {MOST} in a sweep", fix="give fewer values")


def _shortened(name: str) -> str:
    """Returns a name that `student.name` takes: the end of a longer one is its digest."""
    return name if re.match(SAFE_NAME, name) else f"{name[:55]}-{sha256(name.encode()).hexdigest()[:8]}"


def _word(field: str, value: str) -> str:
    """Returns a part of the student's name; numbers include the name of their field."""
    value = re.sub(r"^\.(?=\d)", "0.", value)
    word = re.sub(r"[^A-Za-z0-9._]+", "-", value).strip("-._") or "empty"
    return word if word[0].isalpha() and word not in {"true", "false", "null"} else f"{field.rpartition('.')[2]}-{word}"


# ---- on a cluster


def _train_in_parallel(source: ExperimentSource, sweep_runs: Sequence[SweepRun], *, quiet: bool) -> None:
    """Runs the earlier stages one after the other, since students share them; then trains students in parallel."""
    waiting: dict[str, Run] = {}
    for sweep_run in sweep_runs:
        sweep_run.check_file()
        run = open_run(source, sweep_run.overrides, console=PrefixedConsole(sweep_run.name, quiet=quiet))
        if not STUDENT.is_needed(run.experiment):
            continue
        earlier = [stage for stage in STAGES[: STAGES.index(STUDENT)] if stage.is_needed(run.experiment)]
        with working(run):
            update(earlier, run, keep_overrides=False)
            STUDENT.resolve_inputs(run)
            state = stage_state(STUDENT, run)
        if state.state != "current" and state.fingerprint:
            waiting.setdefault(state.fingerprint, run)
    signals = InterruptHandler()
    with signals.listening(), ThreadPoolExecutor(max(len(waiting), 1)) as drivers:
        for run in waiting.values():
            run.signals = signals
        train = partial(update, STAGES, target=STUDENT.name, keep_overrides=False)
        trained = [drivers.submit(train, run) for run in waiting.values()]
    for future in trained:  # all have ended: an error of one has stopped no other
        future.result()


class PrefixedConsole(Console):
    def __init__(self, name: str, *, quiet: bool) -> None:
        super().__init__(quiet=quiet, tables=False)
        self._name = name

    def say(self, text: str, *, always: bool = False) -> None:
        super().say(f"{self._name}: {text}", always=always)

    def stage_reused(self, stage: str) -> None: ...


# ---- results


Spread = tuple[float, float] | tuple[None, None]
"""Mean and standard deviation; None where a score of a student is None."""


class SweepResult(TypedDict):
    name: str
    values: dict[str, str]
    fingerprint: str | None
    folder: str | None
    n: int | None
    groups: dict[str, list[str]]
    scores: SystemScores | None


class SeedSummary(TypedDict):
    name: str
    students: int
    accuracy: Spread
    macro_f1: Spread
    nll_nats: Spread
    ece: Spread


def _result(sweep_run: SweepRun, run: Run) -> SweepResult:
    evaluation, learns = evaluation_if_any(run), run.experiment.student.learns
    return {
        "name": sweep_run.name,
        "values": sweep_run.values,
        "fingerprint": run.fingerprint(STUDENT.name) if learns else None,
        "folder": str(run.base / STUDENTS / sweep_run.name) if learns else None,
        "n": evaluation["n"] if evaluation else None,
        "groups": evaluation["groups"] if evaluation else {},
        "scores": reported_scores(evaluation) if evaluation else None,
    }


@dataclass(frozen=True, repr=False)
class Sweep(Printed):
    """The students of a sweep."""

    students: list[SweepResult]
    notes: list[str]
    """On replaced students, and on equal ones."""
    experiments: Mapping[str, Any]
    """In Python: the experiment of each student."""

    @property
    def frame(self) -> pl.DataFrame:
        """student, the swept fields, and the scores of the student as `evaluation` has them."""
        rows = [
            {"student": student["name"]}
            | {field: _value(text) for field, text in student["values"].items()}
            | (frames.scores_row(student["scores"], student["groups"]) if student["scores"] else {})
            for student in self.students
        ]
        return pl.DataFrame(rows, infer_schema_length=None, strict=False)

    def table(self) -> tuple[str, list[str], list[list[str]]]:
        """Returns title, header and rows: the scores of each student, and the means over seeds."""
        scored = [student for student in self.students if student["scores"]]
        if not scored:
            title = "there are no labelled test texts (corpus.test): `amalgam report NAME` describes one student"
            return title, ["student"], [[student["name"]] for student in self.students]
        groups = [
            name
            for name, labels in scored[0]["groups"].items()
            if all(set(labels) == set(student["groups"].get(name, ())) for student in scored)
        ]
        summaries = list(over_seeds(self.students))
        columns = header(groups)
        blank = [""] * (len(columns) - 1)
        rows = [
            row(student["name"], student["scores"], groups) if student["scores"] else [student["name"], *blank]
            for student in self.students
        ]
        for summary in summaries:
            cells = [_mean(score, *summary[score]) for score in SCORES]
            rows.append([f"{summary['name']}, mean of {summary['students']}", *cells, *blank[len(cells) :]])
        spread = "; ± is the standard deviation over seeds, in percentage points (NLL in nats)" if summaries else ""
        numbers = [student["n"] or 0 for student in scored]
        least, most = min(numbers), max(numbers)
        texts = f"{least:,} labelled test texts"
        if least < most:
            texts = f"{least:,} to {most:,} labelled test texts; accuracies on different texts cannot be compared"
        return f"{texts}{spread}", columns, rows

    def print_to(self, console: Console) -> None:
        console.table(*self.table())


def _value(text: str) -> Any:
    """Returns a number, text, bool or None; the text of other values."""
    with suppress(ValueError):
        value = json.loads(text)
        return text if isinstance(value, list | dict) else value
    return text


def _mean(score: Score, mean: float | None, deviation: float | None) -> str:
    """Returns a mean and its deviation without unit: in nats or percentage points, which `%` would not state."""
    if mean is None or deviation is None:
        return "-"
    return f"{measure(score, mean)} ± {measure(score, deviation).removesuffix(' %')}"


def over_seeds(results: Iterable[SweepResult]) -> Iterator[SeedSummary]:
    """Yields mean and standard deviation of students that differ only in seeds."""
    groups: dict[str, list[SystemScores]] = {}
    for result in results:
        words = [_word(field, value) for field, value in result["values"].items() if not field.endswith(".seed")]
        if result["scores"] and len(words) < len(result["values"]):
            groups.setdefault("-".join(words) or "all", []).append(result["scores"])
    for name, students in groups.items():
        if len(students) > 1:
            accuracy, macro_f1, nll_nats, ece = (_spread(students, score) for score in SCORES)
            yield SeedSummary(
                name=name, students=len(students), accuracy=accuracy, macro_f1=macro_f1, nll_nats=nll_nats, ece=ece
            )


def _spread(students: Sequence[SystemScores], score: Score) -> Spread:
    values = [value for scores in students if (value := scores[score]) is not None]
    return (statistics.mean(values), statistics.stdev(values)) if len(values) == len(students) else (None, None)
