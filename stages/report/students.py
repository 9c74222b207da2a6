"""Finds the other students of a workspace that were measured on the same test texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from amalgam.pipeline.config.schema import ExperimentConfig
from amalgam.pipeline.storage.small_files import canonical
from amalgam.pipeline.storage.store import MANIFEST, Record, Store
from amalgam.stages.report.conditions import too_many_learned
from amalgam.stages.report.json_types import StudentScores, SweepPoint
from amalgam.stages.report.verdict_types import LearnedTexts, RivalCounts

TARGET_STAGES = {"build-targets", "weigh-teachers"}
"""Stages between the teachers' predictions and the student: their settings are compared, not their results."""


@dataclass(frozen=True)
class OtherStudent:
    """A student that this workspace measured on the same labelled test texts, in its report or for a gate."""

    scores: StudentScores
    student: str | None
    """Fingerprint of the student; None for a method without training."""
    right_hex: str | None
    """Bits of the test texts that the student predicts right."""
    supervised: bool
    """Whether its targets are gold labels alone."""
    learned: LearnedTexts | None
    """The test texts that it learned, if they are too many for a comparison."""
    encoder: Any
    temperature: float | None
    rest: str
    """All other inputs of the student and its targets."""
    settings: Mapping[str, Any]
    """The fields of the experiment that the student and its targets depend on."""
    inputs: str
    """All inputs of the student and its targets that are no settings."""


def complete_reports(store: Store) -> Iterator[tuple[str, Record]]:
    """Yields the fingerprint and the manifest of every report whose files exist."""
    for folder in store.folders("report"):
        manifest = store.manifest("report", folder.name)
        if manifest is not None and not store.missing_files(manifest):
            yield folder.name, manifest


def other_students(store: Store, test: str, selected: str | None, rows: str | None) -> Iterator[OtherStudent]:
    """Yields every report of this workspace on the same labelled test texts, including the current one.

    `test`, `selected` and `rows` are the digests of the labels, of the selection of texts, and of the texts measured.
    """
    for fingerprint, manifest in complete_reports(store):
        if not manifest.facts.get("scores"):
            continue
        own_texts = [manifest.identity.get("inputs", {}).get(name) for name in ("test", "picked")]
        if [*own_texts, manifest.facts.get("rows")] != [test, selected, rows]:
            continue
        student = _upstream(store, manifest.identity, "train-student")
        targets = _upstream(store, student, "build-targets")
        made_by = student, targets, _upstream(store, targets, "weigh-teachers")
        settings = dict(targets.get("config", {}).get("targets", {}))
        temperature = settings.pop("temperature", None)
        inputs = [targets.get(key) for key in ("inputs", "upstream", "version")]
        without_upstream = {key: value for key, value in student.items() if key != "upstream"}
        scores: Any = {"fingerprint": fingerprint, "method": manifest.facts["method"], **manifest.facts["scores"]}
        yield OtherStudent(
            scores=scores,
            student=manifest.identity.get("upstream", {}).get("train-student"),
            right_hex=manifest.facts.get("right_hex"),
            supervised=manifest.facts["supervised"],
            learned=too_many_learned(manifest.facts),
            encoder=student.get("inputs", {}).get("encoder"),
            temperature=temperature,
            rest=canonical([settings, *inputs, without_upstream]),
            settings={name: value for identity in made_by for name, value in _settings(identity)},
            inputs=canonical([_other_inputs(identity) for identity in made_by[:2]]),
        )


def _settings(identity: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the fields of the experiment in an identity; `config` has a section for each."""
    for section, fields in identity.get("config", {}).items():
        if isinstance(fields, Mapping):
            yield from ((f"{section}.{name}", value) for name, value in fields.items())


def _other_inputs(identity: Mapping[str, Any]) -> list[Any]:
    upstream = {name: value for name, value in identity.get("upstream", {}).items() if name not in TARGET_STAGES}
    return [identity.get("inputs"), upstream, identity.get("version")]


def damaged_reports(store: Store, file_option: str) -> list[str]:
    """Returns a note for each report whose record cannot be read."""
    unread = [folder for folder in store.folders("report") if store.manifest("report", folder.name) is None]
    damaged = [folder.name for folder in unread if MANIFEST in store.backend.names(store.inside(folder))]
    consequence = f"is damaged: its student is not compared; run `amalgam verify{file_option}`"
    return [f"report/{name}/{MANIFEST} {consequence}" for name in damaged]


def _upstream(store: Store, identity: Mapping[str, Any], stage: str) -> Mapping[str, Any]:
    """Returns the identity of an earlier stage's result; empty if there is none."""
    name = identity.get("upstream", {}).get(stage)
    manifest = store.manifest(stage, name) if name else None
    return manifest.identity if manifest else {}


def best_supervised(fingerprint: str, students: list[OtherStudent]) -> StudentScores | None:
    """Returns the scores of the best student of the same encoder that was trained on gold labels."""
    encoder = next((student.encoder for student in students if student.scores["fingerprint"] == fingerprint), None)
    supervised = [student for student in students if student.supervised and not student.learned]
    candidates = [student.scores for student in supervised if encoder is None or student.encoder == encoder]
    return max(candidates, key=lambda scores: float(scores["accuracy"]), default=None)


def temperature_sweep(fingerprint: str, students: list[OtherStudent]) -> list[SweepPoint]:
    """Returns students of muka-soft that differ in temperature alone: this student's group, else the largest."""
    # A student may have several reports: that of the page counts.
    ordered = sorted(students, key=lambda student: student.scores["fingerprint"] == fingerprint)
    groups: dict[str, list[SweepPoint]] = {}
    for student in {student.student: student for student in ordered}.values():
        if student.temperature is not None:
            ours = student.scores["fingerprint"] == fingerprint
            point: SweepPoint = {"temperature": student.temperature, "ours": ours, **student.scores}
            groups.setdefault(student.rest, []).append(point)

    def order(rest: str) -> tuple[bool, int, str]:
        return not any(point["ours"] for point in groups[rest]), -len(groups[rest]), rest

    points = groups[min(groups, key=order)] if groups else []
    return sorted(points, key=lambda point: (point["temperature"], point["fingerprint"])) if len(points) > 1 else []


# ---- rivals


def changed_settings(ours: OtherStudent | None, other: OtherStudent) -> dict[str, Any]:
    """Returns the overrides that make the other student from our experiment; none if other inputs differ too."""
    if ours is None or ours.inputs != other.inputs:
        return {}
    return {name: value for name, value in other.settings.items() if ours.settings.get(name) != value}


def named_students(
    students: Sequence[OtherStudent], ours: str | None, names: Mapping[str, str]
) -> list[tuple[str, OtherStudent]]:
    """Returns the other students, each once, by name."""
    # A student may have several reports: the last counts. A gate does not know the test texts that it learned.
    ordered = sorted(students, key=lambda student: (bool(student.learned), bool(student.right_hex)))
    others = {student.student: student for student in ordered if student.student and student.student != ours}
    named = [
        (names.get(fingerprint, _unnamed(student.scores["method"], fingerprint)), student)
        for fingerprint, student in others.items()
    ]
    return sorted(named, key=lambda entry: entry[0])


def rival_names(experiment: ExperimentConfig, store: Store, names: Mapping[str, str]) -> list[str]:
    """Returns the rivals that a report of this experiment can have, on any test texts; `names` as in named_students."""
    if not experiment.student.learns:
        return []
    teachers = experiment.teacher_names
    students = {*names.values()} | _unnamed_students(store, names)
    return [
        *(["ensemble"] if teachers else []),
        "zero-shot",
        *(teachers if len(teachers) > 1 else []),
        *sorted(students - {experiment.student.name}),
    ]


def _unnamed_students(store: Store, names: Mapping[str, str]) -> set[str]:
    """Returns names of the reported students without a folder."""
    reports = [store.manifest("report", folder.name) for folder in store.folders("report")]
    students = [(report, report.identity.get("upstream", {}).get("train-student")) for report in reports if report]
    return {
        _unnamed(report.facts["method"], student) for report, student in students if student and student not in names
    }


def _unnamed(method: object, fingerprint: str) -> str:
    return f"{method} {fingerprint[:8]}"


def student_rivals(right: int, right_hex: str | None, students: list[tuple[str, OtherStudent]]) -> list[RivalCounts]:
    """Compares the student, which has `right` texts right, with the others, text by text if the bits are stored."""
    rivals: list[RivalCounts] = []
    for name, student in students:
        n, gained, lost = student.scores["n"], None, None
        if right_hex and student.right_hex:
            gained, lost = gained_lost(right_hex, student.right_hex)
        rivals.append(
            {
                "name": name,
                "kind": "supervised student" if student.supervised else "student",
                "n": n,
                "student_right": right,
                "right": round(student.scores["accuracy"] * n),
                "gained": gained,
                "lost": lost,
            }
        )
        if student.student:
            rivals[-1]["fingerprint"] = student.student
        if student.learned:
            rivals[-1]["learned"] = student.learned
    return rivals


def gained_lost(first: str, second: str) -> tuple[int, int]:
    """Counts the texts that only the first system predicts right, and only the second; each is a `right_hex`."""
    a, b = int(first, 16), int(second, 16)
    return (a & ~b).bit_count(), (b & ~a).bit_count()
