"""Makes the demo's models without a download: a tiny BERT encoder and a tiny GPT-2, each with its own tokenizer.

Word vectors from the co-occurrence of words replace the encoder's pre-training. The language model learns from texts
whose words come from different topics. It thus has the words and the sentences, but no topic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.normalizers import BertNormalizer
from transformers import BertConfig, BertModel, BertTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from amalgam.pipeline.storage.local import atomic_write
from amalgam.stages.common.models.loading import save_pretrained_folder

LAYERS, WIDTH, HEADS = 2, 96, 4


def _by_frequency(counts: Counter[str]) -> list[str]:
    """Returns the words, the most frequent first; ties are in order of the alphabet."""
    return sorted(counts, key=lambda word: (-counts[word], word))


# ---- the encoder

ENCODER_POSITIONS = 64
DROPOUT = 0.1
VOCABULARY = 2000
WORD_SCALE = 0.1  # size of an entry of a word vector; five times BERT's random one, so that words outweigh positions
_WORDS = "embeddings.word_embeddings.weight"
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def tiny_encoder(folder: Path, texts: Sequence[str], seed: int) -> None:
    """A BERT encoder with random weights and a lower-case WordPiece tokenizer that fits the texts, in one folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = BertTokenizer(vocab=word_pieces(texts), do_lower_case=True, model_max_length=ENCODER_POSITIONS)
    tokenizer.save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=2 * WIDTH,
        max_position_embeddings=ENCODER_POSITIONS,
        hidden_dropout_prob=DROPOUT,
        attention_probs_dropout_prob=DROPOUT,
        architectures=["BertModel"],
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        weights = BertModel(config).state_dict()
    options = {"add_special_tokens": False, "truncation": True, "max_length": ENCODER_POSITIONS}
    weights[_WORDS] = _word_vectors(weights[_WORDS], tokenizer(list(texts), **options)["input_ids"])
    config.save_pretrained(folder)
    # save_pretrained of a model draws a progress bar that can only be switched off for the whole process.
    with atomic_write(folder / "model.safetensors") as temporary:
        save_file(weights, temporary, metadata={"format": "pt"})


def word_pieces(texts: Sequence[str]) -> dict[str, int]:
    """The most frequent words, and every character as a piece for all others.

    The library's WordPiece trainer breaks ties by a hash that differs from process to process; this is reproducible.
    """
    normalise, split = BertNormalizer().normalize_str, pre_tokenizers.BertPreTokenizer().pre_tokenize_str
    counts = Counter(word for text in texts for word, _ in split(normalise(text)))
    characters = sorted({character for word in counts for character in word})
    pieces = [*_SPECIAL, *characters, *(f"##{character}" for character in characters)]
    words = [word for word in _by_frequency(counts) if len(word) > 1]
    pieces += words[: max(0, VOCABULARY - len(pieces))]
    return {piece: number for number, piece in enumerate(pieces)}


def _word_vectors(random: torch.Tensor, encoded: Sequence[Sequence[int]]) -> torch.Tensor:
    """Returns the leading directions of the positive mutual information of two words in one text."""
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
    # An eigenvector is free to point either way: its largest entry becomes positive.
    signs = vectors.gather(0, vectors.abs().argmax(0, keepdim=True)).sign()
    vectors *= WORD_SCALE * random.shape[1] ** 0.5 / size * signs
    words = random.clone()
    # Rounded, so that the last bits of the eigenvectors, which vary with the number of threads, do not enter a digest.
    words[occurs, : vectors.shape[1]] = vectors[occurs].float().mul(2**14).round().div(2**14)
    return words


# ---- the language model

POSITIONS = 128
WINDOW = 40  # tokens of a training row
BATCH = 32
STEPS = 500
RATE = 3e-3
WARM_UP = 0.1
_END, _UNKNOWN = "<|endoftext|>", "<|unknown|>"


def tiny_language_model(folder: Path, texts: Sequence[str], seed: int) -> None:
    """Writes the model to a temporary folder and renames it, so that an existing folder is complete."""
    tokenizer = _word_tokenizer(texts)
    end = tokenizer.eos_token_id
    config = GPT2Config(
        vocab_size=len(tokenizer),
        bos_token_id=end,
        eos_token_id=end,
        n_layer=LAYERS,
        n_embd=WIDTH,
        n_head=HEADS,
        n_positions=POSITIONS,
        activation_function="gelu_pytorch_tanh",  # GPT-2's own in one kernel; without dropout attention has one too
        resid_pdrop=0.0,  # a text is seen some twice
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    rows = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = GPT2LMHeadModel(config)
        # Every text ends in the token that the next one begins with.
        _train(model, torch.tensor([end, *(token for row in rows for token in (*row, end))]))
    with atomic_write(folder) as temporary:
        save_pretrained_folder(model, tokenizer, temporary)


def _word_tokenizer(texts: Sequence[str]) -> Any:
    """Returns a tokenizer with one token for every word and the space before it."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    counts = Counter(piece for text in texts for piece, _ in split.pre_tokenize_str(text))
    vocabulary = {piece: number for number, piece in enumerate([_END, _UNKNOWN, *_by_frequency(counts)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=_UNKNOWN))
    tokenizer.pre_tokenizer, tokenizer.decoder = split, decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=_END, eos_token=_END, unk_token=_UNKNOWN, model_max_length=POSITIONS
    )


def _train(model: Any, ids: torch.Tensor) -> None:
    """Trains on windows that start at the start of a text, as generated texts do."""
    begins = (ids[:-WINDOW] == ids[0]).nonzero().flatten()
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.1)
    model.train()
    for step in range(STEPS):
        done = step / STEPS
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, done / WARM_UP + 0.01, (1 - done) / (1 - WARM_UP))
        starts = begins[torch.randint(len(begins), (BATCH, 1))]
        batch = ids[starts + torch.arange(WINDOW)]
        logits = model(input_ids=batch).logits[:, :-1]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    model.eval()
