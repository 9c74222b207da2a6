"""The data-free demo's language model is a plain Hugging Face folder that generate can write with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from amalgam.data.demo_corpus import mixture
from amalgam.stages.app import demo_models
from amalgam.stages.app.demo_models import tiny_language_model
from amalgam.stages.generate.language_model import BatchedCache, LanguageModel

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = mixture(400, 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("lm") / "lm", 0, steps=40)


def made(folder: Path, seed: int, steps: int) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_models, "STEPS", steps)
        tiny_language_model(folder, TEXTS, seed)
    return folder


def test_texts_come_back_from_its_tokens_as_they_were(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = tokenizer(TEXTS, add_special_tokens=False)["input_ids"]
    assert [tokenizer.decode(row, clean_up_tokenization_spaces=False) for row in rows] == TEXTS
    assert not any(tokenizer.unk_token_id in row for row in rows)


def test_stage_0_writes_with_it_in_slots_and_it_begins_and_ends_texts(folder: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    language_model_ = LanguageModel(model, tokenizer, slots=2, longest=33, device="cpu")
    assert language_model_.notes == []
    assert isinstance(language_model_.slots, BatchedCache)
    assert language_model_.ends == {tokenizer.eos_token_id}
    assert bool(language_model_.banned[tokenizer.unk_token_id])


def test_it_has_learned_something(folder: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    end = tokenizer.eos_token_id
    ids = [torch.tensor([[end, *tokenizer(text)["input_ids"], end]]) for text in mixture(420, 0)[400:]]
    with torch.inference_mode():
        losses = [
            torch.nn.functional.cross_entropy(model(input_ids=one).logits[0, :-1], one[0, 1:]).item() for one in ids
        ]
    assert sum(losses) / len(losses) < 0.8 * torch.tensor(float(len(tokenizer))).log().item()


def test_the_same_seed_gives_the_same_weights_and_leaves_torchs_own_seed_alone(tmp_path: Path) -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    folders = [made(tmp_path / name, seed, 2) for name, seed in (("a", 0), ("b", 0), ("c", 1))]
    assert torch.equal(torch.get_rng_state(), state)
    one, again, other = (load_file(folder / "model.safetensors") for folder in folders)
    torch.testing.assert_close(one, again)
    assert any(not torch.allclose(one[name], other[name], atol=1e-3) for name in one)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]
