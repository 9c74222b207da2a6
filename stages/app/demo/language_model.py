"""Trains the language model of the data-free demo, a tiny GPT-2 with its own tokenizer.

It learns from texts whose words come from different topics. It thus has the words and the sentences, but no topic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amalgam.pipeline.storage.local import atomic_write

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["tiny_language_model"]


LAYERS = 2

WIDTH = 96

HEADS = 4

POSITIONS = 128

WINDOW = 40  # tokens of a training row

BATCH = 32

STEPS = 500

RATE = 3e-3

WARM_UP = 0.1


_END, _UNKNOWN = "<|endoftext|>", "<|unknown|>"


def tiny_language_model(folder: Path, texts: Sequence[str], seed: int) -> None:
    """Writes the model to a temporary folder and renames it, so that an existing folder is complete."""
    import torch

    from amalgam.stages.common.models.loading import save_pretrained_folder

    tokenizer = _tokenizer(texts)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = _model(tokenizer)
        _train(model, _end_to_end(tokenizer, texts))
    with atomic_write(folder) as temporary:
        save_pretrained_folder(model, tokenizer, temporary)


def _tokenizer(texts: Sequence[str]) -> Any:
    """Returns a tokenizer with one token for every word and the space before it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    counts = Counter(piece for text in texts for piece, _ in split.pre_tokenize_str(text))
    pieces = [_END, _UNKNOWN, *sorted(counts, key=lambda piece: (-counts[piece], piece))]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=_UNKNOWN))
    tokenizer.pre_tokenizer, tokenizer.decoder = split, decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=_END, eos_token=_END, unk_token=_UNKNOWN, model_max_length=POSITIONS
    )


def _model(tokenizer: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    end = tokenizer.eos_token_id
    shape = {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": HEADS, "n_positions": POSITIONS}
    # GPT-2's own activation in one kernel; without dropout attention has one too. A text is seen some twice.
    quick = {"activation_function": "gelu_pytorch_tanh", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), bos_token_id=end, eos_token_id=end, **shape, **quick))


def _end_to_end(tokenizer: Any, texts: Sequence[str]) -> Tensor:
    """Every text ends in the token that the next one begins with."""
    import torch

    rows = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    end = tokenizer.eos_token_id
    return torch.tensor([end, *(token for row in rows for token in (*row, end))])


def _train(model: Any, ids: Tensor) -> None:
    """Trains on windows that start at the start of a text, as generated texts do."""
    import torch

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
