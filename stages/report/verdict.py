"""Decides whether to ship a student, or that the texts do not suffice, with the causes and the next command.

docs/verdict.md has the rule. It reads counts alone: of the student and each rival on the same labelled test texts, or
without labels the agreement with the targets.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NotRequired, TypedDict

from amalgam.data.keys import shown_names
from amalgam.stages.common.intervals import (
    bounds,
    errors_of,
    interval,
    paired,
    percent,
    texts_needed,
    unpaired,
)
from amalgam.stages.common.training.schedule import FEW_STEPS
from amalgam.stages.weigh_teachers.weigh import AccuracyEstimate

Decision = Literal["ship", "do not ship", "cannot say"]

Kind = Literal[
    "ensemble",
    "zero-shot",
    "teacher",
    "teacher on its own labels",
    "student",
    "supervised student",
    "most frequent label",
]

Standing = Literal["better", "worse", "not clearly different"]

BLOCKING: tuple[Kind, ...] = ("ensemble", "zero-shot", "teacher", "student", "most frequent label")
"""Rivals that cost nothing more than the student: a significantly better one decides against the student."""

BASELINES: tuple[Kind, ...] = ("ensemble", "zero-shot", "most frequent label")
"""The first of these that exists is the baseline, which a student must beat or equal."""

EQUAL = 0.01
"""Accuracy by which a student may be worse than the baseline, at the lower end of the interval."""

LEAST_TEXTS = 50
"""Least labelled test texts of a student to ship."""

LEAST_OF_LABEL = 10
"""Least texts of a label or of a teacher's labels that are looked at alone."""

LEAST_AGREEMENT = 0.5
"""Without labelled texts: least agreement with the targets, at the upper end of the interval."""

MANY_LONG, SKEWED = 0.2, 0.8
"""Share of truncated texts, and share of the most frequent label, from which they are named as a cause."""

TO_LABEL = ".to-label.csv"
"""End of the name of the file with the texts to label."""

PREDICTED_COLUMNS = ("student", "ensemble", "why")
"""Columns of this file that follow the column to fill."""

SHOWN = 5
"""Labels named in a sentence."""


# ---- types


class RivalCounts(TypedDict):
    """The student and another system on the same n test texts."""

    name: str
    kind: Kind
    n: int
    student_right: int
    right: int
    gained: int | None
    """Texts on which only the student is right; None if the two cannot be compared text by text."""
    lost: int | None


class Rival(RivalCounts):
    """`mean`: accuracy of the student minus that of the rival; `low` and `high`: its interval."""

    mean: float
    low: float
    high: float
    student_is: Standing


class Cause(TypedDict):
    code: str
    text: str


class Next(TypedDict):
    """The next step: what to do, and the command that does it."""

    text: str
    command: NotRequired[str]


class Verdict(TypedDict):
    decision: Decision
    reasons: list[str]
    causes: list[Cause]
    cautions: list[str]
    """Remarks on which the decision does not depend."""
    next: Next
    rivals: list[Rival]
    texts_needed: int | None
    """About how many labelled test texts would decide; None if the decision is clear or the number is too large."""


class Answered(TypedDict):
    """Texts answered, and answered right."""

    n: int
    right: int


class Threshold(Answered):
    probability: float
    """Least probability of the answers."""


class Coverage(TypedDict):
    """Texts answered (`n`) and answered right, by least probability, and for the most probable n texts."""

    thresholds: list[Threshold]
    curve: list[Answered]


class Agreement(TypedDict):
    """How many texts have the label of the reference, which is the targets or the ensemble."""

    reference: Literal["targets", "ensemble"]
    texts: Literal["held-out texts", "training texts"]
    n: int
    right: int


class LabelShare(TypedDict):
    """A label among n training texts, without gold labels."""

    label: str
    predicted: int
    expected: int | None
    """Texts whose reference has the label first."""
    mass: float | None
    """Sum of the label's probabilities in the reference."""


class UnlabelledQuality(TypedDict):
    """The student on n training texts, without gold labels."""

    n: int
    held_out: int
    """Texts that the student was not trained on."""
    agreement: Agreement | None
    ensemble: int | None
    """Texts on which the ensemble has the same label."""
    labels: list[LabelShare]
    coverage: Coverage
    """Agreement with the reference by least probability."""
    to_label: int
    """Texts in the file to label."""


SystemKind = Literal["student", "targets", "ensemble", "teacher", "teacher on its own labels"]


class SystemEstimate(TypedDict):
    """The estimated accuracy of a system on n labelled training texts, with its 95 % interval."""

    name: str
    kind: SystemKind
    n: int
    mean: float
    low: float
    high: float


class LabelEstimates(TypedDict):
    """Estimates on the n labelled training texts that the student was not trained on."""

    n: int
    labels: int
    """All labels in `labels` of the experiment."""
    empty: int
    """Rows of the file without a label."""
    random: bool
    """Whether the texts are known to be a random sample of the training texts."""
    weights: bool
    """Whether the labels chose the weights of the teachers, so that targets and student are corrected for it."""
    systems: list[SystemEstimate]
    gained: int | None
    """Texts on which only the student is right, and not the ensemble; None without teachers."""
    lost: int | None


class LabelCounts(TypedDict):
    """The test texts of a label, its right predictions and all predictions of it."""

    label: str
    n: int
    right: int
    predicted: int


@dataclass(frozen=True)
class VerdictInputs:
    """Everything that the verdict depends on."""

    n: int
    """Labelled test texts."""
    rivals: Sequence[RivalCounts] = ()
    labels: Sequence[LabelCounts] = ()
    unlabelled: UnlabelledQuality | None = None
    teachers: int = 0
    steps: int | None = None
    epochs: int = 1
    largest_loss: str | None = None
    """Step with the largest loss of accuracy: teachers, choice, fit, choice and fit."""
    estimate: AccuracyEstimate | None = None
    """The accuracy of the targets, estimated without labels."""
    by_labels: LabelEstimates | None = None
    """Accuracies on labelled training texts; they count only without labelled test texts."""
    weights_unused: bool = False
    """Whether the teachers' evidence was dropped, and each text's own confidences were used."""
    long_texts: float = 0.0
    """Share of the training texts that the student's limit truncates."""
    method: str = "amalgam"
    label: str | None = "label"
    """Column of the gold labels in the experiment file."""
    selected_texts: bool = False
    """Whether the test texts are those of the file to label, which are harder than average."""
    page: str = "student"
    overrides: Mapping[str, str] = field(default_factory=dict)
    """Overrides of this run, which the next command repeats."""


# ---- the verdict


def verdict(inputs: VerdictInputs) -> Verdict:
    if not inputs.n:
        return _without_labels(inputs)
    rivals = [_compared(counts, inputs.rivals) for counts in inputs.rivals]
    faults = list(_faults(inputs, rivals))
    baseline = _baseline(rivals)
    decision, reasons, needed = _decided(inputs, baseline)
    if faults:
        decision, reasons, needed = "do not ship", faults, None
    causes = list(_causes(inputs, rivals)) if decision != "ship" else []
    if decision == "cannot say":
        causes += _too_few(inputs, needed)
    return {
        "decision": decision,
        "reasons": reasons,
        "causes": causes,
        "cautions": list(_cautions(inputs, rivals)),
        "next": _next(inputs, decision, causes, rivals, needed),
        "rivals": rivals,
        "texts_needed": needed,
    }


def lines(verdict: Verdict) -> list[str]:
    """Returns the end of `amalgam run`: the decision with its reason, the causes, and the next step."""
    printed = [f"verdict: {verdict['decision']}. {' '.join(verdict['reasons'][:2])}"]
    causes = [cause["text"] for cause in verdict["causes"] if cause["code"] != "no-labels"]  # the reason names it
    if causes:
        printed.append(f"  cause: {'; '.join(causes[:3])}")
    step = verdict["next"]
    printed.append(f"  next: {step['command']}  # {step['text']}" if "command" in step else f"  next: {step['text']}")
    return printed


def _compared(counts: RivalCounts, rivals: Sequence[RivalCounts]) -> Rival:
    """Adds the difference; of several rivals of one kind the interval holds for all together."""
    errors = errors_of(sum(rival["kind"] == counts["kind"] for rival in rivals))
    gained, lost, n = counts["gained"], counts["lost"], counts["n"]
    if gained is None or lost is None:
        mean, low, high = unpaired(counts["student_right"] / max(n, 1), counts["right"] / max(n, 1), n, errors)
    else:
        mean, low, high = paired(gained, lost, n, errors)
    student_is: Standing = "better" if low > 0 else "worse" if high < 0 else "not clearly different"
    return {**counts, "mean": mean, "low": low, "high": high, "student_is": student_is}


def _baseline(rivals: Sequence[Rival]) -> Rival | None:
    by_kind = {rival["kind"]: rival for rival in rivals}
    return next((by_kind[kind] for kind in BASELINES if kind in by_kind), None)


def _decided(inputs: VerdictInputs, baseline: Rival | None) -> tuple[Decision, list[str], int | None]:
    """Compares the student with the baseline: the decision, its reason, and the texts that would decide."""
    n = inputs.n
    if n < LEAST_TEXTS:
        return "cannot say", [f"{n:,} labelled test texts are too few: a verdict needs at least {LEAST_TEXTS}."], None
    if baseline is None:
        return "cannot say", ["There is nothing to compare the student with."], None
    if baseline["student_is"] == "better":
        return "ship", [f"{difference_sentence(baseline)}, and no rival is significantly better."], None
    if baseline["low"] > -EQUAL:
        reason = f"The student is at most 1 point worse than {name_of(baseline)} ({_numbers(baseline)})"
        return "ship", [f"{reason}, and no rival is significantly better."], None
    reason = f"The student and {name_of(baseline)} are not clearly different ({_numbers(baseline)})."
    return "cannot say", [reason], texts_needed(baseline["gained"] or 0, baseline["lost"] or 0, n, EQUAL)


# ---- do not ship


def _faults(inputs: VerdictInputs, rivals: Sequence[Rival]) -> Iterator[str]:
    better = [rival for rival in rivals if rival["kind"] in BLOCKING and rival["student_is"] == "worse"]
    best: dict[Kind, list[Rival]] = {}
    for rival in sorted(better, key=lambda rival: rival["mean"]):
        best.setdefault(rival["kind"], []).append(rival)
    for kind, (rival, *more) in best.items():
        also = f"; {len(more)} more {kind}{'s are' if len(more) > 1 else ' is'} better too" if more else ""
        yield f"{difference_sentence(rival)}{also}."
    lost = [row["label"] for row in inputs.labels if row["n"] >= LEAST_OF_LABEL and not row["right"]]
    if lost:
        never = f"{_labels(lost, 'is', 'are')} never predicted right, with at least {LEAST_OF_LABEL} test texts"
        yield f"{never}: {shown_names(lost, SHOWN)}."
    for rival in _lost_teachers(rivals):
        yield (
            f"On the labels of teacher {rival['name']} the student has {_share(rival['student_right'], rival['n'])} "
            f"accuracy, less than half of the teacher's {_share(rival['right'], rival['n'])} (n = {rival['n']:,})."
        )
    for rival in rivals:
        useless = rival["high"] < (1 - rival["right"] / max(rival["n"], 1)) / 2
        if rival["kind"] == "most frequent label" and rival["student_is"] == "not clearly different" and useless:
            yield f"The student is no better than always predicting {rival['name']} ({_numbers(rival)})."


def _lost_teachers(rivals: Sequence[Rival]) -> list[Rival]:
    """Returns the teachers on whose labels the student's interval ends below half of the teacher's accuracy."""
    return [
        rival
        for rival in rivals
        if rival["kind"] == "teacher on its own labels"
        and rival["n"] >= LEAST_OF_LABEL
        and interval(rival["student_right"] / rival["n"], rival["n"])[1] < rival["right"] / rival["n"] / 2
    ]


# ---- without labels


def _without_labels(inputs: VerdictInputs) -> Verdict:
    quality, faults, cautions = inputs.unlabelled, list[str](), list[str]()
    reasons = ["There are no labelled test texts."]
    if inputs.by_labels:
        reasons.append(estimate_sentence(inputs.by_labels))
        worse = _worse_than_ensemble(inputs.by_labels)
        (faults if inputs.by_labels["random"] else cautions).extend([worse] if worse else [])
    if quality:
        missing, agreement = never_predicted(quality), quality["agreement"]
        if missing:
            never = f"{_labels(missing, 'is', 'are')} never predicted, though the targets have them"
            faults.append(f"{never}: {shown_names(missing, SHOWN)}.")
        if agreement:
            low, high = interval(agreement["right"] / max(agreement["n"], 1), agreement["n"])
            reasons.append(
                f"The student agrees with the {agreement['reference']} on {_share(agreement['right'], agreement['n'])} "
                f"of {agreement['n']:,} {agreement['texts']} (95 % interval {bounds(low, high)})."
            )
            if high < LEAST_AGREEMENT:
                faults.append(f"The student did not learn its targets. {reasons[-1]}")
        if inputs.estimate and not inputs.by_labels:
            low, value, high = (inputs.estimate[part] for part in ("low", "value", "high"))
            reasons.append(
                f"The targets' accuracy is estimated at {percent(value)} (95 % interval {bounds(low, high)}), "
                "from how clear the evidence for the teachers is."
            )
        cautions.append("Agreement is no accuracy: the student repeats the teachers' errors too.")
    decision: Decision = "do not ship" if faults else "cannot say"
    causes = list(_causes(inputs, []))
    unknown = "the accuracy is unknown without labelled test texts"
    causes.append({"code": "no-labels", "text": "there are no labelled test texts" if inputs.by_labels else unknown})
    return {
        "decision": decision,
        "reasons": faults or reasons,
        "causes": causes,
        "cautions": cautions,
        "next": _next(inputs, decision, causes, [], None),
        "rivals": [],
        "texts_needed": None,
    }


def estimate_sentence(estimates: LabelEstimates) -> str:
    """Returns the estimated accuracies on labelled training texts, and the condition under which they hold."""
    systems = {system["kind"]: system for system in estimates["systems"]}
    student, *others = (systems[kind] for kind in ("student", "targets", "ensemble") if kind in systems)
    also = "; ".join(f"the {other['name']} {percent(other['mean'])}" for other in others)
    sentence = (
        f"On {estimates['n']:,} labelled training texts, which it did not learn, the student has about "
        f"{percent(student['mean'])} accuracy (95 % interval {bounds(student['low'], student['high'])})"
    )
    condition = "" if estimates["random"] else " This holds if they are a random sample of the training texts."
    return f"{sentence}{f'; {also}' if also else ''}.{condition}"


def _worse_than_ensemble(estimates: LabelEstimates) -> str | None:
    """Returns a sentence if the student is significantly worse than the ensemble on the labelled training texts."""
    if estimates["gained"] is None or estimates["lost"] is None:
        return None
    mean, low, high = paired(estimates["gained"], estimates["lost"], estimates["n"])
    if high >= 0:
        return None
    numbers = f"95 % interval {-100 * high:+.1f} to {-100 * low:+.1f}, n = {estimates['n']:,}"
    return f"On labelled training texts the ensemble is {-100 * mean:.1f} points better than the student ({numbers})."


def never_predicted(quality: UnlabelledQuality) -> list[str]:
    """Returns the labels that the student never predicts, though at least LEAST_OF_LABEL targets have them first."""
    return [
        row["label"] for row in quality["labels"] if not row["predicted"] and (row["expected"] or 0) >= LEAST_OF_LABEL
    ]


# ---- causes and cautions


def _causes(inputs: VerdictInputs, rivals: Sequence[Rival]) -> Iterator[Cause]:
    """Yields the likely causes of a bad or unclear student, the most likely first."""
    if inputs.steps is not None and inputs.steps < FEW_STEPS:
        yield {"code": "few-steps", "text": f"{inputs.steps:,} training steps are few"}
    silent = [row["label"] for row in inputs.labels if row["n"] and not row["predicted"]]
    if not inputs.n and inputs.unlabelled:
        silent = never_predicted(inputs.unlabelled)
    if silent:
        text = f"{_labels(silent, 'is', 'are')} never predicted ({shown_names(silent, SHOWN)})"
        yield {"code": "labels-never-predicted", "text": text}
    for rival in _lost_teachers(rivals):
        text = f"the student has {_share(rival['student_right'], rival['n'])} accuracy on the labels of {rival['name']}"
        yield {"code": "teacher-loses", "text": text}
    if inputs.weights_unused:
        text = "the evidence for a choice of teachers was dropped"
        yield {"code": "choice-not-trusted", "text": text}
    losses = {
        "teachers": ("teachers-wrong", "the teachers are wrong on many texts"),
        "choice": ("wrong-choice", "the targets often follow the wrong teacher"),
        "fit": ("not-fitted", "the student does not fit its targets"),
        "choice and fit": ("choice-or-fit", "the targets follow the wrong teacher, or the student does not fit them"),
    }
    if inputs.largest_loss in losses:
        code, text = losses[inputs.largest_loss]
        yield {"code": code, "text": text}
    if inputs.long_texts >= MANY_LONG:
        text = f"{percent(inputs.long_texts)} of the training texts are longer than student.max_tokens"
        yield {"code": "long-texts", "text": text}
    frequent = next((rival for rival in rivals if rival["kind"] == "most frequent label"), None)
    if frequent and frequent["right"] >= SKEWED * frequent["n"]:
        text = f"{_share(frequent['right'], frequent['n'])} of the test texts have one label, {frequent['name']}"
        yield {"code": "skewed-labels", "text": text}


def _too_few(inputs: VerdictInputs, needed: int | None) -> list[Cause]:
    if inputs.n < LEAST_TEXTS:
        return [{"code": "few-test-texts", "text": f"only {inputs.n:,} labelled test texts"}]
    if needed is None:
        return [{"code": "tie", "text": "the two differ too little for any practical number of test texts"}]
    text = f"{inputs.n:,} test texts are too few; about {needed:,} would decide, if the difference stays"
    return [{"code": "few-test-texts", "text": text}]


def _cautions(inputs: VerdictInputs, rivals: Sequence[Rival]) -> Iterator[str]:
    for rival in rivals:
        if rival["kind"] == "supervised student" and rival["student_is"] == "worse":
            yield f"{difference_sentence(rival)}. It was trained on gold labels: if you have them, ship that student."
        if rival["kind"] == "teacher on its own labels" and rival["student_is"] == "worse":
            yield (
                f"On its own labels, teacher {rival['name']} alone has {_share(rival['right'], rival['n'])} accuracy, "
                f"the student {_share(rival['student_right'], rival['n'])} (n = {rival['n']:,})."
            )
    rare = [row["label"] for row in inputs.labels if row["n"] < LEAST_OF_LABEL]
    if rare:
        few = f"{_labels(rare, 'has', 'have')} fewer than {LEAST_OF_LABEL} test texts, too few for a decision"
        yield f"{few}: {shown_names(rare, SHOWN)}."
    if inputs.selected_texts:
        yield (
            "The test texts were selected because they are hard: accuracies and differences on ordinary texts are "
            "others. Only rows with `random` in column `why` estimate them."
        )


# ---- the next step


def _next(
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


# ---- words


def name_of(rival: RivalCounts) -> str:
    """Returns the rival as the object of a sentence."""
    return {
        "ensemble": "the ensemble",
        "zero-shot": "zero-shot",
        "teacher": f"teacher {rival['name']}",
        "teacher on its own labels": f"teacher {rival['name']} on its own labels",
        "student": f"student “{rival['name']}”",
        "supervised student": f"student “{rival['name']}”",
        "most frequent label": f"always predicting {rival['name']}",
    }[rival["kind"]]


def difference_sentence(rival: Rival) -> str:
    """Returns the better of the two as the subject; the interval is that of the stated difference."""
    name, points = name_of(rival), f"{100 * abs(rival['mean']):.1f} points better than"
    if rival["mean"] >= 0:
        return f"The student is {points} {name} ({_numbers(rival)})"
    return f"{name[0].upper()}{name[1:]} is {points} the student ({_numbers(rival, rival_first=True)})"


def _numbers(rival: Rival, *, rival_first: bool = False) -> str:
    n, low, high = rival["n"], rival["low"], rival["high"]
    first, second = _share(rival["student_right"], n), _share(rival["right"], n)
    if rival_first:
        first, second, low, high = second, first, -high, -low
    return f"{first} against {second}, 95 % interval {100 * low:+.1f} to {100 * high:+.1f}, n = {n:,}"


def _labels(names: Sequence[str], verb: str, plural: str) -> str:
    return f"1 label {verb}" if len(names) == 1 else f"{len(names)} labels {plural}"


def _share(count: int, n: int) -> str:
    return percent(count / max(n, 1))
