"""Tests the verdict on made experiments: predictions with given accuracies, and no training."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from amalgam.stages.common.intervals import (
    errors_of,
    interval,
    interval_of_mean,
    paired,
    points,
    texts_needed,
    unpaired,
)
from amalgam.stages.report.conditions import never_predicted
from amalgam.stages.report.tables import estimate_line
from amalgam.stages.report.verdict import EQUAL, lines, verdict
from amalgam.stages.report.verdict_types import (
    LabelEstimates,
    RivalCounts,
    ShareOfUnknown,
    SystemEstimate,
    SystemKind,
)
from amalgam.stages.report.verdict_words import (
    difference_sentence,
    evaluation_cautions,
    figures_of,
    learned_sentence,
    selection_sentence,
)
from amalgam.tests.stages.verdict_cases import (
    CASES,
    MISSED,
    RARE,
    changed,
    estimates,
    labelled_inputs,
    linear_map,
    made,
    of_selected,
    of_teachers,
    unlabelled,
    unlabelled_inputs,
    with_student,
)

Array = Any
ESTIMATED = unlabelled(91) | {"estimates": estimates()}


@pytest.mark.parametrize("name", CASES)
def test_the_verdict_of_a_made_experiment(name: str) -> None:
    make, decision, causes, command = CASES[name]
    result = verdict(replace(make(), file="other.yaml"))
    assert result["decision"] == decision, result
    assert causes <= {cause["code"] for cause in result["causes"]}
    assert command in result["next"].get("command", result["next"]["text"])
    assert result["next"].get("command", "-c other.yaml").endswith("-c other.yaml")
    assert result["reasons"]
    first, *more = lines(result)
    assert first.startswith(f"verdict: {decision}. ")
    assert len(more) <= 4


@pytest.mark.parametrize(("ece", "n", "cautions"), [(0.21, 100, 1), (0.19, 100, 0), (0.9, 99, 0), (None, 100, 0)])
def test_probabilities_far_from_the_accuracy_are_a_caution(ece: float | None, n: int, cautions: int) -> None:
    evaluation: Any = {
        "n": n,
        "left_out": 0,
        "system": "student",
        "systems": {"student": {"accuracy": 0.7, "ece": ece}, "ensemble": {"ece": 1.0}},
    }
    sentences = list(evaluation_cautions(evaluation))
    assert len(sentences) == cautions
    assert all("page" not in sentence for sentence in sentences), "the model card has them without the page"
    assert all("by 21.0 points on average (ECE)" in sentence for sentence in sentences)


def test_without_labels_the_estimates_are_a_reason_and_a_lead_of_the_student_decides_nothing() -> None:
    with_it, without = (verdict(unlabelled_inputs(unlabelled=quality)) for quality in (ESTIMATED, unlabelled(91)))
    [reason] = [text for text in with_it["reasons"] if text not in without["reasons"]]
    figures = "90.0 % (95 % interval 75.0 to 95.0); that of the targets at 92.0 %, that of the ensemble at 70.0 %."
    assert f"The student's accuracy is estimated at {figures}" in reason
    assert with_it["decision"] == without["decision"] == "cannot say"
    assert any(caution.startswith("Agreement and estimates are no accuracy") for caution in with_it["cautions"])
    # Also those of `supervised`, which are gold labels.
    assert "Agreement is no accuracy: the student repeats the errors of the targets too." in without["cautions"]


def test_without_held_out_texts_the_estimate_of_the_targets_comes_first() -> None:
    systems = estimates()["systems"][1:]
    quality = unlabelled(91) | {"estimates": {"systems": systems, "gap": None}}
    result = verdict(unlabelled_inputs(unlabelled=quality))
    assert "The targets' accuracy is estimated at 92.0 %" in result["reasons"][1]
    assert result["decision"] == "cannot say"


@pytest.mark.parametrize(("lead", "error", "decision"), [(0.2, 0.09, "do not ship"), (0.2, 0.11, "cannot say")])
def test_only_a_lead_of_the_ensemble_of_ten_points_decides_without_labels(
    lead: float, error: float, decision: str
) -> None:
    result = verdict(unlabelled_inputs(unlabelled=unlabelled(91) | {"estimates": estimates(lead, error)}))
    assert result["decision"] == decision
    sentence = "The ensemble's estimated accuracy is 20.0 points higher than the student's (95 % interval +11.0 to +"
    assert result["reasons"][0].startswith(sentence) == (decision == "do not ship")


@pytest.mark.parametrize(
    ("gained", "lost", "decision"),
    [(4, 24, "do not ship"), (24, 4, "cannot say"), (0, 9, "cannot say"), (20, 34, "cannot say")],
    ids=["clear", "the student is better", "less than ten points", "not significant"],
)
def test_only_a_clear_lead_of_a_linear_map_decides_where_labels_do_not(gained: int, lost: int, decision: str) -> None:
    without = unlabelled_inputs(unlabelled=unlabelled(90 - lost))
    sentence = "It has their label on 66.0 % of 100 held-out texts, a linear map of its encoder's states on"
    for inputs in (without, made(49, 0.9, 0.8), made(300, 0.75, 0.75)):
        result = verdict(changed(inputs, linear_map=linear_map(gained, lost)))
        assert result["decision"] == decision
        assert (sentence in result["reasons"][0]) == (decision == "do not ship")
    assert verdict(changed(made(1000, 0.9, 0.8), linear_map=linear_map(gained, lost)))["decision"] == "ship"


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
    result = verdict(unlabelled_inputs(unlabelled=ESTIMATED, label_estimates=estimated(85, 60, gained=30)))
    text = "the student has about 85.0 % accuracy (95 % interval 75.0 to 95.0); the targets 88.0 %; the ensemble 60.0 %"
    assert text in lines(result)[0]
    assert "random sample" not in lines(result)[0]
    assert not any("is estimated at" in reason for reason in result["reasons"])
    assert result["decision"] == "cannot say"
    condition = verdict(
        unlabelled_inputs(unlabelled=unlabelled(91), label_estimates=estimated(85, 60, gained=30, random=False))
    )
    assert "This holds if they are a random sample" in lines(condition)[0]


def test_a_student_below_the_ensemble_on_random_labelled_texts_is_not_shipped() -> None:
    results = {
        (gained, random): verdict(unlabelled_inputs(label_estimates=estimated(60, 75, gained=gained, random=random)))
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
    assert verdict(changed(inputs, label_estimates=estimated(60, 75, gained=2))) == verdict(inputs)


def test_the_estimate_is_printed_before_the_agreement() -> None:
    first, second, *_ = lines(verdict(unlabelled_inputs(unlabelled=ESTIMATED)))
    assert "estimated at 90.0 %" in first
    assert "agrees with the targets on 91.0 %" in second


def test_without_labels_absent_labels_and_wrong_shares_are_reasons() -> None:
    quality = unlabelled(70, ensemble=[550, 450, 0], banking=(950, 550), music=(50, 450), law=(0, 0))
    printed = "\n".join(lines(verdict(unlabelled_inputs(unlabelled=quality))))
    assert "Neither targets nor student have 1 label: law." in printed
    assert "The student predicts banking on 95.0 % of the texts; the targets have it on 55.0 %." in printed


def test_targets_that_are_no_labels_are_not_named_as_the_reference() -> None:
    """The logits of uhc or scores are no distribution over the labels, so the reference is the ensemble."""
    quality = unlabelled(70, banking=(1000, 550), music=(0, 450), law=(0, 0))
    quality["agreement"]["reference"] = "ensemble"
    result = verdict(unlabelled_inputs(unlabelled=quality))
    printed = "\n".join([*result["reasons"], *result["cautions"], *(cause["text"] for cause in result["causes"])])
    assert "1 label is never predicted, though the ensemble has it: music." in printed
    assert "targets" not in printed
    shares = "\n".join(lines(verdict(unlabelled_inputs(unlabelled=quality | {"labels": quality["labels"][:1]}))))
    assert "The student predicts banking on 100.0 % of the texts; the ensemble has it on 55.0 %." in shares
    assert "targets" not in shares


def test_a_teacher_that_targets_and_student_lost_is_named() -> None:
    quality = unlabelled(100, banking=(1000, 1000), law=(0, 0), ensemble=[600, 400])
    [reason] = verdict(unlabelled_inputs(unlabelled=quality))["reasons"]
    assert reason.startswith("The student never predicts a label of teacher teacher-1; the ensemble does on 40.0 %")


def test_a_lost_teacher_of_fewer_than_ten_texts_may_be_chance() -> None:
    for of_teacher, decision in ((9, "cannot say"), (10, "do not ship")):
        quality: Any = unlabelled(100, banking=(100, 100), law=(0, 0), ensemble=[100 - of_teacher, of_teacher])
        quality["n"] = 100
        assert verdict(unlabelled_inputs(unlabelled=quality))["decision"] == decision


def test_rare_labels_that_are_never_right_are_named_together() -> None:
    reasons = verdict(made(500, MISSED, 0.55, labels=77, gold=RARE))["reasons"]
    [reason] = [text for text in reasons if "never predicted right" in text]
    assert reason.startswith("20 labels are never predicted right, with ")
    assert "intent-57, " in reason
    assert reason.endswith(" and 15 more.")


def test_many_texts_of_no_label_are_a_caution() -> None:
    for unknown, is_named in ((2, False), (12, True)):
        low, high = interval(unknown / 50, 50)
        share: ShareOfUnknown = {"n": 50, "unknown": unknown, "low": low, "high": high}
        for inputs in (changed(made(400, [0.9] * 4, 0.6), unknown_share=share), unlabelled_inputs(unknown_share=share)):
            named = [text for text in verdict(inputs)["cautions"] if "fit no label" in text]
            assert bool(named) == is_named


@pytest.mark.parametrize("tested", [True, False])
def test_many_labelled_texts_of_no_teacher_are_a_caution(*, tested: bool) -> None:
    for left_out, is_named in ((5, False), (25, True)):
        by_labels: LabelEstimates = {**estimated(85, 70, gained=20), "left_out": left_out, "sample": 100}
        inputs = changed(made(400, [0.9] * 4, 0.6), left_out=4 * left_out, label_estimates=by_labels)
        cautions = " ".join(verdict(inputs if tested else unlabelled_inputs(label_estimates=by_labels))["cautions"])
        of_training = "25 of 125 labelled training texts have a label of no teacher and are not counted: "
        assert (f"{of_training}of all 125, about 68.0 % are right." in cautions) == is_named
        assert ("100 of 500 labelled test texts" in cautions) == (is_named and tested)


def occurrences(ensemble: int, *, tested: int = 0) -> list[Any]:
    """40 texts of the labels of teacher a, and `tested` ones of teacher b, which shares law with a."""
    owners = {"banking": ["a"], "law": ["a", "b"], "java": ["b"], "ruby": ["b"]}
    counts = {"banking": (20, 20), "law": (20, 20), "java": (tested, ensemble), "ruby": (0, 0)}
    return [
        {"label": label, "teachers": teachers, **dict.fromkeys(("n", "right", "predicted"), n), "ensemble": predicted}
        for label, teachers in owners.items()
        for n, predicted in [counts[label]]
    ]


def test_labels_of_a_teacher_that_no_labelled_text_has_are_a_caution_if_the_ensemble_predicts_them() -> None:
    absent = "has a label of teacher b alone: java, ruby. The ensemble predicts them on 5. Labels that are older"
    never = "The student never predicts labels that no test text has, though the ensemble does: java."
    for ensemble, tested, is_named in ((5, 0, True), (4, 0, False), (5, 1, False)):
        rows = occurrences(ensemble, tested=tested)
        inputs = labelled_inputs(40 + tested, made(400, [0.9] * 4, 0.6).rivals, rows, given_labels=rows)
        cautions = " ".join(verdict(inputs)["cautions"])
        assert (f"No test text {absent}" in cautions) == (never in cautions) == is_named
        assert (f"No text of `labels` {absent}" in cautions) == is_named
        without = " ".join(verdict(unlabelled_inputs(given_labels=rows))["cautions"])
        assert (f"No text of `labels` {absent}" in without) == is_named
    few = [{**row, "n": row["n"] // 2} for row in occurrences(5)]
    assert not verdict(unlabelled_inputs(given_labels=few))["cautions"]


def test_one_label_of_twenty_may_be_lost_but_not_two() -> None:
    for labels, lost, decision in ((19, 1, "do not ship"), (20, 1, "ship"), (40, 2, "ship"), (40, 3, "do not ship")):
        result = verdict(made(100 * labels, [0.9] * (labels - lost) + [0.0] * lost, 0.6, labels=labels))
        never = f"{lost} labels are never predicted right, each " if lost > 1 else "is never predicted right, with 100 "
        assert result["decision"] == decision
        assert any(never in text for text in result["cautions" if decision == "ship" else "reasons"])
    frequent = [0] * 100 + [1 + at % 39 for at in range(900)]
    assert verdict(made(0, [0.0] + [0.9] * 39, 0.5, labels=40, gold=frequent))["decision"] == "do not ship"


def test_without_labels_one_label_of_twenty_may_be_unpredicted() -> None:
    never = "1 label is never predicted, though the targets have it: lost."
    for others, decision, part in ((19, "cannot say", "cautions"), (18, "do not ship", "reasons")):
        counts: Any = {"lost": (0, 10)} | {f"label-{at}": (10, 10) for at in range(others)}
        result: Any = verdict(unlabelled_inputs(unlabelled=unlabelled(90, 100, **counts)))
        assert result["decision"] == decision
        assert never in result[part]


def test_a_student_below_one_half_ships_with_a_caution() -> None:
    result = verdict(made(5005, 0.45, 0.36, 0.30, labels=77, own=(0.85, 0.85)))
    assert result["decision"] == "ship"
    assert any(caution.startswith("The student has only 44.6 %") for caution in result["cautions"])
    of_teachers = {text for text in result["cautions"] if "on its own labels is" in text}
    [printed] = [line for line in lines(result, page="page") if "on its own labels is" in line]
    worst = min(rival["mean"] for rival in result["rivals"] if rival["kind"] == "teacher on its own labels")
    assert (len(of_teachers), printed.removeprefix("  caution: ") in of_teachers) == (2, True)
    assert f"is {-100 * worst:.1f} points better than the student (" in printed


def test_untested_teachers_are_named() -> None:
    result = verdict(made(500, 0.9, 0.7, gold=[0, 1] * 250))
    assert result["reasons"] == ["No test text has a label of teacher teacher-1."]


def test_texts_of_one_teacher_are_no_reason_against_a_student_of_all() -> None:
    """The teacher of these texts is better, as is an ensemble that follows it."""
    tested = made(500, 0.84, 0.95, own=(0.93, 0.9), gold=[0, 1] * 250)
    result = verdict(tested)
    assert (result["decision"], result["reasons"]) == ("cannot say", ["No test text has a label of teacher teacher-1."])
    remarks = " ".join(result["cautions"])
    assert "The ensemble is 11.0 points better than the student (" in remarks
    assert "on texts without a label of teacher teacher-1." in remarks
    assert "Teacher teacher-0 on its own labels is " in remarks
    by_zero_shot = verdict(made(500, 0.84, 0.7, 0.95, gold=[0, 1] * 250))
    assert by_zero_shot["decision"] == "do not ship"
    assert by_zero_shot["reasons"][0].endswith("), on texts without a label of teacher teacher-1.")
    useless = verdict(made(500, 0.3, 0.95, own=(0.93, 0.9), gold=[0, 1] * 250))
    assert useless["decision"] == "do not ship"  # by the teacher's labels


@pytest.mark.parametrize(("few", "is_named"), [(9, True), (10, False)])
def test_a_difference_names_the_teachers_that_few_test_texts_are_of(few: int, *, is_named: bool) -> None:
    result = verdict(made(500, 0.9, 0.5, gold=[0] * 250 + [1] * (250 - few) + [2] * few))
    assert result["decision"] == "ship"
    few_texts = ", on texts of which fewer than 10 have a label of teacher teacher-1, and no rival is"
    assert (few_texts in result["reasons"][0]) == is_named


@pytest.mark.parametrize(("n", "text"), [(1, "1 held-out text ("), (2, "2 held-out texts (")])
def test_one_text_is_no_plural(n: int, text: str) -> None:
    printed = " ".join(lines(verdict(unlabelled_inputs(unlabelled=unlabelled(1, n=n)))))
    assert text in printed


def test_a_student_without_folder_is_trained_again() -> None:
    inputs = with_student(made(1000, 0.80, 0.70), 0.90)
    again = {"student.epochs": 12, "student.name": "the better one", "student.layers": None}
    step = verdict(replace(inputs, remade={"muka-0": again}, file="my file.yaml"))["next"]
    assert step["command"] == (
        "amalgam run student.epochs=12 'student.name=\"the better one\"' student.layers=null -c 'my file.yaml'"
    )
    unknown = replace(inputs, remade={"muka-0": {}})
    assert verdict(unknown)["reasons"][0].endswith("It is in no folder now.")
    assert not verdict(inputs)["reasons"][0].endswith("now.")
    assert verdict(unknown)["next"]["command"] == "amalgam run student.epochs=auto student.name=longer"
    two = with_student(made(1000, 0.80, 0.70), 0.90, same=2)
    for overrides in ({}, again):
        assert verdict(replace(two, remade={"muka-0": overrides}))["next"]["command"] == "amalgam report muka-1"
    for teachers in (0, 2):  # without and with the command of an audit
        step = verdict(changed(unknown, labels=of_teachers(teachers), epochs=12))["next"]
        assert "command" not in step
        assert "muka-0" in step["text"]
        assert "Repeat the command that trained it, with an unused student.name: its texts" in step["text"]


def test_a_command_of_an_experiment_without_file_comes_after_that_of_the_file() -> None:
    inputs = CASES["another student is better"][0]()
    with_file, without = (verdict(replace(inputs, file=file))["next"]["text"] for file in ("amalgam.yaml", ""))
    assert without == f"{with_file} Call experiment.write() first."


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
    selected = inputs.report["evaluation"]["selected"]["texts"]
    assert caution.startswith(f"{selected} of {inputs.n + selected} test texts were selected")
    assert f"  caution: {caution}" in lines(verdict(inputs), [caution])
    [ensemble] = [rival for rival in verdict(inputs)["rivals"] if rival["kind"] == "ensemble"]
    assert 0 < ensemble["on_random"] < ensemble["mean"]
    alone = f"with selected texts; on random texts alone {100 * ensemble['on_random']:+.1f})"
    assert alone in verdict(inputs)["reasons"][0]
    worse = verdict(of_selected(0.70, 0.85))["reasons"][0]
    assert re.search(r"The ensemble is .* with selected texts; on random texts alone \+", worse)
    del ensemble["on_random"]  # as in a report of an older version
    assert "on random texts alone the difference is smaller" in difference_sentence(ensemble)


def test_sentences_about_one_text_have_the_singular() -> None:
    assert selection_sentence(0, 1).startswith("The only test text was selected")
    assert "1 of 50 test texts was selected" in selection_sentence(49, 1)
    assert "uses it;" in selection_sentence(49, 1)
    assert "uses them; its difference is larger than on ordinary texts." in selection_sentence(48, 2)
    one, two = (learned_sentence({"texts": texts, "of": 500, "labelled": True}) for texts in (1, 2))
    assert "1 of 500 test texts was learned with its gold label:" in one
    assert "2 of 500 test texts were learned with their gold labels:" in two
    one, two = (estimate_line(estimated(85, 60, gained=30) | {"empty": empty}) for empty in (1, 2))
    assert "1 more has no label and may be a harder one" in one
    assert "2 more have no label and may be harder ones" in two


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
    assert command == "amalgam run 'targets.mode=\"a b\"' student.epochs=auto student.name=longer"
    taken = replace(inputs, folders={"student", "longer", "longer-2"})
    assert verdict(taken)["next"]["command"] == f"{command}-3"


@pytest.mark.parametrize(
    "name",
    [
        "targets of the wrong teacher by the default method",
        "evidence that disagrees",
        "zero-shot is better after many epochs",
        "eight texts",
        "test texts that the teachers learned",
    ],
)
def test_every_command_about_this_student_repeats_its_overrides(name: str) -> None:
    overrides = {"corpus.test": "texts/few.csv", "student.name": "two"}
    step = verdict(replace(CASES[name][0](), overrides=overrides))["next"]
    assert " corpus.test=texts/few.csv student.name=two" in step.get("command", step["text"])


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
    result = verdict(labelled_inputs(1000, [ensemble]))
    assert (result["decision"], result["texts_needed"]) == ("cannot say", 4000)
    assert [cause["code"] for cause in result["causes"]] == ["few-test-texts"]
    assert "about 4,000" in result["next"]["text"]


def test_few_training_texts_name_no_number_of_labels_where_all_test_texts_were_selected() -> None:
    base = made(1000, 0.7, 0.5)
    for texts, expected in ((115, ["115 training texts are few"]), (0, [])):  # as-dfd reads no text
        causes = verdict(changed(base, selected={"texts": 20, "random": 0}, texts=texts))["causes"]
        assert [cause["text"] for cause in causes if cause["code"] == "few-texts"] == expected


def test_several_comparisons_have_wider_intervals() -> None:
    assert errors_of(1) == pytest.approx(1.96)
    assert errors_of(20) == pytest.approx(3.02, abs=0.01)
    assert interval(0.5, 100, errors_of(20))[0] < interval(0.5, 100)[0]
    counts: RivalCounts = {
        "name": "a", "kind": "student", "n": 1000, "student_right": 800, "right": 860, "gained": 25, "lost": 85
    }  # fmt: skip
    ensemble: RivalCounts = {**counts, "name": "ensemble", "kind": "ensemble"}
    cases = (labelled_inputs(1000, [*[counts] * number, ensemble]) for number in (1, 2))
    one, two = (verdict(case)["rivals"][0] for case in cases)
    assert two["low"] < one["low"]
    assert "95 % interval -" in figures_of(one)
    assert "95 % interval for 2 comparisons together -" in figures_of(two)


def test_a_label_is_missed_only_if_the_targets_have_it_often() -> None:
    quality = unlabelled(90, banking=(990, 900), law=(0, 9), music=(0, 91))
    assert never_predicted(quality) == ["music"]


@pytest.mark.parametrize(("missed", "is_named"), [(20, False), (30, True)])
def test_rare_labels_are_named_only_if_more_are_missed_than_by_chance(missed: int, is_named: bool) -> None:
    """Of 40 labels with two texts, chance misses 29 texts at an accuracy of 0.4; three standard errors are 18."""
    rare: Any = [{"label": f"rare-{at}", "n": 2, "right": int(at >= missed), "predicted": 1} for at in range(40)]
    frequent: Any = {"label": "frequent", "n": 900, "right": 760, "predicted": 900}
    inputs = labelled_inputs(980, made(980, 0.9, 0.7).rivals, [frequent, *rare])
    assert any("are never predicted right, with" in reason for reason in verdict(inputs)["reasons"]) == is_named


def test_no_number_of_selected_texts_is_proposed() -> None:
    result = verdict(of_selected(0.8, 0.77))
    assert (result["decision"], result["texts_needed"]) == ("cannot say", None)
    assert "at least 200 in all" in result["next"]["text"]
    more = verdict(changed(of_selected(0.8, 0.77), selected={"texts": 100, "random": 300}))
    assert "Label more random test texts, at least 600 in all" in more["next"]["text"]
    assert verdict(made(200, 0.85, 0.80))["texts_needed"]


@pytest.mark.parametrize(("gained", "n", "low"), [(81, 263, 0.2535), (15, 148, 0.0598)])
def test_the_interval_of_a_share_with_continuity_correction_is_newcombes(gained: int, n: int, low: float) -> None:
    """All texts differ, so the lower end is that of the share gained: Newcombe 1998, table I, method 4."""
    assert (1 + paired(gained, n - gained, n).low) / 2 == pytest.approx(low, abs=1e-4)


def test_points_of_no_difference_have_no_minus() -> None:
    differences = (0.0, -0.0, -0.0004, -0.0006, 0.012)
    assert list(map(points, differences)) == ["+0.0", "+0.0", "+0.0", "-0.1", "+1.2"]
