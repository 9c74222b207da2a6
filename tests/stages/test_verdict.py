"""Tests the verdict on made experiments: predictions with given accuracies, and no training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from amalgam.data.keys import union_of
from amalgam.pipeline.config.schema import Corpus
from amalgam.stages.common.given_labels import DIFFERING, ORDINARY
from amalgam.stages.common.intervals import errors_of, interval, interval_of_mean, paired, texts_needed, unpaired
from amalgam.stages.report.causes import never_predicted
from amalgam.stages.report.evaluation import Predictions
from amalgam.stages.report.evaluation import TestAnswers as Answers
from amalgam.stages.report.labelling import columns_of, select
from amalgam.stages.report.quality import by_length, coverage, rival_counts, rivals_of_selected
from amalgam.stages.report.verdict import EQUAL, lines, verdict
from amalgam.stages.report.verdict_types import LabelEstimates, RivalCounts, SystemEstimate, SystemKind, VerdictInputs
from amalgam.stages.weigh_teachers.weigh import AccuracyEstimate

Array = Any

NAMES = ["banking", "law", "music", "sports", "travel", "weather", *(f"intent-{at}" for at in range(6, 150))]


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
        name: Predictions(labels_of, np.ones(len(gold)), np.ones(len(gold))) for name, labels_of in answers.items()
    }
    test = Answers(everything, gold, teacher_answers, systems, everything, 0.0)
    counts: list[Any] = [
        {"label": NAMES[at], "n": int((gold == at).sum()), "right": int(((ours == at) & (gold == at)).sum())}
        | {"predicted": int((ours == at).sum())}
        for at in range(labels)
    ]
    return VerdictInputs(
        n=len(gold),
        rivals=rival_counts(test, space, "student"),
        labels=counts,
        **{"teachers": teachers, "steps": 900, "epochs": 3, **facts},
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
    picked = np.array([ORDINARY if why == "random" else DIFFERING for _, why in chosen], np.int8)
    systems = {name: Predictions(own[rows].argmax(axis=1), *np.ones((2, len(rows)))) for name, own in made.items()}
    space = union_of({"teacher-0": NAMES[:2], "teacher-1": NAMES[2:4]})
    own = {name: np.full(len(rows), place) for place, name in enumerate(space.columns)}
    answers = Answers(rows, gold[rows], own, systems, rows, 0.0, picked=picked)
    random = answers.where(picked == ORDINARY)
    ours = random.systems["student"].label
    counts: list[Any] = [
        {"label": NAMES[at], "n": int((random.gold == at).sum()), "predicted": int((ours == at).sum())}
        | {"right": int(((ours == at) & (random.gold == at)).sum())}
        for at in range(4)
    ]
    rivals, n = rivals_of_selected(answers, space, "student"), len(random.gold)
    rivals = [rival for rival in rivals if rival["kind"] != "teacher on its own labels"]
    return VerdictInputs(n=n, rivals=rivals, labels=counts, teachers=2, steps=900, selected=len(rows) - n)


def with_student(inputs: VerdictInputs, accuracy: float, kind: Any = "student", *, same: int = 1) -> VerdictInputs:
    """Adds other students whose errors are independent of this student's."""
    n, ours = inputs.n, inputs.rivals[-1]["student_right"]
    right = round(accuracy * n)
    both = round(right * ours / n)
    counts = {"n": n, "student_right": ours, "right": right, "gained": ours - both, "lost": right - both}
    others = [{"name": f"muka-{at}", "kind": kind, **counts} for at in range(same)]
    return replace(inputs, rivals=[*inputs.rivals, *others], reports={"student", "muka-0"})  # type: ignore[list-item]


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
    }


RARE = [at % 77 for at in range(500)]
MISSED = [0.9] * 57 + [0.0] * 20
"""Accuracies of 77 labels; 20 of them are never predicted right."""

ONE_LABEL = [0] * 190 + [1, 2, 3, 4, 5] * 2

CASES: dict[str, tuple[Callable[[], VerdictInputs], str, set[str], str]] = {
    # good
    "better than the ensemble": (lambda: made(500, 0.852, 0.762, 0.62), "ship", set(), "amalgam predict"),
    "a little better on many texts": (lambda: made(5000, 0.90, 0.87), "ship", set(), "amalgam predict"),
    "equal on very many texts": (lambda: made(40_000, 0.90, 0.90), "ship", set(), "amalgam predict"),
    "77 labels, half of the texts, good teachers": (
        lambda: made(5005, 0.49, 0.40, 0.30, labels=77, own=(0.85, 0.85)),
        "ship",
        set(),
        "amalgam predict",
    ),
    "150 labels, half of the texts, good teachers": (
        lambda: made(4500, 0.49, 0.40, 0.30, labels=150, own=(0.85, 0.85)),
        "ship",
        set(),
        "amalgam predict",
    ),
    "77 labels, few texts of each": (
        lambda: made(500, 0.80, 0.70, labels=77, gold=RARE),
        "ship",
        set(),
        "amalgam predict",
    ),
    "unbalanced labels": (
        lambda: made(1000, [0.98, 0.8, 0.8, 0.8], 0.90, 0.5, gold=[0] * 850 + [1, 2, 3] * 50),
        "ship",
        set(),
        "amalgam predict",
    ),
    "selected texts, a better student": (lambda: of_selected(0.90, 0.80, 0.78), "ship", set(), "amalgam predict"),
    "selected texts, a student that is too certain": (
        lambda: of_selected(0.90, 0.80, 0.78, sharp=3),
        "ship",
        set(),
        "amalgam predict",
    ),
    "no zero-shot": (lambda: made(500, 0.85, 0.75, None), "ship", set(), "amalgam predict"),
    "no teachers": (lambda: made(500, 0.9, None, 0.5, teachers=0), "ship", set(), "amalgam predict"),
    "a rare label is missed": (
        lambda: made(304, [0.9, 0.9, 0.9, 0.0], 0.7, gold=[0, 1, 2] * 100 + [3] * 4),
        "ship",
        set(),
        "amalgam predict",
    ),
    "a supervised student is better": (
        lambda: with_student(made(500, 0.85, 0.75), 0.97, "supervised student"),
        "ship",
        set(),
        "amalgam predict",
    ),
    "many equal students": (
        lambda: with_student(made(1000, 0.85, 0.75), 0.882, same=20),
        "ship",
        set(),
        "amalgam predict",
    ),
    # bad
    "an untrained student": (
        lambda: made(500, 0.494, 0.762, 0.62, steps=54, largest_loss="fit"),
        "do not ship",
        {"few-steps", "not-fitted"},
        "student.epochs=auto",
    ),
    "zero-shot is better": (
        lambda: made(1000, 0.547, 0.623, 0.947, labels=6, steps=120),
        "do not ship",
        {"few-steps"},
        "student.epochs=",
    ),
    "another student is better": (
        lambda: with_student(made(1000, 0.80, 0.70), 0.90),
        "do not ship",
        set(),
        "amalgam report muka-0 student",
    ),
    "a label is never predicted": (
        lambda: made(600, [0.99, 0.99, 0.99, 0.0], 0.70, labels=4),
        "do not ship",
        set(),
        "student.epochs=auto",
    ),
    "one teacher always loses": (
        lambda: made(1000, [0.99, 0.99, 0.2, 0.2], 0.5, own=(0.95, 0.95)),
        "do not ship",
        {"teacher-loses"},
        "amalgam audit",
    ),
    "one teacher, which is better": (
        lambda: made(1000, 0.84, 0.90, teachers=1, automatic_epochs=3),
        "do not ship",
        set(),
        "amalgam audit",
    ),
    "zero-shot is better after many epochs": (
        lambda: made(1000, 0.60, 0.58, 0.94, epochs=34, automatic_epochs=12),
        "do not ship",
        set(),
        "student.method=zero-shot",
    ),
    "a learning rate far above auto": (
        lambda: made(1000, 0.6, 0.8, epochs=12, automatic_epochs=12, learning_rate=1e-3, automatic_rate=5e-5),
        "do not ship",
        {"high-rate"},
        "student.learning_rate=auto student.name=auto-rate",
    ),
    "few training texts": (
        lambda: made(1000, 0.6, 0.8, texts=90, epochs=150, automatic_epochs=150),
        "do not ship",
        {"few-texts"},
        "Add training texts",
    ),
    "targets of the wrong teacher by the default method": (
        lambda: made(1000, 0.6, 0.8, largest_loss="choice"),
        "do not ship",
        {"wrong-choice"},
        "amalgam label --count 100",
    ),
    "20 rare labels are never right": (
        lambda: made(500, MISSED, 0.55, labels=77, gold=RARE),
        "do not ship",
        {"labels-never-predicted"},
        "",
    ),
    "long texts": (
        lambda: made(1000, 0.6, 0.8, long_texts=0.5),
        "do not ship",
        {"long-texts"},
        "student.max_tokens=256",
    ),
    "evidence that disagrees": (
        lambda: made(1000, 0.6, 0.8, weights_unused=True),
        "do not ship",
        {"choice-not-trusted"},
        "amalgam audit",
    ),
    "targets of the wrong teacher": (
        lambda: made(1000, 0.6, 0.8, largest_loss="choice", method="muka-soft"),
        "do not ship",
        {"wrong-choice"},
        "student.method=amalgam",
    ),
    "no teachers, and zero-shot is better": (
        lambda: made(500, 0.5, None, 0.9, teachers=0),
        "do not ship",
        set(),
        "amalgam run",
    ),
    # hopeless
    "everything guesses": (
        lambda: made(1000, 0.26, 0.25, 0.25, own=(0.5, 0.5)),
        "do not ship",
        {"teachers-weak"},
        "amalgam audit",
    ),
    "a bad student of bad teachers": (
        lambda: made(1000, 0.352, 0.28, 0.28, own=(0.428, 0.456)),
        "do not ship",
        {"teachers-weak"},
        "amalgam audit",
    ),
    "hardly better than chance on many texts": (
        lambda: made(20_000, 0.28, 0.25, 0.25, own=(0.9, 0.9)),
        "do not ship",
        {"teacher-loses"},
        "amalgam audit",
    ),
    "wrong on most texts, teachers that guess": (
        lambda: made(3000, 0.45, 0.40, 0.30, own=(0.6, 0.6)),
        "do not ship",
        {"teachers-weak"},
        "amalgam audit",
    ),
    "always the most frequent label": (
        lambda: made(200, [1.0, 0, 0, 0, 0, 0], 0.80, 0.5, labels=6, gold=ONE_LABEL),
        "do not ship",
        {"skewed-labels"},
        "amalgam run",
    ),
    "unbalanced labels, little but the frequent one": (
        lambda: made(5000, [0.999, 0.03, 0.03, 0.03], 0.80, 0.5, gold=[0] * 4700 + [1, 2, 3] * 100),
        "do not ship",
        {"skewed-labels"},
        "",
    ),
    "selected texts, a worse student": (lambda: of_selected(0.70, 0.85), "do not ship", set(), ""),
    # unclear
    "texts of one teacher only": (
        lambda: made(500, 0.9, 0.7, gold=[0, 1] * 250),
        "cannot say",
        {"teacher-untested"},
        "Add labelled test texts of teacher-1",
    ),
    "selected texts, an equal student": (
        lambda: of_selected(0.85, 0.85, sharp=3),
        "cannot say",
        {"few-test-texts"},
        "random test texts",
    ),
    "only selected texts": (
        lambda: replace(of_selected(0.90, 0.80), n=0, labels=(), rivals=of_selected(0.90, 0.80).rivals[:1]),
        "cannot say",
        {"few-test-texts"},
        "random test texts",
    ),
    "a tie": (lambda: made(500, 0.82, 0.80), "cannot say", {"few-test-texts"}, "Label more test texts"),
    "an exact tie": (lambda: made(400, 0.80, 0.80), "cannot say", {"tie"}, "size and speed"),
    "one teacher, about equal": (lambda: made(300, 0.89, 0.90, teachers=1), "cannot say", set(), ""),
    "eight texts": (lambda: made(8, 1.0, 0.5), "cannot say", {"few-test-texts"}, "at least 200"),
    "thirty texts, a far better student": (
        lambda: made(30, 1.0, 0.3),
        "cannot say",
        {"few-test-texts"},
        "at least 200",
    ),
    "an unclear untrained student": (lambda: made(60, 0.5, 0.55, steps=54), "cannot say", {"few-steps"}, "epochs=auto"),
    # no labels
    "no labels at all": (lambda: VerdictInputs(0), "cannot say", {"no-labels"}, "corpus.test"),
    "no labels, a good student": (
        lambda: VerdictInputs(0, unlabelled=unlabelled(91)),
        "cannot say",
        {"no-labels"},
        "corpus.test=reports/student.to-label.csv",
    ),
    "no labels, a label is never predicted": (
        lambda: VerdictInputs(0, steps=54, unlabelled=unlabelled(80, banking=(900, 600), law=(0, 300))),
        "do not ship",
        {"labels-never-predicted", "few-steps", "no-labels"},
        "student.epochs=",
    ),
    "no labels, nothing was learned": (
        lambda: VerdictInputs(0, unlabelled=unlabelled(30)),
        "do not ship",
        {"no-labels"},
        "student.epochs=auto",
    ),
    "no labels, a teacher is lost": (
        lambda: VerdictInputs(
            0, unlabelled=unlabelled(100, banking=(1000, 1000), law=(0, 0), ensemble=[600, 400]), teachers=2, steps=54
        ),
        "do not ship",
        {"teacher-absent", "no-labels"},
        "amalgam audit",
    ),
    "no labels, a label that no text has": (
        lambda: VerdictInputs(
            0, unlabelled=unlabelled(100, banking=(1000, 1000), law=(0, 0), ensemble=[990, 10]), teachers=2
        ),
        "cannot say",
        {"no-labels"},
        "corpus.test",
    ),
    "no labels, six held-out texts": (
        lambda: VerdictInputs(0, unlabelled=unlabelled(2, n=6)),
        "cannot say",
        {"no-labels"},
        "corpus.test",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_verdict_of_a_made_experiment(name: str) -> None:
    make, decision, causes, command = CASES[name]
    inputs = make()
    result = verdict(inputs)
    assert result["decision"] == decision, result
    assert causes <= {cause["code"] for cause in result["causes"]}
    assert command in result["next"].get("command", result["next"]["text"])
    assert result["reasons"]
    first, *more = lines(result)
    assert first.startswith(f"verdict: {decision}. ")
    assert len(more) <= 4


def test_without_labels_an_estimate_of_the_targets_is_a_reason_and_decides_nothing() -> None:
    estimate: AccuracyEstimate = {"low": 0.312, "value": 0.5, "high": 0.688}
    with_it, without = (verdict(VerdictInputs(0, unlabelled=unlabelled(91), estimate=one)) for one in (estimate, None))
    [reason] = [text for text in with_it["reasons"] if text not in without["reasons"]]
    assert "targets' accuracy is estimated at 50.0 % (95 % interval 31.2 to 68.8)" in reason
    assert with_it["decision"] == without["decision"] == "cannot say"


def test_the_interval_of_a_mean_is_wilson_s_and_wider_for_values_that_vary_more() -> None:
    right = np.arange(100) < 80
    assert interval_of_mean(right.astype(float)) == pytest.approx(interval(0.8, 100))
    assert interval_of_mean(np.ones(100)) == pytest.approx(interval(1.0, 100))
    varied = right + np.tile([1, -1], 50)
    low, high = interval_of_mean(varied)
    assert varied.mean() == pytest.approx(0.8)
    assert high - low > 1.5 * (interval(0.8, 100)[1] - interval(0.8, 100)[0])
    wide = interval_of_mean(np.array([2.0, 0.0] * 10))
    assert 0 <= wide[0] < 0.8
    assert wide[1] == 1


def estimated(student: int, ensemble: int, *, gained: int, random: bool = True) -> LabelEstimates:
    """Accuracies on 100 labelled training texts; `gained`: texts on which only the student is right."""
    counts: dict[SystemKind, int] = {"student": student, "targets": 88, "ensemble": ensemble}
    systems: list[SystemEstimate] = [
        {"name": kind, "kind": kind, "n": 100, "mean": right / 100, "low": right / 100 - 0.1, "high": right / 100 + 0.1}
        for kind, right in counts.items()
    ]
    return {
        "n": 100,
        "labels": 100,
        "empty": 0,
        "random": random,
        "weights": True,
        "systems": systems,
        "gained": gained,
        "lost": gained - student + ensemble,
    }


def test_labelled_training_texts_replace_the_estimate_without_labels() -> None:
    estimate: AccuracyEstimate = {"low": 0.312, "value": 0.5, "high": 0.688}
    estimates = estimated(85, 60, gained=30)
    result = verdict(VerdictInputs(0, unlabelled=unlabelled(91), estimate=estimate, by_labels=estimates))
    text = "the student has about 85.0 % accuracy (95 % interval 75.0 to 95.0); the targets 88.0 %; the ensemble 60.0 %"
    assert text in lines(result)[0]
    assert "random sample" not in lines(result)[0]
    assert not any("is estimated at 50.0 %" in reason for reason in result["reasons"])
    assert result["decision"] == "cannot say"
    condition = verdict(
        VerdictInputs(0, unlabelled=unlabelled(91), by_labels=estimated(85, 60, gained=30, random=False))
    )
    assert "This holds if they are a random sample" in lines(condition)[0]


def test_a_student_below_the_ensemble_on_random_labelled_texts_is_not_shipped() -> None:
    results = {
        (gained, random): verdict(VerdictInputs(0, by_labels=estimated(60, 75, gained=gained, random=random)))
        for gained in (2, 40)
        for random in (True, False)
    }
    sentence = "On labelled training texts the ensemble is 15.0 points better than the student ("
    assert results[2, True]["decision"] == "do not ship"
    assert results[2, True]["reasons"][0].startswith(sentence)
    assert results[2, False]["decision"] == "cannot say"
    assert any(caution.startswith(sentence) for caution in results[2, False]["cautions"])
    assert results[40, True]["decision"] == "cannot say"  # the difference may be chance


def test_labelled_training_texts_change_no_verdict_on_test_texts() -> None:
    inputs = made(500, 0.852, 0.762, 0.62)
    assert verdict(replace(inputs, by_labels=estimated(60, 75, gained=2))) == verdict(inputs)


def test_the_estimate_is_printed_before_the_agreement() -> None:
    estimate: AccuracyEstimate = {"low": 0.312, "value": 0.5, "high": 0.688}
    first, second, *_ = lines(verdict(VerdictInputs(0, unlabelled=unlabelled(91), estimate=estimate)))
    assert "estimated at 50.0 %" in first
    assert "agrees with the targets on 91.0 %" in second


def test_without_labels_absent_labels_and_wrong_shares_are_reasons() -> None:
    quality = unlabelled(70, ensemble=[550, 450, 0], banking=(950, 550), music=(50, 450), law=(0, 0))
    printed = "\n".join(lines(verdict(VerdictInputs(0, unlabelled=quality))))
    assert "Neither targets nor student have 1 label: law." in printed
    assert "The student predicts banking on 95.0 % of the texts; it is first in 55.0 % of the targets." in printed


def test_a_teacher_that_targets_and_student_lost_is_named() -> None:
    quality = unlabelled(100, banking=(1000, 1000), law=(0, 0), ensemble=[600, 400])
    [reason] = verdict(VerdictInputs(0, unlabelled=quality))["reasons"]
    assert reason.startswith("The student never predicts a label of teacher teacher-1; the ensemble does on 40.0 %")


def test_rare_labels_that_are_never_right_are_named_together() -> None:
    reasons = verdict(made(500, MISSED, 0.55, labels=77, gold=RARE))["reasons"]
    [reason] = [text for text in reasons if "never predicted right" in text]
    assert reason.startswith("20 labels are never predicted right, with ")
    assert "intent-57, " in reason
    assert reason.endswith(" and 15 more.")


def test_a_student_below_one_half_ships_with_a_caution() -> None:
    result = verdict(made(5005, 0.49, 0.40, 0.30, labels=77, own=(0.85, 0.85)))
    assert any(caution.startswith("The student has only 49.") for caution in result["cautions"])


def test_untested_teachers_are_named() -> None:
    result = verdict(made(500, 0.9, 0.7, gold=[0, 1] * 250))
    assert result["reasons"] == ["No test text has a label of teacher teacher-1."]


@pytest.mark.parametrize(("n", "text"), [(1, "1 held-out text ("), (2, "2 held-out texts (")])
def test_one_text_is_no_plural(n: int, text: str) -> None:
    printed = " ".join(lines(verdict(VerdictInputs(0, unlabelled=unlabelled(1, n=n)))))
    assert text in printed


def test_a_student_without_folder_is_trained_again() -> None:
    inputs = with_student(made(1000, 0.80, 0.70), 0.90)
    again = {"student.epochs": 12, "student.name": "the better one", "student.layers": None}
    step = verdict(replace(inputs, remade={"muka-0": again}, file="my file.yaml"))["next"]
    assert step["command"] == (
        "amalgam run student.epochs=12 'student.name=the better one' student.layers=null -c 'my file.yaml'"
    )
    step = verdict(replace(inputs, remade={"muka-0": {}}))["next"]
    assert "command" not in step
    assert "muka-0" in step["text"]
    step = verdict(replace(inputs, reports={"student"}))["next"]
    assert step["command"].endswith("--student students/muka-0")


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[3].startswith("amalgam")])
def test_every_command_names_the_experiment_file(name: str) -> None:
    command = verdict(replace(CASES[name][0](), file="other.yaml"))["next"]["command"]
    assert command.endswith(" -c other.yaml")


def test_the_reason_names_the_rival_and_both_accuracies() -> None:
    [reason] = [text for text in verdict(made(1000, 0.548, 0.624, 0.948))["reasons"] if "shot" in text]
    assert all(number in reason for number in ("94.8 %", "54.8 %", "40.0 points", "n = 1,000"))


def test_the_worst_rival_comes_first() -> None:
    reasons = verdict(made(1000, 0.547, 0.75, 0.947, labels=6))["reasons"]
    assert reasons[0].startswith("Zero-shot")
    assert reasons[1].startswith("The ensemble")


def test_a_supervised_student_is_a_caution() -> None:
    cautions = verdict(with_student(made(500, 0.85, 0.75), 0.97, "supervised student"))["cautions"]
    assert any(text.startswith("The other student “muka-0” is") for text in cautions)
    assert any("gold labels" in text for text in cautions)


def test_selected_texts_are_a_caution_on_page_and_console() -> None:
    inputs = of_selected(0.90, 0.80)
    caution = verdict(inputs)["cautions"][0]
    assert caution.startswith(f"{inputs.selected} of {inputs.n + inputs.selected} test texts were selected")
    assert f"  caution: {caution}" in lines(verdict(inputs), caution)
    assert "selected texts" in verdict(inputs)["reasons"][0]


@pytest.mark.parametrize("sharp", [0.3, 1, 3])
def test_selected_texts_decide_as_all_texts_would(sharp: float) -> None:
    decisions = {
        accuracies: [verdict(of_selected(*accuracies, sharp=sharp, seed=seed))["decision"] for seed in range(10)]
        for accuracies in ((0.90, 0.80, 0.78), (0.85, 0.85, 0.78), (0.75, 0.85, 0.78))
    }
    better, equal, worse = decisions.values()
    assert (better.count("ship") > 6, "do not ship" in better) == (True, False)
    assert equal.count("cannot say") > 6
    assert (worse.count("do not ship") > 6, "ship" in worse) == (True, False)


def test_the_next_command_repeats_the_overrides_of_the_run() -> None:
    inputs = made(500, 0.5, 0.8, steps=54, overrides={"targets.mode": "a b", "student.epochs": 2})
    command = verdict(inputs)["next"]["command"]
    assert command == "amalgam run 'targets.mode=a b' student.epochs=auto student.name=longer"


def test_a_student_of_few_stored_texts_is_compared_without_pairs() -> None:
    rival: RivalCounts = {
        "name": "other", "kind": "student", "n": 1000, "student_right": 700, "right": 800, "gained": None, "lost": None
    }  # fmt: skip
    base = made(1000, 0.7, 0.5)
    assert verdict(replace(base, rivals=[*base.rivals, rival]))["decision"] == "do not ship"


# ---- intervals


@given(st.integers(0, 80), st.integers(0, 80), st.integers(0, 500))
def test_the_paired_interval_excludes_zero_as_mcnemars_test_does(gained: int, lost: int, equal: int) -> None:
    n = gained + lost + equal
    difference = paired(gained, lost, n)
    assert -1 <= difference.low <= difference.mean <= difference.high <= 1
    discordant = gained + lost
    significant = discordant and max(abs(gained - lost) - 1, 0) ** 2 / discordant > 1.96**2
    assert (difference.low > 0 or difference.high < 0) == bool(significant)


def test_without_a_differing_text_the_interval_is_not_empty() -> None:
    low, high = paired(0, 0, 40)[1:]
    assert low < -0.05
    assert high > 0.05
    assert paired(0, 0, 0) == (0.0, -1.0, 1.0)


def test_the_paired_interval_covers_the_true_difference() -> None:
    rng, inside = np.random.default_rng(0), 0
    for gained, lost, _ in rng.multinomial(200, [0.15, 0.08, 0.77], 500):
        _, low, high = paired(int(gained), int(lost), 200)
        inside += low <= 0.07 <= high
    assert inside >= 475


def test_independent_shares_have_a_wider_interval_than_pairs() -> None:
    pairs, shares = paired(60, 20, 500), unpaired(0.80, 0.72, 500)
    assert shares.mean == pytest.approx(pairs.mean)
    assert shares.low < pairs.low


def test_the_needed_texts_decide() -> None:
    n = texts_needed(40, 30, 500)
    assert n is not None
    assert n > 500
    scaled = paired(round(40 * n / 500), round(30 * n / 500), n)
    assert scaled.low > 0
    assert texts_needed(30, 30, 500) is None
    assert texts_needed(301, 300, 1000) is None


@pytest.mark.parametrize(("gained", "lost"), [(25, 25), (20, 25), (10, 20)])
def test_the_needed_texts_show_a_student_that_is_at_most_one_point_worse(gained: int, lost: int) -> None:
    """An equal student has no difference from 0 to show, but it ships once the interval ends above -1 point."""
    n = 1000
    assert paired(gained, lost, n).low < -EQUAL
    needed = texts_needed(gained, lost, n, EQUAL)
    assert needed is not None
    scaled = paired(round(gained * needed / n), round(lost * needed / n), needed)
    assert scaled.low > -EQUAL or scaled.high < 0


@pytest.mark.parametrize(("gained", "lost", "n"), [(0, 0, 200), (1, 1, 200), (2, 3, 210), (0, 1, 60)])
def test_the_interval_of_the_needed_texts_decides(gained: int, lost: int, n: int) -> None:
    needed = texts_needed(gained, lost, n, EQUAL)
    assert needed is not None
    difference = paired(gained * needed / n, lost * needed / n, needed)
    assert difference.low > -EQUAL or difference.high < 0
    assert needed >= 381 or difference.high < 0


def test_an_equal_student_on_few_texts_is_no_tie() -> None:
    ensemble: RivalCounts = {
        "name": "ensemble", "kind": "ensemble", "n": 1000, "student_right": 800, "right": 800, "gained": 25, "lost": 25
    }  # fmt: skip
    result = verdict(VerdictInputs(1000, [ensemble], steps=900))
    assert (result["decision"], result["texts_needed"]) == ("cannot say", 4000)
    assert [cause["code"] for cause in result["causes"]] == ["few-test-texts"]
    assert "about 4,000" in result["next"]["text"]


def test_several_comparisons_have_wider_intervals() -> None:
    assert errors_of(1) == pytest.approx(1.96)
    assert errors_of(20) == pytest.approx(3.02, abs=0.01)
    assert interval(0.5, 100, errors_of(20))[0] < interval(0.5, 100)[0]


# ---- the texts to label


def test_texts_to_label_are_random_ones_and_random_ones_on_which_student_and_ensemble_differ() -> None:
    rng = np.random.default_rng(0)
    student, ensemble = rng.dirichlet(np.ones(4), 1000), rng.dirichlet(np.ones(4), 1000)
    chosen = select(student, ensemble)
    assert chosen == select(student, ensemble)
    assert len({row for row, _ in chosen}) == len(chosen) == 200
    by_reason = {why: [row for row, reason in chosen if reason == why] for _, why in chosen}
    assert {why: len(own) for why, own in by_reason.items()} == {"student and ensemble differ": 100, "random": 100}
    differ = np.flatnonzero(student.argmax(axis=1) != ensemble.argmax(axis=1))
    assert by_reason["student and ensemble differ"] == differ[differ >= 100][:100].tolist()


@pytest.mark.parametrize("wrong", [0.02, 0.5])
def test_random_texts_to_label_estimate_the_accuracy(wrong: float) -> None:
    rng = np.random.default_rng(0)
    for _ in range(5):
        student, gold = rng.dirichlet(np.ones(4), 1000), np.empty(1000, int)
        gold[:] = student.argmax(axis=1)
        errors = rng.random(1000) < wrong
        gold[errors] = (gold[errors] + 1) % 4
        chosen = select(student, np.eye(4)[gold])  # the ensemble disagrees exactly on errors
        assert 190 <= len(chosen) <= 200
        random = [row for row, why in chosen if why == "random"]
        assert sorted(random) == list(range(len(random)))  # the first rows are a random sample
        assert len(random) >= 100


def test_few_texts_are_all_labelled_and_no_ensemble_is_needed() -> None:
    student = np.random.default_rng(0).dirichlet(np.ones(3), 30)
    assert sorted(row for row, _ in select(student, None)) == list(range(30))


def test_the_columns_are_those_of_the_corpus() -> None:
    plain = Corpus(train=["a.csv"])
    assert columns_of(plain) == ["key", "text", "label", "student", "ensemble", "why"]
    pairs = Corpus(train=["a.csv"], text=["premise", "why"], id="number", label="gold")
    assert columns_of(pairs) == ["key", "number", "premise", "why", "gold", "student", "ensemble", "why_"]


# ---- coverage and lengths


def test_coverage_counts_what_is_answered_and_right() -> None:
    rows = coverage(np.array([0.95, 0.85, 0.65, 0.3]), np.array([True, True, False, True]))
    at = {row["probability"]: (row["n"], row["right"]) for row in rows["thresholds"]}
    assert (at[0.0], at[0.6], at[0.8], at[0.99]) == ((4, 3), (3, 2), (2, 2), (0, 0))
    assert [(row["n"], row["right"]) for row in rows["curve"]] == [(1, 1), (2, 2), (3, 2), (4, 3)]


def test_texts_of_similar_length_are_counted_together() -> None:
    letters = np.repeat([10, 20, 30, 400], 25)
    rows = by_length(letters, letters < 400)
    assert sum(row["n"] for row in rows) == 100
    assert [row["right"] / row["n"] for row in rows][-1] == 0
    assert by_length(letters[:20], letters[:20] < 400) == []
    assert by_length(np.full(100, 7), np.ones(100, dtype=bool)) == []


def test_a_label_is_missed_only_if_the_targets_have_it_often() -> None:
    quality = unlabelled(90, banking=(990, 900), law=(0, 9), music=(0, 91))
    assert never_predicted(quality) == ["music"]
