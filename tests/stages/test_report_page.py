"""Tests the report's counts and figures with small numbers that a person can check."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markupsafe import Markup

from amalgam.stages.app.comparison import comparison_of, difference
from amalgam.stages.common.intervals import interval, paired
from amalgam.stages.report.evaluation import SystemPredictions
from amalgam.stages.report.figures import Figure, FigureAxis, axis, figures, spikes
from amalgam.stages.report.html import CLASSES_SHOWN, TEACHERS_SHOWN, as_html, page
from amalgam.stages.report.quality import (
    MATRIX,
    MOST_LETTERS,
    MOST_PAIRS,
    by_length,
    calibration,
    confused_pairs,
    confusion_matrix,
    coverage,
    histogram,
    separation,
    shortened,
)
from amalgam.stages.report.report_json import accuracy_losses, summary
from amalgam.stages.report.verdict import relevant_loss, verdict
from amalgam.stages.report.verdict_words import figures_of
from amalgam.stages.report.writing_systems import scripts_of
from amalgam.tests.stages.verdict_cases import CASES, estimates, made
from amalgam.tests.workspaces import TEACHER_LABELS, Workspace

# ---- the summary


@pytest.mark.parametrize(("right", "n", "low", "high"), [(0.5, 100, 0.4038, 0.5962), (0.0, 10, 0.0, 0.2775)])
def test_an_interval_is_wilsons(right: float, n: int, low: float, high: float) -> None:
    assert interval(right, n) == pytest.approx((low, high), abs=1e-4)


def test_without_test_texts_the_summary_is_the_estimate_and_the_page_has_it_once(built: Workspace) -> None:
    blocks = built.numbers() | {"evaluation": None, "label_estimates": None, "student_quality": None}
    blocks |= {"unlabelled": None, "target_quality": None}
    assert summary(blocks)[0].startswith("The accuracy of the student (muka-soft) is unknown: there are no labelled")
    estimated = blocks | {"unlabelled": {"estimates": estimates()}}
    assert summary(estimated)[0].startswith("The student's accuracy is estimated at 90.0 % (95 % interval ")
    shown = built.numbers()
    shown["verdict"]["reasons"] = ["A reason."]
    shown["summary"] = ["A reason.", "Another sentence."]
    html = page(shown)
    assert [html.count(sentence) for sentence in shown["summary"]] == [1, 1]


def measured(oracle: int, targets: int, accuracy: float, n: int = 1000, *, on_training: int | None = None) -> Any:
    """`on_training`: training texts that a teacher predicts right, if not as many as test texts."""
    system = {"accuracy": accuracy}
    return {
        "learns": True,
        "method": "muka-soft",
        "fingerprint": "f",
        "supervised": None,
        "settings": {"targets": {"mode": "soft"}},
        "evaluation": {"system": "student", "n": n, "systems": {"student": system, "teacher:a": {"accuracy": 0.25}}},
        "student_quality": {"teachers": {"oracle": oracle}, "rivals": []},
        "target_quality": {
            "choice": {"n": n, "oracle": on_training or oracle},
            "targets": {"right": targets, "labelled": n},
        },
    }


@pytest.mark.parametrize(
    ("oracle", "targets", "accuracy", "pattern"),
    [
        (700, 690, 0.68, r"wrong teachers.* 70\.0 %"),
        (970, 700, 0.69, r"choice of the teacher.* 97\.0 %"),
        (970, 960, 0.60, r"student's fit.* 60\.0 %.* 96\.0 %"),
    ],
)
def test_the_summary_names_the_step_with_the_largest_loss(
    oracle: int, targets: int, accuracy: float, pattern: str
) -> None:
    report = measured(oracle, targets, accuracy)
    report["accuracy_losses"] = accuracy_losses(report, teachers=2)
    assert sum(row["lost"] for row in report["accuracy_losses"]) == pytest.approx(1 - accuracy)
    first, second = summary(report)
    assert re.search(f"{100 * accuracy:.1f} % .*1,000 test texts", first)
    assert re.search(r"\(a\).* 25\.0 %", first)
    assert re.search(pattern, second)


def test_teachers_that_know_only_the_training_texts_have_their_loss_on_the_test_texts() -> None:
    report = measured(280, 750, 0.17, on_training=980)
    report["accuracy_losses"] = losses = accuracy_losses(report, teachers=2)
    assert [round(loss["lost"], 2) for loss in losses] == [0.72, 0.23, -0.12]
    assert relevant_loss(losses) == "teachers"
    assert "72.0 points of accuracy: wrong teachers" in summary(report)[1]
    report["target_quality"]["choice"]["n"] = 49
    assert [loss["step"] for loss in accuracy_losses(report, teachers=2)] == ["teachers", "choice and fit"]


def test_the_summary_names_the_teachers_that_the_test_texts_miss() -> None:
    report = measured(970, 960, 0.9)
    report["accuracy_losses"] = accuracy_losses(report, teachers=2)
    for n, words in ((0, "1,000 test texts without a label of teacher b (95 %"), (10, "1,000 test texts (95 %")):
        report["student_quality"]["rivals"] = [{"name": "b", "kind": "teacher on its own labels", "n": n}]
        assert words in summary(report)[0]


def test_without_gold_labels_in_training_choice_and_fit_are_one_step() -> None:
    report = measured(900, 0, 0.7)
    report["target_quality"] = {"choice": {"n": 0, "oracle": 0}, "targets": {"right": None, "labelled": 0}}
    report["accuracy_losses"] = accuracy_losses(report, teachers=2)
    assert [row["step"] for row in report["accuracy_losses"]] == ["teachers", "choice and fit"]
    assert summary(report)[1]


def test_a_student_of_one_teacher_loses_accuracy_by_its_fit_and_not_by_a_choice(workspace: Workspace) -> None:
    report = measured(900, 0, 0.7)
    report["target_quality"] = {"choice": {"n": 0, "oracle": 0}, "targets": {"right": None, "labelled": 0}}
    report["accuracy_losses"] = losses = accuracy_losses(report, teachers=1)
    assert "the student's fit: 70.0 % accuracy on the test texts, about 90.0 % for its targets" in summary(report)[1]
    causes = verdict(made(1000, 0.7, 0.9, teachers=1, accuracy_losses=losses))["causes"]
    assert causes == [{"code": "not-fitted", "text": "the student does not fit its targets"}]
    workspace.write([(text, "") for text, _ in workspace.texts()])
    workspace.write([row for row in workspace.texts("test") if row[1] in TEACHER_LABELS["first"]], "test")
    workspace.edit("  - name: second\n    model: ./models/second\n", "")
    workspace("run", "--quiet")
    assert [row["step"] for row in workspace.numbers()["accuracy_losses"]] == ["teachers", "fit"]


def test_zero_shot_loses_no_accuracy_by_a_choice_of_teachers() -> None:
    report = measured(900, 0, 0.7) | {"learns": False, "method": "zero-shot", "target_quality": None}
    report["accuracy_losses"] = accuracy_losses(report, teachers=1)
    assert report["accuracy_losses"] == []
    assert summary(report)[1] == "Accuracy losses cannot be separated: the method uses no teachers."


def test_without_a_pair_of_teachers_the_page_compares_none(built: Workspace) -> None:
    report = built.numbers()
    assert "of such pairs (chance 50.0 %)" in page(report)
    report["target_quality"]["uncertainty"]["separation"] = None
    report["labels"]["teachers"] = report["labels"]["teachers"][:1]
    text = page(report)
    assert "such pairs" not in text
    assert "Uncertainty is 1 - confidence, by entropy. " in text  # perhaps by fewer passes than are cached
    assert "labels in the union of 1 teacher;" in text


def test_a_system_without_texts_has_no_estimate_on_the_page(built: Workspace) -> None:
    own: dict[str, Any] = {"name": "desk", "kind": "teacher on its own labels", "mean": 0.0, "low": 0.0, "high": 1.0}
    report = built.numbers() | {
        "label_estimates": {"n": 20, "labels": 20, "empty": 0, "random": True, "weights": False, "systems": [own]}
    }
    rows = []
    for texts in (0, 20):
        own["n"] = texts
        rows.append(page(report).split("desk on its own labels</th>")[1].split("</tr>")[0])
    assert ["0.0 to 100.0" in row for row in rows] == ["circle" in row for row in rows] == [False, True]


def test_the_ends_of_a_difference_keep_their_signs_on_page_and_console(built: Workspace) -> None:
    report = built.numbers()
    [rival] = [rival for rival in report["verdict"]["rivals"] if rival["kind"] == "ensemble"]
    rival |= {"low": -0.0004, "high": 0.0104, "student_is": "not clearly different"}
    assert "95 % interval -0.0 to +1.0" in figures_of(rival)
    assert '<span class="note">-0.0 to +1.0</span>' in page(report)
    rival |= {"selected": True, "on_random": 0.0}
    assert figures_of(rival, rival_first=True).endswith(" alone +0.0")


def test_a_system_without_probabilities_or_leads_has_no_columns_of_them(built: Workspace) -> None:
    report = built.numbers()
    columns = ('<th class="n">probability</th>', '<th class="n">of the gold label</th>', "s lead</th>")
    assert all(column in page(report) for column in columns)
    report["evaluation"]["system"], report["verdict"], report["learns"] = "zero-shot", None, False
    assert not any(column in page(report) for column in columns)


def test_the_page_leaves_out_only_the_students_note_where_the_verdict_has_its_cause(built: Workspace) -> None:
    report = built.numbers()
    assert "few-steps" in {cause["code"] for cause in report["verdict"]["causes"]}
    few = "9 steps are few for fine-tuning an encoder"
    report["notes"] = [{"stage": "train-teachers", "note": f"desk: {few}"}, {"stage": "train-student", "note": few}]
    text = page(report)
    assert f"Note of train-teachers: desk: {few}" in text
    assert "Note of train-student" not in text


@pytest.mark.parametrize(
    ("teachers", "student", "cause"),
    [
        (119, 116, "choice and fit"),
        (110, 108, "choice and fit"),
        (109, 108, "teachers"),
        (119, 119, None),
        (122, 122, None),
    ],
)
def test_teachers_are_a_cause_only_if_they_are_wrong_on_many_texts(
    teachers: int, student: int, cause: str | None
) -> None:
    lost = {"teachers": 1 - teachers / 122, "choice and fit": (teachers - student) / 122}
    losses: Any = [{"step": step, "right": 0.0, "n": 122, "where": "test texts", "lost": lost[step]} for step in lost]
    assert relevant_loss(losses) == cause


def test_two_runs_are_compared_on_the_texts_where_they_differ() -> None:
    def run(right: list[int]) -> Any:
        bits = np.packbits(np.array(right, dtype=bool)).tobytes().hex()
        return {"test": "t", "evaluation": {"n": len(right), "left_out": 0}, "student_quality": {"right_hex": bits}}

    one, other = run([1, 1, 1, 0, 1, 0, 1, 1, 1, 1]), run([1, 0, 1, 1, 0, 0, 1, 1, 1, 0])
    comparison = difference(one, other)
    assert comparison is not None
    assert (comparison["gained"], comparison["lost"]) == (3, 1)
    assert comparison["mean"] == pytest.approx(0.2)
    assert (comparison["low"], comparison["high"]) == paired(3, 1, 10)[1:]
    assert difference(one, other | {"test": "elsewhere"}) is None


def test_runs_have_a_row_for_the_labels_of_a_teacher_only_if_these_are_the_same(built: Workspace) -> None:
    first, second = built.numbers(), built.numbers()
    assert [row["group"] for row in comparison_of({"a": first, "b": second})["groups"]] == ["first", "second"]
    for row in second["student_quality"]["classes"]:
        row["teachers"] = ["second" if name == "first" else "first" for name in row["teachers"]]
    assert comparison_of({"a": first, "b": second})["groups"] == []


# ---- counting


def test_separation_compares_a_right_and_a_wrong_teacher_of_one_text() -> None:
    values = np.array([[0.1, 0.5, 0.9], [0.7, 0.2, 0.2]])
    owns = np.array([[True, False, False], [False, True, False]])
    assert separation(values, owns) == pytest.approx((2 + 1 + 0.5) / 4)
    assert separation(values, np.zeros_like(owns)) is None


def test_a_value_past_an_end_by_rounding_is_counted_at_that_end() -> None:
    bins = histogram(np.array([-1e-7, 0.5, 1 + 1e-6]), (0.0, 1.0))
    assert (sum(bins["counts"]), bins["counts"][0], bins["counts"][-1]) == (3, 1, 1)


def test_calibration_bins_are_those_of_ece() -> None:
    answers = np.array([[0.9, 0.1], [0.8, 0.2], [0.4, 0.6]])
    gold = np.array([0, 1, 1])
    bins = calibration(SystemPredictions.of(answers, gold), gold, 5)
    assert [(one["low"], one["n"], one["accuracy"]) for one in bins] == [(0.4, 1, 1.0), (0.6, 1, 0.0), (0.8, 1, 1.0)]


def test_of_many_labels_those_with_the_most_errors_are_shown_and_no_text_is_lost() -> None:
    rng = np.random.default_rng(0)
    confusion = rng.integers(0, 3, (500, 500)) + 50 * np.eye(500, dtype=np.int64)
    confusion[17, 300] = 99
    names = tuple(f"label {place}" for place in range(500))
    matrix, pairs = confusion_matrix(confusion, names), confused_pairs(confusion, names)
    assert (len(matrix["counts"]), matrix["others"]) == (MATRIX, 500 - MATRIX + 1)
    assert {"label 17", "label 300"} <= set(matrix["labels"])
    assert sum(map(sum, matrix["counts"])) == confusion.sum()
    assert len(pairs["pairs"]) == MOST_PAIRS
    assert pairs["pairs"][0] == {"gold": "label 17", "predicted": "label 300", "n": 99, "of": int(confusion[17].sum())}
    assert pairs["of"] == int((confusion * ~np.eye(500, dtype=bool) > 0).sum())


def test_a_text_counts_for_the_writing_system_of_most_letters() -> None:
    texts = ["the cat", "кошка cat", "猫がいる", "قط", "12 34", "גן hi there"]
    assert scripts_of(texts) == {
        "Latin": 2,
        "Arabic": 1,
        "Cyrillic": 1,
        "Japanese kana": 1,
        "no letters": 1,
    }


def test_long_texts_are_cut_and_both_of_a_pair_shown() -> None:
    assert shortened(("a" * 999,)) == "a" * MOST_LETTERS + "…"
    assert shortened(("one", "two")) == "one ‖ two"


# ---- drawing


@settings(max_examples=50)
@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_few_and_hold_what_is_drawn(low: float, width: float) -> None:
    ticks = axis("x", low, low + width).ticks
    assert 2 <= len(ticks) <= 8
    assert ticks[0] <= low + 1e-4 * width
    assert ticks[-1] >= low + width - 1e-4 * width
    assert axis("y", 0.0, width).ticks[0] == 0


def test_a_figure_names_its_axes_and_escapes_its_words() -> None:
    unit = FigureAxis("<b>share</b>", [0.0, 1.0])
    figure = Figure('a "title"', unit, unit, {"<i>one</i>": "one"})
    figure.path([(0.0, 0.0), (1.0, 0.5)], "line one")
    svg = figure.svg()
    assert isinstance(svg, Markup)
    assert svg.count("&lt;b&gt;share") == 2
    assert "&lt;i&gt;one" in svg
    assert 'aria-label="a &#34;title&#34;"' in svg
    assert svg.count('class="line one"') == 2


@pytest.mark.parametrize("text", ["<b>", "a\u202eb", "a\x00b", "a\ud800b", "a\u2066b", "\ufeff"])
def test_invisible_characters_are_escaped(text: str) -> None:
    printed = as_html(text)
    assert printed.encode()
    assert all(letter.isprintable() for letter in printed)
    assert "<" not in printed


def test_emoji_and_persian_keep_their_joiners() -> None:
    text = "👩\u200d🌾 می\u200cروم"
    assert as_html(text) == text


def test_a_histogram_with_all_values_in_one_bin_is_not_drawn(built: Workspace) -> None:
    report = built.numbers()
    margin = report["target_quality"]["targets"]["margin"]
    assert "margins" in figures(report)
    for counts in margin.values():
        counts["counts"] = [counts["n"], *[0] * (len(counts["counts"]) - 1)]
    assert "margins" not in figures(report)
    text = page(report)
    assert "Margin between" not in text
    assert "Margin, first minus second teacher: between" in text


def test_a_page_is_made_for_every_verdict(built: Workspace) -> None:
    report = built.numbers()
    for make, decision, _, _ in CASES.values():
        inputs = make()
        report["verdict"], report["unlabelled"] = verdict(inputs), inputs.report["unlabelled"]
        text = page(report if inputs.n else report | {"evaluation": None, "student_quality": None})
        assert f'<p class="decision">{decision.capitalize()}</p>' in text


# ---- many


def test_the_page_links_its_sections(built: Workspace) -> None:
    html = page(built.numbers())
    links = re.findall(r'<a href="#(.+?)">(.+?)</a>', html[: html.index("<h2")])
    assert len(links) > 5
    assert re.findall(r'<h2 id="(.+?)">(.+?)</h2>', html) == links
    assert html.count("<h2") == len(links)


def test_a_student_named_by_its_method_has_the_name_once(built: Workspace) -> None:
    numbers = built.numbers()
    scores = numbers["evaluation"]["systems"]["ensemble"]
    numbers["students"] = [{**scores, "name": name, "supervised": False, "method": "uhc"} for name in ("uhc", "other")]
    html = page(numbers)
    assert re.findall(r'>student (\w+)(?: <span class="note">(\w+)</span>)?</th>', html)[-2:] == [
        ("uhc", ""),
        ("other", "uhc"),
    ]


def test_a_complete_matrix_has_no_list_of_confusions(built: Workspace) -> None:
    numbers = built.numbers()
    matrix = numbers["student_quality"]["matrix"]
    lists = [page(numbers).count("Most frequent confusions") for matrix["others"] in (0, 3)]
    assert (lists, bool(numbers["student_quality"]["confusions"]["pairs"])) == ([0, 1], True)


def test_five_hundred_labels_and_fifty_teachers_stay_one_readable_page(built: Workspace) -> None:
    report = built.numbers()
    labels = [f"a label with quite a long name, number {place}" for place in range(500)]
    names = [f"teacher-{place}" for place in range(50)]
    one = {"n": 20, "right": 11, "predicted": 19, "teachers_right": 18}
    report["student_quality"]["classes"] = [{"label": label, "teachers": names[:5], **one} for label in labels]
    own = {"n": 10, "alone": 10, "shown": labels[:8], "content": "0" * 64}
    report["labels"] = {"n": 500, "shared": 3, "teachers": [{"teacher": name, **own} for name in names]}
    report["target_quality"]["mixture"]["mean"] = {name: place / 1225 for place, name in enumerate(names)}
    audit = report["target_quality"]["audit"]
    audit["teachers"] = [audit["teachers"][0] | {"teacher": name} for name in names]
    audit["conflicts"] = {"teachers": names, "confident_from": 0.5, "shares": np.full((50, 50), 0.25).tolist()}
    systems = report["evaluation"]["systems"]
    systems |= {f"teacher:{name}": systems["teacher:first"] for name in names}
    text = page(report)
    assert len(text.encode()) < 200_000
    assert f"{CLASSES_SHOWN} of 500 labels" in text
    assert f"{TEACHERS_SHOWN} of 50" in text
    assert f"{TEACHERS_SHOWN} of 1,225 pairs" in text
    assert "teacher-49" in text
    assert "16 of 55 systems" in text
    assert page(report) == text


def test_with_more_test_texts_than_are_compared_the_report_has_no_bits(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("amalgam.stages.report.quality.MOST_COMPARED", 1)
    workspace("report", "--force")
    assert workspace.numbers()["student_quality"]["right_hex"] is None


def test_the_wheel_takes_the_templates() -> None:
    """They are in a folder that the build takes whole, and git does not ignore them."""
    root = Path(__file__).resolve().parents[2]
    templates = {path.suffix for path in (root / "stages/report").iterdir()} & {".j2", ".css"}
    assert templates == {".j2", ".css"}
    assert '"stages"' in (root / "pyproject.toml").read_text().split("targets.wheel]")[1].split("\n\n")[0]


@pytest.mark.parametrize(("counts", "sentences"), [([0, 0, 0, 9], 0), ([9, 0, 0, 0], 1)])
def test_targets_of_one_teacher_each_need_no_sentence(counts: list[int], sentences: int) -> None:
    weights = {"texts": 9, "weight_bins": [3, 2, 2, 2]}
    largest = {"n": 9, "counts": counts, "low": 0.0, "high": 1.0}
    quality = {"targets": {"summary": weights, "margin": None}, "mixture": {"largest": largest}}
    content: Any = {"target_quality": quality}
    assert len(spikes(content)) == sentences


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
