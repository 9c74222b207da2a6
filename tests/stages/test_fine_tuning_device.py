"""Training and the device: the precision, and how seldom the host waits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from amalgam.stages.common.device import dtype_for
from amalgam.stages.common.models.static import token_vectors
from amalgam.stages.common.training import loop
from amalgam.stages.common.training.loop import TrainingResult, training_dtype
from amalgam.stages.common.training.losses import WeightedKL
from amalgam.stages.make_embeddings.search import fit_projection
from amalgam.stages.train_student.training import split_embeddings
from amalgam.tests.stages.test_fine_tuning import PLAIN
from amalgam.tests.stages.tiny_models import plain_examples, tiny, train_to_the_end

CPU = torch.device("cpu")
SHORT = replace(PLAIN, learning_rate=1e-2, accumulate=2, warmup=0.0, evaluate_every=1000)


class MeanOfWords(torch.nn.Module):
    """The smallest encoder; it stores the dtype of its matrix products."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(50, 16)
        self.head = torch.nn.Linear(16, 4)
        self.seen: set[torch.dtype] = set()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        present = attention_mask.unsqueeze(-1)
        logits = self.head((self.words(input_ids) * present).sum(1) / present.sum(1))
        self.seen.add(logits.dtype)
        return SimpleNamespace(logits=logits)


def train(model: Any, folder: Path, dtype: str = "fp32") -> TrainingResult:
    labels = 4 if isinstance(model, MeanOfWords) else model.config.num_labels
    return train_to_the_end(model, plain_examples(32, labels), SHORT, folder, dtype=dtype)


@pytest.mark.parametrize(("computed", "chosen"), [("bf16", "bf16"), ("fp16", "fp32"), ("fp32", "fp32")])
def test_training_takes_bf16_where_the_hardware_computes_it_and_never_fp16(
    monkeypatch: pytest.MonkeyPatch, computed: str, chosen: str
) -> None:
    assert training_dtype(CPU) == dtype_for(CPU)
    monkeypatch.setattr(loop, "dtype_for", lambda _device: computed)
    assert training_dtype(CPU) == chosen


def test_in_bf16_the_products_are_bf16_and_the_weights_stay_fp32(tmp_path: Path) -> None:
    full, half = MeanOfWords(), MeanOfWords()
    assert train(full, tmp_path / "full").facts["dtype"] == "fp32"
    assert train(half, tmp_path / "half", "bf16").facts["dtype"] == "bf16"
    assert (full.seen, half.seen) == ({torch.float32}, {torch.bfloat16})
    assert {weight.dtype for weight in half.parameters()} == {torch.float32}
    assert not torch.equal(half.head.weight, full.head.weight)
    assert torch.allclose(half.head.weight, full.head.weight, atol=0.02)


def test_a_model_that_cannot_run_in_bf16_is_trained_in_fp32(tmp_path: Path) -> None:
    """As a DeBERTa, whose attention fills a mask with the least number of fp32."""
    full, half = (tiny("deberta")[0] for _ in range(2))
    expected, result = train(full, tmp_path / "full"), train(half, tmp_path / "half", "bf16")
    assert (result.facts["dtype"], expected.notes) == ("fp32", [])
    assert [note.partition(":")[0] for note in result.notes] == ["the model is trained in fp32, since bf16 fails in it"]
    torch.testing.assert_close(half.classifier.weight, full.classifier.weight)


def test_unset_options_are_chosen_by_the_machine(tmp_path: Path) -> None:
    assert train(MeanOfWords(), tmp_path, "auto").facts["dtype"] == training_dtype(CPU)


def test_the_loop_reads_no_single_number_from_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and gradient norm come together, once a step: on a GPU each number read waits for all work before it."""
    together: list[int] = []
    whole = torch.Tensor.tolist

    def read(_: torch.Tensor) -> float:
        raise AssertionError("a single number was read")

    def read_together(tensor: torch.Tensor) -> Any:
        together.append(tensor.numel())
        return whole(tensor)

    monkeypatch.setattr(torch.Tensor, "__float__", read)
    monkeypatch.setattr(torch.Tensor, "item", read)
    monkeypatch.setattr(torch.Tensor, "tolist", read_together)
    fitted = train(MeanOfWords(), tmp_path)
    assert together == [2] * fitted.facts["steps"]


class OnDevice:
    """A tensor of a device without fp64, as MPS is: it becomes float64 on the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def mean(self, axis: int) -> OnDevice:
        return OnDevice(self.tensor.mean(axis))

    def detach(self) -> OnDevice:
        return self

    def cpu(self) -> torch.Tensor:
        return self.tensor


class BodyOnDevice(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(40, 8)

    def forward(self, input_ids: torch.Tensor | None = None, **inputs: torch.Tensor) -> Any:
        if input_ids is None:
            return SimpleNamespace(logits=OnDevice(inputs["inputs_embeds"].sum(1)))
        return SimpleNamespace(last_hidden_state=OnDevice(self.words(input_ids)))


def test_a_device_needs_no_fp64() -> None:
    body, vocabulary = BodyOnDevice(), {f"word{number}": number for number in range(40)}
    encoder = SimpleNamespace(base_model=body, config=SimpleNamespace())
    assert token_vectors(encoder, lambda _: {"input_ids": []}, 40, CPU, lambda _: None).dtype == torch.float32

    tokenizer = SimpleNamespace(get_vocab=lambda: vocabulary, all_special_tokens=[])
    model = SimpleNamespace(get_input_embeddings=lambda: SimpleNamespace(weight=OnDevice(body.words.weight.data)))
    projection = fit_projection((model, tokenizer), (model, tokenizer), "first")
    assert torch.allclose(projection, torch.eye(8), atol=1e-2)

    targets = torch.full((8, 4), 0.25)
    _, selection = split_embeddings(torch.randn(8, 3, 4), targets, WeightedKL(), held_out=0.5)
    assert np.isfinite(selection.score(body))
