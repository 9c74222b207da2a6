"""benchmarks/passes.py: the choice by cheaper predictions, against that by K passes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from amalgam.benchmarks.passes import Predictions, adaptive_choice, rows
from amalgam.stages.cache_teachers import adaptive
from amalgam.stages.common.cached.load import adaptive_size

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
