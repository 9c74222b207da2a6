"""Makes the demo's encoder, a tiny BERT with its own tokenizer, without a download.

Word vectors from the co-occurrence of words replace pre-training; the other weights are random.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import BertTokenizer


__all__ = ["tiny_encoder"]


LAYERS = 2

WIDTH = 96

HEADS = 4

POSITIONS = 64

DROPOUT = 0.1

VOCABULARY = 2000

WORD_SCALE = 0.1  # size of an entry of a word vector; five times BERT's random one, so that words outweigh positions


_WORDS = "embeddings.word_embeddings.weight"

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
        torch.default_generator.manual_seed(seed)
        weights = BertModel(config).state_dict()
    encoded = tokenizer(list(texts), add_special_tokens=False, truncation=True, max_length=POSITIONS)["input_ids"]
    weights[_WORDS] = _vectors_by_company(weights[_WORDS], encoded)
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


def _vectors_by_company(random: Tensor, encoded: Sequence[Sequence[int]]) -> Tensor:
    """Returns the leading directions of the positive mutual information of two words in one text."""
    import torch

    present = torch.zeros(len(encoded), len(random))
    for row, ids in enumerate(encoded):
        present[row, list(ids)] = 1
    together = (present.T @ present).double().fill_diagonal_(0)
    total = together.sum(1)
    occurs = total > 0
    if not occurs.any():  # no two words share a text
        return random
    expected = (total[:, None] * total / total.sum()).clamp_min(1e-9)
    information = (together / expected).log().clamp_min(0)
    values, directions = torch.linalg.eigh(information)
    vectors = (directions * values.clamp_min(0).sqrt())[:, -random.shape[1] :]
    size = vectors[occurs].norm(dim=1).mean().clamp_min(1e-9)
    vectors *= WORD_SCALE * random.shape[1] ** 0.5 / size * _leading_signs(vectors)
    words = random.clone()
    # Rounded, so that the last bits of the eigenvectors, which vary with the number of threads, do not enter a digest.
    words[occurs, : vectors.shape[1]] = vectors[occurs].float().mul(2**14).round().div(2**14)
    return words


def _leading_signs(vectors: Tensor) -> Tensor:
    """An eigenvector is free to point either way: let its largest entry be positive."""
    return vectors.gather(0, vectors.abs().argmax(0, keepdim=True)).sign()
