"""How foreign a text is to a teacher, against cases worked out by hand in float64 and against whole matrices."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from amalgam.data.arrays import Gaussians, Moments, shrunk
from amalgam.stages.common.cached.read import States
from amalgam.stages.fit_statistics import fit as statistics
from amalgam.stages.fit_statistics import stage
from amalgam.stages.fit_statistics.fit import Statistics, confidences, folds_of, most_confident, scores_of
from amalgam.stages.fit_statistics.stage import StatisticsFacts, notes
from amalgam.stages.target_methods import COMPARATIVE, TeacherPredictions

MD = 1


def states(values: Any) -> States:
    """[texts, blocks, width]."""
    array = np.asarray(values, np.float16)
    every = np.arange(len(array))
    return States("t", [array], np.zeros_like(every), every, np.ones_like(every))


def gaussians(values: Any, groups: list[int]) -> Gaussians:
    results = np.asarray(values, np.float64)
    moments = Moments(results[0], max(groups) + 1)
    moments.add(results, np.array(groups))
    return Gaussians.of([moments])


# ---- distances


def test_rmd_is_the_distance_from_the_nearest_class_less_that_from_the_background() -> None:
    """Classes {0, 2} and {10, 12}: means 1 and 11, variance 1. With 26 the background has mean 10, variance 84.8."""
    pair = gaussians([[0], [2], [10], [12]], [0, 0, 1, 1]), gaussians([[0], [2], [10], [12], [26]], [0] * 5)
    rmd, md = scores_of(pair, np.array([[4.0], [11.0], [30.0]]))
    assert md.tolist() == pytest.approx([9, 0, 361])
    assert rmd.tolist() == pytest.approx([9 - 36 / 84.8, 0 - 1 / 84.8, 361 - 400 / 84.8])


def test_a_distance_in_two_dimensions_takes_the_shrunk_covariance_of_all_classes_together() -> None:
    """Deviations (1, 1), (-1, -1), (1, 0), (-1, 0): covariance [[1, 1/2], [1/2, 1/2]], trace 3/2, squares 7/4."""
    statistics = gaussians([[1, 1], [-1, -1], [9, 0], [7, 0]], [0, 0, 1, 1])
    share = (3 / 2) ** 2 / ((4 + 1 - 1) * (7 / 4 - 9 / 8))
    a, b, d = (1 - share) + share * 0.75, (1 - share) / 2, (1 - share) / 2 + share * 0.75
    assert float(statistics.shrinkage) == pytest.approx(share)
    # From (2, 3), nearest to (0, 0): [2 3] S^-1 [2 3]'
    expected = (4 * d - 12 * b + 9 * a) / (a * d - b * b)
    assert statistics.distance(np.array([[2.0, 3.0]])).tolist() == pytest.approx([expected])


def test_shrinkage_goes_by_the_texts_and_by_how_uneven_the_covariance_is() -> None:
    """Trace 4, squares 10, uneven by 2: 16 / (10 * 2), and half of it for twice as many texts."""
    few, share = shrunk(np.diag([3.0, 1.0]), 10)
    assert share == pytest.approx(0.8)
    np.testing.assert_allclose(few, np.diag([2.2, 1.8]))
    assert shrunk(np.diag([3.0, 1.0]), 20)[1] == pytest.approx(0.4)


def test_fewer_texts_than_dimensions_give_finite_distances() -> None:
    draw = np.random.default_rng(0)
    statistics = gaussians(draw.normal(size=(5, 40)), [0, 0, 1, 1, 1])
    far = statistics.distance(draw.normal(size=(7, 40)))
    assert np.isfinite(far).all()
    assert (far > 0).all()
    assert 0 < float(statistics.shrinkage) <= 1


def test_states_that_are_all_the_same_are_no_division_by_zero() -> None:
    statistics = gaussians(np.ones((4, 3)), [0, 0, 1, 1])
    assert statistics.distance(np.array([[1.0, 1, 1], [1, 1, 2]])).tolist() == pytest.approx([0, 1e6])


def test_a_class_without_texts_is_never_the_nearest() -> None:
    statistics = gaussians([[0], [2], [10], [12]], [0, 0, 2, 2])
    assert statistics.means.tolist() == [[1], [11]]
    assert statistics.distance(np.array([[0.0]])).tolist() == pytest.approx([1])


# ---- of a teacher


def drawn(texts: int = 2500, width: int = 5) -> tuple[States, Any, Any]:
    """Half of the texts are the teacher's own, of three classes of which one has none."""
    draw = np.random.default_rng(3)
    groups = draw.choice([-1, -1, -1, 0, 0, 2], size=texts).astype(np.int64)
    values = draw.normal(size=(texts, 2, width)) * np.arange(1, width + 1) + 50 + 2 * groups[:, None, None]
    return states(values), draw.normal(size=(texts, 3)).astype(np.float32), groups


def whole(values: Any, groups: Any) -> tuple[Any, Any]:
    """Means of the classes there are and the inverse of the shrunk covariance, from the matrix of all texts."""
    existing = np.unique(groups)
    means = np.stack([values[groups == label].mean(0) for label in existing])
    apart = values - means[np.searchsorted(existing, groups)]
    return means, np.linalg.inv(shrunk(apart.T @ apart / len(values), len(values))[0])


def far(values: Any, fitted: tuple[Any, Any]) -> Any:
    apart = values[:, None] - fitted[0][None]
    return np.einsum("ncw,wv,ncv->nc", apart, fitted[1], apart).min(axis=1)


def test_streamed_statistics_are_those_of_the_whole_matrix() -> None:
    content, logits, groups = drawn()
    assert len(content) > 2 * statistics.ROWS
    gaussian, own = Statistics.of(content, logits, groups), groups >= 0
    values = content.take(np.arange(len(content)))[:, 0].astype(np.float64)
    folds = folds_of(groups)
    for block in range(2):
        pair, rows = gaussian.pairs[block], values[:, block]
        background = np.zeros(len(groups), np.int64)
        for one, (means, inverse) in zip(pair, (whole(rows[own], groups[own]), whole(rows, background)), strict=True):
            np.testing.assert_allclose(one.means, means, rtol=1e-10)
            np.testing.assert_allclose(one.whiten.T @ one.whiten, inverse, rtol=1e-8, atol=1e-12)
        scores = np.empty((2, len(groups)))
        for fold in range(statistics.FOLDS):
            kept, mine = folds != fold, (folds == fold) & own
            nearest = far(rows[mine], whole(rows[kept & own], groups[kept & own]))
            scores[:, mine] = nearest - far(rows[mine], whole(rows[kept], background[kept])), nearest
        np.testing.assert_allclose(gaussian.mean[:2, block], scores[:, own].mean(1), rtol=1e-8)
        np.testing.assert_allclose(gaussian.deviation[:2, block], scores[:, own].std(1), rtol=1e-8)


def test_msp_is_minus_the_largest_probability_in_deviations_of_the_own_texts() -> None:
    """The own texts' are 0.9, 0.5 and 0.7: mean 0.7."""
    logits = np.log([[0.9, 0.1], [0.5, 0.5], [0.3, 0.7], [0.99, 0.01]])
    statistics = Statistics.of(states(np.zeros((4, 2, 3))), logits, np.array([0, 0, 1, -1]))
    deviation = math.sqrt(0.08 / 3)
    given = statistics.standardised(np.zeros((2, 2, 3)), np.log([[0.6, 0.4], [0.2, 0.8]]), "msp")
    assert given.tolist() == pytest.approx(np.array([[0.1 / deviation] * 2, [-0.1 / deviation] * 2]))


def test_new_texts_of_a_teacher_score_as_its_own_do_however_few_they_were() -> None:
    """A Gaussian is near the texts it was fitted on: without correction new texts would score as out of domain."""
    draw = np.random.default_rng(0)
    scale = np.exp(-np.arange(200) / 30)
    own, other, new = (draw.normal(size=(count, 1, 200)) * scale for count in (60, 60, 500))
    other[:, :, :30] += 2
    statistics = Statistics.of(states(np.concatenate([own, other])), np.zeros((120, 1)), np.repeat([0, -1], 60))
    for measure in ("rmd", "md"):
        assert abs(statistics.standardised(new, None, measure).mean()) < 1.5
        assert statistics.standardised(other, None, measure).mean() > 3
    naive, later = (scores_of(statistics.pairs[0], rows[:, 0])[MD] for rows in (own, new))
    assert (later.mean() - naive.mean()) / naive.std() > 3


@pytest.mark.parametrize("own", [1, 2, 4])
def test_a_handful_of_own_texts_gives_numbers_all_the_same(own: int) -> None:
    draw = np.random.default_rng(1)
    groups = np.where(np.arange(9) < own, 0, -1)
    statistics = Statistics.of(states(draw.normal(size=(9, 2, 6))), draw.normal(size=(9, 2)), groups)
    for measure in COMPARATIVE:
        assert np.isfinite(
            statistics.standardised(draw.normal(size=(3, 2, 6)), draw.normal(size=(3, 2)), measure)
        ).all()


def test_a_teacher_of_constant_confidence_gives_zero_scores() -> None:
    statistics = Statistics.of(states(np.ones((8, 1, 3))), np.tile([900.0, 0.0], (8, 1)), np.repeat([0, -1], 4))
    assert statistics.deviation.tolist() == [[0], [0], [0]]
    for measure in COMPARATIVE:
        assert statistics.standardised(np.full((2, 1, 3), 7.0), np.zeros((2, 2)), measure).tolist() == [[0], [0]]


def test_saved_statistics_are_read_back_exactly(tmp_path: Path) -> None:
    kept, logits, groups = drawn(60)
    statistics = Statistics.of(kept, logits, groups)
    statistics.save(tmp_path / "one.safetensors")
    again = Statistics.load(tmp_path / "one.safetensors")
    values = kept.take(np.arange(9))[:, 0].astype(np.float64)
    for measure in COMPARATIVE:
        one = statistics.standardised(values, logits[:9], measure)
        assert np.array_equal(one, again.standardised(values, logits[:9], measure))


# ---- which texts, and among teachers


def test_reference_texts_are_a_share_of_each_predicted_class() -> None:
    """Margins are 4, 3, 0 and 2 in the first class, 1 and 0.5 in the second, less certain one."""
    logits = np.array([[4.0, 0, 0], [0, 1, 0], [3, 0, 0], [1, 1, 0], [2, 0, 0], [0, 0.5, 0]])
    everything = np.ones(6, bool)
    assert most_confident(logits, everything, 0.25).tolist() == [0, 1, -1, -1, -1, -1]
    assert most_confident(logits, everything, 0.5).tolist() == [0, 1, 0, -1, -1, -1]
    assert most_confident(logits, everything, 1.0).tolist() == [0, 1, 0, 0, 0, 1]
    assert most_confident(logits, np.array([False, True, True, True, True, False]), 0.5).tolist() == [
        -1,
        1,
        0,
        -1,
        0,
        -1,
    ]


def test_a_text_is_a_worse_reference_the_more_the_teacher_predicts_its_catch_all() -> None:
    logits, catch_all = np.array([[3.0, 0], [1, 0], [2, 0]]), np.array([[9.0], [0], [0]])
    assert most_confident(logits, np.ones(3, bool), 0.5, catch_all).tolist() == [-1, 0, 0]
    assert most_confident(logits[:, :1], np.ones(3, bool), 0.3, catch_all).tolist() == [-1, -1, 0]


def test_a_share_of_so_many_texts_is_not_one_more_by_rounding() -> None:
    logits = np.array([[float(place), 0.0] for place in range(1, 50)])
    assert (most_confident(logits, np.ones(49, bool), 1 / 49) >= 0).sum() == 1  # 1 / 49 * 49 < 1, and 0.07 * 100 > 7
    assert (most_confident(np.tile([1.0, 0.0], (100, 1)), np.ones(100, bool), 0.07) >= 0).sum() == 7
    assert (most_confident(logits, np.ones(49, bool), 1e-12) >= 0).sum() == 1


@pytest.mark.parametrize("measure", COMPARATIVE)
def test_confidence_is_the_softmax_over_teachers_of_the_negated_domain_score(measure: str) -> None:
    draw, texts = np.random.default_rng(0), np.arange(40)
    contents, logits = [states(draw.normal(size=(40, 2, 3))) for _ in "ab"], [draw.normal(size=(40, 2)) for _ in "ab"]
    fitted = [Statistics.of(*teacher, np.zeros(40, np.int64)) for teacher in zip(contents, logits, strict=True)]
    first, second = (
        statistics.standardised(content.take(texts)[:, 0].astype(np.float64), of_teacher, measure)
        for statistics, content, of_teacher in zip(fitted, contents, logits, strict=True)
    )
    shares = confidences(fitted, contents, logits, measure)
    np.testing.assert_allclose(shares[:, :, 0], 1 / (1 + np.exp(first - second)))
    np.testing.assert_allclose(shares.sum(axis=2), 1)


def test_targets_use_the_confidences_of_the_last_block(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = np.array([[[0.9, 0.1], [0.3, 0.7]], [[0.8, 0.2], [0.4, 0.6]]])  # [texts, blocks, teachers]
    monkeypatch.setattr(stage, "domain_confidences", lambda *_: shares)
    empty = pl.Series([], dtype=pl.Float64)
    predictions = [TeacherPredictions(name, empty, empty, empty) for name in ("first", "second")]
    run: Any = None
    first, second = stage.with_domain_confidence(run, predictions, [], np.empty(0, "S16"))
    assert (first.confidence.to_list(), second.confidence.to_list()) == ([0.3, 0.4], [0.7, 0.6])


def test_absent_classes_few_texts_and_empty_measures_give_notes() -> None:
    facts: StatisticsFacts = {
        "texts": 10,
        "which": "the most confident",
        "background": 100,
        "width": 32,
        "absent_places": [1],
        "shrinkage": [0.5, 0.25],
        "same": [False, False, True],
    }
    body = " ".join(notes("first", facts, ["money", "law"]))
    assert "no text of law;" in body
    assert "no text of justice;" in notes("first", facts, ["money", "justice"])[0]
    assert "10 texts" in body
    assert "0.50 and 0.25" in body
    assert "have the same msp:" in body
    assert "1 text for 32 dimensions" in " ".join(notes("first", {**facts, "texts": 1}, ["money", "law"]))
    assert notes("first", {**facts, "texts": 99, "absent_places": [], "same": [False] * 3}, ["money", "law"]) == []
