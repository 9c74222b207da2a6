"""Collects report.json: the stored evaluation and findings, the manifests of the stages, and other students.

Manifests are read again for every page, because another student may exist since the report was made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict, cast

from amalgam.data.keys import LabelSpace
from amalgam.pipeline.config.schema import ExperimentConfig
from amalgam.pipeline.execution.runner import TIMING
from amalgam.pipeline.storage.fingerprint import canonical
from amalgam.pipeline.storage.store import Record, Store
from amalgam.stages.common.cached.coverage import family_in
from amalgam.stages.methods import method_name
from amalgam.stages.report.blocks import (
    DataFacts,
    Evaluation,
    EvaluationBlock,
    Findings,
    LabelFacts,
    ReportJson,
    Scores,
    StageFacts,
    StudentQuality,
    StudentScores,
    SweepPoint,
    TeacherCost,
)
from amalgam.stages.report.summary import accuracy_losses, summary

FORMAT = 2

LABELS_SHOWN = 8

NOT_SETTINGS = {"execution", "schema_version"}

Identity = Mapping[str, Any]


@dataclass(frozen=True)
class ReportInputs:
    """Everything that report.json is made of, resolved from the run by report/stage.py."""

    settings: ExperimentConfig
    store: Store
    results: Mapping[str, tuple[str, Record]]
    """Stage -> fingerprint and manifest."""
    labels: LabelSpace
    contents: Mapping[str, str]
    """Teacher -> digest of its files."""

    def facts(self, stage: str) -> dict[str, Any]:
        return self.results[stage][1].facts if stage in self.results else {}

    @property
    def fingerprint(self) -> str:
        return self.results["report"][0]

    @property
    def manifest(self) -> Record:
        return self.results["report"][1]


def report_json(inputs: ReportInputs, evaluation: Evaluation | None, findings: Findings, name: str) -> ReportJson:
    students = list(other_students(inputs))
    record = inputs.store.record(inputs.store.folder("report", inputs.fingerprint) / "report.json")
    history = record.made if record else {}
    quality = findings["student_quality"]
    numbers: ReportJson = {
        "amalgam_report": FORMAT,
        "name": name,
        "method": method_name(inputs.settings),
        "learns": inputs.settings.student.learns,
        "fingerprint": inputs.fingerprint,
        "evaluation": _evaluation_block(evaluation) if evaluation else None,
        "student_quality": quality,
        "target_quality": findings["target_quality"],
        "chance": _chance(quality) if quality else None,
        "supervised": best_supervised(inputs.fingerprint, students),
        "sweep": temperature_sweep(inputs.fingerprint, students),
        "labels": _labels(inputs),
        "data": _data(inputs, findings),
        "stages": _stages(inputs, set(history.get("executed", ()))),
        "teacher_costs": list(history.get("teacher_costs", ())),
        "student": _student(inputs),
        "libraries": inputs.manifest.made.get("libraries", {}),
        "test": inputs.manifest.identity["inputs"].get("test"),
        "settings": inputs.settings.model_dump(mode="json", exclude=NOT_SETTINGS),
        "accuracy_losses": [],
        "summary": [],
    }
    numbers["accuracy_losses"] = accuracy_losses(numbers)
    numbers["summary"] = summary(numbers)
    return numbers


def _evaluation_block(evaluation: Evaluation) -> EvaluationBlock:
    """Leaves out confusion matrices and F1 by label, which evaluation.json has."""
    systems = {
        name: cast("Scores", {key: value for key, value in scores.items() if key not in {"confusion", "label_f1"}})
        for name, scores in evaluation["systems"].items()
    }
    names: dict[str, Any] = {"labels": len(evaluation["labels"]), "groups": list(evaluation["groups"])}
    return cast("EvaluationBlock", evaluation | names | {"systems": systems})


def _chance(quality: StudentQuality) -> float | None:
    """Returns the accuracy of always predicting the most frequent gold label."""
    counts = [row["n"] for row in quality["classes"]]
    return max(counts) / sum(counts) if sum(counts) else None


def _labels(inputs: ReportInputs) -> LabelFacts:
    labels = inputs.labels
    owners = labels.owners
    return {
        "n": len(labels.names),
        "shared": sum(len(teachers) > 1 for teachers in owners),
        "teachers": [
            {
                "teacher": name,
                "n": len(columns),
                "alone": sum(teachers == [name] for teachers in owners),
                "shown": [labels.names[column] for column in columns[:LABELS_SHOWN]],
                "content": inputs.contents[name],
            }
            for name, columns in labels.columns.items()
        ],
    }


def _data(inputs: ReportInputs, findings: Findings) -> DataFacts:
    facts = inputs.facts("read-corpus")
    counts = ("rows", "texts", "duplicates", "conflicts", "over_limit", "skipped")
    return {
        "parts": [
            {"part": name, **{key: part[key] for key in counts}, "labels": len(part["labels"])}
            for name, part in facts["parts"].items()
        ],
        "leaks": {part: count for part, (count, _) in facts["leaks"].items()},
        "cut": inputs.facts("cache-teachers").get("cut", {}),
        "cut_student": inputs.facts("train-student").get("cut"),
        "scripts": findings["scripts"],
    }


def _student(inputs: ReportInputs) -> dict[str, Any] | None:
    if "train-student" not in inputs.results:
        return None
    _, manifest = inputs.results["train-student"]
    weights = sum(file.bytes for file in manifest.files if file.path.endswith(".safetensors"))
    facts = {key: manifest.facts.get(key) for key in ("steps", "best_step", "best_score", "selected_by", "dtype")}
    return facts | {"bytes": weights, "libraries": manifest.made.get("libraries", {})}


# ---- the stages of this result


def teacher_costs(manifest: Record, store: Store, families: Mapping[str, str]) -> list[TeacherCost]:
    """Sums text-passes, tokens and seconds of the cached units of this experiment, by teacher."""
    teacher_of = {family: teacher for teacher, family in families.items()}
    costs: dict[str, TeacherCost] = {
        teacher: {"teacher": teacher, "seconds": 0.0, "text_passes": 0, "tokens": 0} for teacher in teacher_of.values()
    }
    paths = {file.path: store.root / f"{file.path.rpartition('-')[0]}.json" for file in manifest.files}
    records = store.records(list(paths.values()), complete=False)
    for file in manifest.files:
        record = records.get(paths[file.path])
        if record is None or "tokens" not in record.facts or "seconds" not in record.made:
            continue
        facts = record.facts
        passes = int(facts["last"]) - int(facts["first"]) + int(bool(facts["logits"]))
        cost = costs[teacher_of[family_in(file.path)]]
        cost["seconds"] = round(cost["seconds"] + float(record.made["seconds"]), 3)
        cost["text_passes"] += int(facts["rows"]) * passes
        cost["tokens"] += int(facts["tokens"]) * passes
    return list(costs.values())


def _stages(inputs: ReportInputs, executed: set[str]) -> list[StageFacts]:
    rows: list[StageFacts] = []
    for stage, (fingerprint, manifest) in inputs.results.items():
        record = inputs.store.record(inputs.store.folder(stage, fingerprint) / TIMING)
        seconds, units, reused = (record.facts[key] for key in ("seconds", "units", "found")) if record else [None] * 3
        state = "made in part" if reused else "made"
        if stage not in executed or (record and reused == units):
            state = "reused"
        rows.append(
            {
                "stage": stage,
                "fingerprint": fingerprint,
                "description": _description(stage, manifest),
                "bytes": sum(file.bytes for file in manifest.files),
                "seconds": seconds,
                "units": units,
                "reused_units": reused,
                "state": state,
            }
        )
    return rows


def _description(stage: str, manifest: Record) -> str:
    facts, config = manifest.facts, manifest.identity.get("config", {})
    descriptions = {
        "generate": lambda: f"{facts['texts']:,} texts, {facts['source']}",
        "read-corpus": lambda: f"texts: {', '.join(_part(*part) for part in facts['parts'].items())}",
        "train-teachers": lambda: f"{len(facts['teachers'])} teachers",
        "cache-teachers": lambda: f"{len(facts['families'])} teachers, {config['cache']['passes']} passes each",
        "cache-features": lambda: f"states of {len(facts['families'])} models",
        "fit-statistics": lambda: f"{len(facts['teachers'])} teachers",
        "weigh-teachers": lambda: f"weights: {config['targets']['teacher_weights']}",
        "build-targets": lambda: f"{facts['summary']['texts']:,} targets over {len(facts['labels'])} labels",
        "make-embeddings": lambda: f"for {len(facts['teachers'])} teachers",
        "train-student": lambda: f"{facts['steps']:,} steps, best at {facts['best_step']:,}",
        "report": lambda: str(facts["method"]),
    }
    return descriptions[stage]() if stage in descriptions else ""


def _part(name: str, facts: Mapping[str, Any]) -> str:
    return f"{facts['texts']:,} {'for the ' if name == 'teachers' else ''}{name}"


# ---- other students of this workspace


class OtherStudent(TypedDict):
    """A report of this workspace and the identities of its student and targets."""

    scores: StudentScores
    student: Identity
    targets: Identity


def other_students(inputs: ReportInputs) -> Iterator[OtherStudent]:
    """Yields every report of this workspace on the same labelled test texts, including this one."""
    store, test = inputs.store, inputs.manifest.identity["inputs"].get("test")
    for folder in store.folders("report") if test else []:
        manifest = store.manifest("report", folder.name)
        same_texts = manifest and manifest.identity.get("inputs", {}).get("test") == test
        if manifest is None or not same_texts or store.missing_files(manifest):
            continue
        student = _upstream(store, manifest, "train-student")
        targets = _upstream(store, student, "build-targets") if student else None
        scores = manifest.facts.get("scores")
        if scores:
            yield {
                "scores": cast(
                    "StudentScores", {"fingerprint": folder.name, "method": str(manifest.facts["method"]), **scores}
                ),
                "student": student.identity if student else {},
                "targets": targets.identity if targets else {},
            }


def _upstream(store: Store, manifest: Record, stage: str) -> Record | None:
    name = manifest.identity.get("upstream", {}).get(stage)
    return store.manifest(stage, name) if name else None


def best_supervised(fingerprint: str, students: list[OtherStudent]) -> StudentScores | None:
    """Returns the scores of the best student of the same encoder that was trained on gold labels."""
    encoder = next((_encoder(other) for other in students if other["scores"]["fingerprint"] == fingerprint), None)
    candidates = [
        other["scores"]
        for other in students
        if _mode(other) == "supervised" and (encoder is None or _encoder(other) == encoder)
    ]
    return max(candidates, key=lambda scores: scores["accuracy"], default=None)


def temperature_sweep(fingerprint: str, students: list[OtherStudent]) -> list[SweepPoint]:
    """Returns students of muka-soft that differ in temperature alone: this student's group, else the largest."""
    groups: dict[str, list[OtherStudent]] = {}
    for other in students:
        if _mode(other) == "soft" and "temperature" in other["targets"]["config"]["targets"]:
            groups.setdefault(_all_but_temperature(other), []).append(other)

    def order(item: tuple[str, list[OtherStudent]]) -> tuple[bool, int, str]:
        key, group = item
        return all(other["scores"]["fingerprint"] != fingerprint for other in group), -len(group), key

    group = min(groups.items(), key=order)[1] if groups else []
    points: list[SweepPoint] = [
        {
            "temperature": other["targets"]["config"]["targets"]["temperature"],
            "ours": other["scores"]["fingerprint"] == fingerprint,
            **other["scores"],
        }
        for other in group
    ]
    return sorted(points, key=lambda point: (point["temperature"], point["fingerprint"])) if len(points) > 1 else []


def _mode(other: OtherStudent) -> str:
    return str(other["targets"].get("config", {}).get("targets", {}).get("mode", ""))


def _encoder(other: OtherStudent) -> Any:
    return other["student"].get("inputs", {}).get("encoder")


def _all_but_temperature(other: OtherStudent) -> str:
    targets, student = other["targets"], {key: value for key, value in other["student"].items() if key != "upstream"}
    settings = {key: value for key, value in targets["config"]["targets"].items() if key != "temperature"}
    return canonical([settings, targets["inputs"], targets["upstream"], targets["version"], student])
