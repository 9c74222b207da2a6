"""Trains a small language model of general English with GPT-2's architecture for the benchmarks of generation.

python benchmarks/train_lm.py --texts PATH/lm_brown/train.parquet PATH/lm_abc/train.parquet \
    PATH/wikitext2_valid_test/train.parquet --out lm [--layers 4 --width 256 --steps 2000] [--json]

Tokenizer (byte-level BPE) and weights are trained on the texts. One text in fifty is held out. The result is a
Hugging Face folder. The row has the loss in nats per token and the perplexity per token and word of held-out texts.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from amalgam.benchmarks.protocol import row, show
from amalgam.stages.common.models.loading import save_pretrained_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

END = "<|endoftext|>"
HELD_OUT = 50
WARM_UP = 0.05


@dataclass(frozen=True)
class Corpus:
    """Holds concatenated token ids with an end token after each text, and the number of held-out words."""

    learned: NDArray[np.int64]
    held_out: NDArray[np.int64]
    held_out_words: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=Path, nargs="+", required=True, help="Parquet files with a column `text`")
    parser.add_argument("--out", type=Path, required=True, help="output folder")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--context", type=int, default=160, help="maximum length of a text in tokens")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    texts = [text for path in options.texts for text in texts_in(path)]
    held_out = texts[::HELD_OUT]
    learned = [text for place, text in enumerate(texts) if place % HELD_OUT]
    tokenizer = new_tokenizer(learned, options.vocabulary)
    corpus = Corpus(ids_of(tokenizer, learned), ids_of(tokenizer, held_out), sum(len(t.split()) for t in held_out))
    model = new_model(tokenizer, options)
    began = time.perf_counter()
    train(model, corpus, options)
    figures = {"seconds": round(time.perf_counter() - began, 1), **measured(model, corpus, options)}
    save_pretrained_folder(model, tokenizer, options.out)
    about = {"texts": len(texts), "tokens": len(corpus.learned), "parameters": model.num_parameters()}
    shape = {name: getattr(options, name) for name in ("layers", "width", "vocabulary", "context", "steps", "batch")}
    show([row("train_lm", "amalgam", **about, **shape, **figures)], as_json=options.json)


def texts_in(path: Path) -> list[str]:
    import pyarrow.parquet as pq

    return [str(text).strip() for text in pq.read_table(path, columns=["text"]).column("text").to_pylist()]


def new_tokenizer(texts: Sequence[str], size: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END)


def ids_of(tokenizer: Any, texts: Sequence[str]) -> NDArray[np.int64]:
    """Returns the ids with one token between texts, as in the training of GPT-2."""
    rows = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)["input_ids"]
    end = tokenizer.eos_token_id
    return np.array([end, *(token for ids in rows for token in (*ids, end))], np.int64)


def new_model(tokenizer: Any, options: argparse.Namespace) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    end = tokenizer.eos_token_id
    shape = {"n_layer": options.layers, "n_embd": options.width, "n_head": options.heads}
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=options.context, bos_token_id=end, eos_token_id=end, **shape
    )
    return GPT2LMHeadModel(config)


def train(model: Any, corpus: Corpus, options: argparse.Namespace) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), options.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    random = np.random.default_rng(options.seed)
    model.train()
    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * pace(step / options.steps)
        batch = windows(corpus.learned, random, options)
        loss = loss_of(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Returns the mean loss in nats, without the first token of each row."""
    logits = model(input_ids=ids).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def pace(done: float) -> float:
    """Returns the learning rate factor: linear warm-up, then a cosine decay to a tenth."""
    if done < WARM_UP:
        return done / WARM_UP
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (done - WARM_UP) / (1 - WARM_UP)))


def windows(ids: NDArray[np.int64], random: np.random.Generator, options: argparse.Namespace) -> torch.Tensor:
    """Returns random windows that start at the beginning of a text."""
    begins = np.flatnonzero(ids == ids[0])
    begins = begins[begins < len(ids) - options.context]
    starts = random.choice(begins, options.batch)
    return torch.from_numpy(np.stack([ids[start : start + options.context] for start in starts]))


def measured(model: Any, corpus: Corpus, options: argparse.Namespace) -> dict[str, float]:
    """Returns loss and perplexity on windows of the held-out texts, without the first token of each window."""
    model.eval()
    losses, count = 0.0, 0
    with torch.inference_mode():
        for window in _cut(corpus.held_out, options.context):
            ids = torch.from_numpy(window)[None]
            losses += float(loss_of(model, ids)) * (len(window) - 1)
            count += len(window) - 1
    loss = losses / count
    per_word = loss * len(corpus.held_out) / corpus.held_out_words
    figures = {"loss": loss, "perplexity": math.exp(loss), "perplexity_per_word": math.exp(per_word)}
    return {name: round(value, 3) for name, value in figures.items()}


def _cut(ids: NDArray[np.int64], width: int) -> Iterator[NDArray[np.int64]]:
    for start in range(0, len(ids) - 1, width - 1):
        yield ids[start : start + width]


if __name__ == "__main__":
    main()
