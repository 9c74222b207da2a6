"""MT-BERT's losses against cases worked out by hand in float64, and that all of it learns."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from amalgam.data.keys import LabelSpace, union_of
from amalgam.data.tokens import encode
from amalgam.pipeline.config.schema import Objective, Targets
from amalgam.stages.common.cached.read import States
from amalgam.stages.common.training.batches import Examples
from amalgam.stages.common.training.loop import TrainingSettings
from amalgam.stages.common.training.losses import MTBertLoss, targets_loss
from amalgam.stages.target_methods import TargetBatch, TargetInputs, TeacherPredictions, target_method
from amalgam.stages.train_student.objectives import MTBertObjective, ObjectiveContext
from amalgam.tests.stages.tiny_models import tiny, train_to_the_end

SPACE = union_of({"a": ["x", "y"], "b": ["y", "x"]})
CE_A, CE_B = -math.log(0.9), -math.log(0.8)


def predictions(name: str, *probability: float) -> TeacherPredictions:
    logits = pl.Series([[math.log(p) + 7 for p in probability]], dtype=pl.Array(pl.Float64, len(probability)))
    return TeacherPredictions(name, logits, logits, pl.Series([0.5]))


TEACHERS = [predictions("a", 0.9, 0.1), predictions("b", 0.2, 0.8)]  # both predict x, b by its second label


def mt_bert_targets(
    predictions: list[TeacherPredictions], gold: pl.Series, space: LabelSpace, targets: Targets
) -> TargetBatch:
    return target_method(targets).build(TargetInputs(space, gold, predictions))


def targets_of(gold: str | None, **settings: Any) -> tuple[list[float], float]:
    targets = mt_bert_targets(
        TEACHERS, pl.Series("label", [gold], pl.String), SPACE, Targets(mode="mt-bert", **settings)
    )
    return targets.target.to_list()[0], targets.weight.to_list()[0]


def test_each_teacher_weighs_by_how_right_it_is_whatever_the_order_of_its_labels() -> None:
    target, weight = targets_of("x")
    a, b = 1 / (1 + CE_A), 1 / (1 + CE_B)
    assert target == pytest.approx([0.9 * a + 0.8 * b, 0.1 * a + 0.2 * b, 1, 0])
    assert weight == 1
    a, b = 1 / (1 - math.log(0.1)), 1 / (1 - math.log(0.2))
    assert targets_of("y")[0] == pytest.approx([0.9 * a + 0.8 * b, 0.1 * a + 0.2 * b, 0, 1])


def test_the_temperature_is_that_of_the_answers_and_not_of_the_weights() -> None:
    a, b = 1 / (1 + CE_A), 1 / (1 + CE_B)
    of_a, of_b = (math.sqrt(p) / (math.sqrt(p) + math.sqrt(1 - p)) for p in (0.9, 0.8))
    target, _ = targets_of("x", kd_temperature=2.0)
    assert target == pytest.approx([of_a * a + of_b * b, (1 - of_a) * a + (1 - of_b) * b, 1, 0])


def test_its_parts_can_be_left_out_one_by_one_and_then_no_label_is_needed() -> None:
    assert targets_of("x", text_weights="none")[0] == pytest.approx([1.7, 0.3, 1, 0])
    a, b = 1 / (1 + CE_A), 1 / (1 + CE_B)
    assert targets_of("x", task_loss=False)[0] == pytest.approx([0.9 * a + 0.8 * b, 0.1 * a + 0.2 * b, 0, 0])
    target, weight = targets_of(None, task_loss=False, text_weights="none")
    assert target == pytest.approx([1.7, 0.3, 0, 0])
    assert weight == 1


def test_a_text_whose_label_no_teacher_has_weighs_zero() -> None:
    low = pl.Series([[math.log(0.5) - 1] * 2], dtype=pl.Array(pl.Float64, 2))
    for teachers in (TEACHERS, [TeacherPredictions(name, low, low, pl.Series([0.5])) for name in "ab"]):
        batch = mt_bert_targets(teachers, pl.Series(["z"]), SPACE, Targets(mode="mt-bert"))
        assert batch.weight.to_list() == [0]
        assert all(math.isfinite(part) for part in batch.target.to_list()[0])


def test_a_teacher_that_is_wrong_beyond_what_a_softmax_holds_weighs_little_and_stays_a_number() -> None:
    logits = pl.Series([[0.0, 2000.0]], dtype=pl.Array(pl.Float64, 2))
    one = TeacherPredictions("a", logits, logits, pl.Series([1.0]))
    targets = mt_bert_targets([one], pl.Series(["x"]), union_of({"a": ["x", "y"]}), Targets(mode="mt-bert"))
    assert targets.target.to_list()[0] == pytest.approx([0, 1 / 2001, 1, 0])


def test_the_loss_is_the_teachers_cross_entropy_at_t_and_the_golds_at_one() -> None:
    """Logits are logs of 1 and 3: 1/4, 3/4 at t = 1, and at t = 2 1 : sqrt 3."""
    logits = torch.log(torch.tensor([[1.0, 3.0]], dtype=torch.float64))
    settings = {
        "targets": torch.tensor([[1.2, 0.4, 0.0, 1.0]], dtype=torch.float64),
        "weights": torch.tensor([2.0], dtype=torch.float64),
    }
    hot = [1 / (1 + math.sqrt(3)), math.sqrt(3) / (1 + math.sqrt(3))]
    wanted = -1.2 * math.log(hot[0]) - 0.4 * math.log(hot[1]) - math.log(0.75)
    assert MTBertLoss(2.0)(logits, settings).tolist() == pytest.approx([2 * wanted])
    plain = -1.2 * math.log(0.25) - 0.4 * math.log(0.75) - math.log(0.75)
    assert MTBertLoss()(logits, settings).tolist() == pytest.approx([2 * plain])
    assert targets_loss({"student_temperature": 2.0, "objective": "mt-bert", "columns": []}) == MTBertLoss(2.0)


def states(values: Any) -> States:
    """[texts, blocks, width]."""
    array = np.asarray(values, np.float16)
    one = np.ones(len(array), np.int64)
    return States("t", [array], np.zeros(len(array), np.int64), np.cumsum(one) - one, one)


def led(teachers: list[States], *, width: int, layers: int, **settings: Any) -> MTBertObjective:
    return MTBertObjective(ObjectiveContext(Objective(name="mt-bert", **settings), MTBertLoss(), teachers, width))


def test_each_block_is_led_to_every_teachers_through_a_map_of_its_own() -> None:
    """The student's two layers have the means [2, 1] and [0, 0]; the maps give [2, 4], [1, 1] and [3, 1], [0, 2]."""
    objective = led([states([[[2.0], [1.0]]]), states([[[3.0, 1.0, 9.0], [0.0, 2.0, 9.0]]])], width=2, layers=2)
    objective = objective.double()
    with torch.no_grad():
        objective.get_parameter("maps.0.0.weight").copy_(torch.tensor([[1.0], [2.0]]))
        objective.get_parameter("maps.0.1.weight").copy_(torch.tensor([[1.0], [1.0]]))
    layers = [[[[1.0, 0], [3, 2], [50, 50]]], [[[1.0, -1], [-1, 1], [50, 50]]]]
    batch: Any = {
        "targets": torch.tensor([[0.5, 0.5, 1.0, 0.0]], dtype=torch.float64),
        "weights": torch.ones(1, dtype=torch.float64),
        "attention_mask": torch.tensor([[1, 1, 0]]),
        "states": tuple(torch.tensor(one, dtype=torch.float64) for one in layers),
        **objective.extra_batch(np.array([0])),
    }
    logits = torch.zeros(1, 2, dtype=torch.float64)
    # The third width of the second teacher is left out by a map that starts as the identity.
    hidden = (0 + 9) / 2 + (1 + 1) / 2 + (1 + 0) / 2 + (0 + 4) / 2
    assert objective(logits, batch).tolist() == pytest.approx([2 * math.log(2) + hidden])


@pytest.mark.parametrize("teachers", [1, 2])
def test_all_weights_of_the_student_and_every_map_are_trained(tmp_path: Path, teachers: int) -> None:
    model, tokenizer = tiny("bert", labels=("x", "y"), spread=4.0, rate=0.1)
    texts = [(f"word{row} word{row + 7} word{3 * row}",) for row in range(16)]
    tokens = encode(tokenizer, texts, 16, types=True)
    random = np.random.default_rng(0)
    target = random.dirichlet([1, 1], 16) * 1.5
    gold = np.eye(2)[np.arange(16) % 2]
    examples = Examples(
        tokens.ids, tokens.type_ids, np.hstack([target, gold]).astype(np.float32), np.ones(16, np.float32)
    )
    objective = led([states(random.normal(size=(16, 2, width))) for width in (48, 32)[:teachers]], width=32, layers=2)
    before = {name: value.clone() for part in (model, objective) for name, value in part.named_parameters()}
    training = TrainingSettings(2, 1e-3, 8, 0.0, 0.0, 0)
    train_to_the_end(model, examples, training, tmp_path, objective=objective, cpu=True)
    after = {name: value for part in (model, objective) for name, value in part.named_parameters()}
    assert [name for name in before if torch.equal(before[name], after[name])] == []
    assert len(list(objective.maps.parameters())) == 2 * teachers
