"""Benchmarks that compute figures: by hand, and on synthetic answers whose gold labels are known."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from amalgam.benchmarks import verdicts
from amalgam.benchmarks.estimates import ABSTAINS, dawid_skene, gap_over, label_model, within
from amalgam.benchmarks.methods import STUDENT, Trained, figures_of, text_files
from amalgam.benchmarks.passes import Predictions, adaptive_choice, rows
from amalgam.benchmarks.verdicts import CASES, FEW, outcome
from amalgam.stages.cache_teachers import adaptive
from amalgam.stages.common.cached.load import adaptive_size


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


# ---- benchmarks/passes.py


TEXTS, PASSES = 1000, 8


@pytest.fixture(autouse=True)
def usual(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows set it."""
    monkeypatch.setattr(adaptive, "SETTLED_BY", adaptive.SETTLED_BY)


@pytest.fixture
def predictions() -> Predictions:
    """Return two teachers, one of which is three times too certain without dropout."""
    random = np.random.default_rng(0)
    centres = [random.normal(0, 2, (TEXTS, 1, 3)) for _ in range(2)]
    passes = [centre + random.normal(0, 0.1, (TEXTS, 2 * PASSES, 3)) for centre in centres]
    return Predictions([3 * centres[0][:, 0], centres[1][:, 0]], passes)


def measured(predictions: Predictions) -> dict[str, dict[str, Any]]:
    return {each["row"]: each for each in rows("two", predictions, [0.5, 2.0], draws=4)}


def test_the_regressions_learn_the_scale_of_each_teacher(predictions: Predictions) -> None:
    figures = measured(predictions)
    assert figures["no passes"]["same"] < 0.9
    assert figures["adaptive, 0.5 errors"]["same"] > figures["no passes"]["same"] + 0.05
    assert figures["adaptive, 2 errors"]["same"] >= figures["adaptive, 0.5 errors"]["same"]
    assert figures["other passes"]["difference"] == 0.0
    assert figures["no passes"]["low"] < figures["no passes"]["difference"] < figures["no passes"]["high"] < 0


def test_the_passes_of_sampled_and_open_texts_are_counted(predictions: Predictions) -> None:
    figures = measured(predictions)
    assert [figures[name]["passes"] for name in ("other passes", "no passes")] == [1 + PASSES, 1]
    sampled = 1 + PASSES * adaptive_size(TEXTS, PASSES) / TEXTS
    assert sampled < figures["adaptive, 0.5 errors"]["passes"] < figures["adaptive, 2 errors"]["passes"] < 1 + PASSES


def test_texts_that_never_stop_have_the_choice_of_k_passes(
    predictions: Predictions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adaptive, "SETTLED_BY", np.inf)
    choice, passes = adaptive_choice(predictions, np.arange(100))
    assert (choice == predictions.first.argmin(axis=1)).all()
    assert passes == 1 + PASSES


@pytest.mark.parametrize(("texts", "size"), [(150, 0), (1000, 62), (4000, 200), (8000, 400), (200_000, 5000)])
def test_a_sample_has_at_most_one_text_in_k(texts: int, size: int) -> None:
    assert adaptive_size(texts, 16) == size


# ---- benchmarks/verdicts.py


@pytest.mark.parametrize(
    ("verdict", "right", "on_many", "expected"),
    [
        ("ship", None, "ship", "right"),
        ("cannot say", None, "cannot say", "right"),
        ("cannot say", None, "do not ship", "undecided"),
        ("ship", None, "do not ship", "wrong"),
        ("do not ship", None, "cannot say", "wrong"),
        ("cannot say", "cannot say", "ship", "right"),
        ("ship", "cannot say", "ship", "wrong"),
        ("do not ship", "cannot say", "do not ship", "right"),
        ("do not ship", "cannot say", "ship", "wrong"),
    ],
)
def test_a_verdict_is_right_undecided_or_wrong(verdict: str, right: str | None, on_many: str, expected: str) -> None:
    assert outcome(verdict, right, on_many) == expected


def made(folder: Path, texts: int) -> Path:
    for name in ("trec6", "ag_news"):
        (folder / name).mkdir(parents=True)
        for part in ("train", "test"):
            rows = [(f"{name} {part} {place}", "abcd"[place % 4]) for place in range(texts)]
            pl.DataFrame(rows, schema=["text", "label"], orient="row").write_parquet(folder / name / f"{part}.parquet")
    return folder


def test_texts_of_a_case_are_disjoint_and_wrong_labels_are_shuffled(tmp_path: Path) -> None:
    options = argparse.Namespace(data=made(tmp_path / "data", 400), texts=100, test=60, many=200)
    verdicts.write_texts("trec6", tmp_path, options)
    files = {path.stem: pl.read_parquet(path) for path in tmp_path.glob("*.parquet")}
    parts = [set(files[part]["text"]) for part in ("teachers", "train", "test", "many")]
    assert len(set().union(*parts)) == sum(map(len, parts)) == 100 + 100 + 60 + 200
    assert len(files["few"]) == FEW
    assert set(files["first"]["label"]) == {"a", "b"}
    assert files["wrong"]["text"].equals(files["teachers"]["text"])
    assert (files["wrong"]["label"] != files["teachers"]["label"]).sum() > 0
    assert files["train"].columns == ["text"]
    assert not set(files["other"]["text"]) & set(files["train"]["text"])
    names = {name for case in CASES.values() for name in (case.train, case.test, case.teachers) if name}
    assert names <= set(files)


def test_too_few_texts_are_refused(tmp_path: Path) -> None:
    options = argparse.Namespace(data=made(tmp_path / "data", 100), texts=100, test=100, many=200)
    with pytest.raises(SystemExit, match=r"no text is left for \w+.parquet"):
        verdicts.write_texts("trec6", tmp_path, options)
