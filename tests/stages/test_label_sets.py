"""Teachers with the same labels, which count as one."""

from __future__ import annotations

import numpy as np
import pytest

from amalgam.data.keys import union_of
from amalgam.stages.weigh_teachers.label_sets import LabelSets
from amalgam.stages.weigh_teachers.neighbours import BlockSpace
from amalgam.stages.weigh_teachers.signals import Params


def test_teachers_with_the_same_labels_in_any_order_are_one_group() -> None:
    labels = {"a": ["x", "y"], "b": ["z", "y"], "copy": ["y", "x"]}
    label_sets = LabelSets.of(union_of(labels))
    assert label_sets.groups == [[0, 2], [1]]
    assert not label_sets.all_differ
    assert LabelSets.of(union_of({"a": ["x", "y"], "b": ["y", "z"]})).all_differ


def test_a_group_has_the_mean_evidence_and_divides_its_weight_by_the_predictions() -> None:
    label_sets = LabelSets([[0, 2], [1]])
    assert label_sets.mean(np.array([[1.0, 5.0, 3.0]])).tolist() == [[2.0, 5.0]]
    weights, answers = np.array([[0.8, 0.2], [0.6, 0.4]]), np.array([[1.0, 0.0, 1.0], [2.0, 1.0, 1.0]])
    divided = label_sets.divided(weights, answers, Params())
    assert divided[:, [0, 2]].sum(axis=1) == pytest.approx(weights[:, 0])
    assert divided[:, 1] == pytest.approx(weights[:, 1])
    assert divided[1, 0] > divided[1, 2]
    assert label_sets.divided_shares(np.array([0.7, 0.3]), divided).sum() == pytest.approx(1)


def test_a_group_predicts_the_label_of_its_most_confident_teacher() -> None:
    label_sets = LabelSets([[0, 2], [1]])
    answers = np.array([[0.1, 0.0, 0.9], [0.8, 0.0, 0.2]])
    assert label_sets.predicted(np.array([[0, 2, 1], [0, 2, 1]]), answers).tolist() == [[1, 2], [0, 2]]


def test_copies_of_a_teacher_have_one_space_with_the_neighbours_of_one() -> None:
    random = np.random.default_rng(0)
    states = [random.normal(size=(40, 6)), random.normal(size=(40, 4)) + 3]
    spaces = [BlockSpace(own, own) for own in states]
    joined = LabelSets([[0, 2], [1]]).joined([spaces[0], spaces[1], spaces[0]])
    plain, copied = (np.concatenate([space.centred().texts[:] for space in each], axis=1) for each in (spaces, joined))
    assert copied @ copied.T == pytest.approx(plain @ plain.T, abs=1e-6)


def test_spaces_of_a_group_count_alike_whatever_their_scale() -> None:
    random = np.random.default_rng(0)
    states = [random.normal(size=(40, 6)), 1000 * random.normal(size=(40, 4)) + 3]
    [joined] = LabelSets([[0, 1]]).joined([BlockSpace(own, own) for own in states])
    squares = (joined.texts[:] - joined.texts[:].mean(axis=0)) ** 2
    assert squares[:, :6].sum(axis=1).mean() == pytest.approx(1, abs=1e-4)
    assert squares[:, 6:].sum(axis=1).mean() == pytest.approx(1, abs=1e-4)


def test_other_blocks_divide_a_groups_weight_as_the_fitted_block_does() -> None:
    label_sets, random = LabelSets([[0, 1]]), np.random.default_rng(0)
    weights, answers, params = np.ones((60, 1)), random.normal(size=(60, 2)) * [1, 5], Params()
    whole = label_sets.divided(weights, answers, params)
    reused = Params(params.values, is_reused=True)
    parts = [label_sets.divided(weights[rows], answers[rows], reused) for rows in (slice(0, 20), slice(20, 60))]
    assert np.concatenate(parts) == pytest.approx(whole)
