"""The inputs of the verdict, and conditions on their counts that its rule, the next step and the sentences share."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from amalgam.data.keys import of_one_teacher
from amalgam.stages.common.given_labels import LEAST_LABELS
from amalgam.stages.common.intervals import errors_of, interval
from amalgam.stages.common.training.schedule import Schedule, StudentFacts
from amalgam.stages.report import verdict_types as types
from amalgam.stages.report.json_types import EvaluatedSystems, LabelQuality, ReportJson, random_texts

LEAST_TEXTS = 50
"""Least labelled test texts of a student to ship; least labelled training texts for losses and a harmless teacher."""

LEAST_OF_LABEL = 10
"""Least texts of a label or of a teacher's labels that are looked at alone."""

MOST_LOST = 0.05
"""Share of the labels, and of the texts, that a student to ship may lose: one label of 20."""

MOST_LEARNED = 0.02
"""Share of the test texts that training may have used with their gold labels, or that may be generated."""

MOST_OUTSIDE = 0.05
"""Share of the labelled texts that no accuracy counts, because no teacher has their label, without a caution."""

LEAST_EXPECTED = 5
"""Least texts for which the ensemble predicts labels that no labelled text has, so that gold labels are in doubt."""

WEAK_TEACHERS = 2 / 3
"""Accuracy of the teachers on their own labels below which they are weak, at the upper end of the interval."""


@dataclass(frozen=True, kw_only=True)
class VerdictInputs:
    """The report, and facts about the student that it lacks."""

    report: ReportJson
    """All sections but the verdict."""
    rivals: Sequence[types.RivalCounts]
    """Rivals of the evaluation, and the other students."""
    student: StudentFacts
    automatic: Schedule
    """The schedule that `auto` would choose."""
    teacher_steps: int | None = None
    """The fewest steps of a teacher that this experiment trained; None without one."""
    weights_unused: bool = False
    """Whether the teachers' evidence was dropped, and each text's own confidences were used."""
    generates: bool = False
    """Whether stage generate wrote the training texts, which are then no test texts."""
    file: str = ""
    """Name of the experiment file; empty without one."""
    remade: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """By student without a folder: the overrides that train it again; empty if they are unknown."""
    folders: Collection[str] = ()
    """Names in students/, which no proposed student has."""
    overrides: Mapping[str, object] = field(default_factory=dict)
    """Overrides of this run, which the next command repeats."""

    @property
    def n(self) -> int:
        """Returns the number of labelled test texts, without selected ones."""
        return random_texts(self.report["evaluation"])

    @property
    def random(self) -> str:
        """Returns the word for these texts if others were selected, else nothing."""
        return "random " if "selected" in (self.report["evaluation"] or {}) else ""

    @property
    def learned(self) -> types.LearnedTexts | None:
        return too_many_learned(self.report["evaluation"])

    @property
    def labels(self) -> Sequence[LabelQuality]:
        """Returns the teachers' labels with their counts among the n texts; empty without any."""
        quality = self.report["student_quality"]
        return quality["classes"] if quality and self.n else ()


def too_many_learned(evaluation: EvaluatedSystems | None) -> types.LearnedTexts | None:
    """Returns the test texts that were learned with gold labels or generated, if they are too many to compare systems.

    `evaluation` may be the facts of a report's manifest.
    """
    learned = evaluation.get("learned") if evaluation else None
    if not learned or not (learned["labelled"] or learned.get("generated")):
        return None
    return learned if learned["texts"] > MOST_LEARNED * learned["of"] else None


def never_right(inputs: VerdictInputs) -> list[LabelQuality]:
    """Returns the labels with at least LEAST_OF_LABEL test texts that the student never predicts right."""
    return [row for row in inputs.labels if row["n"] >= LEAST_OF_LABEL and not row["right"]]


def many_lost(lost: Sequence[LabelQuality], inputs: VerdictInputs) -> bool:
    """Returns whether lost labels are more than MOST_LOST of the tested labels or of the test texts."""
    return _are_many([row["n"] for row in lost], [row["n"] for row in inputs.labels], inputs.n)


def _are_many(lost: Sequence[int], labels: Sequence[int], texts: int) -> bool:
    """Compares lost labels with all labels that have texts, and their texts with all texts."""
    return len(lost) > MOST_LOST * sum(n > 0 for n in labels) or sum(lost) > MOST_LOST * texts


def weak_teachers(rivals: Sequence[types.Rival]) -> types.Answered | None:
    """Returns the teachers' accuracy on their own labels if they are weak; of a single teacher it is the ensemble's."""
    used = [rival for rival in rivals if rival["kind"] == "teacher on its own labels"]
    used = used or [rival for rival in rivals if rival["kind"] == "ensemble" and not rival.get("selected")]
    n, right, frequent = sum(rival["n"] for rival in used), sum(rival["right"] for rival in used), most_frequent(rivals)
    texts = min(n, frequent["n"]) if frequent else n  # teachers with the same labels have the same texts
    return {"n": n, "right": right} if n and interval(right / n, texts)[1] < WEAK_TEACHERS else None


def most_frequent(rivals: Sequence[types.Rival]) -> types.Rival | None:
    """Returns the rival that always predicts the most frequent label."""
    return next((rival for rival in rivals if rival["kind"] == "most frequent label"), None)


def untested_teachers(rivals: Sequence[types.RivalCounts]) -> list[str]:
    return [rival["name"] for rival in rivals if rival["kind"] == "teacher on its own labels" and not rival["n"]]


def absent_labels(rows: Sequence[types.LabelOccurrence]) -> dict[str, list[types.LabelOccurrence]]:
    """Returns the teachers of whose own labels, which no other has, no text exists though the ensemble predicts them.

    The gold labels may be older than the teacher.
    """
    if sum(row["n"] for row in rows) < LEAST_LABELS:
        return {}
    by_label = {row["label"]: row for row in rows}
    alone = of_one_teacher((row["label"], row["teachers"]) for row in rows)
    of_teachers = [(teacher, [by_label[label] for label in labels]) for teacher, labels in alone.items()]
    return {
        teacher: labels
        for teacher, labels in of_teachers
        if not any(row["n"] for row in labels) and predicted_by_ensemble(labels) >= LEAST_EXPECTED
    }


def predicted_by_ensemble(rows: Sequence[types.LabelOccurrence]) -> int:
    return sum(row["ensemble"] or 0 for row in rows)


def lost_teachers(rivals: Sequence[types.Rival]) -> list[types.Rival]:
    """Returns the teachers on whose labels the student's interval ends below half of the teacher's accuracy.

    Both are measured, so the bound of the difference decides too; all teachers are compared at once.
    """
    large = [rival for rival in rivals if rival["kind"] == "teacher on its own labels" and rival["n"] >= LEAST_OF_LABEL]
    errors = errors_of(len(large))
    return [rival for rival in large if _is_below_half(rival, errors)]


def better_on_own_labels(rivals: Sequence[types.Rival]) -> list[types.Rival]:
    """Returns the teachers that are significantly better on their own labels, without those of `lost_teachers`."""
    own, lost = [rival for rival in rivals if rival["kind"] == "teacher on its own labels"], lost_teachers(rivals)
    return [rival for rival in own if rival["student_is"] == "worse" and rival not in lost]


def _is_below_half(rival: types.Rival, errors: float) -> bool:
    n, student, teacher = rival["n"], rival["student_right"] / rival["n"], rival["right"] / rival["n"]
    difference, variance = student - teacher / 2, student * (1 - student) + teacher * (1 - teacher) / 4
    if rival["gained"] is not None:
        both = student - rival["gained"] / n
        variance -= both - student * teacher
    is_clear = difference + errors * math.sqrt(max(variance, 0) / n) < 0
    return is_clear and interval(student, n, errors)[1] < teacher / 2


def never_predicted(quality: types.UnlabelledQuality) -> list[str]:
    """Returns the labels that the student never predicts, though LEAST_OF_LABEL texts have them in the reference."""
    return [row["label"] for row in quality["labels"] if not row["predicted"] and row["expected"] >= LEAST_OF_LABEL]


def many_unpredicted(quality: types.UnlabelledQuality) -> bool:
    """Returns whether the labels of `never_predicted` are more than MOST_LOST of the reference's labels or texts."""
    expected = {row["label"]: row["expected"] for row in quality["labels"]}
    return _are_many([expected[label] for label in never_predicted(quality)], [*expected.values()], quality["n"])


def unpredicted_teachers(quality: types.UnlabelledQuality) -> dict[str, list[types.LabelShare]]:
    """Returns the teachers of whose labels the student predicts none, with their labels."""
    labels = quality["labels"]
    teachers = dict.fromkeys(name for row in labels for name in row["teachers"])
    labels_of = {teacher: [row for row in labels if teacher in row["teachers"]] for teacher in teachers}
    return {teacher: rows for teacher, rows in labels_of.items() if not any(row["predicted"] for row in rows)}
