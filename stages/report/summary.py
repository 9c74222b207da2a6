"""The verdict in two sentences: how right the student is beside the others, and what keeps it from more.

What is lost is counted in three steps, each a number that exists: teachers that are wrong about their own labels, a
target that follows the wrong teacher, and a student that does not give its target on new texts.
"""

from __future__ import annotations

import math
from typing import Any

Found = dict[str, Any]


SURE = 1.96
"""Standard errors of a 95 % interval."""


def verdict(numbers: Found) -> list[str]:
    evaluation = numbers["evaluation"]
    if not evaluation:
        return [_unmeasured(numbers), _unmeasured_limit(numbers)]
    return [_standing(numbers, evaluation), _limit(numbers)]


def interval(right: float, n: int) -> tuple[float, float]:
    """Wilson's, of a share."""
    if not n:
        return 0.0, 1.0
    middle = (right + SURE**2 / (2 * n)) / (1 + SURE**2 / n)
    reach = SURE / (1 + SURE**2 / n) * math.sqrt(right * (1 - right) / n + SURE**2 / (4 * n * n))
    return max(0.0, middle - reach), min(1.0, middle + reach)


def _standing(numbers: Found, evaluation: Found) -> str:
    judged, systems, n = evaluation["judged"], evaluation["systems"], evaluation["n"]
    low, high = interval(systems[judged]["accuracy"], n)
    said = f"The {judged if judged.startswith('student') else f'method judged, {judged},'} is right on "
    said += f"{systems[judged]['accuracy']:.3f} of {n:,} test texts (95 % interval {low:.3f} to {high:.3f})"
    rivals = []
    if "ensemble" in systems and judged != "ensemble":
        rivals.append(f"the teachers' ensemble on {systems['ensemble']['accuracy']:.3f}")
    teachers = {
        name: one["accuracy"] for name, one in systems.items() if name.startswith("teacher:") and name != judged
    }
    if teachers:
        best = max(teachers, key=lambda name: teachers[name])
        rivals.append(f"the best single teacher ({best.removeprefix('teacher:')}) on {teachers[best]:.3f}")
    ceiling = numbers["supervised"]
    if ceiling and ceiling["fingerprint"] != numbers["fingerprint"]:
        rivals.append(f"a student that learned from the gold labels on {ceiling['accuracy']:.3f}")
    return said + (f"; {_listed(rivals)}" if rivals else "") + "."


def losses(numbers: Found) -> list[Found]:
    """From all right to the student, step by step; each `lost` is a share of texts, and may be negative."""
    judged, taught, evaluation = numbers["judged"], numbers["taught"] or {}, numbers["evaluation"]
    if not evaluation or _supervised(numbers):
        return []
    steps: list[tuple[str, float, int, str]] = []
    choice, targets = taught.get("choice"), taught.get("targets", {})
    if choice and choice["n"]:
        steps.append(("teachers", choice["oracle"] / choice["n"], choice["n"], "training texts with gold labels"))
        if targets.get("right") is not None:
            steps.append(("choice", targets["right"] / targets["labelled"], targets["labelled"], steps[0][3]))
    elif judged["teachers"]["oracle"] is not None:
        steps.append(("teachers", judged["teachers"]["oracle"] / evaluation["n"], evaluation["n"], "test texts"))
    accuracy = evaluation["systems"][evaluation["judged"]]["accuracy"]
    last = "fit" if len(steps) > 1 or not steps else "choice and fit"
    steps.append((last, accuracy, evaluation["n"], "test texts"))
    before, rows = 1.0, []
    for name, right, n, where in steps:
        rows.append({"step": name, "right": right, "n": n, "where": where, "lost": before - right})
        before = right
    return rows


def _supervised(numbers: Found) -> bool:
    """Nothing is lost on a way from teachers by a student that learned from gold labels alone."""
    return bool(numbers["learns"]) and numbers["settings"]["targets"]["mode"] == "supervised"


REASONS = {
    "teachers": "teachers' own accuracy: even with the right teacher always chosen, {right:.3f} of the {where} "
    "would be right",
    "choice": "choice of the teacher: with the right one always chosen {before:.3f} of the {where} would be right, "
    "the targets are right on {right:.3f}",
    "fit": "student's fit: it is right on {right:.3f} of the test texts, its targets on {before:.3f} of the "
    "training texts",
    "choice and fit": "choice of the teacher and the student's fit together: with the right teacher always chosen "
    "{before:.3f} of the {before_where} would be right (nothing here tells the two apart)",
}

UNTRAINED = "choice of the teacher: with the right teacher always chosen {before:.3f} of the test texts would be right"

SUPERVISED = "It learned from the gold labels and from no teacher: what it lacks is its own."


def _limit(numbers: Found) -> str:
    rows = numbers["losses"]
    if _supervised(numbers):
        return SUPERVISED
    if len(rows) < 2:
        return "What limits it cannot be told apart: there are no teachers whose answers it was made from."
    place = max(range(len(rows)), key=lambda index: rows[index]["lost"])
    row, last = rows[place], rows[max(place - 1, 0)]
    if row["lost"] <= 0:
        return "Nothing is lost on the way from the teachers to it that these numbers could show."
    reasons = REASONS if numbers["learns"] else REASONS | {"choice and fit": UNTRAINED}
    said = reasons[row["step"]].format(before=last["right"], before_where=last["where"], **row)
    return f"What limits it most is the {said} ({100 * row['lost']:.1f} points of accuracy)."


def _unmeasured(numbers: Found) -> str:
    return (
        f"How right the student ({numbers['method']}) is cannot be said here: the experiment has no labelled "
        "test texts (corpus.test)."
    )


def _unmeasured_limit(numbers: Found) -> str:
    choice = (numbers["taught"] or {}).get("choice")
    if choice and choice["n"]:
        right, oracle = choice["right"] / choice["n"], choice["oracle"] / choice["n"]
        return (
            f"Of {choice['n']:,} training texts with gold labels, a teacher that has the label leads on {right:.3f}, "
            f"and with the right teacher always chosen {oracle:.3f} would be right."
        )
    return (
        "What limits it cannot be told either: no training text that was looked at has a gold label that a teacher has."
    )


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
