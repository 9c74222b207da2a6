"""What students minimise, against cases worked out by hand in float64."""

from __future__ import annotations

import math

import pytest
import torch

from amalgam.stages.common.training.losses import RestrictedKL, WeightedKL, targets_loss
from amalgam.stages.target_methods import LossFacts


def batch(targets: list[list[float]], weights: list[float]) -> dict[str, torch.Tensor]:
    return {
        "targets": torch.tensor(targets, dtype=torch.float64),
        "weights": torch.tensor(weights, dtype=torch.float64),
    }


def test_uhc_is_the_sum_over_teachers_of_the_divergence_on_their_own_labels() -> None:
    """Teachers on labels {0, 1} and {1, 2}; the student's logits are logs of 1, 2, 6: over {0, 1} 1/3, 2/3."""
    logits = torch.log(torch.tensor([[1.0, 2.0, 6.0]], dtype=torch.float64))
    loss = RestrictedKL(((0, 1), (1, 2)))(logits, batch([[0.5, 0.5, 0.1, 0.9]], [2.0]))
    first = 0.5 * math.log(0.5 / (1 / 3)) + 0.5 * math.log(0.5 / (2 / 3))
    second = 0.1 * math.log(0.1 / 0.25) + 0.9 * math.log(0.9 / 0.75)
    assert loss.tolist() == pytest.approx([2.0 * (first + second)])


def test_uhc_at_a_temperature_is_scaled_by_its_square() -> None:
    logits = torch.tensor([[0.3, -1.0, 2.0]], dtype=torch.float64)
    batch_ = batch([[0.5, 0.5, 1.0]], [1.0])
    hot = RestrictedKL(((0, 1), (2,)), 2.0)(logits, batch_)
    assert hot.tolist() == pytest.approx((4 * RestrictedKL(((0, 1), (2,)))(logits / 2, batch_)).tolist())


def test_uhc_does_not_compare_labels_of_different_teachers() -> None:
    """Raising both logits of a teacher together changes nothing."""
    logits = torch.tensor([[0.3, -1.0, 2.0, 0.1]], dtype=torch.float64)
    batch_ = batch([[0.5, 0.5, 0.4, 0.6]], [1.0])
    objective = RestrictedKL(((0, 1), (2, 3)))
    raised = logits + torch.tensor([[5.0, 5.0, 0.0, 0.0]], dtype=torch.float64)
    assert objective(raised, batch_).tolist() == pytest.approx(objective(logits, batch_).tolist())


def test_uhc_is_least_where_the_student_agrees_with_every_teacher() -> None:
    target = [0.2, 0.8, 0.7, 0.3]
    agreed = torch.log(torch.tensor([[0.2, 0.8, 7.0, 3.0]], dtype=torch.float64))
    assert RestrictedKL(((0, 1), (2, 3)))(agreed, batch([target], [1.0])).item() == pytest.approx(0, abs=1e-12)


def test_the_targets_say_by_which_objective_they_are_learned() -> None:
    facts: LossFacts = {"student_temperature": 2.0, "columns": [[0, 1], [2]], "objective": "restricted"}
    assert targets_loss(facts) == RestrictedKL([[0, 1], [2]], 2.0)
    assert targets_loss({**facts, "objective": "kl"}) == WeightedKL(2.0)
