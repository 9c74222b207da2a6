"""The fast way through an encoder gives the model's own numbers, or is not taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from amalgam.data.tokens import encode
from amalgam.pipeline.errors import ModelError
from amalgam.stages.common.inference import teacher as inference
from amalgam.stages.common.inference.batches import run_passes
from amalgam.stages.common.inference.fast_encoder import describe_fast_encoder
from amalgam.stages.common.inference.states import write_pooled, write_states
from amalgam.stages.common.inference.teacher import Rows, Teacher
from amalgam.stages.common.models.resolve import LAST_LAYER
from amalgam.tests.stages.tiny_models import tiny

TEXTS = [(" ".join(f"word{(i * 7 + j) % 90}" for j in range(n)),) for i, n in enumerate((3, 9, 9, 20, 31))]
KEYS = [bytes([i + 1]) * 16 for i in range(len(TEXTS))]
LEAN = ("bert", "roberta", "xlm-roberta", "electra", "distilbert", "camembert", "modernbert")


def teacher_of(kind: str, **settings: Any) -> Teacher:
    torch.manual_seed(3)
    model, tokenizer = tiny(kind, **settings)
    for weights in model.parameters():
        torch.nn.init.normal_(weights, std=0.3)
    return Teacher(model, tokenizer, digest="d", seed=5, limit=40)


def both_ways(teacher: Teacher, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of the fast encoder and of the model's own layers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inference, "build_fast_encoder", lambda _teacher: None)
        plain = Teacher(teacher.model, teacher.tokenizer, digest="d", seed=5, limit=40)
        assert plain.fast_encoder is None
    return teacher.run(rows), plain.run(rows)


@pytest.mark.parametrize("passes", [[-1] * 5, [0, 1, 2, 3, 3]])
@pytest.mark.parametrize("kind", LEAN)
def test_it_gives_the_numbers_of_the_model_padded_or_not(kind: str, passes: list[int]) -> None:
    teacher = teacher_of(kind)
    assert teacher.fast_encoder is not None
    assert teacher.fast_encoder.first_token
    tokens = teacher.tokenise(TEXTS)
    for rows in (Rows(tokens, KEYS, np.array(passes)), Rows(tokens[1:3], KEYS[1:3], np.array(passes[1:3]))):
        fast, plain = both_ways(teacher, rows)
        assert float(plain.std(0).max()) > 0.01
        assert torch.allclose(fast, plain, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("passes", [[-1] * 5, [0, 1, 2, 3, 3]])
def test_a_layer_with_a_window_that_is_not_the_last_gives_the_numbers_of_the_model(passes: list[int]) -> None:
    teacher = teacher_of("modernbert", num_hidden_layers=4, global_attn_every_n_layers=3)
    assert [layer.attention_type[:7] for layer in teacher.model.model.layers] == [
        "full_at",
        *["sliding"] * 2,
        "full_at",
    ]
    fast, plain = both_ways(teacher, Rows(teacher.tokenise(TEXTS), KEYS, np.array(passes)))
    assert teacher.fast_encoder is not None
    assert torch.allclose(fast, plain, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", LEAN)
def test_one_run_gives_logits_and_the_states_of_the_last_layer(kind: str, tmp_path: Path) -> None:
    teacher = teacher_of(kind)
    tokens = encode(teacher.tokenizer, TEXTS, teacher.limit, types=teacher.takes_types)
    pooled = np.empty((len(TEXTS), teacher.width), np.float16)
    both, alone = (
        run_passes(teacher, tokens, KEYS, range(0), deterministic=True, batch_tokens=64, states=states)[0]
        for states in (pooled, None)
    )
    assert both is not None
    assert alone is not None
    assert np.allclose(both, alone, atol=2e-5, rtol=1e-4)
    (tmp_path / "apart").mkdir()
    (tmp_path / "together").mkdir()
    write_states(tmp_path / "apart", teacher, KEYS, tokens, blocks=LAST_LAYER, by_token=False)
    write_pooled(tmp_path / "together", KEYS, pooled)
    apart, together = (np.load(tmp_path / name / "states.npy") for name in ("apart", "together"))
    assert apart.shape == together.shape == (len(TEXTS), 1, teacher.width)
    assert float(apart.std(0).max()) > 0.01
    assert np.allclose(apart, together, atol=2e-3, rtol=2e-3)
    same = [(tmp_path / name / "keys.parquet").read_bytes() for name in ("apart", "together")]
    assert same[0] == same[1]


def test_after_a_run_the_models_weights_can_still_be_in_a_computation_with_gradients() -> None:
    teacher = teacher_of("bert")
    teacher.run(Rows(teacher.tokenise(TEXTS), KEYS, np.arange(5)))
    assert teacher.fast_encoder is not None
    assert not any(weights.is_inference() for weights in teacher.model.parameters())


def test_sites_that_are_switched_off_stay_off() -> None:
    for rates in ({"attention_probs_dropout_prob": 0.0}, {"hidden_dropout_prob": 0.0}):
        teacher = teacher_of("bert", **rates)
        assert teacher.fast_encoder is not None
        tokens = teacher.tokenise(TEXTS)
        fast, plain = both_ways(teacher, Rows(tokens, KEYS, np.arange(5)))
        assert torch.allclose(fast, plain, atol=2e-5, rtol=1e-4)


def test_a_head_that_reads_every_token_keeps_the_whole_last_layer() -> None:
    teacher = teacher_of("bert")
    pooler = teacher.model.bert.pooler

    class Mean(torch.nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return torch.tanh(pooler.dense(hidden.mean(1)))

    teacher.model.bert.pooler = Mean()
    assert teacher.fast_encoder is not None
    assert not teacher.fast_encoder.first_token
    fast, plain = both_ways(teacher, Rows(teacher.tokenise(TEXTS), KEYS, np.arange(5)))
    assert torch.allclose(fast, plain, atol=2e-5, rtol=1e-4)


def test_layers_that_compute_something_else_are_left_to_the_model() -> None:
    teacher = teacher_of("bert")
    layer = teacher.model.bert.encoder.layer[0]
    layer.output.register_forward_hook(lambda _module, _args, odd: odd * 1.5)
    assert describe_fast_encoder(teacher.model, first_token=True) is not None
    assert teacher.fast_encoder is None
    assert torch.isfinite(teacher.run(Rows(teacher.tokenise(TEXTS), KEYS, np.arange(5)))).all()


@pytest.mark.parametrize("kind", ["albert", "deberta", "mpnet", "gpt2"])
def test_other_architectures_keep_their_own_layers(kind: str) -> None:
    teacher = teacher_of(kind)
    assert teacher.fast_encoder is None


def test_weights_are_not_held_twice() -> None:
    teacher = teacher_of("bert")
    assert teacher.fast_encoder is not None
    layer = teacher.fast_encoder.layers[0]
    width = layer.query.out_features
    assert layer.key.weight.data_ptr() == layer.weight[width:].data_ptr()
    assert torch.equal(layer.weight[2 * width :], layer.value.weight)


def test_a_model_whose_dropout_cannot_be_keyed_still_answers_with_dropout_off() -> None:
    teacher = teacher_of("bert")

    class Noise(torch.nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden + torch.randn_like(hidden) if self.training else hidden

    teacher.model.dropout = Noise()
    assert torch.isfinite(teacher.run(Rows(teacher.tokenise(TEXTS), KEYS, np.full(5, -1)))).all()
    with pytest.raises(ModelError, match="cannot key"):
        _ = teacher.sites
