"""What the report counts and draws, from small numbers that a person can check."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markupsafe import Markup

from amalgam.stages.app.compare_reports import difference
from amalgam.stages.common.metrics import Predictions
from amalgam.stages.report.figures import Axis, Figure, axis_between, axis_to, plain, shown
from amalgam.stages.report.findings import scripts_of
from amalgam.stages.report.html import CLASSES_SHOWN, TEACHERS_SHOWN, page
from amalgam.stages.report.student_quality import (
    LETTERS,
    MATRIX,
    PAIRS,
    calibration,
    confusion_matrix,
    confusion_pairs,
    shortened,
)
from amalgam.stages.report.summary import interval, losses, verdict
from amalgam.stages.report.target_quality import auc, histogram
from amalgam.tests.workspaces import Workspace

Found = dict[str, Any]


def numbers(built: Workspace) -> Found:
    report: Found = json.loads((built.folder / "reports/student.json").read_text("utf-8"))
    return report


# ---- the verdict


@pytest.mark.parametrize(("right", "n", "low", "high"), [(0.5, 100, 0.4038, 0.5962), (0.0, 10, 0.0, 0.2775)])
def test_an_interval_is_wilsons(right: float, n: int, low: float, high: float) -> None:
    assert interval(right, n) == pytest.approx((low, high), abs=1e-4)


def measured(oracle: int, targets: int, accuracy: float, n: int = 1000) -> Found:
    system = {"accuracy": accuracy}
    return {
        "learns": True,
        "method": "muka-soft",
        "fingerprint": "f",
        "supervised": None,
        "settings": {"targets": {"mode": "soft"}},
        "evaluation": {"judged": "student", "n": n, "systems": {"student": system, "teacher:a": {"accuracy": 0.25}}},
        "judged": {"teachers": {"oracle": oracle}},
        "taught": {"choice": {"n": n, "oracle": oracle}, "targets": {"right": targets, "labelled": n}},
    }


@pytest.mark.parametrize(
    ("oracle", "targets", "accuracy", "pattern"),
    [
        (700, 690, 0.68, "teachers.* 0.700"),
        (970, 700, 0.69, "choice of the teacher.* 0.970"),
        (970, 960, 0.60, "student's fit.* 0.600.* 0.960"),
    ],
)
def test_what_limits_a_student_is_where_most_is_lost(oracle: int, targets: int, accuracy: float, pattern: str) -> None:
    figures = measured(oracle, targets, accuracy)
    figures["losses"] = losses(figures)
    assert sum(row["lost"] for row in figures["losses"]) == pytest.approx(1 - accuracy)
    first, second = verdict(figures)
    assert re.search(f"{accuracy:.3f} .*1,000 test texts", first)
    assert re.search(r"\(a\).* 0\.250", first)
    assert re.search(pattern, second)


def test_without_gold_labels_in_training_choice_and_fit_are_one_step() -> None:
    figures = measured(900, 0, 0.7)
    figures["taught"] = {"choice": {"n": 0, "oracle": 0}, "targets": {"right": None, "labelled": 0}}
    figures["losses"] = losses(figures)
    assert [row["step"] for row in figures["losses"]] == ["teachers", "choice and fit"]
    assert verdict(figures)[1]


def test_two_runs_are_compared_on_the_texts_where_they_differ() -> None:
    def run(right: list[int]) -> Found:
        bits = np.packbits(np.array(right, dtype=bool)).tobytes().hex()
        return {"test": "t", "evaluation": {"n": len(right), "left_out": 0}, "judged": {"right_hex": bits}}

    one, other = run([1, 1, 1, 0, 1, 0, 1, 1, 1, 1]), run([1, 0, 1, 1, 0, 0, 1, 1, 1, 0])
    comparison = difference(one, other)
    assert comparison is not None
    assert (comparison["gained"], comparison["lost"]) == (3, 1)
    assert comparison["mean"] == pytest.approx(0.2)
    assert comparison["high"] - comparison["mean"] == pytest.approx(1.96 * math.sqrt(4 - 10 * 0.04) / 10)
    assert difference(one, {**other, "test": "elsewhere"}) is None


# ---- counting


def test_a_right_teacher_is_told_from_a_wrong_one_by_pairs_of_one_text() -> None:
    values = np.array([[0.1, 0.5, 0.9], [0.7, 0.2, 0.2]])
    owns = np.array([[True, False, False], [False, True, False]])
    assert auc(values, owns) == pytest.approx((2 + 1 + 0.5) / 4)
    assert auc(values, np.zeros_like(owns)) is None


def test_a_value_past_an_end_by_rounding_is_counted_at_that_end() -> None:
    bins = histogram(np.array([-1e-7, 0.5, 1 + 1e-6]), (0.0, 1.0))
    assert (sum(bins["counts"]), bins["counts"][0], bins["counts"][-1]) == (3, 1, 1)


def test_calibration_bins_are_those_of_ece() -> None:
    answers = np.array([[0.9, 0.1], [0.8, 0.2], [0.4, 0.6]])
    gold = np.array([0, 1, 1])
    bins = calibration(Predictions.of(answers, gold), gold, 5)
    assert [(one["low"], one["n"], one["accuracy"]) for one in bins] == [(0.4, 1, 1.0), (0.6, 1, 0.0), (0.8, 1, 1.0)]


def test_of_many_labels_those_with_the_most_errors_are_shown_and_no_text_is_lost() -> None:
    rng = np.random.default_rng(0)
    confusion = rng.integers(0, 3, (500, 500)) + 50 * np.eye(500, dtype=np.int64)
    confusion[17, 300] = 99
    names = tuple(f"label {place}" for place in range(500))
    html, pairs = confusion_matrix(confusion, names), confusion_pairs(confusion, names)
    assert (len(html["counts"]), html["others"]) == (MATRIX, 500 - MATRIX + 1)
    assert {"label 17", "label 300"} <= set(html["labels"])
    assert sum(map(sum, html["counts"])) == confusion.sum()
    assert len(pairs["pairs"]) == PAIRS
    assert pairs["pairs"][0] == {"gold": "label 17", "said": "label 300", "n": 99, "of": int(confusion[17].sum())}
    assert pairs["of"] == int((confusion * ~np.eye(500, dtype=bool) > 0).sum())


def test_writing_systems_are_told_by_most_letters() -> None:
    texts = ["the cat", "кошка cat", "猫がいる", "قط", "12 34", "גן hi there"]
    assert scripts_of(texts) == {
        "Latin": 2,
        "Arabic": 1,
        "Cyrillic": 1,
        "Japanese kana": 1,
        "no letters": 1,
    }


def test_long_texts_are_cut_and_both_of_a_pair_shown() -> None:
    assert shortened(("a" * 999,)) == "a" * LETTERS + "…"
    assert shortened(("one", "two")) == "one ‖ two"


# ---- drawing


@settings(max_examples=50, deadline=None)
@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_few_and_hold_what_is_drawn(low: float, width: float) -> None:
    axis = axis_between("x", low, low + width)
    assert 2 <= len(axis.ticks) <= 8
    assert axis.low <= low + 1e-4 * width
    assert axis.high >= low + width - 1e-4 * width
    whole = axis_to("y", width)
    assert (whole.low, whole.ticks[0]) == (0, 0)
    assert whole.high >= width * (1 - 1e-4)


def test_a_figure_names_its_axes_and_escapes_its_words() -> None:
    unit = Axis("<b>share</b>", 0.0, 1.0, [0.0, 1.0], plain)
    figure = Figure('a "title"', unit, unit, [("<i>one</i>", "one")])
    figure.line([(0.0, 0.0), (1.0, 0.5)], "one")
    figure.across(0.3, "chance")
    svg = figure.svg()
    assert isinstance(svg, Markup)
    assert svg.count("&lt;b&gt;share") == 2
    assert "&lt;i&gt;one" in svg
    assert 'aria-label="a &#34;title&#34;"' in svg
    assert ">chance</text>" in svg


@pytest.mark.parametrize("text", ["<b>", "a\u202eb", "a\x00b", "a\ud800b", "a\u2066b", "\ufeff"])
def test_what_cannot_be_seen_is_written_out(text: str) -> None:
    printed = shown(text)
    assert printed.encode()
    assert all(letter.isprintable() for letter in printed)
    assert "<" not in printed


def test_emoji_and_persian_keep_their_joiners() -> None:
    text = "👩\u200d🌾 می\u200cروم"
    assert shown(text) == text


# ---- many


def test_five_hundred_labels_and_fifty_teachers_stay_one_readable_page(built: Workspace) -> None:
    report = numbers(built)
    labels = [f"a label with quite a long name, number {place}" for place in range(500)]
    names = [f"teacher-{place}" for place in range(50)]
    one = {"n": 20, "right": 11, "predicted": 19, "known": 18}
    report["judged"]["classes"] = [{"label": label, "teachers": names[:5], **one} for label in labels]
    own = {"n": 10, "alone": 10, "shown": labels[:8], "content": "0" * 64}
    report["labels"] = {"n": 500, "shared": 3, "teachers": [{"teacher": name, **own} for name in names]}
    report["taught"]["mixture"]["mean"] = {name: place / 1225 for place, name in enumerate(names)}
    audit = report["taught"]["audit"]
    audit["teachers"] = [audit["teachers"][0] | {"teacher": name} for name in names]
    audit["conflicts"] = {"teachers": names, "confident_from": 0.5, "shares": np.full((50, 50), 0.25).tolist()}
    systems = report["evaluation"]["systems"]
    systems |= {f"teacher:{name}": systems["teacher:first"] for name in names}
    text = page(report)
    assert len(text.encode()) < 200_000
    assert f"{CLASSES_SHOWN} of 500 labels" in text
    assert f"{TEACHERS_SHOWN} of 50" in text
    assert f"The {TEACHERS_SHOWN} of 1,225 pairs" in text
    assert "teacher-49" in text
    assert "16 of 55 systems" in text
    assert page(report) == text


def test_the_wheel_takes_the_templates() -> None:
    """They lie in a folder that the build takes whole, and git does not ignore them."""
    root = Path(__file__).resolve().parents[2]
    templates = {path.suffix for path in (root / "stages/report").iterdir()} & {".j2", ".css"}
    assert templates == {".j2", ".css"}
    assert '"stages"' in (root / "pyproject.toml").read_text().split("targets.wheel]")[1].split("\n\n")[0]
