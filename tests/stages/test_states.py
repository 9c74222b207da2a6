"""Teachers' states: which layers make a block, means over real tokens alone, and reading them back by row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from amalgam.data.parquet import read_table
from amalgam.data.tokens import encode
from amalgam.pipeline.errors import ModelError
from amalgam.stages.common.cached.read import States
from amalgam.stages.common.inference.states import Encoder, in_blocks, shares, write_states
from amalgam.stages.common.inference.teacher import Rows, Teacher
from amalgam.stages.common.models.resolve import NewClassifier
from amalgam.tests.stages.tiny_models import SEQ2SEQ, tiny

TEXTS = [("word1 word2 word3 word4 word5 word6",), ("word7",), ("word8 word9 word10",)]
KEYS = [bytes([place]) * 16 for place in range(1, 4)]


def teacher_of(kind: str = "bert", **settings: Any) -> Teacher:
    model, tokenizer = tiny(kind, **settings)
    return Teacher(model, tokenizer, digest="d", seed=0, limit=32)


def written(folder: Path, teacher: Teacher, *, blocks: int, by_token: bool) -> States:
    tokens = encode(teacher.tokenizer, TEXTS, teacher.limit, types=teacher.takes_types)
    write_states(folder, teacher, KEYS, tokens, blocks=blocks, by_token=by_token)
    lengths = read_table(folder / "keys.parquet").column("rows").to_numpy().astype(np.int64)
    mapped = np.load(folder / "states.npy", mmap_mode="r")
    return States("t", [mapped], np.zeros(3, np.int64), np.cumsum(lengths) - lengths, lengths)


def alone(teacher: Teacher, text: tuple[str, ...]) -> torch.Tensor:
    """Returns [layers, tokens, width] of one text, computed alone by the library's own call."""
    inputs = teacher.tokenizer(*text, return_tensors="pt")
    with torch.no_grad():
        output = teacher.model(**inputs, output_hidden_states=True)
    states = output.encoder_hidden_states if teacher.model.config.is_encoder_decoder else output.hidden_states
    return torch.stack(states[1:])[:, 0]


@pytest.mark.parametrize(
    ("layers", "blocks", "expected"),
    [
        (6, 3, [[0, 1], [2, 3], [4, 5]]),
        (6, 4, [[0], [1, 2], [3], [4, 5]]),
        (3, 3, [[0], [1], [2]]),
        (12, 1, [list(range(12))]),
        (2, 4, [[0], [0], [1], [1]]),
    ],
)
def test_blocks_share_out_consecutive_layers_and_repeat_them_where_there_are_too_few(
    layers: int, blocks: int, expected: list[list[int]]
) -> None:
    assert [list(share) for share in shares(layers, blocks)] == expected


def test_a_block_is_the_mean_of_its_layers() -> None:
    states = [torch.full((1, 2, 3), float(layer)) for layer in (1, 3, 10, 20)]
    blocks = in_blocks(states, 2)
    assert blocks.shape == (1, 2, 2, 3)
    assert blocks[0, 0, :, 0].tolist() == [2.0, 15.0]


@pytest.mark.parametrize(
    "kind", ["bert", "distilbert", "roberta", "albert", "deberta-v2", "modernbert", "mpnet", "gpt2", *SEQ2SEQ]
)
def test_states_in_a_padded_launch_are_those_of_each_text_alone(tmp_path: Path, kind: str) -> None:
    teacher = teacher_of(kind)
    (tmp_path / "tokens").mkdir()
    (tmp_path / "pooled").mkdir()
    by_token = written(tmp_path / "tokens", teacher, blocks=2, by_token=True)
    pooled = written(tmp_path / "pooled", teacher, blocks=2, by_token=False)
    for row, text in enumerate(TEXTS):
        wanted = alone(teacher, text)
        rows = torch.from_numpy(by_token.take(np.array([row]))[0]).float()
        assert by_token.lengths[row] == wanted.shape[1]
        torch.testing.assert_close(rows, wanted.permute(1, 0, 2), atol=4e-3, rtol=2e-3)
        mean = torch.from_numpy(pooled.take(np.array([row]))[0, 0]).float()
        torch.testing.assert_close(mean, wanted.mean(1), atol=4e-3, rtol=2e-3)


def test_rows_are_read_back_in_the_order_asked_filled_with_zeros(tmp_path: Path) -> None:
    states = written(tmp_path, teacher_of(), blocks=1, by_token=True)
    rows = states.take(np.array([1, 0]))
    assert rows.shape == (2, 8, 1, 32)
    assert not rows[0, 3:].any()
    assert np.array_equal(rows[0, :3], states.take(np.array([1]))[0])


def test_one_block_can_be_read_without_the_others(tmp_path: Path) -> None:
    states = written(tmp_path, teacher_of(num_hidden_layers=3), blocks=3, by_token=False)
    rows = np.array([2, 0])
    assert np.array_equal(states.take(rows, slice(-1, None)), states.take(rows)[:, :, -1:])


def test_states_too_large_for_half_precision_are_cut_to_its_largest_number(tmp_path: Path) -> None:
    teacher = teacher_of()
    with torch.no_grad():
        teacher.model.base_model.encoder.layer[-1].output.LayerNorm.bias[0] = 1e6
    states = written(tmp_path, teacher, blocks=1, by_token=False)
    assert np.isfinite(states.files[0]).all()
    assert states.files[0].max() == np.finfo(np.float16).max


def test_a_model_with_fewer_states_than_tokens_is_refused() -> None:
    teacher = teacher_of("funnel")
    tokens = encode(teacher.tokenizer, TEXTS, 32, types=teacher.takes_types)
    with pytest.raises(ModelError, match="a state of each token"):
        teacher.states(Rows(list(tokens), KEYS, np.full(3, -1)))
    new = NewClassifier(teacher.model, teacher.tokenizer, "", 32, types=False, pad_id=0)
    with pytest.raises(ModelError, match=r"the encoder gives \d states for \d tokens"):
        Encoder(teacher.model.base_model, new, teacher.device).check()


def test_a_teacher_without_layers_to_look_at_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = teacher_of()
    monkeypatch.setattr(teacher.model.base_model, "forward", lambda **_: object())
    tokens = list(encode(teacher.tokenizer, TEXTS, 8, types=True))
    with pytest.raises(ModelError, match="after each layer"):
        teacher.states(Rows(tokens, KEYS, np.full(3, -1)))
