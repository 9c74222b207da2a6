"""Tests the conditions of the verdict that compare the student with several teachers."""

from __future__ import annotations

from typing import Any

from amalgam.stages.report.conditions import lost_teachers, weak_teachers
from amalgam.stages.report.verdict import verdict
from amalgam.tests.stages.verdict_cases import made


def own(teachers: int, n: int, student: int, right: int, gained: int = 0) -> list[Any]:
    """Makes rivals: teachers on their own labels, on each of which the student has the same counts."""
    kind, lost = "teacher on its own labels", right - student + gained
    counts = {"kind": kind, "n": n, "student_right": student, "right": right, "gained": gained, "lost": lost}
    return [{"name": f"teacher-{at}", **counts} for at in range(teachers)]


def test_of_many_teachers_one_that_is_lost_needs_clearer_evidence() -> None:
    assert lost_teachers(own(1, 10, 1, 9))
    assert not lost_teachers(own(20, 10, 1, 9))
    assert len(lost_teachers(own(20, 100, 20, 90))) == 20
    assert lost_teachers(own(1, 60, 10, 36))
    assert not lost_teachers(own(1, 60, 10, 36, gained=10))  # with errors on other texts, the difference is less sure


def test_teachers_with_the_same_labels_are_no_more_texts_than_one() -> None:
    frequent: Any = {"name": "banking", "kind": "most frequent label", "n": 60, "student_right": 30, "right": 20}
    for teachers in (1, 10):
        assert weak_teachers([*own(teachers, 60, 30, 37), frequent]) is None


def test_a_teacher_that_is_lost_is_a_reason_and_no_caution_too() -> None:
    sentence = "The teacher chooses among its own labels alone, the student among all."
    lost, better = (made(1000, [0.99, 0.99, worst, worst], 0.5, own=(0.95, 0.95)) for worst in (0.2, 0.7))
    assert not any(sentence in caution for caution in verdict(lost)["cautions"])
    assert any(sentence in caution for caution in verdict(better)["cautions"])
