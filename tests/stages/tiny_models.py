"""Tiny, randomly initialised classifiers of every family the tests need, with a word-level tokenizer of their own.

`tiny` makes them in memory, `save_tiny` in a folder that AutoModelForSequenceClassification and AutoTokenizer load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from amalgam.pipeline.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import torch

    from amalgam.stages.common.training.batches import Examples
    from amalgam.stages.common.training.loop import TrainingResult, TrainingSettings

WORDS = tuple(f"word{i}" for i in range(90))
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# At these the hidden sizes, heads and lengths all differ, so that no axis can be mistaken for another.
SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
POSITIONS = 64

SETTINGS: dict[str, dict[str, Any]] = {
    "bert": SHAPE,
    "roberta": {**SHAPE, "type_vocab_size": 1},
    "xlm-roberta": {**SHAPE, "type_vocab_size": 1},
    "camembert": {**SHAPE, "type_vocab_size": 1},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
    "albert": {**SHAPE, "embedding_size": 16, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
    "electra": {**SHAPE, "embedding_size": 16},
    "deberta": {**SHAPE, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_relative_positions": 20},
    "deberta-v2": {
        **SHAPE,
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 8,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "position_biased_input": False,
    },
    "mpnet": SHAPE,
    "modernbert": {**SHAPE, "local_attention": 8, "global_attn_every_n_layers": 2},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "bart": {
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
    },
    "t5": {"d_model": 32, "num_layers": 2, "num_heads": 4, "d_kv": 8, "d_ff": 48, "decoder_start_token_id": 0},
}
SEQ2SEQ = ("bart", "t5")
ENCODERS = tuple(name for name in SETTINGS if name not in {"gpt2", "camembert", *SEQ2SEQ})
UNLIKE: dict[str, dict[str, Any]] = {
    "canine": SHAPE,
    "convbert": {**SHAPE, "embedding_size": 16},
    "flaubert": {"emb_dim": 32, "n_layers": 2, "n_heads": 4, "pad_index": 0},
    "fnet": {**SHAPE, "tpu_short_seq_length": POSITIONS},
    "funnel": {"block_sizes": [1, 1], "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 48},
    "longformer": {**SHAPE, "attention_window": [8, 8]},
    "nystromformer": {**SHAPE, "num_landmarks": 4, "segment_means_seq_len": 4},
    "openai-gpt": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "reformer": {
        "hidden_size": 32,
        "attention_head_size": 8,
        "num_attention_heads": 4,
        "attn_layers": ["local", "lsh"],
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 2,
        "axial_pos_shape": [8, 8],
        "axial_pos_embds_dim": [16, 16],
        "feed_forward_size": 48,
        "is_decoder": False,
        "hash_seed": 0,
    },
    "squeezebert": {**SHAPE, "embedding_size": 32},
    "xlnet": {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48},
    "yoso": SHAPE,
}
"""No vocabulary; no half precision; ever fewer states; masks of windows; logits that depend on padding; channels."""


def word_tokenizer(words: Sequence[str] = WORDS, *, types: bool = True, special: bool = True) -> Any:
    """Lower-cased words by id, [CLS] and [SEP] around them; without `special`, no pad token either."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate((*SPECIAL, *words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))  # noqa: S106  a token of text
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names: dict[str, Any] = {"unk_token": "[UNK]", "eos_token": "[SEP]"}
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
        )
        names |= {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    inputs = ["input_ids", "token_type_ids", "attention_mask"] if types else ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=inputs, **names)


def tiny_config(kind: str, labels: Sequence[str] = ("a", "b", "c"), **settings: Any) -> Any:
    from transformers import AutoConfig

    positions = {} if kind == "xlnet" else {"max_position_embeddings": POSITIONS}
    return AutoConfig.for_model(
        kind,
        **{
            "vocab_size": len(SPECIAL) + len(WORDS),
            **positions,
            "pad_token_id": None if kind == "gpt2" else 0,
            "bos_token_id": 2,
            "cls_token_id": 2,
            "eos_token_id": 3,
            "sep_token_id": 3,
            "id2label": dict(enumerate(labels)),
            "label2id": {label: i for i, label in enumerate(labels)},
            **(SETTINGS | UNLIKE)[kind],
            **settings,
        },
    )


def tiny(
    kind: str = "bert",
    *,
    labels: Sequence[str] = ("a", "b", "c"),
    seed: int = 0,
    spread: float = 1.0,
    rate: float | None = None,
    **settings: Any,
) -> tuple[Any, Any]:
    """A model in eval() and its tokenizer. `spread` scales all weight matrices, so that texts differ; `rate` sets every
    dropout rate.
    """
    import torch
    from transformers import AutoModelForSequenceClassification

    from amalgam.stages.common.models.loading import apply_rate

    config = tiny_config(kind, labels, **settings)
    if rate is not None:
        apply_rate(config, rate)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(spread)
    types = kind in {"bert", "albert", "electra", "deberta", "deberta-v2"}
    return model.eval(), word_tokenizer(types=types, special=kind != "gpt2")


def save_tiny(folder: Path, kind: str = "bert", **settings: Any) -> Path:
    model, tokenizer = tiny(kind, **settings)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tiny_language_model(
    kind: str = "gpt2", *, words: Sequence[str] = WORDS, seed: int = 0, spread: float = 8.0, **settings: Any
) -> tuple[Any, Any]:
    """A random causal language model whose next words differ much in probability, and a tokenizer of whole words."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": POSITIONS} if kind == "gpt2" else {}
    special = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
    vocabulary = {"vocab_size": len(SPECIAL) + len(words)}
    config = AutoConfig.for_model(kind, **{**vocabulary, **special, **shape, **settings})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(spread)
    return model.eval(), word_tokenizer(words)


def refusal(call: Callable[[], object]) -> ModelError:
    """Returns the error of the call, whose fields are single lines."""
    with pytest.raises(ModelError) as caught:
        call()
    error = caught.value
    for line in (error.what, error.where, error.fix):
        assert line
        assert "\n" not in line
    return error


def key_of(text: int) -> bytes:
    return int(text).to_bytes(8, "big") * 2


def plain_examples(count: int, labels: int) -> Examples:
    """Returns texts of random tokens and targets, all of the same weight, without token types."""
    import numpy as np

    from amalgam.stages.common.training.batches import Examples

    draw = np.random.default_rng(0)
    tokens = [draw.integers(len(SPECIAL), 50, length).astype(np.int32) for length in draw.integers(3, 13, count)]
    targets = draw.dirichlet(np.ones(labels), count).astype(np.float32)
    return Examples(tokens, None, targets, np.ones(count, np.float32))


def trained_weights(kind: str, examples: Examples, parts: int, folder: Path) -> torch.Tensor:
    """Returns the weights of a tiny student after two steps on all examples, each step in this many parts."""
    import torch

    from amalgam.stages.common.training.loop import TrainingSettings

    model, _ = tiny(kind, rate=0.0)
    settings: dict[str, Any] = {"epochs": 2, "learning_rate": 1e-2, "warmup": 0.0, "weight_decay": 0.0, "seed": 1}
    training = TrainingSettings(**settings, batch_size=len(examples.tokens), accumulate=parts)
    train_to_the_end(model, examples, training, folder / str(parts), cpu=True, dtype="fp32")
    return torch.cat([weight.flatten() for weight in model.parameters()])


def train_to_the_end(
    model: Any, examples: Examples, training: TrainingSettings, folder: Path, **options: Any
) -> TrainingResult:
    """Trains the model; by default no score chooses a step and nothing stops the training."""
    from amalgam.stages.common.training.loop import TrainingRun

    options = {"pad_id": 0, "score": lambda _: 0.0, "stop": lambda: False, "on_step": lambda *_: None, **options}
    return TrainingRun(model, examples, training, checkpoint=folder, **options).fit()
