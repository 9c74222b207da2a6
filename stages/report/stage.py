"""Stage report: one unit, evaluation.json. Teachers are measured from the cache; only the student runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from amalgam.pipeline.experiment import Experiment
from amalgam.pipeline.stage import Identity, Run, Unit, UnitByUnit
from amalgam.pipeline.store import Record
from amalgam.stages.cache_teachers.adaptive import audit_lines
from amalgam.stages.cache_teachers.stage import dtype_of, families_of
from amalgam.stages.methods import method_of
from amalgam.stages.read_corpus.parts import part_of
from amalgam.stages.teachers import teachers_of

SHOWN = 12  # systems in the table; evaluation.json has them all


class Report(UnitByUnit):
    name: ClassVar[str] = "report"
    VERSION: ClassVar[int] = 1
    spread: ClassVar[Literal["units", "together", "alone"]] = "alone"
    measure: ClassVar[str] = "evaluations"

    def wanted(self, experiment: Experiment) -> bool:
        return experiment.corpus.test is not None

    def prepare(self, run: Run) -> None: ...

    def identity(self, run: Run) -> Identity:
        test = part_of(run, "test")
        inputs: dict[str, Any] = {"test": test.labels_digest if test else None}
        if teachers_of(run):
            inputs |= {"families": families_of(run), "dtype": dtype_of(run)}
            if run.experiment.cache.adaptive:
                inputs["adaptive"] = run.fingerprint("cache-teachers")
            inputs["knows"] = {teacher.name: list(teacher.labels) for teacher in teachers_of(run)}
        student = {"train-student": run.fingerprint("train-student")}
        return Identity({"report": run.experiment.report.model_dump()}, inputs, student)

    def units(self, run: Run, folder: Path) -> Sequence[Unit]:  # noqa: ARG002
        return [Unit("report", folder)]

    def run_unit(self, run: Run, unit: Unit) -> None:
        from amalgam.stages.report.evaluation import evaluate_all

        found = evaluate_all(run)
        with run.store.draft(unit.folder, unit.name) as draft:
            (draft.folder / "evaluation.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")

    def finish(self, run: Run, folder: Path, records: Sequence[Record]) -> dict[str, Any]:  # noqa: ARG002
        return {"method": method_of(run.experiment.targets.model_dump(), run.experiment.objective.name)}

    def deliver(self, run: Run, manifest: Record, *, fresh: bool) -> None:  # noqa: ARG002 - the answer, each time
        show_evaluation(run, evaluation(run))


def evaluation(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run.store.checked(run.result("report").files[0]).read_text("utf-8"))
    return found


def show_evaluation(run: Run, found: dict[str, Any]) -> None:
    header = ["", "accuracy", "macro-F1", "NLL", "ECE", *(f"on {name}" for name in found["groups"])]
    rows = [row(name, system, found["groups"]) for name, system in list(found["systems"].items())[-SHOWN:]]
    title = f"{found['n']:,} labelled test texts, {len(found['labels'])} labels; accuracy over all labels"
    run.console.table(title, header, rows)
    if found.get("adaptive"):
        for line in audit_lines(found["adaptive"], run.experiment.cache.passes):
            run.console.say(line)


def row(name: str, system: dict[str, Any], groups: dict[str, Any]) -> list[str]:
    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    scores = [number(system[key]) for key in ("accuracy", "macro_f1", "nll_nats", "ece")]
    return [name, *scores, *(number(system["slice_accuracy"][group]) for group in groups)]
