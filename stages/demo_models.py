"""The demo's encoder: a tiny BERT with its own tokenizer, made on the spot, so that nothing is downloaded.

It knows no language: what teachers and student know, they learned from the demo's texts.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from transformers import BertTokenizer

__all__ = ["tiny_encoder"]

LAYERS = 2
WIDTH = 128
HEADS = 4
POSITIONS = 64
DROPOUT = 0.1
VOCABULARY = 2000

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def tiny_encoder(folder: Path, texts: Sequence[str], seed: int) -> None:
    """A BERT encoder with random weights and a lower-case WordPiece tokenizer that fits the texts, in one folder."""
    import torch
    from safetensors.torch import save_file
    from transformers import BertConfig, BertModel

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(texts)
    tokenizer.save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=2 * WIDTH,
        max_position_embeddings=POSITIONS,
        hidden_dropout_prob=DROPOUT,
        attention_probs_dropout_prob=DROPOUT,
        architectures=["BertModel"],
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        weights = BertModel(config).state_dict()
    config.save_pretrained(folder)
    # save_pretrained of a model draws a progress bar that can only be switched off for the whole process.
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _tokenizer(texts: Sequence[str]) -> BertTokenizer:
    from transformers import BertTokenizer

    return BertTokenizer(vocab=_vocabulary(texts), model_max_length=POSITIONS)


def _vocabulary(texts: Sequence[str]) -> dict[str, int]:
    """The most frequent words, and every character as a piece for all others.

    The library's WordPiece trainer breaks ties by a hash that differs from process to process; this is reproducible.
    """
    from tokenizers.normalizers import BertNormalizer
    from tokenizers.pre_tokenizers import BertPreTokenizer

    normalise, split = BertNormalizer().normalize_str, BertPreTokenizer().pre_tokenize_str
    counts = Counter(word for text in texts for word, _ in split(normalise(text)))
    characters = sorted({character for word in counts for character in word})
    pieces = [*_SPECIAL, *characters, *(f"##{character}" for character in characters)]
    words = sorted((word for word in counts if len(word) > 1), key=lambda word: (-counts[word], word))
    pieces += words[: max(0, VOCABULARY - len(pieces))]
    return {piece: number for number, piece in enumerate(pieces)}
