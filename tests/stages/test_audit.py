"""What the audit counts, against cases worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from amalgam.data.keys import union_of
from amalgam.stages.report.audit import AuditCounts, AuditedTexts


def counts_of(labels: dict[str, list[str]], *, hard: bool = False) -> AuditCounts:
    return AuditCounts(union_of(labels), 0.2, winner_takes_all=hard)


def block(
    distributions: list[list[list[float]]], confidence: list[list[float]], gold: list[int] | None = None
) -> AuditedTexts:
    gold_labels = np.array(gold if gold is not None else [-1] * len(confidence))
    return AuditedTexts([np.array(one) for one in distributions], np.array(confidence), None, gold_labels)


def two_strangers(*, hard: bool = False) -> AuditCounts:
    """A has labels x, y and B z, w. Weights are softmax(c / 0.2): 0.95 : 0.05 for confidences 0.6 apart."""
    counts = counts_of({"A": ["x", "y"], "B": ["z", "w"]}, hard=hard)
    a = [[0.9, 0.1], [0.6, 0.4], [0.99, 0.01], [0.5, 0.5]]
    b = [[0.6, 0.4], [0.05, 0.95], [0.1, 0.9], [0.5, 0.5]]
    counts.add(block([a, b], [[0.8, 0.2], [0.3, 0.9], [0.95, 0.6], [0.0, 0.0]], [0, 3, 3, -1]))
    return counts


@pytest.mark.parametrize("hard", [False, True])
def test_strangers_are_counted_as_by_hand(hard: bool) -> None:
    """The union predicts x, w, x, x; without A: z, w, w, z; without B: x, x, x, x. Gold is x, w, w, none."""
    counts = two_strangers(hard=hard)
    assert (counts.texts, counts.labelled, counts.right) == (4, 3, 2)
    assert counts.wins.tolist() == [3, 1]  # a tie is the first teacher's
    assert counts.changed.tolist() == [3, 1]
    assert (counts.gained.tolist(), counts.lost.tolist()) == ([1, 0], [1, 1])
    assert counts.conflicts.tolist() == [[0, 1], [1, 0]]  # both are confident on the third text alone
    assert counts.predicted.tolist() == [[4, 0, 0, 0], [0, 0, 2, 2]]
    assert counts.predicted_and_won.tolist() == [[3, 0, 0, 0], [0, 0, 0, 1]]
    assert counts.gold_won.tolist() == [[1, 0], [0, 0], [0, 0], [1, 1]]
    assert counts.gold_right.tolist() == [1, 0, 0, 1]
    assert counts.met[0, 1] == 0
    assert counts.comparable.tolist() == [0, 0]  # without shared labels nothing is comparable


def test_a_text_counts_the_same_in_whichever_block_it_comes() -> None:
    whole, parts = two_strangers(), counts_of({"A": ["x", "y"], "B": ["z", "w"]})
    parts.add(block([[[0.9, 0.1]], [[0.6, 0.4]]], [[0.8, 0.2]], [0]))
    rest = ([[0.6, 0.4], [0.99, 0.01], [0.5, 0.5]], [[0.05, 0.95], [0.1, 0.9], [0.5, 0.5]])
    parts.add(block(list(rest), [[0.3, 0.9], [0.95, 0.6], [0.0, 0.0]], [3, 3, -1]))
    for name in ("wins", "changed", "gained", "lost", "conflicts", "gold_won"):
        assert getattr(whole, name).tolist() == getattr(parts, name).tolist()
    assert whole.confidence.tolist() == pytest.approx(parts.confidence.tolist())


def test_of_three_with_the_same_labels_the_one_that_misleads_is_seen_without_gold() -> None:
    """A and B predict x, C predicts y with certainty. A disagrees with the union of B and C, agrees with B."""
    counts = counts_of({name: ["x", "y"] for name in "ABC"})
    texts = 20
    a, c = [[0.9, 0.1]] * texts, [[0.0, 1.0]] * texts
    counts.add(block([a, a, c], [[0.5, 0.5, 0.5]] * texts))
    assert counts.comparable.tolist() == [40, 40, 40]
    assert (counts.only_with.tolist(), counts.only_without.tolist()) == ([0, 0, 0], [0, 0, 40])
    assert counts.changed.tolist() == [texts, texts, 0]  # x of 1.8 against 1.2; A or B alone is outvoted by C
    assert counts.differed.tolist() == [[0, 0, texts], [0, 0, texts], [0, 0, 0]]
    assert [counts.distance[pair] for pair in ((0, 1), (0, 2))] == pytest.approx([0.0, 0.9 * texts])


def test_labels_in_another_order_are_the_same_labels() -> None:
    counts = counts_of({"A": ["x", "y"], "B": ["y", "x"]})
    counts.add(block([[[0.7, 0.3]], [[0.2, 0.8]]], [[0.5, 0.5]]))
    assert (counts.met[0, 1], counts.differed[0, 1]) == (1, 0)
    assert counts.distance[0, 1] == pytest.approx(0.1)


def test_partly_overlapping_teachers_disagree_on_labels_that_both_know_alone() -> None:
    """A has x, y, z and B y, z, w: the first text is not shared, they agree on the second, not on the third."""
    counts = counts_of({"A": ["x", "y", "z"], "B": ["y", "z", "w"]})
    a = [[0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.1, 0.8, 0.1]]
    b = [[0.8, 0.1, 0.1], [0.8, 0.1, 0.1], [0.1, 0.8, 0.1]]
    counts.add(block([a, b], [[0.6, 0.6]] * 3))
    assert (counts.met[0, 1], counts.differed[0, 1]) == (2, 1)
    assert counts.conflicts[0, 1] == 2  # x against y, and y against z


def test_given_weights_replace_confidences() -> None:
    """The last text's weight is all A's: without A the others are equal."""
    counts = counts_of({"A": ["x", "y"], "B": ["z", "w"], "C": ["u", "v"]})
    one = block([[[0.9, 0.1]] * 2, [[0.6, 0.4]] * 2, [[0.1, 0.9]] * 2], [[0.9, 0.1, 0.1]] * 2)
    weights = np.array([[0.2, 0.3, 0.5], [1.0, 0.0, 0.0]])
    counts.add(AuditedTexts(one.distributions, one.confidence_NT, weights, one.gold_N))
    assert (counts.wins.tolist(), counts.wins_by_weights.tolist()) == ([2, 0, 0], [1, 0, 1])
    assert counts.changed.tolist() == [1, 0, 1]
    alone = counts.weights(AuditedTexts(one.distributions, one.confidence_NT, weights, one.gold_N), [1, 2])
    assert alone.tolist() == [pytest.approx([3 / 8, 5 / 8]), [0.5, 0.5]]


def test_weights_by_confidence_are_the_softmax_over_the_teachers_with_a_label() -> None:
    weights = counts_of({"A": ["x"], "B": ["y"], "C": ["z"]}).weights(block([], [[0.8, 0.2, 0.5]]), [0, 1])
    assert weights[0].tolist() == pytest.approx([1 / (1 + math.exp(-3)), 1 / (1 + math.exp(3))])


def test_a_single_teacher_has_no_left_out_counts() -> None:
    counts = counts_of({"A": ["x", "y"]})
    counts.add(block([[[0.2, 0.8]]], [[0.5]], [1]))
    assert (counts.wins.tolist(), counts.changed.tolist(), counts.right) == ([1], [0], 1)
