"""StrataNet's amalgamation and loss against cases worked out in float64, and what keeps it from a constant."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from amalgam.pipeline.config.schema import Objective
from amalgam.stages.common.training.losses import WeightedKL
from amalgam.stages.train_student.objectives import GUARD, ObjectiveContext, Strata, StrataNetObjective
from amalgam.tests.stages.test_state_objectives import KL, SURE, batch, fill, states

CONFIDENCE = torch.tensor([[0.25, 0.75]], dtype=torch.float64)


def tensors(*values: list[float]) -> list[torch.Tensor]:
    """A state of each teacher."""
    return [torch.tensor([one], dtype=torch.float64) for one in values]


def mapped(how: str) -> Strata:
    """Teachers' states 2 and (1, 2) become 7 and 3."""
    module = Strata([1, 2], 1, how).double()
    fill(module, into__0__weight=[[3.0]], into__0__bias=[1.0], into__1__weight=[[1.0, 1.0]], into__1__bias=[0.0])
    return module


def test_without_st_it_is_a_linear_map_of_the_confidence_weighted_sum() -> None:
    """0.25 * 7 + 0.75 * 3 = 4, and 2 * 4 - 1 = 7."""
    module = mapped("no-st")
    fill(module, merge__weight=[[2.0]], merge__bias=[-1.0])
    assert module(tensors([2.0], [1.0, 2.0]), CONFIDENCE).tolist() == [[7.0]]


def layer_norm(values: Any, norm: Any) -> Any:
    centred = values - values.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + norm.eps)
    return scaled * numbers(norm.weight) + numbers(norm.bias)


def numbers(tensor: Any) -> Any:
    return tensor.detach().numpy()


def by_hand(module: Strata, tokens: Any, heads: int) -> Any:
    """One text's tokens [N + 1, W] through the layer, step by step; returns the first output."""
    layer, width = module.layer, tokens.shape[1]
    joined = tokens @ numbers(layer.self_attn.in_proj_weight).T + numbers(layer.self_attn.in_proj_bias)
    queries, keys, values = np.split(joined, 3, axis=1)
    size = width // heads
    parts = []
    for head in range(heads):
        mine = slice(head * size, (head + 1) * size)
        scores = np.exp(queries[:, mine] @ keys[:, mine].T / math.sqrt(size))
        parts.append(scores / scores.sum(1, keepdims=True) @ values[:, mine])
    out = layer.self_attn.out_proj
    once = layer_norm(tokens + np.concatenate(parts, 1) @ numbers(out.weight).T + numbers(out.bias), layer.norm1)
    inner = once @ numbers(layer.linear1.weight).T + numbers(layer.linear1.bias)
    raised = inner * 0.5 * (1 + np.vectorize(math.erf)(inner / math.sqrt(2)))
    return layer_norm(once + raised @ numbers(layer.linear2.weight).T + numbers(layer.linear2.bias), layer.norm2)[0]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("how", ["st", "multiply"])
def test_st_is_one_layer_over_amalg_and_the_teachers_tokens_and_gives_what_comes_out_in_front(
    how: str, training: bool
) -> None:
    torch.manual_seed(0)
    module = Strata([3, 5], 16, how).double().train(training)
    given = [torch.randn(2, width, dtype=torch.float64) for width in (3, 5)]
    shares = torch.tensor([[0.25, 0.75], [0.9, 0.1]], dtype=torch.float64)
    output = module(given, shares).detach().numpy()
    for row in range(2):
        tokens = []
        for teacher, into in enumerate(module.into):
            state = numbers(into.weight) @ given[teacher][row].numpy() + numbers(into.bias)
            share = float(shares[row, teacher])
            if how == "st":
                tokens.append(state + numbers(module.enrich.weight)[:, 0] * share + numbers(module.enrich.bias))
            else:
                tokens.append(share * state)
        np.testing.assert_allclose(output[row], by_hand(module, np.stack([numbers(module.amalg), *tokens]), 8))


@pytest.mark.parametrize(("width", "heads"), [(384, 8), (12, 6), (7, 7), (22, 2), (1, 1)])
def test_heads_are_as_many_as_divide_the_width(width: int, heads: int) -> None:
    assert Strata([4], width, "st").layer.self_attn.num_heads == heads


# ---- the loss


def objective(
    teachers: Any, confidence: Any, *, width: int = 2, guard: float = GUARD, **settings: Any
) -> StrataNetObjective:
    """`teachers`: the states of each, [texts, blocks, W]."""
    overrides = Objective(name="stratanet", **settings)
    kept = [states(one) for one in teachers]
    shares = np.asarray(confidence, np.float64)
    return StrataNetObjective(ObjectiveContext(overrides, WeightedKL(), kept, width, 2, shares), guard).double()


def plain(**settings: Any) -> StrataNetObjective:
    """Student and head as they are; amalgamated is 0.25 * (0, 8) + 0.75 * (0, 4) = (0, 5)."""
    output = objective([[[[0.0, 8.0]]], [[[0.0, 4.0]]]], [[[0.25, 0.75]]], fusion="no-st", **settings)
    eye = [[1.0, 0], [0, 1]]
    for name in ("fusion__0__into__0", "fusion__0__into__1", "fusion__0__merge", "maps__0"):
        fill(output, **{f"{name}__weight": eye, f"{name}__bias": [0.0, 0]})
    fill(output, heads__0__weight=[[0.0, 0], [0, 0]], heads__0__bias=SURE[0].tolist())
    return output


def test_the_loss_is_the_states_share_the_targets_rest_and_the_heads_targets() -> None:
    """The student's tokens (2, 4) and (4, 4) have the mean (3, 4): (0.6, 0.8) against (0, 1)."""
    given = [[[[2, 4], [4, 4], [99, 99]]]]
    for alpha in (0.7, 0.0, 1.0):
        result = plain(alpha=alpha)
        loss = result(SURE, batch(result, given, [[1, 1, 0]], [0]))
        assert loss.tolist() == pytest.approx([alpha * (0.36 + 0.04) + (1 - alpha) * KL + KL])


def test_states_are_summed_over_blocks_and_the_heads_averaged() -> None:
    """Both blocks alike: twice the distance, once the targets."""
    output = objective([[[[0.0, 5.0], [0.0, 5.0]]]], [[[1.0], [1.0]]], fusion="no-st")
    eye = [[1.0, 0], [0, 1]]
    for block in (0, 1):
        for name in (f"fusion__{block}__into__0", f"fusion__{block}__merge", f"maps__{block}"):
            fill(output, **{f"{name}__weight": eye, f"{name}__bias": [0.0, 0]})
        weight, bias = f"heads__{block}__weight", f"heads__{block}__bias"
        fill(output, **{weight: [[0.0, 0], [0, 0]], bias: SURE[0].tolist()})
    given = batch(output, [[[[3, 4]]], [[[3, 4]]]], [[1]], [0])
    assert output(SURE, given).tolist() == pytest.approx([0.7 * 2 * 0.4 + 0.3 * KL + KL])


def test_confidences_of_a_batch_are_those_of_its_rows() -> None:
    shares = np.random.default_rng(0).dirichlet(np.ones(2), size=(5, 1))
    output = objective([np.zeros((5, 1, 3)), np.zeros((5, 1, 4))], shares)
    assert np.array_equal(output.extra_batch(np.array([3, 1]))["confidence"].numpy(), shares[[3, 1]])


# ---- the guard


def amalgamated_variance(how: str, guard: float) -> float:
    """After 100 steps of student and teachers with nothing in common; of states at length 1, summed over the width."""
    torch.manual_seed(0)
    draw = np.random.default_rng(0)
    texts, width = 128, 8
    teachers = [draw.normal(size=(texts, 1, one)) for one in (6, 10)]
    output = objective(teachers, draw.dirichlet(np.ones(2), size=(texts, 1)), width=width, guard=guard, fusion=how)
    given = batch(output, [draw.normal(size=(texts, 1, width))], [[1]] * texts, list(range(texts)))
    given["targets"] = torch.from_numpy(np.eye(2)[(teachers[0][:, 0, 0] > 0).astype(int)])
    optimizer = torch.optim.Adam(output.parameters(), 1e-2)
    for _ in range(100):
        optimizer.zero_grad()
        torch.autograd.backward(output(SURE.expand(texts, 2), given).mean())
        optimizer.step()
    with torch.no_grad():
        state = normalize(output.amalgamated(given)[0], dim=-1)
    return float(state.var(dim=0).sum())


@pytest.mark.parametrize("how", ["st", "multiply", "no-st"])
def test_amalgamated_states_stay_apart_and_without_the_guard_they_would_not(how: str) -> None:
    assert amalgamated_variance(how, GUARD) > 0.02
    assert amalgamated_variance(how, 0.0) < 0.001
