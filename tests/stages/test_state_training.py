"""Objectives with weights of their own in the training loop: they learn, resume after a stop, and are not saved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from amalgam.pipeline.config.schema import Objective
from amalgam.pipeline.errors import WorkError
from amalgam.stages.common.cached.read import States
from amalgam.stages.common.training.batches import collate
from amalgam.stages.common.training.loop import TrainingInterrupted, TrainingResult, TrainingSettings
from amalgam.stages.common.training.losses import Loss, WeightedKL
from amalgam.stages.train_student.objectives import OBJECTIVES, ObjectiveContext
from amalgam.tests.stages import test_fine_tuning
from amalgam.tests.stages.test_fine_tuning import Watch
from amalgam.tests.stages.tiny_models import plain_examples, tiny, train_to_the_end

TEXTS = 12
EXAMPLES = plain_examples(TEXTS, labels=3)
# 12 rows in batches of 4: 3 steps an epoch, 6 in all. No decay: what moves, moves by its gradient.
PLAIN = replace(test_fine_tuning.PLAIN, batch_size=4, warmup=0.0, weight_decay=0.0, seed=0)
WAYS: dict[str, dict[str, Any]] = {
    "dfa": {"name": "dfa"},
    "dfa by token": {"name": "dfa", "states": "tokens"},
    "cfl": {"name": "cfl"},
    "stratanet": {"name": "stratanet"},
    "stratanet multiply": {"name": "stratanet", "fusion": "multiply"},
    "stratanet no-st": {"name": "stratanet", "fusion": "no-st"},
    "layerwise": {"name": "layerwise", "states": "tokens", "schedule": "layer-wise"},
    "layerwise ifa": {"name": "layerwise", "states": "tokens", "schedule": "layer-wise", "amalgamation": "ifa"},
}


def objective_of(way: str) -> Any:
    """Three teachers of other widths than the student's; states of two blocks."""
    settings, draw = Objective(**WAYS[way]), np.random.default_rng(1)
    lengths = EXAMPLES.lengths if settings.states == "tokens" else np.ones(TEXTS, np.int64)
    starts, place = np.cumsum(lengths) - lengths, np.zeros(TEXTS, np.int64)
    arrays = [draw.normal(size=(int(lengths.sum()), 2, width)).astype(np.float16) for width in (8, 32, 20)]
    teachers = [States("t", [array], place, starts, lengths) for array in arrays]
    confidence = draw.dirichlet(np.ones(3), size=(TEXTS, 2)).astype(np.float32)
    torch.manual_seed(2)
    [(_, objective)] = OBJECTIVES[settings.name](ObjectiveContext(settings, WeightedKL(), teachers, 32, 3, confidence))
    return objective


def train(
    model: Any,
    folder: Path,
    objective: Loss,
    training: TrainingSettings = PLAIN,
    *,
    stop_after: int | None = None,
    **options: Any,
) -> tuple[TrainingResult, list[float]]:
    watch = Watch(stop_after)

    def score(of: Any) -> float:
        return -float(of.get_parameter("classifier.weight").detach().norm())

    options |= {"score": score, "stop": watch.stop, "on_step": watch.on_step, "objective": objective}
    return train_to_the_end(model, EXAMPLES, training, folder, **options), list(watch.losses.values())


def everything(model: Any, objective: Any) -> dict[str, torch.Tensor]:
    both = {"student": model, "objective": objective}
    return {
        f"{who} {name}": p.detach().cpu().clone() for who, one in both.items() for name, p in one.named_parameters()
    }


@pytest.mark.parametrize("way", WAYS)
def test_every_trainable_number_of_student_and_objective_moves(tmp_path: Path, way: str) -> None:
    model, objective = tiny(labels=("a", "b", "c"))[0], objective_of(way)
    before = everything(model, objective)
    train(model, tmp_path, objective)
    after = everything(model, objective)
    assert any("objective" in name for name in before)
    assert [name for name in before if torch.equal(before[name], after[name])] == []


@pytest.mark.parametrize("rate", [None, 1e-2])
def test_the_objectives_own_layers_have_their_own_learning_rate(tmp_path: Path, rate: float | None) -> None:
    """AdamW's first step is as long as the rate, whatever the gradient."""
    model, objective = tiny()[0], objective_of("dfa")
    before = everything(model, objective)
    train(model, tmp_path, objective, replace(PLAIN, epochs=1, batch_size=TEXTS, objective_rate=rate))
    after = everything(model, objective)
    for owner, expected in (("student", 1e-3), ("objective", rate or 1e-3)):
        moved = [float((after[name] - before[name]).abs().max()) for name in before if name.startswith(owner)]
        assert max(moved) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("way", WAYS)
def test_a_resumed_training_ends_with_the_same_weights_of_student_and_objective(tmp_path: Path, way: str) -> None:
    whole, stopped = tiny()[0], tiny()[0]
    objective, first, second = objective_of(way), objective_of(way), objective_of(way)
    train(whole, tmp_path / "whole", objective)
    with pytest.raises(TrainingInterrupted):
        train(stopped, tmp_path / "stopped", first, stop_after=4)
    resumed = tiny()[0]
    fitted, _ = train(resumed, tmp_path / "stopped", second)
    assert fitted.facts["resumed_from_step"] == 4
    pairs = zip(everything(whole, objective).items(), everything(resumed, second).items(), strict=True)
    assert [name for (name, one), (_, other) in pairs if not torch.allclose(one, other, atol=1e-6)] == []


@pytest.mark.parametrize("way", [way for way in WAYS if way != "cfl"])
def test_the_loss_is_the_same_for_any_accumulation(tmp_path: Path, way: str) -> None:
    losses = {}
    for parts in (1, 3):
        model, _ = tiny(rate=0.0)
        training = replace(PLAIN, accumulate=parts)
        _, losses[parts] = train(model, tmp_path / str(parts), objective_of(way), training, dtype="fp32")
    assert losses[3] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize("way", WAYS)
def test_products_in_bf16_give_the_same_loss_but_for_rounding(tmp_path: Path, way: str) -> None:
    losses = {}
    for dtype in ("fp32", "bf16"):
        model, _ = tiny(rate=0.0)
        _, losses[dtype] = train(model, tmp_path / dtype, objective_of(way), dtype=dtype)
    assert losses["bf16"] != losses["fp32"]
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.02)


@pytest.mark.parametrize("way", ["dfa", "dfa by token", "cfl", "stratanet"])
def test_the_loss_itself_is_computed_in_fp32_where_products_are_in_bf16(way: str) -> None:
    torch.manual_seed(0)
    objective, rows = objective_of(way), np.arange(4)
    batch = collate(EXAMPLES, rows, 0) | objective.extra_batch(rows)
    batch["states"] = tuple(torch.randn(4, batch["input_ids"].shape[1], 32) for _ in range(2))
    logits = torch.randn(4, 3)
    expected = objective(logits, batch)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(objective(logits, batch), expected)


def test_an_objective_that_compares_the_texts_of_a_step_is_not_accumulated(tmp_path: Path) -> None:
    with pytest.raises(WorkError, match="texts"):
        train(tiny()[0], tmp_path, objective_of("cfl"), replace(PLAIN, accumulate=2))


def test_a_phase_that_is_kept_is_not_trained_again(tmp_path: Path) -> None:
    model, again = tiny()[0], tiny()[0]
    train(model, tmp_path, objective_of("layerwise"), keep=True)
    fitted, losses = train(again, tmp_path, objective_of("layerwise"), keep=True)
    assert (losses, fitted.facts["resumed_from_step"], fitted.facts["steps"]) == ([], 6, 6)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), again.parameters(), strict=True))
