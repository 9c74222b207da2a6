"""Results of `amalgam.Experiment` that show themselves: as text, in a notebook as HTML, and as a frame of Polars."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from amalgam.data.lazy import pl
from amalgam.pipeline.console import Console, duration
from amalgam.pipeline.errors import AmalgamError
from amalgam.pipeline.execution.plan import StageState
from amalgam.pipeline.execution.stage import Run
from amalgam.pipeline.notebook import Printed
from amalgam.pipeline.storage.paths import json_object
from amalgam.pipeline.storage.store import TIMING
from amalgam.stages.app import frames
from amalgam.stages.common.deliveries import REPORTS, STUDENTS, page_mark
from amalgam.stages.registry import STAGES
from amalgam.stages.report.json_types import AuditedTeacher, AuditSection
from amalgam.stages.report.publish import page_name
from amalgam.stages.report.stage import evaluation_if_any
from amalgam.stages.report.tables import advice, print_audit
from amalgam.stages.report.verdict_types import Verdict

# ---- plan

Check = Callable[[Sequence[StageState]], tuple[list[str], list[AmalgamError]]]
"""Returns the remarks and problems of the inputs."""


class Plan(Printed, list[StageState]):
    """The state of every stage, in order, with remarks and problems of the inputs."""

    def __init__(self, states: Iterable[StageState], check: Check) -> None:
        super().__init__(states)
        self._check = check

    @property
    def remarks(self) -> list[str]:
        """Settings that are valid but would surprise a user."""
        return self._checked[0]

    @property
    def problems(self) -> list[AmalgamError]:
        """The errors that `run` would end in."""
        return self._checked[1]

    @cached_property
    def _checked(self) -> tuple[list[str], list[AmalgamError]]:
        return self._check(self)

    @property
    def frame(self) -> pl.DataFrame:
        """stage, state, done and total units, reason, detail."""
        fields = ("stage", "state", "done", "total", "reason", "detail")
        types = dict.fromkeys(fields, pl.String) | dict.fromkeys(("done", "total"), pl.Int64)
        return pl.DataFrame([{name: getattr(state, name) for name in fields} for state in self], schema=types)

    @property
    def is_current(self) -> bool:
        """Whether every result exists, so that `run` would do nothing."""
        return all(state.state == "current" for state in self)

    def print_to(self, console: Console) -> None:
        rows = [[state.stage, state.state, state.units, state.why] for state in self]
        console.table("", ("stage", "state", "units", "why"), rows)
        for remark in self.remarks:
            console.result(f"note: {remark}")
        for problem in self.problems:
            console.result(f"error: {problem}")


# ---- audit


@dataclass(frozen=True, repr=False)
class Audit(Printed):
    """The audit of the teachers on the training texts, computed without labels."""

    section: AuditSection

    @property
    def frame(self) -> pl.DataFrame:
        """A row per teacher: labels, mean_confidence, wins, wins_by_weights, and the effect of leaving it out."""
        return pl.DataFrame([_audit_row(teacher) for teacher in self.section["teachers"]], infer_schema_length=None)

    @property
    def advice(self) -> list[str]:
        """A line for each harmful or disagreeing teacher and each pair of duplicates."""
        return advice(self.section)

    def to_json(self) -> AuditSection:
        return self.section

    def print_to(self, console: Console) -> None:
        print_audit(console, self.section)


def _audit_row(teacher: AuditedTeacher) -> dict[str, object]:
    left_out: Mapping[str, object] = teacher["left_out"] or {}
    plain = {name: value for name, value in teacher.items() if name != "left_out"}
    return plain | {f"without_{name}": left_out.get(name) for name in ("changed", "accuracy", "harmful", "disagrees")}


# ---- run


@dataclass(frozen=True)
class StageResult:
    """One stage of a run."""

    stage: str
    outcome: Literal["made", "made in part", "reused", "not complete"]
    """made in part: some units existed. not complete: only this process's part of the units is done."""
    units: int
    reused_units: int
    seconds: float | None
    """Time of this run; None for a reused stage."""
    why: str
    """The reason why the stage ran."""
    description: str
    folder: str

    @property
    def cells(self) -> list[str]:
        units = f"{self.units:,}" + (f", {self.reused_units:,} reused" if self.outcome == "made in part" else "")
        time = "" if self.seconds is None else duration(self.seconds)
        return [self.stage, self.outcome, units, time, self.why, self.description]


@dataclass(frozen=True, repr=False)
class RunResult(Printed):
    """The stages of a run, and its student; `for stage in result` yields each StageResult."""

    stages: tuple[StageResult, ...]
    student: Path | None
    """Folder of the student; None if this run ends before it, or if the method trains none."""
    report: Path | None
    """The report's page."""
    _run: Run = field(compare=False)
    _report_json: Mapping[str, Any] = field(compare=False)
    """Read when the run ends: another experiment may replace the page."""

    def __getstate__(self) -> dict[str, Any]:
        """Pickles the results without the run, which has streams and locks."""
        return {**self.__dict__, "evaluation": self.evaluation, "_run": None}

    @property
    def is_complete(self) -> bool:
        """Whether all units of every stage are done; only false for one part of several (`--part`)."""
        return all(stage.outcome != "not complete" for stage in self.stages)

    @property
    def frame(self) -> pl.DataFrame:
        """A row per stage."""
        return pl.DataFrame([asdict(stage) for stage in self.stages], infer_schema_length=None)

    @cached_property
    def evaluation(self) -> pl.DataFrame | None:
        """The scores of all systems; None without labelled test texts, or if this run ends before the report."""
        return frames.evaluation(self._run) if "report" in self._run.results and evaluation_if_any(self._run) else None

    @cached_property
    def estimates(self) -> pl.DataFrame | None:
        """Accuracies estimated by `labels`, else from the teachers' weights; None without a report, or with neither.

        system, n, accuracy, accuracy_low and accuracy_high: the 95 % interval.
        """
        unlabelled = self._report_json.get("unlabelled") or {}
        estimates = self._report_json.get("label_estimates") or unlabelled.get("estimates")
        return frames.estimates(estimates["systems"]) if estimates else None

    @cached_property
    def verdict(self) -> Verdict | None:
        """The report's verdict: decision, reasons, causes and next command; None without a report or a student."""
        return self._report_json.get("verdict")

    @cached_property
    def summary(self) -> list[str]:
        """The sentences at the top of the report."""
        return list(self._report_json.get("summary") or ())

    def __iter__(self) -> Iterator[StageResult]:
        return iter(self.stages)

    def __len__(self) -> int:
        return len(self.stages)

    def print_to(self, console: Console) -> None:
        header = ("stage", "outcome", "units", "time", "why", "result")
        console.table("", header, [stage.cells for stage in self.stages])
        for line in [f"verdict: {self.verdict['decision']}"] if self.verdict else self.summary:
            console.result(line)
        for name, path in (("student", self.student), ("report", self.report)):
            if path is not None:
                console.result(f"{name}: {os.path.relpath(path)}")


def run_result(run: Run, before: Sequence[StageState]) -> RunResult:
    """Returns the results of a run; `before`: the states of its stages when it started."""
    states = {state.stage: state for state in before}
    stages = [
        _stage_result(run, stage.name, states.get(stage.name), stage.describe(run.result(stage.name)))
        for stage in STAGES
        if stage.name in run.results
    ]
    stages += [
        StageResult(
            state.stage, "not complete", state.total or 0, 0, None, state.why, f"{state.done} of {state.total} done", ""
        )
        for state in before
        if state.stage not in run.results
    ]
    learns = "train-student" in run.results and run.experiment.student.learns
    student = run.base / STUDENTS / run.experiment.student.name
    report = run.base / REPORTS / f"{page_name(run.experiment)}.html" if "report" in run.results else None
    return RunResult(tuple(stages), student if learns else None, report, run, _report_json(run, report))


def _report_json(run: Run, page: Path | None) -> Mapping[str, Any]:
    """Returns the JSON of the page; empty if this run has written none."""
    mark = page_mark(run.base, page.stem) if page else None
    if page is None or mark is None or mark.fingerprint != run.fingerprint("report"):
        return {}
    return json_object(page.with_suffix(".json"))


def _stage_result(run: Run, name: str, before: StageState | None, description: str) -> StageResult:
    folder = run.store.folder(name, run.fingerprint(name))
    units, where = int(run.result(name).facts.get("units", 1)), run.store.where(folder)
    if name not in run.executed:
        return StageResult(name, "reused", units, units, None, "", description, where)
    timing = run.store.record(folder / TIMING)
    facts = timing.facts if timing else {}
    reused = int(facts.get("found", 0))
    outcome: Literal["made", "made in part"] = "made in part" if reused else "made"
    why = before.why if before else ""
    return StageResult(name, outcome, units, reused, facts.get("seconds"), why, description, where)
