"""Estimates of the benchmarks: by hand, and on synthetic answers whose gold labels are known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from amalgam.benchmarks.estimates import ABSTAINS, dawid_skene, gap_over, label_model, within
from amalgam.benchmarks.methods import STUDENT, Trained, figures_of, text_files


def correct(share: float, *, draws: int = 3, texts: int = 1000, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).random((draws, texts)) < share).astype(float)


def test_the_interval_of_three_draws_uses_students_t() -> None:
    assert within([0.7, 0.8, 0.9]) == pytest.approx(4.30 * 0.1 / 3**0.5)
    assert within([0.7]) is None


def test_the_gap_is_a_ratio_of_means_within_its_interval() -> None:
    student, ensemble, supervised = correct(0.8, seed=1), correct(0.6, seed=2), correct(0.9, seed=3)
    gap = gap_over(student, ensemble, supervised)
    assert gap is not None
    assert gap.closed == pytest.approx((student.mean() - ensemble.mean()) / (supervised.mean() - ensemble.mean()))
    assert gap.low < gap.closed < gap.high
    assert gap.high - gap.low < 0.4
    few = gap_over(student[:, :100], ensemble[:, :100], supervised[:, :100])
    assert few is not None
    assert few.high - few.low > gap.high - gap.low


def test_a_denominator_smaller_than_its_error_has_no_gap() -> None:
    ensemble = correct(0.9, texts=60, seed=2)
    assert gap_over(correct(0.9, texts=60, seed=1), ensemble, correct(0.91, texts=60, seed=3)) is None


def test_dawid_skene_outvotes_two_bad_teachers_that_answer_at_random() -> None:
    random = np.random.default_rng(0)
    gold = random.integers(3, size=600)
    right = [0.9, 0.85, 0.4, 0.4]
    answers = np.stack(
        [np.where(random.random(600) < share, gold, random.integers(3, size=600)) for share in right], axis=1
    )
    label = dawid_skene(answers, 3)
    assert label.sum(axis=1) == pytest.approx(np.ones(600))
    majority = np.eye(3)[answers].sum(axis=1).argmax(axis=1)
    assert (label.argmax(axis=1) == gold).mean() > (majority == gold).mean() + 0.02


def test_the_label_model_recovers_accuracies_and_propensities_of_overlapping_label_sets() -> None:
    random, texts = np.random.default_rng(0), 3000
    gold = random.choice(4, texts, p=[0.4, 0.3, 0.2, 0.1])
    sets = [[0, 1, 2], [1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2, 3]]
    accuracies, votes = [0.9, 0.8, 0.7, 0.6, 0.95], np.full((texts, len(sets)), ABSTAINS)
    propensities = np.where([np.isin(np.arange(4), own) for own in sets], 0.8, 0.4)
    for column, (own, right) in enumerate(zip(sets, accuracies, strict=True)):
        first, second = random.permuted(np.tile(own, (texts, 1)), axis=1)[:, :2].T
        wrong = np.where(first == gold, second, first)
        vote = np.where(np.isin(gold, own) & (random.random(texts) < right), gold, wrong)
        votes[:, column] = np.where(random.random(texts) < propensities[column, gold], vote, ABSTAINS)
    model = label_model(votes, sets, 4)
    assert model.label.sum(axis=1) == pytest.approx(np.ones(texts))
    assert model.accuracies == pytest.approx(accuracies, abs=0.04)
    assert np.abs(model.propensities - propensities).max() < 0.1
    counts = np.stack([(votes == label).sum(axis=1) for label in range(4)], axis=1)
    majority = (counts + 0.01 * random.random((texts, 4))).argmax(axis=1)
    assert (model.label.argmax(axis=1) == gold).mean() > (majority == gold).mean() + 0.02


def test_students_learn_other_texts_than_the_teachers(tmp_path: Path) -> None:
    rows = [(f"text {row}", "ab"[row % 2]) for row in range(20)] * 2
    pl.DataFrame(rows, schema=["text", "label"], orient="row").write_parquet(tmp_path / "train.parquet")
    labelled, unlabelled = (pl.read_parquet(path)["text"] for path in text_files(tmp_path, tmp_path, "others"))
    assert len(labelled) == len(unlabelled) == 10
    assert not set(labelled) & set(unlabelled)
    assert text_files(tmp_path, tmp_path, "teachers") == (tmp_path / "train.parquet",) * 2


def test_a_row_is_the_mean_over_draws_and_students() -> None:
    ensemble, supervised = np.arange(100) < 40, np.arange(100) < 90

    def trained(share: int) -> Trained:
        return Trained({STUDENT: np.arange(100) < share, "ensemble": ensemble}, right=share / 100)

    students = {
        "amalgam": [[trained(70), trained(80)], [trained(60), trained(70)]],
        "supervised": [[Trained({STUDENT: supervised, "ensemble": ensemble}, None)] * 2] * 2,
    }
    figures = figures_of(students, "amalgam")
    assert figures["accuracy"] == 0.7
    assert figures["within"] == pytest.approx(12.71 * 0.0707 / 2**0.5, abs=1e-3)
    assert figures["gap_closed"] == 0.6
    assert figures["gap_low"] < 0.6 < figures["gap_high"]
    assert figures["right_teacher"] == 0.7
    assert (figures["draws"], figures["seeds"], figures["texts"]) == (2, 2, 100)
    assert figures_of({"amalgam": students["amalgam"]}, "amalgam")["gap_closed"] is None
