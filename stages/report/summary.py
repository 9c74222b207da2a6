"""Writes the page's two summary sentences: the student's accuracy next to others, and the largest loss of accuracy.

Losses have three steps: wrong teachers, targets that follow the wrong teacher, and a student that does not fit its
targets.
"""

from __future__ import annotations

import math
import unicodedata
from collections import Counter
from collections.abc import Iterable
from functools import cache

from amalgam.stages.report.blocks import AccuracyLoss, EvaluationBlock, ReportJson

NORMAL_95 = 1.96
"""Standard errors of a 95 % interval."""


def interval(share: float, n: int) -> tuple[float, float]:
    """Returns the 95 % Wilson interval of a share."""
    if not n:
        return 0.0, 1.0
    middle = (share + NORMAL_95**2 / (2 * n)) / (1 + NORMAL_95**2 / n)
    reach = NORMAL_95 / (1 + NORMAL_95**2 / n) * math.sqrt(share * (1 - share) / n + NORMAL_95**2 / (4 * n * n))
    return max(0.0, middle - reach), min(1.0, middle + reach)


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def summary(numbers: ReportJson) -> list[str]:
    evaluation = numbers["evaluation"]
    if evaluation is None:
        missing = f"The accuracy of the student ({numbers['method']}) is unknown: there are no labelled test texts."
        return [f"{missing} Set corpus.test.", _teacher_choice(numbers)]
    return [_accuracy(numbers, evaluation), _largest_loss(numbers)]


def _accuracy(numbers: ReportJson, evaluation: EvaluationBlock) -> str:
    system, systems, n = evaluation["system"], evaluation["systems"], evaluation["n"]
    accuracy = systems[system]["accuracy"]
    low, high = interval(accuracy, n)
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
    measured = f"{percent(accuracy)} accuracy on {n:,} test texts (95 % interval {100 * low:.1f} to {100 * high:.1f})"
    return f"{subject} has {measured}{'; ' if others else ''}{_listed(others)}."


def accuracy_losses(numbers: ReportJson) -> list[AccuracyLoss]:
    """Returns the accuracy lost at each step from the teachers to the student."""
    quality, targets_seen, evaluation = numbers["student_quality"], numbers["target_quality"], numbers["evaluation"]
    if not evaluation or not quality or _supervised(numbers):
        return []
    steps: list[tuple[str, float, int, str]] = []
    choice = targets_seen.get("choice") if targets_seen else None
    if choice and choice["n"] and targets_seen:
        where, targets = "training texts with gold labels", targets_seen["targets"]
        steps.append(("teachers", choice["oracle"] / choice["n"], choice["n"], where))
        if targets["right"] is not None:
            steps.append(("choice", targets["right"] / targets["labelled"], targets["labelled"], where))
    elif quality["teachers"]["oracle"] is not None:
        steps.append(("teachers", quality["teachers"]["oracle"] / evaluation["n"], evaluation["n"], "test texts"))
    accuracy = evaluation["systems"][evaluation["system"]]["accuracy"]
    last = "fit" if len(steps) > 1 or not steps else "choice and fit"
    steps.append((last, accuracy, evaluation["n"], "test texts"))
    losses: list[AccuracyLoss] = []
    before = 1.0
    for step, right, n, where in steps:
        losses.append({"step": step, "right": right, "n": n, "where": where, "lost": before - right})
        before = right
    return losses


def _supervised(numbers: ReportJson) -> bool:
    """Returns whether the student learned from gold labels alone."""
    return numbers["learns"] and numbers["settings"]["targets"]["mode"] == "supervised"


REASONS = {
    "teachers": "wrong teachers: with the right teacher always chosen, accuracy on the {where} would be {right}",
    "choice": "the choice of the teacher: the targets have {right} accuracy, the best choice {before} (on the {where})",
    "fit": "the student's fit: {right} accuracy on the test texts, {before} for its targets on the {before_where}",
    "choice and fit": "the choice of the teacher and the student's fit, which cannot be separated here: {right} "
    "accuracy, {before} for the best choice on the {before_where}",
}

UNTRAINED = "the choice of the teacher: {right} accuracy on the test texts, {before} for the best choice"


def _largest_loss(numbers: ReportJson) -> str:
    losses = numbers["accuracy_losses"]
    if _supervised(numbers):
        return "The student learned from gold labels, not from teachers, so its accuracy losses are its own."
    if len(losses) < 2:
        return "Accuracy losses cannot be separated: the method uses no teachers."
    index = max(range(len(losses)), key=lambda index: losses[index]["lost"])
    loss, before = losses[index], losses[max(index - 1, 0)]
    if loss["lost"] <= 0:
        return "These numbers show no accuracy loss from the teachers to the student."
    reasons = REASONS if numbers["learns"] else REASONS | {"choice and fit": UNTRAINED}
    reason = reasons[loss["step"]].format(
        right=percent(loss["right"]), before=percent(before["right"]), where=loss["where"], before_where=before["where"]
    )
    return f"Largest loss, {100 * loss['lost']:.1f} points of accuracy: {reason}."


def _teacher_choice(numbers: ReportJson) -> str:
    targets = numbers["target_quality"]
    choice = targets.get("choice") if targets else None
    if choice and choice["n"]:
        right, oracle = percent(choice["right"] / choice["n"]), percent(choice["oracle"] / choice["n"])
        return (
            f"Of {choice['n']:,} training texts with gold labels, the leading teacher has the label of {right}; "
            f"with the right teacher always chosen, accuracy would be {oracle}."
        )
    return "Accuracy losses are unknown too: no sampled training text has a gold label of a teacher."


def _listed(parts: list[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else "".join(parts)


# ---- writing systems

SCRIPT_TEXTS = 5_000
"""Texts of a part, the first in key order, whose writing systems are counted."""

SCRIPT_LETTERS = 300
"""Letters of a text that are read."""

SCRIPTS = {"CJK": "Han", "HIRAGANA": "Japanese kana", "KATAKANA": "Japanese kana", "FULLWIDTH": "Latin"}


def scripts_of(texts: Iterable[str]) -> dict[str, int]:
    """Counts texts by writing system, the most frequent first."""
    counts = Counter(_script(text[:SCRIPT_LETTERS]) for text in texts)
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _script(text: str) -> str:
    letters: Counter[str] = Counter()
    for letter, count in Counter(text).items():
        name = _script_of_letter(letter)
        if name:
            letters[name] += count
    return min(letters, key=lambda name: (-letters[name], name)) if letters else "no letters"


@cache
def _script_of_letter(letter: str) -> str:
    if not letter.isalpha():
        return ""
    word = unicodedata.name(letter, "OTHER").split()[0]
    return SCRIPTS.get(word, word.capitalize())
