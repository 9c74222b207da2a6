"""Trainings with nothing set: they converge, and the chosen values are those that a file may set."""

from __future__ import annotations

from typing import Any

import numpy as np

from amalgam.tests.workspaces import Workspace, word_list

GOLD = "targets.mode=supervised"
NOTHING_SET = ("student.epochs=auto", "student.learning_rate=auto")
OLD_DEFAULTS = ("student.epochs=3", "student.learning_rate=2e-5")


def write_topics(workspace: Workspace) -> int:
    """Writes texts that name their topic by one word among five others; returns the number of labels."""
    labels, draw = sorted({label for _, label in workspace.texts()}), np.random.default_rng(0)
    words = word_list(workspace)
    topics, others = words[: len(labels)], words[len(labels) :]
    for part, count in (("train", 200), ("test", 80)):
        rows = []
        for index in range(count):
            place = index % len(labels)
            text = [topics[place], *draw.choice(others, 5, replace=False)]
            draw.shuffle(text)
            rows.append((" ".join(text), labels[place]))
        workspace.write(rows, part)
    return len(labels)


def accuracy(workspace: Workspace, *overrides: str) -> tuple[float, str]:
    """Return the student's accuracy, and the messages of the run."""
    result = workspace("run", GOLD, *overrides)
    report: dict[str, Any] = workspace.numbers()
    evaluation = report["evaluation"]
    return float(evaluation["systems"][evaluation["system"]]["accuracy"]), result.err


def test_a_student_with_nothing_set_learns_200_texts_and_set_to_the_same_values_is_reused(fresh: Workspace) -> None:
    chance = 1 / write_topics(fresh)
    assert accuracy(fresh, *OLD_DEFAULTS)[0] < chance + 0.2
    learned, messages = accuracy(fresh, *NOTHING_SET)
    assert learned > 0.7
    chosen = fresh.plan(GOLD, *NOTHING_SET)["train-student"]["chosen"]
    assert set(chosen) == {"student.epochs", "student.learning_rate", "student.evaluate_every"}
    explicit = [f"{field}={value}" for field, value in chosen.items()]
    assert fresh.plan(GOLD, *explicit)["train-student"]["chosen"] == {}
    assert fresh.stale(GOLD, *explicit) == set()
    assert fresh.stale(GOLD, *explicit, f"student.epochs={chosen['student.epochs'] + 1}") == {"train-student", "report"}
    assert " ".join(explicit) in messages
    assert f"student.epochs={chosen['student.epochs']}" in fresh("plan", GOLD, *NOTHING_SET).out


def test_held_out_texts_are_part_of_no_epoch(fresh: Workspace) -> None:
    """Of 33 texts, 31 are learned: an epoch has one step instead of two."""
    labels = sorted({label for _, label in fresh.texts()})
    fresh.write(fresh.texts()[:33])
    teachers = (f"train_teachers={{encoder: ./models/encoder, groups: {{one: {labels}}}}}", "teachers=[]")
    fresh("build-targets", GOLD)
    of_student, of_teacher = fresh.plan(GOLD, *NOTHING_SET)["train-student"], fresh.plan(*teachers)["train-teachers"]
    assert of_student["chosen"]["student.epochs"] == 300 + 10 * len(labels)
    assert of_teacher["chosen"]["train_teachers.epochs"] == 300 + 10 * len(labels)
