"""Made experiments with the verdict that each must have: predictions with given accuracies, and no training."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from amalgam.data.keys import union_of
from amalgam.stages.common.training.schedule import Schedule
from amalgam.stages.report.conditions import VerdictInputs
from amalgam.stages.report.evaluation import Picked, SystemPredictions
from amalgam.stages.report.evaluation import TestAnswers as Answers
from amalgam.stages.report.labelling import select
from amalgam.stages.report.quality import rival_counts, rivals_of_selected

Array = Any

NAMES = ["banking", "law", "music", "sports", "travel", "weather", *(f"intent-{at}" for at in range(6, 150))]

REPORT: Any = {
    "name": "student",
    "method": "amalgam",
    "evaluation": None,
    "student_quality": None,
    "unlabelled": None,
    "linear_map": None,
    "label_estimates": None,
    "unknown_share": None,
    "given_labels": [],
    "accuracy_losses": [],
    "labels": {"teachers": []},
    "settings": {
        "labels": None,
        "corpus": {"text": ["text"], "label": "label"},
        "student": {"max_tokens": 128},
    },
}
STUDENT: Any = {"steps": 900, "epochs": 3, "learning_rate": 5e-5, "texts": 5000, "cut": 0}
NO_LABELS = VerdictInputs(report=REPORT, rivals=(), student=STUDENT, automatic=Schedule(12, 5e-5, 100))


def changed(inputs: VerdictInputs, **facts: Any) -> VerdictInputs:
    """Changes blocks of the report, parts of its evaluation, facts of the student, or fields of the inputs, by name."""

    def taken(names: Collection[str]) -> dict[str, Any]:
        return {name: facts.pop(name) for name in [*facts] if name in names}

    report: Any = {**inputs.report, **taken(inputs.report)}
    evaluation = taken(("left_out", "learned", "selected"))
    report["evaluation"] = {**report["evaluation"], **evaluation} if evaluation else report["evaluation"]
    student: Any = {**inputs.student, **taken(inputs.student)}
    return replace(inputs, report=report, student=student, **facts)


def unlabelled_inputs(**facts: Any) -> VerdictInputs:
    return changed(NO_LABELS, **facts)


def labelled_inputs(n: int, rivals: Any, classes: Sequence[Any] = (), **facts: Any) -> VerdictInputs:
    """Makes the inputs with n labelled test texts; a label needs its name and counts."""
    accuracy = sum(row["right"] for row in classes) / n
    systems = {"student": {"accuracy": accuracy, "ece": None}}
    evaluation = {"n": n, "left_out": 0, "system": "student", "systems": systems}
    quality = {"classes": [{"teachers": [], "ensemble": None, **row} for row in classes]}
    return changed(NO_LABELS, rivals=rivals, evaluation=evaluation, student_quality=quality, **facts)


def of_teachers(count: int) -> Any:
    """Returns the report's block on the labels of so many teachers."""
    return {"teachers": [{}] * count}


def loss(step: str) -> Any:
    """Returns accuracy losses, the largest of which is at this step."""
    return [{"step": "other", "lost": 0.0}, {"step": step, "lost": 0.2}]


def made(
    n: int,
    student: float | Sequence[float],
    ensemble: float | None,
    zero_shot: float | None = 0.4,
    *,
    labels: int = 4,
    teachers: int = 2,
    own: Sequence[float] = (),
    gold: Array = None,
    **facts: Any,
) -> VerdictInputs:
    """Makes predictions with exact accuracies and independent errors; `student` may have one accuracy per label."""
    rng = np.random.default_rng(0)
    gold = np.arange(n) % labels if gold is None else np.asarray(gold)

    def predicted(accuracy: float, rows: Array) -> Array:
        answers = gold[rows].copy()
        wrong = rng.permutation(len(rows))[: round((1 - accuracy) * len(rows))]
        answers[wrong] = (answers[wrong] + rng.integers(1, labels, len(wrong))) % labels
        return answers

    everything = np.arange(len(gold))
    ours = np.empty(len(gold), np.int64)
    for label in range(labels):
        rows = everything[gold == label]
        ours[rows] = predicted(student if isinstance(student, float) else student[label], rows)
    groups = np.array_split(np.arange(labels), max(teachers, 1))
    space = union_of({f"teacher-{at}": [NAMES[label] for label in group] for at, group in enumerate(groups)})
    answers = {"student": ours}
    teacher_answers = {}
    for at, group in enumerate(groups if teachers else ()):
        inside, accuracy = np.isin(gold, group), own[at] if own else 0.9
        answer = np.full(len(gold), group[0])
        answer[inside] = np.where(rng.random(inside.sum()) < accuracy, gold[inside], group[0] - 1)
        teacher_answers[f"teacher-{at}"] = answers[f"teacher:teacher-{at}"] = answer
    answers |= {} if ensemble is None else {"ensemble": predicted(ensemble, everything)}
    answers |= {} if zero_shot is None else {"zero-shot": predicted(zero_shot, everything)}
    systems = {
        name: SystemPredictions(labels_of, np.ones(len(gold)), np.ones(len(gold)))
        for name, labels_of in answers.items()
    }
    test = Answers(everything, gold, teacher_answers, systems, everything, 0.0)
    counts: list[Any] = [
        {"label": NAMES[at], "n": int((gold == at).sum()), "right": int(((ours == at) & (gold == at)).sum())}
        | {"predicted": int((ours == at).sum())}
        for at in range(labels)
    ]
    return labelled_inputs(
        len(gold), rival_counts(test, space, "student"), counts, labels=of_teachers(teachers), **facts
    )


def of_selected(student: float, ensemble: float, zero_shot: float = 0.4, *, sharp: float = 1.0, seed: int = 0) -> Any:
    """Selects texts to label of 2,000, labels them, and compares; `sharp` makes the student more certain."""
    rng = np.random.default_rng(seed)
    gold, shared = rng.integers(0, 4, 2000), rng.normal(size=(2000, 4))

    def probabilities(accuracy: float, sharp: float) -> Array:
        noise, signal = (shared + rng.normal(size=(2000, 4))) / 2, np.eye(4)[gold]
        lowest = np.sort((noise - noise[np.arange(2000), gold][:, None])[signal == 0].reshape(2000, 3).max(axis=1))
        scores = sharp * (noise + signal * lowest[round(accuracy * 2000)])
        return np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)

    everything = {"student": (student, 2 * sharp), "ensemble": (ensemble, 2), "zero-shot": (zero_shot, 1)}
    made = {name: probabilities(*settings) for name, settings in everything.items()}
    chosen = select(made["student"], made["ensemble"])
    rows = np.array([row for row, _ in chosen])
    picked = np.array([Picked.RANDOM if why == "random" else Picked.DIFFERING for _, why in chosen], np.int8)
    systems = {
        name: SystemPredictions(own[rows].argmax(axis=1), *np.ones((2, len(rows)))) for name, own in made.items()
    }
    space = union_of({"teacher-0": NAMES[:2], "teacher-1": NAMES[2:4]})
    own = {name: np.full(len(rows), place) for place, name in enumerate(space.columns)}
    answers = Answers(rows, gold[rows], own, systems, rows, 0.0, picked=picked)
    random = answers.where(picked == Picked.RANDOM)
    ours = random.systems["student"].label
    counts: list[Any] = [
        {"label": NAMES[at], "n": int((random.gold == at).sum()), "predicted": int((ours == at).sum())}
        | {"right": int(((ours == at) & (random.gold == at)).sum())}
        for at in range(4)
    ]
    rivals, n = rivals_of_selected(answers, space, "student"), len(random.gold)
    rivals = [rival for rival in rivals if rival["kind"] != "teacher on its own labels"]
    selected = {"texts": len(rows) - n, "random": n}
    return labelled_inputs(n, rivals, counts, labels=of_teachers(2), selected=selected)


def with_student(
    inputs: VerdictInputs, accuracy: float, kind: Any = "student", *, same: int = 1, **facts: Any
) -> VerdictInputs:
    """Adds other students whose errors are independent of this student's."""
    n, ours = inputs.n, inputs.rivals[-1]["student_right"]
    right = round(accuracy * n)
    both = round(right * ours / n)
    counts = {"n": n, "student_right": ours, "right": right, "gained": ours - both, "lost": right - both, **facts}
    others = [{"name": f"muka-{at}", "kind": kind, **counts} for at in range(same)]
    return replace(inputs, rivals=[*inputs.rivals, *others])  # type: ignore[list-item]


def unlabelled(right: int, n: int = 100, *, ensemble: Sequence[int] | None = None, **labels: tuple[int, int]) -> Any:
    """Describes a student on 1,000 training texts; by label: texts predicted, and expected by the targets."""
    counts = labels or {"banking": (480, 500), "law": (520, 500)}
    return {
        "n": 1000,
        "held_out": n,
        "agreement": {"reference": "targets", "texts": "held-out texts", "n": n, "right": right},
        "ensemble": 900,
        "labels": [
            {"label": label, "predicted": predicted, "expected": expected, "mass": float(expected)}
            | {"ensemble": expected if ensemble is None else ensemble[at], "teachers": [f"teacher-{at}"]}
            for at, (label, (predicted, expected)) in enumerate(counts.items())
        ],
        "coverage": {"thresholds": [], "curve": []},
        "to_label": 200,
        "estimates": None,
    }


def linear_map(gained: int, lost: int, n: int = 100) -> Any:
    """Counts the texts on which the student or the linear map alone has the label of the targets."""
    return {"n": n, "student_right": 90 - lost, "right": 90 - gained, "gained": gained, "lost": lost}


def estimates(lead: float = -0.2, error: float = 0.05) -> Any:
    """Estimates accuracies without labels; `lead`: that of the ensemble over the student, and half of its interval."""
    means = {"student": 0.7 - lead, "targets": 0.92, "ensemble": 0.7, "muka": 0.71}
    return {
        "systems": [
            {"name": kind, "kind": kind, "n": 80, "mean": mean, "low": mean - 0.15, "high": mean + 0.05}
            for kind, mean in means.items()
        ],
        "gap": {"n": 80, "mean": lead, "low": lead - error, "high": lead + error},
    }


RARE = [at % 77 for at in range(500)]
MISSED = [0.9] * 57 + [0.0] * 20
"""Accuracies of 77 labels; 20 of them are never predicted right."""

ONE_LABEL = [0] * 190 + [1, 2, 3, 4, 5] * 2

SHIPPED: dict[str, Callable[[], VerdictInputs]] = {
    "better than the ensemble": lambda: made(500, 0.852, 0.762, 0.62),
    "a little better on many texts": lambda: made(5000, 0.90, 0.87),
    "equal on very many texts": lambda: made(40_000, 0.90, 0.90),
    "77 labels, half of the texts, good teachers": lambda: made(5005, 0.49, 0.40, 0.30, labels=77, own=(0.85, 0.85)),
    "77 labels, one is lost": lambda: made(1540, [0.85] * 76 + [0.0], 0.73, labels=77),
    "150 labels, half of the texts, good teachers": lambda: made(4500, 0.49, 0.40, 0.30, labels=150, own=(0.85, 0.85)),
    "77 labels, few texts of each": lambda: made(500, 0.80, 0.70, labels=77, gold=RARE),
    "unbalanced labels": lambda: made(1000, [0.98, 0.8, 0.8, 0.8], 0.90, 0.5, gold=[0] * 850 + [1, 2, 3] * 50),
    "selected texts, a better student": lambda: of_selected(0.90, 0.80, 0.78),
    "selected texts, a student that is too certain": lambda: of_selected(0.90, 0.80, 0.78, sharp=3),
    "no zero-shot": lambda: made(500, 0.85, 0.75, None),
    "no teachers": lambda: made(500, 0.9, None, 0.5, teachers=0),
    "a rare label is missed": lambda: made(304, [0.9, 0.9, 0.9, 0.0], 0.7, gold=[0, 1, 2] * 100 + [3] * 4),
    "a supervised student is better": lambda: with_student(made(500, 0.85, 0.75), 0.97, "supervised student"),
    "a student that learned the test texts is better": lambda: with_student(
        made(500, 0.85, 0.75), 0.97, learned={"texts": 60, "of": 500, "labelled": True}
    ),
    "many equal students": lambda: with_student(made(1000, 0.85, 0.75), 0.882, same=20),
    "few test texts that the teachers learned": lambda: made(
        500, 0.90, 0.80, learned={"texts": 6, "of": 500, "labelled": True}
    ),
    "test texts that are also unlabelled training texts": lambda: made(
        500, 0.90, 0.80, learned={"texts": 500, "of": 500, "labelled": False}
    ),
}

Cases = dict[str, tuple[Callable[[], VerdictInputs], set[str], str]]
"""By name: the experiment, codes of its causes, and a part of the next step."""

NOT_SHIPPED: Cases = {
    "an untrained student": (
        lambda: made(500, 0.494, 0.762, 0.62, steps=54, accuracy_losses=loss("fit")),
        {"few-steps", "not-fitted"},
        "student.epochs=auto",
    ),
    "zero-shot is better": (
        lambda: made(1000, 0.547, 0.623, 0.947, labels=6, steps=120),
        {"few-steps"},
        "student.epochs=",
    ),
    "another student is better": (lambda: with_student(made(1000, 0.80, 0.70), 0.90), set(), "amalgam report muka-0"),
    "a label is never predicted": (
        lambda: made(600, [0.99, 0.99, 0.99, 0.0], 0.70, labels=4),
        set(),
        "student.epochs=auto",
    ),
    "one teacher always loses": (
        lambda: made(1000, [0.99, 0.99, 0.2, 0.2], 0.5, own=(0.95, 0.95)),
        {"teacher-loses"},
        "amalgam audit",
    ),
    "one teacher, which is better": (
        lambda: made(1000, 0.84, 0.90, teachers=1, automatic=Schedule(3, 5e-5, 100)),
        set(),
        "amalgam audit",
    ),
    "zero-shot is better after many epochs": (
        lambda: made(1000, 0.60, 0.58, 0.94, epochs=34),
        set(),
        "student.method=zero-shot",
    ),
    "a learning rate far above auto": (
        lambda: made(1000, 0.6, 0.8, epochs=12, learning_rate=1e-3),
        {"high-rate"},
        "student.learning_rate=auto student.name=auto-rate",
    ),
    "few training texts": (lambda: made(1000, 0.6, 0.8, texts=90, epochs=150), {"few-texts"}, "Add training texts"),
    "targets of the wrong teacher by the default method": (
        lambda: made(1000, 0.6, 0.8, accuracy_losses=loss("choice")),
        {"wrong-choice"},
        "amalgam label --count 100",
    ),
    "20 rare labels are never right": (
        lambda: made(500, MISSED, 0.55, labels=77, gold=RARE),
        {"labels-never-predicted"},
        "",
    ),
    "long texts": (lambda: made(1000, 0.6, 0.8, cut=2500), {"long-texts"}, "student.max_tokens=256"),
    "evidence that disagrees": (
        lambda: made(1000, 0.6, 0.8, weights_unused=True),
        {"choice-not-trusted"},
        "amalgam audit",
    ),
    "targets of the wrong teacher": (
        lambda: made(1000, 0.6, 0.8, accuracy_losses=loss("choice"), method="muka-soft"),
        {"wrong-choice"},
        "student.method=amalgam",
    ),
    "no teachers, and zero-shot is better": (lambda: made(500, 0.5, None, 0.9, teachers=0), set(), "amalgam run"),
    "everything guesses": (lambda: made(1000, 0.26, 0.25, 0.25, own=(0.5, 0.5)), {"teachers-weak"}, "amalgam audit"),
    "a bad student of bad teachers": (
        lambda: made(1000, 0.352, 0.28, 0.28, own=(0.428, 0.456)),
        {"teachers-weak"},
        "amalgam audit",
    ),
    "hardly better than chance on many texts": (
        lambda: made(20_000, 0.28, 0.25, 0.25, own=(0.9, 0.9)),
        {"teacher-loses"},
        "amalgam audit",
    ),
    "wrong on most texts, teachers that guess": (
        lambda: made(3000, 0.45, 0.40, 0.30, own=(0.6, 0.6)),
        {"teachers-weak"},
        "amalgam audit",
    ),
    "always the most frequent label": (
        lambda: made(200, [1.0, 0, 0, 0, 0, 0], 0.80, 0.5, labels=6, gold=ONE_LABEL),
        {"skewed-labels"},
        "amalgam run",
    ),
    "unbalanced labels, little but the frequent one": (
        lambda: made(5000, [0.999, 0.03, 0.03, 0.03], 0.80, 0.5, gold=[0] * 4700 + [1, 2, 3] * 100),
        {"skewed-labels"},
        "",
    ),
    "selected texts, a worse student": (lambda: of_selected(0.70, 0.85), set(), ""),
    "a bad student, and test texts that the teachers learned": (
        lambda: made(500, 0.70, 0.80, learned={"texts": 60, "of": 500, "labelled": True}),
        set(),
        "",
    ),
    "no labels, a label is never predicted": (
        lambda: unlabelled_inputs(steps=54, unlabelled=unlabelled(80, banking=(900, 600), law=(0, 300))),
        {"labels-never-predicted", "few-steps", "no-labels"},
        "student.epochs=",
    ),
    "no labels, nothing was learned": (
        lambda: unlabelled_inputs(unlabelled=unlabelled(30)),
        {"no-labels"},
        "student.epochs=auto",
    ),
    "no labels, less was learned than by a linear map": (
        lambda: unlabelled_inputs(unlabelled=unlabelled(65), linear_map=linear_map(4, 24), steps=54),
        {"few-steps", "no-labels"},
        "student.epochs=auto",
    ),
    "no labels, the ensemble is estimated to be better": (
        lambda: unlabelled_inputs(unlabelled=unlabelled(60) | {"estimates": estimates(0.2)}, steps=54),
        {"few-steps", "no-labels"},
        "student.epochs=auto",
    ),
    "no labels, a teacher is lost": (
        lambda: unlabelled_inputs(
            unlabelled=unlabelled(100, banking=(1000, 1000), law=(0, 0), ensemble=[600, 400]),
            labels=of_teachers(2),
            steps=54,
        ),
        {"teacher-absent", "no-labels"},
        "amalgam audit",
    ),
}

UNCLEAR: Cases = {
    "texts of one teacher only": (
        lambda: made(500, 0.9, 0.7, gold=[0, 1] * 250),
        {"teacher-untested"},
        "Add labelled test texts of teacher-1",
    ),
    "selected texts, an equal student": (
        lambda: of_selected(0.85, 0.85, sharp=3),
        {"few-test-texts"},
        "random test texts",
    ),
    "only selected texts": (
        lambda: changed(
            of_selected(0.90, 0.80), rivals=of_selected(0.90, 0.80).rivals[:1], selected={"texts": 100, "random": 0}
        ),
        {"few-test-texts"},
        "random test texts",
    ),
    "a tie": (lambda: made(500, 0.82, 0.80), {"few-test-texts"}, "Label more test texts"),
    "an exact tie": (lambda: made(400, 0.80, 0.80), {"tie"}, "size and speed"),
    "one teacher, about equal": (lambda: made(300, 0.89, 0.90, teachers=1), set(), ""),
    "eight texts": (lambda: made(8, 1.0, 0.5), {"few-test-texts"}, "at least 200"),
    "thirty texts, a far better student": (lambda: made(30, 1.0, 0.3), {"few-test-texts"}, "at least 200"),
    "an unclear untrained student": (lambda: made(60, 0.5, 0.55, steps=54), {"few-steps"}, "epochs=auto"),
    "test texts that the teachers learned": (
        lambda: made(500, 0.90, 0.80, learned={"texts": 60, "of": 500, "labelled": True}),
        {"test-texts-learned"},
        "Remove these texts from corpus.test",
    ),
    "test texts that stage generate wrote": (
        lambda: made(500, 0.90, 0.80, learned={"texts": 60, "of": 500, "labelled": False, "generated": True}),
        {"test-texts-generated"},
        "Use labelled real texts as corpus.test",
    ),
    "test texts that selected the checkpoint": (
        lambda: made(500, 0.90, 0.80, learned={"texts": 60, "of": 500, "labelled": True, "validation": True}),
        {"test-texts-learned"},
        "student.select=held-out",
    ),
    "no labels at all": (lambda: NO_LABELS, {"no-labels"}, "corpus.test"),
    "no labels, a good student": (
        lambda: unlabelled_inputs(unlabelled=unlabelled(91)),
        {"no-labels"},
        "corpus.test=reports/student.to-label.csv",
    ),
    "no labels, generated training texts": (
        lambda: unlabelled_inputs(unlabelled=unlabelled(91), generates=True),
        {"no-labels"},
        "Label about 200 real texts",
    ),
    "no labels, the ensemble may be better": (
        lambda: unlabelled_inputs(unlabelled=unlabelled(60) | {"estimates": estimates(0.2, error=0.11)}),
        {"no-labels"},
        "corpus.test",
    ),
    "no labels, a label that no text has": (
        lambda: unlabelled_inputs(
            unlabelled=unlabelled(100, banking=(1000, 1000), law=(0, 0), ensemble=[990, 10]), labels=of_teachers(2)
        ),
        {"no-labels"},
        "corpus.test",
    ),
    "no labels, six held-out texts": (
        lambda: unlabelled_inputs(unlabelled=unlabelled(2, n=6)),
        {"no-labels"},
        "corpus.test",
    ),
}

CASES: dict[str, tuple[Callable[[], VerdictInputs], str, set[str], str]] = {
    **{name: (make, "ship", set(), "amalgam predict") for name, make in SHIPPED.items()},
    **{name: (make, "do not ship", causes, step) for name, (make, causes, step) in NOT_SHIPPED.items()},
    **{name: (make, "cannot say", causes, step) for name, (make, causes, step) in UNCLEAR.items()},
}
