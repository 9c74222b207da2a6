"""The content of report.json, from the stored evaluation, the manifests and other students.

Manifests are read again for every page, because another student may exist since the report was made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from amalgam.data.keys import LabelSpace
from amalgam.pipeline.config.schema import ExperimentConfig
from amalgam.pipeline.storage.store import TIMING, Record, Store
from amalgam.stages.cache_teachers.stage import CacheFacts
from amalgam.stages.common.cached.coverage import family_in
from amalgam.stages.common.corpus import GENERATED, CorpusFacts, PartRecordFacts, sources_of
from amalgam.stages.common.intervals import bounds, interval, percent
from amalgam.stages.common.models.model_folder import count_parameters
from amalgam.stages.common.models.resolve import ModelFiles
from amalgam.stages.common.training.schedule import Schedule, StudentFacts, TeachersFacts
from amalgam.stages.methods import method_name
from amalgam.stages.report import json_types, students
from amalgam.stages.report import verdict_words as words
from amalgam.stages.report.conditions import LEAST_TEXTS, VerdictInputs
from amalgam.stages.report.next_step import free_student
from amalgam.stages.report.verdict import verdict
from amalgam.stages.weigh_teachers.signals import WeightFacts

FORMAT = 3

LABELS_SHOWN = 8

NOT_SETTINGS = {"execution", "schema_version"}

MEASURES = ("n", "accuracy", "macro_f1", "nll_nats", "ece")
"""The scores of the reported system that its manifest has, for the reports of other students."""


# ---- content


@dataclass(frozen=True)
class ReportInputs:
    """Everything that report.json is made of, resolved from the run by report/load.py."""

    settings: ExperimentConfig
    store: Store
    results: Mapping[str, tuple[str, Record]]
    """Stage -> fingerprint and manifest."""
    descriptions: Mapping[str, str]
    """Stage -> description of its result."""
    labels: LabelSpace
    teachers: Mapping[str, ModelFiles]
    student: Path
    """Published folder of the student."""
    notes: Mapping[str, Sequence[str]]
    """Stage -> notes about its result."""
    needs: Mapping[str, Sequence[str]]
    """Stage -> stages whose results it reads; the stages are in the order of the run."""
    names: Mapping[str, str]
    """Fingerprint of a student -> name of its folder in students/."""
    automatic: Schedule | None
    """The schedule that `auto` would choose; None if no student is trained."""
    file: str
    """Name of the experiment file; empty without one."""
    overrides: Mapping[str, Any]

    @property
    def folders(self) -> set[str]:
        return {folder.name for folder in self.student.parent.glob("*")}

    def fingerprint(self, stage: str) -> str | None:
        return self.results[stage][0] if stage in self.results else None

    def facts(self, stage: str) -> Any:
        """Returns the facts of a stage's manifest; None if the experiment has no such stage."""
        return self.results[stage][1].facts if stage in self.results else None


def report_json(
    inputs: ReportInputs, evaluation: json_types.Evaluation | None, findings: json_types.Findings, name: str
) -> json_types.ReportJson:
    fingerprint, manifest = inputs.results["report"]
    test, selected = (manifest.identity["inputs"].get(name) for name in ("test", "picked"))
    rows = findings["student_quality"] and findings["student_quality"]["rows"]
    measured = list(students.other_students(inputs.store, test, selected, rows)) if test else []
    others = students.named_students(measured, inputs.fingerprint("train-student"), inputs.names)
    ours = next((student for student in measured if student.scores["fingerprint"] == fingerprint), None)
    record = inputs.store.record(inputs.store.folder("report", fingerprint) / "report.json")
    history = record.made if record else {}
    numbers: json_types.ReportJson = {
        "amalgam_report": FORMAT,
        "name": name,
        "date": history.get("date"),
        "method": method_name(inputs.settings),
        "learns": inputs.settings.student.learns,
        "fingerprint": fingerprint,
        "evaluation": _evaluation_block(evaluation) if evaluation else None,
        "student_quality": findings["student_quality"],
        "target_quality": findings["target_quality"],
        "chance": json_types.majority(evaluation) if evaluation else None,
        "supervised": students.best_supervised(fingerprint, measured),
        "sweep": students.temperature_sweep(fingerprint, measured),
        "students": [{**student.scores, "name": name, "supervised": student.supervised} for name, student in others],
        "labels": _labels(inputs),
        "data": _data(inputs, findings),
        "stages": list(_stages(inputs, set(history.get("executed", ())))),
        "teacher_costs": list(history.get("teacher_costs", ())),
        "models": _models(inputs, history),
        "student": _student(inputs.results["train-student"][1]) if inputs.settings.student.learns else None,
        "libraries": manifest.made.get("libraries", {}),
        "test": "-".join(filter(None, (test, selected, rows))) or None,
        "settings": inputs.settings.model_dump(mode="json", exclude=NOT_SETTINGS),
        "accuracy_losses": [],
        "summary": [],
        "verdict": None,
        "unlabelled": findings["unlabelled"],
        "linear_map": findings["linear_map"],
        "label_estimates": findings.get("label_estimates"),
        "unknown_share": findings.get("unknown_share"),
        "given_labels": findings.get("given_labels", []),
        "notes": [{"stage": stage, "note": note} for stage, notes in inputs.notes.items() for note in notes],
    }
    numbers["accuracy_losses"] = accuracy_losses(numbers, teachers=len(inputs.labels.columns))
    numbers["summary"] = summary(numbers)
    if inputs.automatic:
        remade = _remade(inputs, ours, others)
        numbers["verdict"] = verdict(_verdict_inputs(inputs, inputs.automatic, numbers, others, remade))
    return numbers


def _remade(
    inputs: ReportInputs, ours: students.OtherStudent | None, others: list[tuple[str, students.OtherStudent]]
) -> dict[str, dict[str, Any]]:
    """Returns the overrides that train the students without a folder again, under a free name."""
    names, free = set(inputs.names.values()), free_student("better", inputs.folders)
    remade = {}
    for name, student in others:
        if name not in names:
            changed = students.changed_settings(ours, student)
            remade[name] = {**inputs.overrides, **changed, "student.name": free} if changed else {}
    return remade


def _verdict_inputs(
    inputs: ReportInputs,
    automatic: Schedule,
    numbers: json_types.ReportJson,
    others: list[tuple[str, students.OtherStudent]],
    remade: Mapping[str, Mapping[str, Any]],
) -> VerdictInputs:
    evaluation, quality = numbers["evaluation"], numbers["student_quality"]
    weights: WeightFacts | None = inputs.facts("weigh-teachers")
    trained: TeachersFacts | None = inputs.facts("train-teachers")
    rivals = list(quality["rivals"]) if quality else []
    n = json_types.random_texts(evaluation)
    if quality and n:
        rivals += students.student_rivals(n - quality["wrong"], quality["right_hex"], others)
    set_next = {"corpus.test"} if evaluation is None else set()  # by the user: no command repeats an override of these
    set_next |= set() if inputs.settings.corpus.label else {"corpus.label"}
    return VerdictInputs(
        report=numbers,
        rivals=rivals,
        student=inputs.facts("train-student"),
        automatic=automatic,
        teacher_steps=min(facts["steps"] for facts in trained["teachers"].values()) if trained else None,
        weights_unused=weights is not None and weights.get("fallback", False),
        generates=generates(inputs.settings),
        file=inputs.file,
        remade=remade,
        folders=inputs.folders,
        overrides={field: value for field, value in inputs.overrides.items() if field not in set_next},
    )


def generates(settings: ExperimentConfig) -> bool:
    """Returns whether stage generate wrote the training texts, other than those of a corpus."""
    is_used = GENERATED in sources_of(settings).get("train", ())
    return is_used and settings.generate is not None and not settings.generate.reads_corpus


def _evaluation_block(evaluation: json_types.Evaluation) -> json_types.EvaluationSection:
    systems = {name: scores.copy() for name, scores in evaluation["systems"].items()}
    for scores in systems.values():
        scores.pop("confusion", None)
        scores.pop("label_f1", None)
    return {**evaluation, "labels": len(evaluation["labels"]), "groups": list(evaluation["groups"]), "systems": systems}


def _labels(inputs: ReportInputs) -> json_types.LabelsSection:
    labels, owners = inputs.labels, inputs.labels.owners
    teachers: list[json_types.TeacherLabels] = [
        {
            "teacher": name,
            "n": len(columns),
            "alone": owners.count([name]),
            "shown": [labels.names[column] for column in columns[:LABELS_SHOWN]],
            "content": inputs.teachers[name].digest,
        }
        for name, columns in labels.columns.items()
    ]
    shared = sum(len(teachers_of_label) > 1 for teachers_of_label in owners)
    return {"n": len(labels.names), "shared": shared, "teachers": teachers}


def _data(inputs: ReportInputs, findings: json_types.Findings) -> json_types.DataSection:
    facts: CorpusFacts = inputs.facts("read-corpus")
    cache: CacheFacts | None = inputs.facts("cache-teachers")
    student: StudentFacts | None = inputs.facts("train-student")
    return {
        "parts": [_part_counts(name, part) for name, part in facts["parts"].items()],
        "leaks": {leak["part"]: leak["texts"] for leak in facts["leaks"] if leak["other"] == "train"},
        "learned_by_teachers": {leak["part"]: leak["texts"] for leak in facts["leaks"] if leak["other"] == "teachers"},
        "cut": cache["cut"] if cache else {},
        "cut_student": student["cut"] if student else None,
        "scripts": findings["scripts"],
    }


def _part_counts(name: str, facts: PartRecordFacts) -> json_types.PartCounts:
    return {
        "part": name,
        "rows": facts["rows"],
        "texts": facts["texts"],
        "duplicates": facts["duplicates"],
        "conflicts": facts["conflicts"],
        "over_limit": facts["over_limit"],
        "skipped": facts["skipped"],
        "labels": len(facts["labels"]),
    }


def _student(manifest: Record) -> json_types.StudentSection:
    weights = sum(file.bytes for file in manifest.files if PurePosixPath(file.path).match("model*.safetensors"))
    facts: StudentFacts = manifest.facts
    return {
        "steps": facts["steps"],
        "best_step": facts["best_step"],
        "best_score": facts["best_score"],
        "selected_by": facts["selected_by"],
        "dtype": facts.get("dtype"),
        "bytes": weights,
        "libraries": manifest.made.get("libraries", {}),
    }


def _models(inputs: ReportInputs, history: Mapping[str, Any]) -> list[json_types.ModelSize]:
    """Returns size and speed: texts per second of the student in this evaluation, text-passes of the teachers."""
    speed, rows = history.get("student") or {}, list[json_types.ModelSize]()
    costs = {cost["teacher"]: cost for cost in history.get("teacher_costs", ())}
    if inputs.settings.student.learns:
        rate = speed["texts"] / speed["seconds"] if speed.get("seconds") else None
        rows.append({"model": "student", "parameters": count_parameters(inputs.student), "per_second": rate})
    for name, files in inputs.teachers.items():
        cost = costs.get(name, {})
        rate = cost["text_passes"] / cost["seconds"] if cost.get("seconds") else None
        rows.append({"model": name, "parameters": count_parameters(files.folder), "per_second": rate})
    return rows


def _stages(inputs: ReportInputs, executed: set[str]) -> Iterator[json_types.StageSection]:
    for stage, needs in inputs.needs.items():
        fingerprint, manifest = inputs.results[stage]
        record = inputs.store.record(inputs.store.folder(stage, fingerprint) / TIMING)
        seconds, units, reused = (record.facts[key] for key in ("seconds", "units", "found")) if record else [None] * 3
        state: Literal["made", "made in part", "reused"] = "made in part" if reused else "made"
        if stage not in executed or (record and reused == units):
            state = "reused"
        yield {
            "stage": stage,
            "needs": list(needs),
            "fingerprint": fingerprint,
            "description": inputs.descriptions[stage],
            "bytes": sum(file.bytes for file in manifest.files),
            "seconds": seconds,
            "units": units,
            "reused_units": reused,
            "state": state,
        }


def total_seconds(numbers: json_types.ReportJson) -> float | None:
    """Returns the seconds of all stages; None if those of one stage are unknown."""
    seconds = [row["seconds"] for row in numbers["stages"] if row["seconds"] is not None]
    return sum(seconds) if len(seconds) == len(numbers["stages"]) else None


def teacher_costs(manifest: Record, store: Store, families: Mapping[str, str]) -> list[json_types.TeacherCost]:
    """Sums text-passes, tokens and seconds of the cached units of this experiment, by teacher."""
    costs: dict[str, json_types.TeacherCost] = {
        family: {"teacher": teacher, "seconds": 0.0, "text_passes": 0, "tokens": 0}
        for teacher, family in families.items()
    }
    paths = {file.path: store.root / f"{file.path.rpartition('-')[0]}.json" for file in manifest.files}
    records = store.records(list(paths.values()), complete=False)
    for file in manifest.files:
        record = records.get(paths[file.path])
        if record is None or "tokens" not in record.facts or "seconds" not in record.made:
            continue
        facts, cost = record.facts, costs[family_in(file.path)]
        passes = int(facts["last"]) - int(facts["first"]) + int(bool(facts["logits"]))
        cost["seconds"] = round(cost["seconds"] + float(record.made["seconds"]), 3)
        cost["text_passes"] += int(facts["rows"]) * passes
        cost["tokens"] += int(facts["tokens"]) * passes
    return list(costs.values())


# ---- summary: two sentences, the student's accuracy next to others, and the largest loss of accuracy

TEST, LABELLED = "test texts", "training texts with gold labels"


def summary(numbers: json_types.ReportJson) -> list[str]:
    evaluation = numbers["evaluation"]
    if evaluation is None and numbers["label_estimates"]:
        return [words.estimate_sentence(numbers["label_estimates"]), _teacher_choice(numbers)]
    if evaluation is None and numbers["unlabelled"] and numbers["unlabelled"]["estimates"]:
        return [words.weight_estimate_sentence(numbers["unlabelled"]["estimates"]), _teacher_choice(numbers)]
    if evaluation is None:
        missing = f"The accuracy of the student ({numbers['method']}) is unknown: there are no labelled test texts."
        return [f"{missing} Set corpus.test.", _teacher_choice(numbers)]
    return [_accuracy(numbers, evaluation), _largest_loss(numbers)]


def _accuracy(numbers: json_types.ReportJson, evaluation: json_types.EvaluationSection) -> str:
    system, systems = evaluation["system"], evaluation["systems"]
    accuracy = systems[system]["accuracy"]
    low, high = interval(accuracy, evaluation["n"])
    subject = f"The {system}" if system.startswith("student") else f"The method {system}"
    others = []
    if "ensemble" in systems and system != "ensemble":
        others.append(f"the teachers' ensemble {percent(systems['ensemble']['accuracy'])}")
    teachers = [name for name in systems if name.startswith("teacher:") and name != system]
    if teachers:
        best = max(teachers, key=lambda name: systems[name]["accuracy"])
        share = percent(systems[best]["accuracy"])
        others.append(f"the best single teacher ({best.removeprefix('teacher:')}) {share}")
    bound = numbers["supervised"]
    if bound and bound["fingerprint"] != numbers["fingerprint"]:
        others.append(f"a student trained on gold labels {percent(bound['accuracy'])}")
    listed = " and ".join([", ".join(others[:-1]), others[-1]]) if len(others) > 1 else "".join(others)
    quality = numbers["student_quality"]
    tested = words.tested_on(quality["rivals"]).removeprefix(", on texts") if quality else ""
    texts = words.evaluated_texts(evaluation, "test text")
    measured = f"{percent(accuracy)} accuracy on {texts}{tested} (95 % interval {bounds(low, high)})"
    return f"{subject} has {measured}{'; ' if others else ''}{listed}."


def accuracy_losses(numbers: json_types.ReportJson, *, teachers: int) -> list[json_types.AccuracyLoss]:
    """Returns the accuracy lost at each step from the teachers to the student; `lost` may be negative.

    The steps: wrong teachers, targets that follow the wrong one of several, a student that does not fit its targets.
    The teachers' loss is that on the test texts; of the rest, the share of the choice is measured on training texts.
    """
    quality, evaluation, targets = numbers["student_quality"], numbers["evaluation"], numbers["target_quality"] or {}
    if not evaluation or not quality or _supervised(numbers) or numbers["method"] == "zero-shot":
        return []
    n, accuracy = evaluation["n"], json_types.reported_scores(evaluation)["accuracy"]
    losses: list[json_types.AccuracyLoss] = []
    choice, oracle = targets.get("choice"), quality["teachers"]["oracle"]
    if oracle is not None:
        losses.append({"step": "teachers", "right": oracle / n, "n": n, "where": TEST, "lost": 1 - oracle / n})
    if choice and choice["n"] >= LEAST_TEXTS and targets["targets"]["right"] is not None:
        labelled = choice["n"]
        right, best = targets["targets"]["right"] / labelled, choice["oracle"] / labelled
        losses.append({"step": "choice", "right": right, "n": labelled, "where": LABELLED, "lost": best - right})
    unseparated = len(losses) == 1 and (teachers > 1 or not numbers["learns"])
    lost = 1 - accuracy - sum(loss["lost"] for loss in losses)
    last = "choice and fit" if unseparated else "fit"
    return [*losses, {"step": last, "right": accuracy, "n": n, "where": TEST, "lost": lost}]


def _supervised(numbers: json_types.ReportJson) -> bool:
    """Returns whether the student learned from gold labels alone."""
    return numbers["learns"] and numbers["settings"]["targets"]["mode"] == "supervised"


REASONS = {
    "teachers": "wrong teachers: the best possible choice of a teacher has {right} accuracy on the {where}",
    "choice": "the choice of the teacher: the targets have {right} accuracy, the best choice {before} (on the {where})",
    "fit": "the student's fit: {right} accuracy on the {where}, about {before} for its targets",
    "choice and fit": "the choice of the teacher and the student's fit, which cannot be separated here: {right} "
    "accuracy, {before} for the best choice on the {where}",
}

UNTRAINED = "the choice of the teacher: {right} accuracy on the test texts, {before} for the best choice"


def _largest_loss(numbers: json_types.ReportJson) -> str:
    losses = numbers["accuracy_losses"]
    if _supervised(numbers):
        return "The student learned from gold labels, not from teachers, so its accuracy losses are its own."
    if len(losses) < 2:
        return "Accuracy losses cannot be separated: the method uses no teachers."
    loss = max(losses, key=lambda loss: float(loss["lost"]))
    if loss["lost"] <= 0:
        return "These numbers show no accuracy loss from the teachers to the student."
    reasons = REASONS if numbers["learns"] else REASONS | {"choice and fit": UNTRAINED}
    before = percent(loss["right"] + loss["lost"])
    reason = reasons[loss["step"]].format(right=percent(loss["right"]), before=before, where=loss["where"])
    return f"Largest loss, {100 * loss['lost']:.1f} points of accuracy: {reason}."


def _teacher_choice(numbers: json_types.ReportJson) -> str:
    choice = (numbers["target_quality"] or {}).get("choice")
    if choice and choice["n"]:
        right, oracle = percent(choice["right"] / choice["n"]), percent(choice["oracle"] / choice["n"])
        return (
            f"On {choice['n']:,} training texts with gold labels, the leading teacher has the label of {right}; "
            f"the best possible choice of a teacher has {oracle} accuracy."
        )
    outside = " that teachers did not learn" if numbers["settings"]["train_teachers"] else ""
    outside = " outside `labels`" if numbers["settings"]["labels"] else outside
    return f"Accuracy losses are unknown: no sampled training text has a gold label of a teacher{outside}."
