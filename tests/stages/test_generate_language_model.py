"""Language models as they come: any architecture, with or without special tokens, limits and memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tokenizers import AddedToken

from amalgam.pipeline.errors import ModelError, WorkError
from amalgam.stages.generate.decoding import SamplingParams, SteeringParams
from amalgam.stages.generate.language_model import BatchedCache, LanguageModel, SingleText
from amalgam.tests.stages.tiny_models import SPECIAL, WORDS, tiny_language_model, word_tokenizer
from amalgam.tests.stages.writers import LONGEST, language_model, orders, teacher_of, whole, written

SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "cls_token", "sep_token")


@pytest.mark.parametrize(
    ("kind", "settings", "way"),
    [
        ("gpt2", {}, BatchedCache),
        (
            "llama",
            {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48},
            BatchedCache,
        ),
        (
            "gpt_neox",
            {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48},
            BatchedCache,
        ),
        ("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}, SingleText),
    ],
)
def test_architectures_write_what_they_would_by_themselves(kind: str, settings: dict[str, Any], way: type) -> None:
    """Greedy and unsteered: the argmax of the model's own logits, whole text by whole text."""
    model = language_model(kind, slots=3, spread=4.0, **settings)
    assert isinstance(model.slots, way)
    assert model.longest == LONGEST  # whether the model has a limit or not
    asked = orders(2, SamplingParams(0.0), ["word1 word2", "word7"])
    texts = written(model, None, asked, SteeringParams(0.0, 6))
    for order in asked:
        row, own = [*model.begin, *model.encode(order.prompt)], list[int]()
        while len(own) < 6 and not (own and own[-1] in model.ends):
            logits = whole(model, [*row, *own], first=not own)
            own.append(int(logits.argmax()))
        assert list(texts[order.tag].choices) == own


def test_a_start_token_that_also_pads_gives_no_warning_of_missing_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr("transformers.modeling_utils.logger.warning_once", warnings.append)
    model, tokenizer = tiny_language_model()
    model.config.pad_token_id = model.config.bos_token_id
    LanguageModel(model, tokenizer, slots=2, longest=LONGEST, device="cpu")
    assert warnings == []


def test_an_encoder_is_no_language_model() -> None:
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    with pytest.raises(ModelError, match="token"):
        language_model("bert", **shape)


def without_special(tokenizer: Any, model: Any) -> None:
    for name in SPECIAL_NAMES:
        setattr(tokenizer, name, None)
    for config in (model.config, model.generation_config):
        config.bos_token_id = config.eos_token_id = config.pad_token_id = None


def test_a_language_model_without_any_special_token_begins_with_a_word_and_runs_to_the_limit() -> None:
    model, tokenizer = tiny_language_model(words=("The", *WORDS[1:]))
    tokenizer = word_tokenizer(("the", *WORDS[1:]))
    without_special(tokenizer, model)
    language_model_ = LanguageModel(model, tokenizer, slots=4, longest=LONGEST, device="cpu")
    assert language_model_.begin == [len(SPECIAL)]
    assert not language_model_.ends
    begins, ends = language_model_.notes
    assert "start token" in begins
    assert "end token" in ends
    assert {
        text.tokens for text in written(language_model_, teacher_of(), orders(2), SteeringParams(1.0, 7)).values()
    } == {7}


def test_special_tokens_that_the_tokenizer_would_add_take_no_place_in_a_text() -> None:
    model, tokenizer = tiny_language_model()
    assert tokenizer.num_special_tokens_to_add() == 2
    language_model_ = LanguageModel(model, tokenizer, slots=2, longest=2, device="cpu")
    texts = written(language_model_, teacher_of(), orders(2), SteeringParams(1.0, 1))
    assert {text.tokens for text in texts.values()} == {1}


class Speechless:
    """A tokenizer that finds no token in any text, and names none."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __len__(self) -> int:
        return len(self.tokenizer)

    def __call__(self, *_: Any, **__: Any) -> dict[str, list[int]]:
        return {"input_ids": []}


def test_one_that_cannot_begin_at_all_is_refused_with_the_fix() -> None:
    model, tokenizer = tiny_language_model()
    without_special(tokenizer, model)
    with pytest.raises(ModelError, match="token"):
        LanguageModel(model, Speechless(tokenizer), slots=4, longest=LONGEST, device="cpu")


def test_its_own_positions_limit_a_text_where_they_are_fewer_than_wanted() -> None:
    model = language_model(longest=1000)
    assert model.longest == 64
    texts = written(model, None, orders(3, SamplingParams(1.0, None, 1.0, 50)), SteeringParams(0.0, 1000))
    assert max(text.tokens for text in texts.values()) == 64  # the last one is not read


def test_special_tokens_and_rows_without_a_token_are_never_written() -> None:
    model = language_model(vocab_size=len(SPECIAL) + len(WORDS) + 9)
    texts = written(model, None, orders(20, SamplingParams(1.0, None, 1.0, 200)), SteeringParams(0.0, 8))
    used = {token for text in texts.values() for token in text.choices}
    assert used <= {3, *range(len(SPECIAL), len(SPECIAL) + len(WORDS))}
    assert 3 in used


def test_a_special_token_that_goes_by_no_name_is_never_written_either() -> None:
    model, tokenizer = tiny_language_model(vocab_size=len(SPECIAL) + len(WORDS) + 1)
    tokenizer.add_tokens([AddedToken("<repo>", special=True)])
    unnamed = tokenizer.convert_tokens_to_ids("<repo>")
    assert unnamed not in tokenizer.all_special_ids
    assert bool(LanguageModel(model, tokenizer, slots=4, longest=LONGEST, device="cpu").banned[unnamed])


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory")],
)
def test_out_of_memory_in_the_language_model_is_an_error_with_a_fix(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def starved(_: BatchedCache, at: Sequence[int], rows: Sequence[Sequence[int]]) -> torch.Tensor:
        raise error

    model = language_model()
    monkeypatch.setattr(BatchedCache, "step", starved)
    with pytest.raises(WorkError, match=r"out of memory.* 3 texts .* 40 tokens"):
        written(model, teacher_of(), orders(1), SteeringParams(1.0, 4))


def test_the_cache_s_memory_decides_how_many_texts_advance_together() -> None:
    model, tokenizer = tiny_language_model("gpt2")
    text = 2 * 4 * model.config.n_layer * model.config.n_embd * LONGEST

    def count(memory: int) -> int:
        language_model_ = LanguageModel(model, tokenizer, slots=8, longest=LONGEST, device="cpu", memory=memory)
        return language_model_.slots.count

    assert [count(memory) for memory in (0, 3 * text, 99 * text)] == [1, 3, 8]
