"""What the audit counts, against cases worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import polars as pl
import pytest

from amalgam.data.keys import LabelSpace, union_of
from amalgam.pipeline.config.schema import Targets
from amalgam.stages.report.audit import AuditCounts, AuditedTexts, left_out
from amalgam.stages.report.tables import advice
from amalgam.stages.target_methods import TargetInputs, TeacherPredictions


def block(
    space: LabelSpace,
    distributions: list[list[list[float]]],
    confidence: list[list[float]],
    gold: list[int] | None = None,
    weights: list[list[float]] | None = None,
    mode: str = "soft",
) -> AuditedTexts:
    predictions = [
        TeacherPredictions(
            name, pl.Series(np.log(np.maximum(own, 1e-9))), pl.Series(np.array(own)), pl.Series(list(column))
        )
        for name, own, column in zip(space.columns, distributions, zip(*confidence, strict=True), strict=True)
    ]
    gold_N = np.array(gold if gold is not None else [-1] * len(confidence))  # noqa: N806
    names = pl.Series([None if one < 0 else space.names[one] for one in gold_N], dtype=pl.String)
    given = None if weights is None else pl.Series(np.array(weights))
    return AuditedTexts(TargetInputs(space, names, predictions, given), Targets(mode=mode, temperature=0.2), gold_N)


STRANGERS = union_of({"A": ["x", "y"], "B": ["z", "w"]})


def two_strangers(mode: str = "soft") -> AuditCounts:
    """A has labels x, y and B z, w. Weights are softmax(c / 0.2): 0.95 : 0.05 for confidences 0.6 apart."""
    counts = AuditCounts(STRANGERS)
    a = [[0.9, 0.1], [0.6, 0.4], [0.99, 0.01], [0.5, 0.5]]
    b = [[0.6, 0.4], [0.05, 0.95], [0.1, 0.9], [0.5, 0.5]]
    confidence = [[0.8, 0.2], [0.3, 0.9], [0.95, 0.6], [0.0, 0.0]]
    counts.add(block(STRANGERS, [a, b], confidence, [0, 3, 3, -1], mode=mode))
    return counts


@pytest.mark.parametrize("mode", ["soft", "hard", "vanilla-kd"])
def test_strangers_are_counted_as_by_hand(mode: str) -> None:
    """The union predicts x, w, x, x; without A: z, w, w, z; without B: x, x, x, x. Gold is x, w, w, none."""
    counts = two_strangers(mode)
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
    whole, parts = two_strangers(), AuditCounts(STRANGERS)
    parts.add(block(STRANGERS, [[[0.9, 0.1]], [[0.6, 0.4]]], [[0.8, 0.2]], [0]))
    rest = ([[0.6, 0.4], [0.99, 0.01], [0.5, 0.5]], [[0.05, 0.95], [0.1, 0.9], [0.5, 0.5]])
    parts.add(block(STRANGERS, list(rest), [[0.3, 0.9], [0.95, 0.6], [0.0, 0.0]], [3, 3, -1]))
    for name in ("wins", "changed", "gained", "lost", "conflicts", "gold_won"):
        assert getattr(whole, name).tolist() == getattr(parts, name).tolist()
    assert whole.confidence.tolist() == pytest.approx(parts.confidence.tolist())


@pytest.mark.parametrize(("teachers", "harmful"), [(2, True), (10, False)])
def test_of_more_teachers_a_harmful_one_needs_clearer_evidence(teachers: int, *, harmful: bool) -> None:
    """16 texts gained and 4 lost are 2.68 standard errors: beyond the 2.24 of two tests, below the 2.81 of ten."""
    counts = AuditCounts(union_of({f"teacher-{n}": [f"label-{n}"] for n in range(teachers)}))
    counts.texts = counts.labelled = 100
    counts.gained[0], counts.lost[0] = 16, 4
    assert left_out(counts, 0)["harmful"] is harmful
    assert left_out(counts, 1)["harmful"] is False


@pytest.mark.parametrize(("labelled", "harmful"), [(0, None), (1, None), (49, None), (50, False)])
def test_a_few_gold_labels_show_a_harmful_teacher_but_not_that_there_is_none(labelled: int, harmful: bool) -> None:
    counts = AuditCounts(union_of({"A": ["x"], "B": ["y"]}))
    counts.texts, counts.labelled = 100, labelled
    counts.gained[0] = min(labelled, 10)
    assert left_out(counts, 0)["harmful"] is (labelled >= 10 or None)
    assert left_out(counts, 1)["harmful"] is harmful


def test_of_three_with_the_same_labels_the_one_that_disagrees_is_seen_without_gold() -> None:
    """A and B predict x, C predicts y with certainty. A disagrees with the union of B and C, agrees with B.

    Two teachers with one answer divide the weight of one, so C's certainty outweighs A and B together.
    """
    space = union_of({name: ["x", "y"] for name in "ABC"})
    counts = AuditCounts(space)
    texts = 20
    a, c = [[0.9, 0.1]] * texts, [[0.0, 1.0]] * texts
    counts.add(block(space, [a, a, c], [[0.5, 0.5, 0.5]] * texts))
    assert counts.comparable.tolist() == [40, 40, 40]
    assert (counts.agreed_with.tolist(), counts.agreed_without.tolist()) == ([0, 0, 0], [0, 0, 40])
    assert counts.changed.tolist() == [0, 0, texts]
    assert counts.differed.tolist() == [[0, 0, texts], [0, 0, texts], [0, 0, 0]]
    assert [counts.distance[pair] for pair in ((0, 1), (0, 2))] == pytest.approx([0.0, 0.9 * texts])
    effects = [left_out(counts, index) for index in range(3)]
    assert [(effect["harmful"], effect["disagrees"]) for effect in effects] == [(None, False)] * 2 + [(None, True)]
    teachers = [{"teacher": name, "left_out": effect} for name, effect in zip("ABC", effects, strict=True)]
    first, *_ = advice({"teachers": teachers, "duplicates": []})  # type: ignore[typeddict-item]
    assert first.startswith(
        "teacher C disagrees with the others (their agreement is 100.0 % without it, 0.0 % with it)"
    )
    assert "remove" not in first


def test_a_text_counts_once_in_the_test_of_a_teacher_that_disagrees() -> None:
    """Of 10 teachers one disagrees on 6 texts, which is 2.4 standard errors: below the 2.81 of ten tests."""
    space = union_of({f"teacher-{n}": ["x", "y"] for n in range(10)})
    counts = AuditCounts(space)
    others, last = [[0.9, 0.1]] * 6, [[0.0, 1.0]] * 6
    counts.add(block(space, [others] * 9 + [last], [[0.5] * 10] * 6))
    assert counts.agreed_without[9] - counts.agreed_with[9] == 6 * 9
    assert left_out(counts, 9)["disagrees"] is False


def test_labels_in_another_order_are_the_same_labels() -> None:
    space = union_of({"A": ["x", "y"], "B": ["y", "x"]})
    counts = AuditCounts(space)
    counts.add(block(space, [[[0.7, 0.3]], [[0.2, 0.8]]], [[0.5, 0.5]]))
    assert (counts.met[0, 1], counts.differed[0, 1]) == (1, 0)
    assert counts.distance[0, 1] == pytest.approx(0.1)


def test_partly_overlapping_teachers_disagree_on_labels_that_both_know_alone() -> None:
    """A has x, y, z and B y, z, w: the first text is not shared, they agree on the second, not on the third."""
    space = union_of({"A": ["x", "y", "z"], "B": ["y", "z", "w"]})
    counts = AuditCounts(space)
    a = [[0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.1, 0.8, 0.1]]
    b = [[0.8, 0.1, 0.1], [0.8, 0.1, 0.1], [0.1, 0.8, 0.1]]
    counts.add(block(space, [a, b], [[0.6, 0.6]] * 3))
    assert (counts.met[0, 1], counts.differed[0, 1]) == (2, 1)
    assert counts.conflicts[0, 1] == 2  # x against y, and y against z


def test_teachers_that_share_one_label_and_give_it_to_other_texts_are_seen() -> None:
    space = union_of({"A": ["x", "y"], "B": ["y", "z"]})
    counts = AuditCounts(space)
    y, not_y = [[0.1, 0.9], [0.9, 0.1]], [[0.9, 0.1], [0.1, 0.9]]  # of A and of B
    rows = [y, y, y, not_y, not_y]
    a, b = [row[0] for row in rows], [row[1] for row in (y, not_y, not_y, y, not_y)]
    counts.add(block(space, [a, b], [[0.6, 0.6]] * 5))
    assert counts.given.tolist() == [[0, 3], [2, 0]]
    assert counts.met[0, 1] - counts.differed[0, 1] == 1


def test_given_weights_replace_confidences() -> None:
    """The last text's weight is all A's: without A the others are equal."""
    space = union_of({"A": ["x", "y"], "B": ["z", "w"], "C": ["u", "v"]})
    counts = AuditCounts(space)
    weights = [[0.2, 0.3, 0.5], [1.0, 0.0, 0.0]]
    distributions = [[[0.9, 0.1]] * 2, [[0.6, 0.4]] * 2, [[0.1, 0.9]] * 2]
    texts = block(space, distributions, [[0.9, 0.1, 0.1]] * 2, weights=weights)
    counts.add(texts)
    assert (counts.wins.tolist(), counts.wins_by_weights.tolist()) == ([2, 0, 0], [1, 0, 1])
    assert counts.changed.tolist() == [1, 0, 1]
    assert texts.weighed([1, 2])[1].tolist() == [pytest.approx([3 / 8, 5 / 8]), [0.5, 0.5]]


def test_weights_by_confidence_are_the_softmax_over_the_teachers_that_are_left() -> None:
    space = union_of({"A": ["x"], "B": ["y"], "C": ["z"]})
    weights = block(space, [[[1.0]]] * 3, [[0.8, 0.2, 0.5]]).weighed([0, 1])[1]
    assert weights[0].tolist() == pytest.approx([1 / (1 + math.exp(-3)), 1 / (1 + math.exp(3))])


@pytest.mark.parametrize("given", [True, False])
def test_two_teachers_with_one_answer_lead_together(given: bool) -> None:
    """A and B answer x with 0.3 each, C answers y with 0.4: the target is x, and A leads as in the targets.

    Confidences are no weights: there the highest confidence wins, and A and B divide the weight of one teacher.
    """
    space = union_of({"A": ["x", "u"], "B": ["x", "v"], "C": ["y", "w"]})
    counts = AuditCounts(space)
    weights = [[0.3, 0.3, 0.4]]
    counts.add(block(space, [[[1.0, 0.0]]] * 3, weights, [0], weights=weights if given else None))
    assert counts.wins.tolist() == [0, 0, 1]
    assert counts.wins_by_weights.tolist() == ([1, 0, 0] if given else [0, 0, 1])
    assert counts.right == int(given)
    assert counts.changed.tolist() == ([1, 1, 0] if given else [0, 0, 1])


def test_a_single_teacher_has_no_left_out_counts() -> None:
    space = union_of({"A": ["x", "y"]})
    counts = AuditCounts(space)
    counts.add(block(space, [[[0.2, 0.8]]], [[0.5]], [1]))
    assert (counts.wins.tolist(), counts.changed.tolist(), counts.right) == ([1], [0], 1)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("mode", ["soft", "hard", "stratanet"])
def test_leaders_and_labels_are_those_of_the_targets(mode: str, given: bool) -> None:
    """All teachers are compared, and those that are left; a confidence of stratanet is a weight."""
    space = union_of({"A": ["x", "y", "z"], "B": ["y", "z"], "C": ["z", "w"]})
    random = np.random.default_rng(0)
    scores = random.dirichlet([1.0, 1.0, 1.0], 500)
    distributions = [random.dirichlet([0.4] * len(own), 500).tolist() for own in space.columns.values()]
    texts = block(space, distributions, scores.tolist(), weights=scores.tolist() if given else None, mode=mode)
    batch = texts.method.build(texts.inputs)
    assert [list(space.columns)[place] for place in texts.leader_N] == list(np.asarray(batch.teacher))
    assert texts.first_labels(texts.padded()).tolist() == batch.target.to_numpy().argmax(axis=1).tolist()
    if mode == "stratanet" or given:  # C has one label less, so A and B have all of the others
        rest = scores[:, :2] / scores[:, :2].sum(axis=1, keepdims=True)
        assert texts.weighed([0, 1])[0].scores.to_numpy() == pytest.approx(rest)
