"""benchmarks/passes.py: the choice by cheaper predictions, against that by K passes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from amalgam.benchmarks.passes import Predictions, corrected_choice, rows, sample_size

TEXTS, PASSES = 1000, 8


@pytest.fixture
def predictions() -> Predictions:
    """Return two teachers, one of which is three times too certain without dropout."""
    random = np.random.default_rng(0)
    centres = [random.normal(0, 2, (TEXTS, 1, 3)) for _ in range(2)]
    passes = [centre + random.normal(0, 0.1, (TEXTS, 2 * PASSES, 3)) for centre in centres]
    return Predictions([3 * centres[0][:, 0], centres[1][:, 0]], passes)


def measured(predictions: Predictions) -> dict[str, dict[str, Any]]:
    return {each["row"]: each for each in rows("two", predictions, [0.0, 0.05], draws=4)}


def test_the_correction_learns_the_scale_of_each_teacher(predictions: Predictions) -> None:
    figures = measured(predictions)
    assert figures["no passes"]["same"] < 0.9
    assert figures["corrected, closest 0%"]["same"] > figures["no passes"]["same"] + 0.05
    assert figures["corrected, closest 5%"]["same"] > figures["corrected, closest 0%"]["same"]
    assert figures["other passes"]["difference"] == 0.0
    assert figures["no passes"]["low"] < figures["no passes"]["difference"] < figures["no passes"]["high"] < 0


def test_the_passes_of_sampled_and_closest_texts_are_counted(predictions: Predictions) -> None:
    figures = measured(predictions)
    sampled = sample_size(TEXTS, PASSES) / TEXTS
    assert [figures[name]["passes"] for name in ("other passes", "no passes")] == [1 + PASSES, 1]
    assert figures["corrected, closest 0%"]["passes"] == pytest.approx(1 + PASSES * sampled, abs=0.01)
    assert figures["corrected, closest 5%"]["passes"] == pytest.approx(1 + PASSES * (sampled + 0.05), abs=0.01)


def test_passes_for_all_texts_give_the_choice_of_k_passes(predictions: Predictions) -> None:
    choice, passes = corrected_choice(predictions, np.arange(100), 1.0)
    assert (choice == predictions.first.argmin(axis=1)).all()
    assert passes == 1 + PASSES


@pytest.mark.parametrize(("texts", "size"), [(150, 9), (1000, 62), (4000, 200), (100_000, 5000)])
def test_a_sample_has_at_most_one_text_in_k(texts: int, size: int) -> None:
    assert sample_size(texts, 16) == size
