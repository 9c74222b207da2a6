"""The rules of MUKA and its baselines against cases worked out by hand."""

from __future__ import annotations

import math
from typing import get_args

import numpy as np
import polars as pl
import pytest

from amalgam.data.keys import LabelSpace, cut_in_groups, union_of
from amalgam.pipeline.config.schema import Targets
from amalgam.stages.common.cached.uncertainty import MEASURES, confidence, summarise_passes, sums_over_passes
from amalgam.stages.target_methods import COMPARATIVE, TargetBatch, TargetInputs, TeacherPredictions, target_method

LN2 = math.log(2)


def arrays(*rows: list[float]) -> pl.Series:
    return pl.Series(list(rows), dtype=pl.Array(pl.Float64, len(rows[0])))


def logs(*probabilities: float) -> list[float]:
    return [math.log(p) for p in probabilities]


def predictions(name: str, probability: list[float], confidence_: float) -> TeacherPredictions:
    return TeacherPredictions(name, arrays(logs(*probability)), arrays(probability), pl.Series([confidence_]))


def sums(measure: str, *passes: list[float]) -> pl.DataFrame:
    raw = np.array([[logit for one in passes for logit in logs(*one)]])
    return pl.DataFrame(sums_over_passes(raw, len(passes), MEASURES[measure]))


def build_targets(
    predictions: list[TeacherPredictions], space: LabelSpace, targets: Targets, weights: pl.Series | None = None
) -> TargetBatch:
    gold = pl.Series("label", [None] * len(predictions[0].logits), pl.String)
    return target_method(targets).build(TargetInputs(space, gold, predictions, weights))


def chosen(batch: TargetBatch) -> list[str]:
    assert batch.teacher is not None
    return batch.teacher.to_list()


SPACE = union_of({"a": ["x", "y"], "b": ["z", "w", "v"]})


def test_soft_targets_weigh_padded_teachers_by_the_softmax_of_their_confidence() -> None:
    batch = build_targets(
        [predictions("a", [0.9, 0.1], 0.8), predictions("b", [0.5, 0.3, 0.2], 0.4)], SPACE, Targets(temperature=0.2)
    )
    first = 1 / (1 + math.exp(-0.4 / 0.2))
    expected = [0.9 * first, 0.1 * first, 0.5 * (1 - first), 0.3 * (1 - first), 0.2 * (1 - first)]
    assert batch.target.to_list()[0] == pytest.approx(expected)
    assert batch.weight.to_list() == pytest.approx([0.4 + 1e-6])
    assert chosen(batch) == ["a"]
    assert batch.confidence is not None
    assert batch.confidence.to_list()[0] == pytest.approx([0.8, 0.4])


def test_hard_targets_are_the_most_confident_teachers_distribution_and_zero_elsewhere() -> None:
    batch = build_targets(
        [predictions("a", [0.9, 0.1], 0.3), predictions("b", [0.5, 0.3, 0.2], 0.4)], SPACE, Targets(mode="hard")
    )
    assert batch.target.to_list()[0] == pytest.approx([0, 0, 0.5, 0.3, 0.2])
    assert chosen(batch) == ["b"]


def test_of_a_teachers_distribution_the_first_label_alone_is_taken_where_that_is_asked_for() -> None:
    teachers = [predictions("a", [0.4, 0.6], 0.3), predictions("b", [0.4, 0.4, 0.2], 0.4)]
    hard = build_targets(teachers, SPACE, Targets(mode="hard", distribution="top-label"))
    assert hard.target.to_list()[0] == [0, 0, 1, 0, 0]
    soft = build_targets(
        teachers, SPACE, Targets(distribution="top-label", teacher_weights="mixture"), arrays([0.25, 0.75])
    )
    assert soft.target.to_list()[0] == pytest.approx([0, 0.25, 0.75, 0, 0])
    meeting = union_of({"a": ["x", "y"], "b": ["y", "z", "w"]})
    both = build_targets(
        teachers, meeting, Targets(distribution="top-label", teacher_weights="mixture"), arrays([0.25, 0.75])
    )
    assert both.target.to_list()[0] == pytest.approx([0, 1, 0, 0])


def test_of_equally_confident_teachers_the_first_is_chosen() -> None:
    batch = build_targets(
        [predictions("a", [0.9, 0.1], 0.4), predictions("b", [0.5, 0.3, 0.2], 0.4)], SPACE, Targets(mode="hard")
    )
    assert chosen(batch) == ["a"]
    assert batch.weight.to_list() == pytest.approx([1e-6])


def test_scores_are_all_teachers_logits_side_by_side_and_every_text_weighs_one() -> None:
    batch = build_targets(
        [predictions("a", [0.9, 0.1], 0.3), predictions("b", [0.5, 0.3, 0.2], 0.4)], SPACE, Targets(mode="scores")
    )
    assert batch.target.to_list()[0] == pytest.approx([*logs(0.9, 0.1), *logs(0.5, 0.3, 0.2)])
    assert batch.weight.to_list() == [1.0]
    assert batch.teacher is None


def test_a_single_teacher_weighs_one() -> None:
    space = union_of({"a": ["x", "y"]})
    batch = build_targets([predictions("a", [0.9, 0.1], 0.8)], space, Targets())
    assert batch.weight.to_list() == [1.0]
    assert batch.target.to_list()[0] == pytest.approx([0.9, 0.1])


def test_where_labels_meet_what_is_padded_is_added() -> None:
    space = union_of({"a": ["x", "y"], "b": ["y", "x"]})
    batch = build_targets([predictions("a", [0.9, 0.1], 0.5), predictions("b", [0.6, 0.4], 0.5)], space, Targets())
    assert batch.target.to_list()[0] == pytest.approx([0.5 * 0.9 + 0.5 * 0.4, 0.5 * 0.1 + 0.5 * 0.6])


def test_without_reweighting_every_text_weighs_one() -> None:
    both = [predictions("a", [0.9, 0.1], 0.8), predictions("b", [0.5, 0.3, 0.2], 0.4)]
    assert build_targets(both, SPACE, Targets(text_weights="none")).weight.to_list() == [1.0]


def test_vanilla_kd_is_one_softmax_over_all_logits_at_its_temperature() -> None:
    a = TeacherPredictions("a", arrays([1.0, 0.0]), arrays([0.7, 0.3]), pl.Series([0.1]))
    b = TeacherPredictions("b", arrays([2.0, 0.0, -1.0]), arrays([0.8, 0.15, 0.05]), pl.Series([0.2]))
    batch = build_targets([a, b], SPACE, Targets(mode="vanilla-kd", kd_temperature=2.0))
    raised = [math.exp(z / 2) for z in (1, 0, 2, 0, -1)]
    assert batch.target.to_list()[0] == pytest.approx([r / sum(raised) for r in raised])
    assert batch.weight.to_list() == [1.0]
    assert batch.teacher is None


def test_vanilla_kd_sums_a_shared_label_after_the_softmax() -> None:
    space = union_of({"a": ["x", "y"], "b": ["y", "z"]})
    a = TeacherPredictions("a", arrays([1.0, 0.0]), arrays([0.7, 0.3]), pl.Series([0.1]))
    b = TeacherPredictions("b", arrays([2.0, 0.0]), arrays([0.8, 0.2]), pl.Series([0.2]))
    raised = [math.exp(z) for z in (1, 0, 2, 0)]
    expected = [raised[0], raised[1] + raised[2], raised[3]]
    batch = build_targets([a, b], space, Targets(mode="vanilla-kd")).target.to_list()[0]
    assert batch == pytest.approx([part / sum(raised) for part in expected])


def entropy(*p: float) -> float:
    return -sum(q * math.log(q) for q in p if q > 0)


@pytest.mark.parametrize(
    ("measure", "expected"),
    [
        ("entropy", 1 - entropy(0.6, 0.4) / LN2),
        ("expected-entropy", 1 - (entropy(0.9, 0.1) + entropy(0.3, 0.7)) / 2 / LN2),
        ("mutual-information", 1 - (entropy(0.6, 0.4) - (entropy(0.9, 0.1) + entropy(0.3, 0.7)) / 2) / LN2),
        ("variation-ratio", 1 - (1 - 0.5) / 0.5),
        ("max-probability", 1 - (1 - 0.6) / 0.5),
    ],
)
def test_a_confidence_is_one_less_the_uncertainty_over_its_largest_value(measure: str, expected: float) -> None:
    assert confidence(sums(measure, [0.9, 0.1], [0.3, 0.7]), MEASURES[measure]).to_list() == pytest.approx([expected])


def test_the_experiment_file_accepts_the_registered_measures() -> None:
    assert set(get_args(Targets.model_fields["uncertainty"].annotation)) == {*MEASURES, *COMPARATIVE}


@pytest.mark.parametrize("measure", list(MEASURES))
def test_every_confidence_is_zero_for_a_uniform_and_one_for_a_certain_teacher(measure: str) -> None:
    uniform = confidence(sums(measure, [1 / 3] * 3), MEASURES[measure]).to_list()[0]
    certain = pl.DataFrame(sums_over_passes(np.array([[300.0, 0.0, 0.0]]), 1, MEASURES[measure]))
    assert confidence(certain, MEASURES[measure]).to_list() == pytest.approx([1.0])
    # One pass never disagrees with itself.
    expected = {"mutual-information": 1.0, "variation-ratio": 1.0}.get(measure, 0.0)
    assert uniform == pytest.approx(expected)


def test_energy_does_not_depend_on_the_level_of_the_logits() -> None:
    energy = MEASURES["energy"]
    low = pl.DataFrame(sums_over_passes(np.array([[1.0, 0.0, -2.0]]), 1, energy))
    high = pl.DataFrame(sums_over_passes(np.array([[51.0, 50.0, 48.0]]), 1, energy))
    assert confidence(low, energy).to_list() == pytest.approx(confidence(high, energy).to_list())


def test_the_union_keeps_first_seen_order_and_the_owners_of_a_label() -> None:
    space = union_of({"a": ["x", "y"], "b": ["z", "y"]})
    assert space.names == ("x", "y", "z")
    assert space.columns == {"a": (0, 1), "b": (2, 1)}
    assert space.owners == [["a"], ["a", "b"], ["b"]]


def test_labels_are_cut_by_name_with_the_remainder_in_the_last_group() -> None:
    assert cut_in_groups(["d", "a", "c", "b", "e"], 2) == [["a", "b"], ["c", "d", "e"]]


def test_weights_that_are_given_take_the_place_of_confidences() -> None:
    teachers = [predictions("a", [0.9, 0.1], 0.8), predictions("b", [0.5, 0.3, 0.2], 0.4)]
    weights = build_targets(teachers, SPACE, Targets(teacher_weights="mixture"), arrays([0.25, 0.75]))
    assert weights.target.to_list()[0] == pytest.approx([0.225, 0.025, 0.375, 0.225, 0.15])
    assert weights.weight.to_list() == pytest.approx([0.5 + 1e-6])
    assert chosen(weights) == ["b"]
    hard = build_targets(teachers, SPACE, Targets(teacher_weights="mixture", mode="hard"), arrays([0.25, 0.75]))
    assert hard.target.to_list()[0] == pytest.approx([0, 0, 0.5, 0.3, 0.2])


def test_uhcs_targets_are_the_teachers_distributions_side_by_side_at_its_temperature() -> None:
    teachers = [predictions("a", [0.9, 0.1], 0.8), predictions("b", [0.5, 0.3, 0.2], 0.4)]
    batch = build_targets(teachers, SPACE, Targets(mode="uhc"))
    assert batch.target.to_list()[0] == pytest.approx([0.9, 0.1, 0.5, 0.3, 0.2])
    assert batch.weight.to_list() == [1.0]
    assert batch.teacher is None
    hot = build_targets(teachers, SPACE, Targets(mode="uhc", kd_temperature=2.0)).target.to_list()[0]
    assert hot[:2] == pytest.approx([3 / 4, 1 / 4])  # square roots of 0.9 and 0.1


def test_stratanets_targets_are_tempered_distributions_weighed_by_the_confidences_themselves() -> None:
    """At temperature 0.5 probabilities are squared: 0.81 and 0.01, 0.25, 0.09 and 0.04."""
    teachers = [predictions("a", [0.9, 0.1], 0.25), predictions("b", [0.5, 0.3, 0.2], 0.75)]
    batch = build_targets(teachers, SPACE, Targets(mode="stratanet", uncertainty="rmd", kd_temperature=0.5))
    first, second = (0.25 / 0.82 * part for part in (0.81, 0.01)), (0.75 / 0.38 * part for part in (0.25, 0.09, 0.04))
    assert batch.target.to_list()[0] == pytest.approx([*first, *second])
    assert batch.weight.to_list() == [1.0]
    assert chosen(batch) == ["b"]
    assert batch.confidence is not None
    assert batch.confidence.to_list()[0] == pytest.approx([0.25, 0.75])


# ---- teachers that share labels


SHARED = union_of({"a": ["x", "y"], "copy": ["y", "x"], "b": ["z", "w"]})


def copied(first: TeacherPredictions) -> TeacherPredictions:
    """The same teacher with its labels in the other order."""
    return TeacherPredictions(
        "copy",
        arrays(*([b, a] for a, b in first.logits.to_list())),
        arrays(*([b, a] for a, b in first.distribution.to_list())),
        first.confidence,
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "soft"},
        {"mode": "hard"},
        {"mode": "hard", "distribution": "top-label"},
        {"mode": "soft", "teacher_weights": "mixture"},
        {"mode": "hard", "distribution": "top-label", "teacher_weights": "mixture"},
    ],
)
def test_two_copies_of_a_teacher_give_the_targets_and_weights_of_one(settings: dict[str, str]) -> None:
    random = np.random.default_rng(0)
    teachers = []
    for name in ("a", "b"):
        shares = random.dirichlet([0.5, 0.5], 50)
        distribution = arrays(*shares.tolist())
        teachers.append(
            TeacherPredictions(name, arrays(*np.log(shares).tolist()), distribution, pl.Series(random.random(50)))
        )
    targets = Targets.model_validate(settings)
    alone = random.random(50)
    weights = np.stack([alone, 1 - alone], axis=1)
    with_copy = np.stack([alone / 2, alone / 2, 1 - alone], axis=1)
    mixed = targets.teacher_weights == "mixture"
    plain = union_of({"a": ["x", "y"], "b": ["z", "w"]})
    one = build_targets(teachers, plain, targets, arrays(*weights.tolist()) if mixed else None)
    a, b = teachers
    two = build_targets([a, copied(a), b], SHARED, targets, arrays(*with_copy.tolist()) if mixed else None)
    assert np.allclose(two.target.to_numpy(), one.target.to_numpy())
    assert two.weight.to_list() == pytest.approx(one.weight.to_list())
    assert chosen(two) == chosen(one)


def test_the_margin_is_the_lead_over_the_best_teacher_with_another_answer() -> None:
    """Both teachers of y have it as first label: 0.5 + 0.3 - 0.2; then the second one has x: 0.5 - 0.3."""
    space = union_of({"a": ["x", "y"], "b": ["y", "z"], "c": ["w", "v"]})
    weights, targets = arrays([0.5, 0.3, 0.2]), Targets(teacher_weights="mixture")
    a, c = predictions("a", [0.1, 0.9], 0.9), predictions("c", [0.5, 0.3], 0.4)
    agreed = build_targets([a, predictions("b", [0.8, 0.2], 0.7), c], space, targets, weights)
    assert agreed.weight.to_list() == pytest.approx([0.6 + 1e-6])
    contested = build_targets([a, predictions("b", [0.2, 0.8], 0.7), c], space, targets, weights)
    assert contested.weight.to_list() == pytest.approx([0.2 + 1e-6])
    muka = build_targets([a, predictions("b", [0.8, 0.2], 0.7), c], space, Targets())
    assert muka.weight.to_list() == pytest.approx([0.9 - 0.4 + 1e-6])


def test_stratanets_confidences_of_teachers_with_one_answer_add_up() -> None:
    space = union_of({"a": ["x", "y"], "b": ["y", "z"], "c": ["w", "v"]})
    teachers = [
        predictions("a", [0.1, 0.9], 0.25),
        predictions("b", [0.8, 0.2], 0.35),
        predictions("c", [0.5, 0.5], 0.4),
    ]
    batch = build_targets(teachers, space, Targets(mode="stratanet", uncertainty="rmd"))
    assert chosen(batch) == ["b"]
    assert batch.margin is not None
    assert batch.margin.to_list() == pytest.approx([0.25 + 0.35 - 0.4 + 1e-6])


def test_an_answer_of_two_teachers_is_chosen_over_a_single_teacher_of_more_weight() -> None:
    space = union_of({"a": ["x", "y"], "b": ["y", "z"], "c": ["w", "v"]})
    teachers = [predictions("a", [0.1, 0.9], 0.9), predictions("b", [0.8, 0.2], 0.7), predictions("c", [0.5, 0.3], 0.4)]
    targets = Targets(mode="hard", distribution="top-label", teacher_weights="mixture")
    batch = build_targets(teachers, space, targets, arrays([0.25, 0.35, 0.4]))
    assert batch.target.to_list()[0] == [0, 1, 0, 0, 0]
    assert chosen(batch) == ["b"]


def test_a_text_on_which_all_teachers_agree_weighs_one() -> None:
    space = union_of({"a": ["x", "y"], "b": ["y", "x"]})
    batch = build_targets([predictions("a", [0.9, 0.1], 0.5), predictions("b", [0.4, 0.6], 0.3)], space, Targets())
    assert batch.weight.to_list() == [1.0]


def test_the_standard_error_of_a_confidence_is_that_of_the_jackknife() -> None:
    """An estimate leaves one pass out. The error of two passes is half of the difference of both estimates."""
    passes = np.log([[[0.9, 0.1], [0.3, 0.7]]])
    summary = summarise_passes(passes)
    half = (entropy(0.3, 0.7) - entropy(0.9, 0.1)) / 2 / LN2
    assert summary.confidence.tolist() == pytest.approx([1 - entropy(0.6, 0.4) / LN2])
    assert summary.confidence_se.tolist() == pytest.approx([half], rel=1e-5)
    three = summarise_passes(np.concatenate([passes, passes[:, :1]], axis=1)).confidence_se
    estimates = np.array([entropy(0.6, 0.4), entropy(0.9, 0.1), entropy(0.6, 0.4)]) / LN2
    assert three.tolist() == pytest.approx([math.sqrt(2 * estimates.var())], rel=1e-5)
    assert np.isnan(summarise_passes(passes[:, :1]).confidence_se).all()


@pytest.mark.parametrize("measure", MEASURES)
def test_sums_over_passes_leave_the_logits_as_they_are(measure: str) -> None:
    raw = np.array([[0.5, -1.0, 2.0, 0.25]], np.float32)  # one text: its transpose is the same memory
    raw.setflags(write=False)
    sums = sums_over_passes(raw, 2, MEASURES[measure])
    assert raw.tolist() == [[0.5, -1.0, 2.0, 0.25]]
    assert sum(sums["probability"].to_list()[0]) == pytest.approx(2.0)
