"""Stage report: what is found of every system and of what was taught, and the page that shows it.

Finding costs the student a look at the test texts, and is stored. The page is drawn from what is stored, in no time.
What the encoder makes of the test texts is a unit of its own, which all methods share.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from amalgam.pipeline.config.schema import ExperimentConfig
from amalgam.pipeline.execution.stage import Identity, Run, Stage, Unit
from amalgam.pipeline.storage.store import Record
from amalgam.stages.cache_teachers.adaptive import audit_lines
from amalgam.stages.common.answers.families import dtype_of, families_of
from amalgam.stages.common.corpus import part_of
from amalgam.stages.common.load import encoder_files, teachers_of
from amalgam.stages.methods import method_name
from amalgam.stages.report.publish import check_page, deliver_page
from amalgam.stages.report.training_texts import teaching_identity
from amalgam.stages.report.workspace_facts import history
from amalgam.stages.report.zero_shot import ENCODER, measure, zero_shot_identity, zero_shot_unit

SHOWN = 12  # systems in the table; evaluation.json has them all

EVALUATION, FINDINGS = "evaluation.json", "findings.json"

INDENTED = 100  # labels


class Report(Stage):
    name = "report"
    VERSION = 4
    parallelism = "single"
    unit_label = "evaluations"
    help = "Evaluate the student and every teacher: a table here, and one HTML page in reports/."
    examples = ("amalgam report", "amalgam report report.calibration_bins=10")

    def needs(self, experiment: ExperimentConfig) -> tuple[str, ...]:
        trained = ("train-teachers",) if experiment.train_teachers else ()
        answers = ("cache-teachers",) if experiment.teacher_names else ()
        student = ("train-student",) if experiment.student.learns else ()
        targets = ("build-targets",) if student and experiment.reads_texts else ()
        return ("read-corpus", *trained, *answers, *targets, *student)

    def resolve_inputs(self, run: Run) -> None:
        check_page(run)
        if run.experiment.corpus.test:
            encoder_files(run, run.experiment.student, ENCODER)

    def identity(self, run: Run) -> Identity:
        test, inputs = part_of(run, "test"), dict[str, Any]()
        if test:
            inputs = {"test": test.labels_digest, "zero-shot": zero_shot_identity(run)}
        if teachers_of(run):
            inputs |= {"families": families_of(run), "dtype": dtype_of(run)}
            if run.experiment.cache.adaptive:
                inputs["adaptive"] = run.fingerprint("cache-teachers")
            inputs["knows"] = {teacher.name: list(teacher.labels) for teacher in teachers_of(run)}
        config: dict[str, Any] = {"report": run.experiment.report.model_dump()}
        if not run.experiment.student.learns:
            return Identity({**config, "method": method_name(run.experiment)}, inputs)
        inputs |= {"train": teaching_identity(run)}
        return Identity(config, inputs, {"train-student": run.fingerprint("train-student")})

    def units(self, run: Run, folder: Path) -> Sequence[Unit]:
        """In this order: the report reads the other."""
        return [*([zero_shot_unit(run)] if part_of(run, "test") else []), Unit("report", folder)]

    def workload(self, run: Run, units: Sequence[Unit] | None) -> float:
        """Returns the number of test texts, counted once for each evaluation."""
        test = part_of(run, "test")
        return float((test.texts if test else 1) * (1 if units is None else len(units)))

    def run_unit(self, run: Run, unit: Unit) -> None:
        if unit.name != "report":
            measure(run, unit)
            return
        from amalgam.stages.report.findings import find

        evaluation, findings = find(run)
        with run.store.draft(unit.folder, unit.name) as draft:
            for name, found in ((EVALUATION, evaluation), (FINDINGS, findings)):
                if found is not None:
                    (draft.folder / name).write_text(_json(found), "utf-8")
            draft.facts, draft.made = _standing(evaluation), history(run)

    def finish(self, run: Run, folder: Path, records: Sequence[Record]) -> dict[str, Any]:  # noqa: ARG002
        return {"method": method_name(run.experiment), **records[-1].facts}

    def publish(self, run: Run, manifest: Record, *, fresh: bool) -> None:  # noqa: ARG002 - the answer, each time
        found = evaluation(run)
        if found:
            show_evaluation(run, found)
        else:
            run.console.say(
                "  no labelled test texts (corpus.test): the page shows what was taught, not how right it is"
            )
        page = deliver_page(run, found, stored(run, FINDINGS) or {})
        run.console.say(f"report: {page}")

    def describe(self, manifest: Record) -> str:
        return str(manifest.facts["method"])


def _json(found: dict[str, Any]) -> str:
    """Indented but where matrices of many labels would be most of the file."""
    many = len(found.get("labels", ())) > INDENTED
    return json.dumps(found, indent=None if many else 1, ensure_ascii=False) + "\n"


def _standing(found: dict[str, Any] | None) -> dict[str, Any]:
    """What other reports of the workspace say of this one."""
    if not found:
        return {}
    judged = found["systems"][found["judged"]]
    return {"judged": {key: judged[key] for key in ("n", "accuracy", "macro_f1", "nll_nats", "ece")}}


def evaluation(run: Run) -> dict[str, Any]:
    """Of the systems on the test part; empty without one."""
    return stored(run, EVALUATION) or {}


def stored(run: Run, name: str) -> dict[str, Any] | None:
    file = next((file for file in run.result("report").files if Path(file.path).name == name), None)
    if file is None:
        return None
    found: dict[str, Any] = json.loads(run.store.verified_path(file).read_text("utf-8"))
    return found


def show_evaluation(run: Run, found: dict[str, Any]) -> None:
    header = ["", "accuracy", "macro-F1", "NLL", "ECE", *(f"on {name}" for name in found["groups"])]
    shown = [name for name in list(found["systems"])[:-SHOWN] if name == found["judged"]]
    shown += list(found["systems"])[-SHOWN:]
    rows = [row(name, found["systems"][name], found["groups"]) for name in shown]
    title = f"{found['n']:,} labelled test texts, {len(found['labels'])} labels; accuracy over all labels"
    run.console.table(title, header, rows)
    if not run.experiment.student.learns:
        run.console.result(f"judged: {found['judged']}; nothing was trained")
    if found.get("adaptive"):
        for line in audit_lines(found["adaptive"], run.experiment.cache.passes):
            run.console.say(line)


def row(name: str, system: dict[str, Any], groups: dict[str, Any]) -> list[str]:
    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    scores = [number(system[key]) for key in ("accuracy", "macro_f1", "nll_nats", "ece")]
    return [name, *scores, *(number(system["slice_accuracy"][group]) for group in groups)]
