"""Chooses the next step after a verdict, and writes its command."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from amalgam.stages.report.causes import LEAST_TEXTS
from amalgam.stages.report.verdict_types import TO_LABEL, Cause, Decision, Next, Rival, VerdictInputs


def next_step(
    inputs: VerdictInputs, decision: Decision, causes: Sequence[Cause], rivals: Sequence[Rival], needed: int | None
) -> Next:
    codes = {cause["code"] for cause in causes}
    if decision == "ship":
        student = "" if inputs.page == "student" else f" --student students/{inputs.page}"
        return {"text": "Use the student.", "command": f'amalgam predict "a text"{student}'}
    if decision == "cannot say" and not inputs.n:
        return _label_texts(inputs)
    if decision == "cannot say" and "tie" in codes:
        return {"text": "Decide by size and speed: the student is one model."}
    if decision == "cannot say" and "few-steps" not in codes:
        goal = f"about {needed:,}" if needed else f"at least {4 * LEAST_TEXTS}"
        return {"text": f"Label more test texts, {goal} in all, and run `amalgam report` again."}
    better = [rival for rival in rivals if rival["kind"] == "student" and rival["student_is"] == "worse"]
    if better:
        best = min(better, key=lambda rival: rival["mean"])["name"]
        return {"text": f"Use student {best} instead.", "command": f"amalgam report {best} {inputs.page}"}
    return _remedy(inputs, codes)


def _remedy(inputs: VerdictInputs, codes: set[str]) -> Next:
    """Returns the remedy of the most likely cause; the teachers need a look where it is None."""
    remedies: dict[str, tuple[str, dict[str, str]] | None] = {
        "few-steps": ("Train long enough.", {"student.epochs": "auto", "student.name": "longer"}),
        "choice-not-trusted": None,
        "teacher-loses": None,
        "teachers-wrong": None,
        "wrong-choice": ("Use another rule.", {"student.method": "amalgam", "student.name": "amalgam"}),
        "long-texts": ("Read more of each text.", {"student.max_tokens": "256", "student.name": "long"}),
    }
    if inputs.method == "amalgam":
        remedies["wrong-choice"] = None
    longer = "Train longer.", {"student.epochs": f"{2 * inputs.epochs}", "student.name": "longer"}
    remedy = next((remedies[code] for code in remedies if code in codes), longer)
    if remedy is None and inputs.teachers:
        return {"text": "Look at the teachers: one may be wrong or not needed.", "command": "amalgam audit"}
    text, overrides = remedy or longer
    return {"text": text, "command": _run(inputs, overrides)}


def _label_texts(inputs: VerdictInputs) -> Next:
    count = inputs.unlabelled["to_label"] if inputs.unlabelled else 0
    if not count:
        return {"text": "Label about 200 texts, and set corpus.test and corpus.label."}
    file = f"reports/{inputs.page}{TO_LABEL}"
    command = _run(inputs, {"corpus.test": file, **({} if inputs.label else {"corpus.label": "label"})})
    return {"text": f"Label the {count:,} texts of {file}, then run the command.", "command": command}


def _run(inputs: VerdictInputs, new: Mapping[str, str]) -> str:
    overrides = {**inputs.overrides, **new}
    return shlex.join(["amalgam", "run", *(f"{name}={value}" for name, value in overrides.items())])
