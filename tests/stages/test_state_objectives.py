"""Objectives that look at teachers' states, against cases worked out by hand in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from amalgam.pipeline.config.schema import Objective
from amalgam.pipeline.errors import ModelError
from amalgam.stages.common.cached.read import States
from amalgam.stages.common.models.model_folder import OTHER_LAYERS
from amalgam.stages.common.training.losses import LogitMSE, WeightedKL
from amalgam.stages.train_student.objectives import (
    Amalgamation,
    BlockMaps,
    CFLObjective,
    DFAObjective,
    LayerwiseObjective,
    ObjectiveContext,
    discrepancy,
    distance,
    layers_of,
)
from amalgam.tests.stages.tiny_models import tiny

SURE = torch.log(torch.tensor([[0.25, 0.75]], dtype=torch.float64))
EVEN = torch.tensor([[0.5, 0.5]], dtype=torch.float64)
KL = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
"""Of EVEN from SURE."""


def states(values: Any, lengths: list[int] | None = None) -> States:
    """[rows, blocks, width], a row for each text if lengths are not given."""
    array = np.asarray(values, np.float16)
    each = np.array(lengths or [1] * len(array), np.int64)
    return States("t", [array], np.zeros(len(each), np.int64), np.cumsum(each) - each, each)


def setting(teachers: list[States], *, width: int, layers: int = 1, **settings: Any) -> ObjectiveContext:
    return ObjectiveContext(Objective(**settings), WeightedKL(), teachers, width)


def fill(module: torch.nn.Module, **values: Any) -> None:
    with torch.no_grad():
        for name, value in values.items():
            module.get_parameter(name.replace("__", ".")).copy_(torch.tensor(value))


def batch(objective: Any, student: Any, mask: Any, rows: list[int]) -> dict[str, Any]:
    """Returns the batch of these rows; `student`: its states after each layer, [layers][B, T, W]."""
    return {
        "targets": EVEN.expand(len(rows), 2),
        "weights": torch.ones(len(rows), dtype=torch.float64),
        "attention_mask": torch.tensor(mask),
        "states": tuple(torch.tensor(one, dtype=torch.float64) for one in student),
        **objective.extra_batch(np.array(rows)),
    }


# ---- parts


def test_a_distance_is_a_mean_over_real_tokens_and_width_and_a_sum_over_blocks() -> None:
    one = torch.zeros(1, 3, 2, 2, dtype=torch.float64)
    other = torch.tensor([[[[1.0, 3.0], [0, 2]], [[2, 0], [0, 0]], [[99, 99], [99, 99]]]], dtype=torch.float64)
    # block 1: (5 + 2) / 2 tokens, block 2: (2 + 0) / 2 tokens; the last token is padding
    assert distance(one, other, torch.tensor([[1, 1, 0]])).tolist() == [3.5 + 1.0]


def squeezed(module: Amalgamation) -> None:
    fill(
        module,
        autoencoders__0__encoder__weight=[[1.0, 0, 0], [0, 1, 1]],
        autoencoders__0__encoder__bias=[0.0, 1],
        autoencoders__0__decoder__weight=[[1.0, 0], [0, 1], [0, 0]],
        autoencoders__0__decoder__bias=[0.0, 0, 1],
    )


def test_all_teachers_at_once_are_squeezed_and_reconstructed() -> None:
    """[2 | 1, 3] -> [2, 5] -> [2, 5, 1]: off by 0, 4 and -2."""
    module = Amalgamation([1, 2], 2, 1, by_two=False).double()
    squeezed(module)
    teachers = [torch.tensor([[[[2.0]]]], dtype=torch.float64), torch.tensor([[[[1.0, 3.0]]]], dtype=torch.float64)]
    code, error = module(teachers, torch.ones(1, 1))
    assert code.tolist() == [[[[2.0, 5.0]]]]
    assert error.tolist() == pytest.approx([20 / 3])
    assert not code.requires_grad


def test_two_at_a_time_each_result_is_merged_with_the_next_teacher() -> None:
    """[2 | 1] -> 2 + 1 = 3, back as [3, 3]; [3 | 4] -> 3 - 4 = -1, back as [-1, 0]."""
    module = Amalgamation([1, 1, 1], 1, 1, by_two=True).double()
    fill(
        module,
        autoencoders__0__encoder__weight=[[1.0, 1.0]],
        autoencoders__0__encoder__bias=[0.0],
        autoencoders__0__decoder__weight=[[1.0], [1.0]],
        autoencoders__0__decoder__bias=[0.0, 0.0],
        autoencoders__1__encoder__weight=[[1.0, -1.0]],
        autoencoders__1__encoder__bias=[0.0],
        autoencoders__1__decoder__weight=[[1.0], [0.0]],
        autoencoders__1__decoder__bias=[0.0, 0.0],
    )
    teachers = [torch.tensor([[[[value]]]], dtype=torch.float64) for value in (2.0, 1.0, 4.0)]
    code, error = module(teachers, torch.ones(1, 1))
    assert code.item() == -1.0
    assert error.item() == pytest.approx((1 + 4) / 2 + (16 + 16) / 2)


@pytest.mark.parametrize("by_two", [False, True])
def test_amalgamation_begins_as_the_mean_of_the_teachers(by_two: bool) -> None:
    teachers = [torch.randn(2, 3, 1, 4, dtype=torch.float64) for _ in range(3)]
    code, _ = Amalgamation([4, 4, 4], 4, 1, by_two=by_two).double()(teachers, torch.ones(2, 3))
    torch.testing.assert_close(code, torch.stack(teachers).mean(0), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("by_two", [False, True])
def test_one_teacher_alone_is_squeezed_too(by_two: bool) -> None:
    code, error = Amalgamation([3], 2, 2, by_two=by_two)([torch.randn(4, 1, 2, 3)], torch.ones(4, 1))
    assert (code.shape, error.shape) == ((4, 1, 2, 2), (4,))


def test_adaption_is_the_identity_at_first_and_always_where_it_does_not_learn() -> None:
    given = torch.randn(2, 3, 2, 4)
    torch.testing.assert_close(BlockMaps(4, 4, 2)(given), given)
    fixed = layer_by_layer(adapter=False)[1].adapter
    assert torch.equal(fixed(given), given)
    assert list(fixed.parameters()) == []


# ---- dfa


def guided() -> DFAObjective:
    objective = DFAObjective(setting([states([[[2.0]]]), states([[[1.0, 3.0]]])], width=2, name="dfa")).double()
    squeezed(objective.amalgamation)
    fill(objective.adapter.get_submodule("0"), weight=[[2.0, 0], [0, 1]], bias=[0.0, 0])
    return objective


def test_dfa_is_the_targets_the_distance_from_amalgamated_states_and_the_reconstruction() -> None:
    """The student's tokens [1, 0], [3, 2] (and padding) have the mean [2, 1], adapted [4, 1]; amalgamated: [2, 5]."""
    objective = guided()
    given = batch(objective, [[[[1, 0], [3, 2], [100, 100]]]], [[1, 1, 0]], [0])
    assert objective(SURE, given).tolist() == pytest.approx([KL + (4 + 16) / 2 + 20 / 3])


def test_dfa_by_token_compares_token_with_token_and_never_padding() -> None:
    """Teacher 1 and 3, amalgamated as they are; the student's tokens 2 and 7 are off by 1 and 4."""
    objective = DFAObjective(
        setting(
            [
                states([[[1.0]], [[3.0]]], [2]),
            ],
            width=1,
            name="dfa",
            states="tokens",
        )
    ).double()
    fill(objective.amalgamation, autoencoders__0__encoder__weight=[[1.0]], autoencoders__0__encoder__bias=[0.0])
    fill(objective.amalgamation, autoencoders__0__decoder__weight=[[1.0]], autoencoders__0__decoder__bias=[0.0])
    given = batch(objective, [[[[2], [7]]]], [[1, 1]], [0])
    assert objective(SURE, given).tolist() == pytest.approx([KL + (1 + 16) / 2])


def test_a_student_of_more_layers_than_blocks_is_taken_in_blocks_too() -> None:
    """Layers 1, 3 and 8 in one block: their mean, 4; the teacher's one block: 1."""
    objective = DFAObjective(setting([states([[[1.0]]])], width=1, layers=3, name="dfa")).double()
    fill(objective.amalgamation, autoencoders__0__encoder__weight=[[1.0]], autoencoders__0__encoder__bias=[0.0])
    fill(objective.amalgamation, autoencoders__0__decoder__weight=[[1.0]], autoencoders__0__decoder__bias=[0.0])
    given = batch(objective, [[[[1]]], [[[3]]], [[[8]]]], [[1]], [0])
    assert objective(SURE, given).tolist() == pytest.approx([KL + 9])


# ---- cfl

FAR = sum(math.exp(-4 / (2 * width**2)) for width in (0.001, 0.01, 0.05, 0.1, 0.2, 1, 2))
"""The kernel of 1 and -1; of a point with itself it is 7."""


def test_the_discrepancy_of_two_samples_is_that_of_their_kernels_means() -> None:
    one = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    other = torch.tensor([[1.0], [1.0]], dtype=torch.float64)
    within, across = (14 + 2 * FAR) / 4, (14 + 2 * FAR) / 4
    assert discrepancy(one, other).item() == pytest.approx(within + 7 - 2 * across)
    assert discrepancy(one, one.flip(0)).item() == pytest.approx(0, abs=1e-12)


def test_cfl_is_the_targets_the_discrepancy_and_the_reconstruction_of_the_last_block() -> None:
    """In the common space (width 1) the student's two texts are 1 and -1, the teacher's 2 and 5: normalised 1 and 1."""
    teacher = states([[[0.0, 0.0], [2.0, 7.0]], [[0.0, 0.0], [5.0, 7.0]]])
    objective = CFLObjective(setting([teacher], width=4, layers=2, name="cfl")).double()
    fill(objective, student_map__weight=[[1.0, 0, 0, 0], [0, 0, 0, 0]], student_map__bias=[0.0, 0])
    fill(objective, teacher_maps__0__weight=[[1.0, 0], [0, 0]], teacher_maps__0__bias=[0.0, 0])
    fill(
        objective, extractor__0__weight=[[1.0, 0]], extractor__0__bias=[3.0]
    )  # never below zero, so that ReLU passes all
    fill(objective, extractor__2__weight=[[1.0]], extractor__2__bias=[-3.0])
    fill(objective, decoders__0__weight=[[1.0], [0.0]], decoders__0__bias=[0.0, 6.0])
    last = [[[1.0, 9, 9, 9]], [[-1.0, 9, 9, 9]]]
    given = batch(objective, [[[[5.0] * 4]] * 2, last], [[1], [1]], [0, 1])
    apart = (14 + 2 * FAR) / 4 + 7 - 2 * (14 + 2 * FAR) / 4
    reconstruction = 0.5  # [2, 7] comes back as [2, 6]
    output = objective(SURE.expand(2, 2), given)
    assert output.tolist() == pytest.approx([KL + 10 * apart + 10 * reconstruction] * 2)


def test_only_the_last_block_is_read_for_cfl() -> None:
    objective = CFLObjective(setting([states(np.zeros((2, 3, 5)))], width=4, name="cfl"))
    assert objective.extra_batch(np.array([1]))["teacher 0"].shape == (1, 1, 1, 5)


# ---- layer-wise


def layer_by_layer(kind: str = "bert", **settings: Any) -> tuple[Any, LayerwiseObjective, dict[str, Any]]:
    model, _ = tiny(kind, labels=("a", "b"))
    random = np.random.default_rng(0)
    teachers = [states(random.normal(size=(5, 2, width)), [5]) for width in (6, 10)]
    torch.manual_seed(0)
    objective = LayerwiseObjective(
        setting(teachers, width=32, layers=2, name="layerwise", states="tokens", **settings)
    ).double()
    with torch.no_grad():
        for parameter in objective.adapter.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    given = {
        "targets": EVEN,
        "weights": torch.ones(1, dtype=torch.float64),
        "input_ids": torch.tensor([[2, 7, 8, 9, 3]]),
        "attention_mask": torch.ones(1, 5, dtype=torch.int64),
        **objective.extra_batch(np.array([0])),
    }
    return model.double(), objective, given


def asked(model: Any, objective: LayerwiseObjective, given: dict[str, Any]) -> torch.Tensor:
    with objective.model_context(model, given):
        output = model(input_ids=given["input_ids"], attention_mask=given["attention_mask"])
    return objective(output.logits, given)


def led(model: Any, objective: LayerwiseObjective, given: dict[str, Any]) -> LayerwiseObjective:
    """With its gradients."""
    torch.autograd.backward(asked(model, objective, given).sum())
    return objective


def gradient(module: torch.nn.Module) -> float:
    return sum(float(one.grad.abs().sum()) for one in module.parameters() if one.grad is not None)


def test_each_layer_makes_of_the_adapted_state_below_that_of_its_own_block() -> None:
    model, objective, given = layer_by_layer()
    output = asked(model, objective, given)
    amalgamated, reconstruction = objective.amalgamation(objective.teachers(given), given["attention_mask"])
    adapted = objective.adapter(amalgamated)
    body = model.bert
    made = [
        body.encoder.layer[0](body.embeddings(given["input_ids"])),
        body.encoder.layer[1](adapted[:, :, 0]),
    ]
    made = [one[0] if isinstance(one, tuple) else one for one in made]
    logits = model.classifier(body.pooler(adapted[:, :, 1]))
    apart = sum(((one - adapted[:, :, place]) ** 2).mean() for place, one in enumerate(made))
    kl = (EVEN * (EVEN.log() - torch.log_softmax(logits, -1))).sum()
    assert output.item() == pytest.approx((kl + apart + reconstruction).item())


def test_a_layers_target_gets_no_gradient() -> None:
    """The adaption of a block learns from the layer that reads it, never by making that layer's task easy."""
    model, objective, given = layer_by_layer()
    given["weights"] = torch.zeros(1, dtype=torch.float64)  # else the second map learns from the head
    first, second = (gradient(one) for one in led(model, objective, given).adapter.children())
    assert first > 0
    assert second == 0


@pytest.mark.parametrize(
    "kind", ["bert", "roberta", "distilbert", "electra", "deberta-v2", "mpnet", "modernbert", "gpt2"]
)
def test_the_layers_of_every_family_can_be_led(kind: str) -> None:
    model, objective, given = layer_by_layer(kind)
    model.config.get_text_config().pad_token_id = 0
    led(model, objective, given)
    assert len(objective.outputs) == 2
    assert all(gradient(layer) > 0 for layer in layers_of(model, 2))
    assert gradient(objective.adapter.get_submodule("1")) > 0  # through the head
    model(input_ids=given["input_ids"])
    assert len(objective.outputs) == 2


def test_an_encoder_that_repeats_one_layer_is_refused_with_the_way_out() -> None:
    model, _ = tiny("albert")
    with pytest.raises(ModelError, match="2 layers") as refused:
        layers_of(model, 2)
    assert "objective.schedule=joint" in str(refused.value.fix)


@pytest.mark.parametrize("kind", ["funnel", *sorted(OTHER_LAYERS)])
def test_an_encoder_whose_layers_give_other_states_is_refused(kind: str) -> None:
    """One layer again and again, fewer states, padded ones, lists, layers in another list, and tokens before texts."""
    with pytest.raises(ModelError, match="2 layers that each give a state of each token"):
        asked(*layer_by_layer(kind))


@pytest.mark.parametrize(
    ("learning", "names"), [("layer-wise", ["layer-wise"]), ("joint", ["joint"]), ("both", ["layer-wise", "joint"])]
)
def test_learning_is_layer_by_layer_or_end_to_end_or_one_after_the_other(learning: str, names: list[str]) -> None:
    values = LayerwiseObjective.phases(
        setting([states(np.zeros((1, 1, 2)))], width=4, name="layerwise", states="tokens", schedule=learning)
    )
    assert [name for name, _ in values] == names
    assert (values[-1][1] == WeightedKL()) == (learning != "layer-wise")


def test_scores_are_compared_logit_by_logit_and_a_shared_label_with_every_teacher() -> None:
    """Teachers on labels {0, 1} and {1, 2}: differences 1, 0, 2 and -3."""
    logits = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64)
    given = {"targets": torch.tensor([[0.0, 2.0, 0.0, 6.0]]), "weights": torch.tensor([2.0])}
    assert LogitMSE([[0, 1], [1, 2]])(logits, given).tolist() == pytest.approx([2 * (1 + 0 + 4 + 9) / 4])
