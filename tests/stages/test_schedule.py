"""The epochs, learning rates and evaluations that are chosen where an experiment sets none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from amalgam.pipeline.config.schema import Student, TrainTeachers
from amalgam.stages.common.models.resolve import ModelFiles, hidden_size
from amalgam.stages.common.training.run import FEWEST_TO_SELECT, Selection
from amalgam.stages.common.training.schedule import (
    HELD_OUT_ACCURACY,
    Schedule,
    TrainingFacts,
    few_steps,
    held_out_rows,
    learned_texts,
    schedule_of,
)
from amalgam.stages.train_teachers import stage


def steps_of(schedule: Schedule, texts: int) -> int:
    return schedule.epochs * -(-texts // 32)


@pytest.mark.parametrize("labels", [2, 20, 150])
@pytest.mark.parametrize("texts", [1, 200, 3_000, 100_000, 1_000_000])
def test_small_data_gets_enough_steps_and_large_data_few_epochs(texts: int, labels: int) -> None:
    schedule = schedule_of(Student(), texts=texts, labels=labels, width=384)
    steps = steps_of(schedule, texts)
    assert steps >= 300 + 10 * labels
    assert schedule.epochs >= 3 or texts >= 300_000
    assert steps <= max(30_000, texts // 32, 1)
    assert schedule.epochs == 1 or texts < 1_000_000


def test_more_labels_get_more_steps_and_more_texts_no_fewer() -> None:
    labels = [schedule_of(Student(), texts=200, labels=count, width=384).epochs for count in (2, 77, 150)]
    assert labels == sorted(set(labels))
    steps = [steps_of(schedule_of(Student(), texts=count, labels=2, width=384), count) for count in (200, 3_000, 10**6)]
    assert steps == sorted(steps)


def test_the_learned_texts_are_counted_unless_they_are_many() -> None:
    keys = np.array([bytes(8) + (int(2**64 * index / 100)).to_bytes(8, "big") for index in range(100)], "S16")
    assert learned_texts(100, 0.3, lambda: keys) == 70
    assert learned_texts(100, 0.3, lambda: keys[:10]) == 100  # none would remain
    assert learned_texts(100, 0.0, lambda: pytest.fail("read")) == 100
    assert learned_texts(1_000_000, 0.05, lambda: pytest.fail("read")) == 950_000
    assert (held_out_rows(2, 0.9).tolist(), held_out_rows(3, 0.5).tolist()) == ([False] * 2, [False, True, True])


def test_a_narrow_encoder_gets_a_larger_rate_than_a_wide_one() -> None:
    rates = [schedule_of(Student(), texts=200, labels=2, width=width).learning_rate for width in (32, 384, 768, 1024)]
    assert rates == sorted(set(rates), reverse=True)
    assert rates[0] == 1e-3  # as the demo's encoder, whose weights are random
    assert 2e-5 <= rates[3] < rates[2] <= 6e-5  # the usual values of BERT-large and BERT-base
    assert rates[1] == 1.4e-4  # MiniLM


def test_a_static_student_has_more_steps_and_one_rate_for_every_encoder() -> None:
    static, other = Student(encoder="static:./encoder"), Student()
    for width in (32, 1024):
        schedule = schedule_of(static, texts=2_000, labels=20, width=width)
        assert schedule.learning_rate == 1e-3
        assert (
            steps_of(schedule, 2_000)
            >= 3 * steps_of(schedule_of(other, texts=2_000, labels=20, width=width), 2_000) - 63
        )
    assert schedule_of(static, texts=30_000, labels=6, width=384).epochs == 6
    assert schedule_of(other, texts=30_000, labels=6, width=384).epochs == 3
    assert schedule_of(static, texts=10**6, labels=20, width=384).epochs == 1


def test_set_fields_stay_and_auto_is_null() -> None:
    student = Student(epochs=7, learning_rate=2e-5, evaluate_every=100)
    assert schedule_of(student, texts=200, labels=2, width=384) == Schedule(7, 2e-5, 100)
    assert Student.model_validate({"epochs": "auto", "learning_rate": "auto", "evaluate_every": "auto"}) == Student()
    assert TrainTeachers.model_validate({"epochs": "auto", "learning_rate": None}) == TrainTeachers()


@pytest.mark.parametrize(("epochs", "evaluations"), [(1, 10), (3, 10), (16, 16), (43, 20)])
def test_a_training_is_evaluated_each_epoch_and_ten_to_twenty_times(epochs: int, evaluations: int) -> None:
    schedule = schedule_of(Student(epochs=epochs), texts=32_000, labels=2, width=384)
    assert steps_of(schedule, 32_000) // schedule.evaluate_every == evaluations
    assert schedule_of(Student(epochs=1), texts=5, labels=2, width=384).evaluate_every == 1


def test_few_held_out_texts_select_nothing_and_validation_texts_always_do() -> None:
    few, enough, validation = (
        Selection("accuracy", lambda _: 0.0, count) for count in (FEWEST_TO_SELECT - 1, FEWEST_TO_SELECT, None)
    )
    assert (few.selects, enough.selects, validation.selects) == (False, True, True)
    assert str(FEWEST_TO_SELECT - 1) in few.selected_by
    assert enough.selected_by == validation.selected_by == "accuracy"


def test_a_short_training_gets_a_note_with_its_settings() -> None:
    facts: TrainingFacts = {
        "steps": 57,
        "best_step": 57,
        "best_score": 0.5,
        "history": [],
        "dtype": "fp32",
        "resumed_from_step": 0,
        "epochs": 3,
        "learning_rate": 2e-5,
        "selected_by": "accuracy",
    }
    [note] = few_steps(facts, "student")
    assert note == "57 steps are few for fine-tuning an encoder: add texts, or set student.epochs=auto (now 3)"
    assert not list(few_steps({**facts, "steps": 300}, "student"))
    [note] = few_steps({**facts, "steps": 1}, "student")
    assert note.startswith("1 step is few ")


@pytest.mark.parametrize(
    "config", [{"hidden_size": 48}, {"dim": 48}, {"model_type": "amalgam", "text_config": {"hidden_size": 48}}]
)
def test_the_width_of_an_encoder_is_in_its_configuration(tmp_path: Path, config: dict[str, Any]) -> None:
    assert hidden_size(ModelFiles("given", tmp_path, "", None, "safetensors", config)) == 48


@pytest.mark.parametrize(
    ("held_out", "selected_by", "text"),
    [
        (0, "the last step", "accuracy 90.0 % on its own training texts, as none are held out"),
        (100, "the last step", "accuracy 90.0 % on 100 held-out texts (95 % interval 82.6 to 94.5)"),
        (1000, HELD_OUT_ACCURACY, "accuracy 90.0 % on 1,000 held-out texts, the best of the evaluations"),
    ],
)
def test_the_accuracy_of_a_teacher_has_an_interval_unless_it_selected_the_checkpoint(
    held_out: int, selected_by: str, text: str
) -> None:
    facts = {"best_score": 0.9, "held_out": held_out, "selected_by": selected_by}
    assert stage._accuracy(facts) == text  # noqa: SLF001 - no training has these figures for certain
