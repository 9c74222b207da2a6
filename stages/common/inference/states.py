"""Computes hidden states with dropout off: pooled by an encoder, and of a teacher by block, pooled or by token.

Texts T, tokens L, blocks B, width W. A file of teacher states holds rows [n, B, W] in fp16, by text or by token.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from amalgam.data.arrays import Array, RowNumbers
from amalgam.data.parquet import FEATURES, STATES, build_table, write_table
from amalgam.data.tokens import TokenRows, encode
from amalgam.pipeline.errors import ModelError, WorkError, first_line
from amalgam.stages.common.device import put_on, tokens_at_once
from amalgam.stages.common.inference.batches import BATCH_TOKENS, LARGEST, model_inputs, token_batches
from amalgam.stages.common.inference.fast_encoder import mean_over_tokens
from amalgam.stages.common.inference.teacher import DROPOUT_OFF, Rows, Teacher
from amalgam.stages.common.models.model_folder import reads_padding
from amalgam.stages.common.models.resolve import LAST_LAYER, NewClassifier

WORD_BOUNDARY = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[\s_-]+")
"""Between the words of a label name: camel case, space, underscore or hyphen."""

CHUNK = 16 << 20


def label_words(label: str) -> str:
    """Returns the words of a label name: sci_tech, sci-tech and sciTech all give two words."""
    return " ".join(word for word in WORD_BOUNDARY.split(label) if word) or label


# ---- the encoder


@dataclass(frozen=True)
class Encoder:
    body: Any
    classifier: NewClassifier
    device: torch.device

    def pooled(self, tokens: TokenRows) -> Array:
        """Returns the mean over tokens of each text's last layer: [texts, width], each of length 1."""
        features: Array | None = None
        with torch.inference_mode():
            for rows in token_batches(tokens.ids.lengths, BATCH_TOKENS, equal=reads_padding(self.body.config)):
                inputs = put_on(self.device, model_inputs(tokens.ids, tokens.type_ids, rows, self.classifier.pad_id))
                states = self.body(**inputs).last_hidden_state.float()
                if states.shape[:2] != inputs["input_ids"].shape:
                    what = f"the encoder gives {states.shape[1]} states for {inputs['input_ids'].shape[1]} tokens"
                    fix = "choose an encoder with a state for each token, such as a BERT"
                    raise ModelError(what, where="student.encoder", fix=fix)
                means = mean_over_tokens(states, inputs["attention_mask"])
                features = np.empty((len(tokens), means.shape[1]), np.float32) if features is None else features
                features[rows] = torch.nn.functional.normalize(means, dim=-1).cpu().numpy()
        return features if features is not None else np.empty((0, 0), np.float32)

    def check(self) -> None:
        """Refuses an encoder that does not give a state of each token."""
        new = self.classifier
        tokens = encode(new.tokenizer, [("one two three four five",)], new.limit, types=new.types)
        try:
            self.pooled(tokens)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            what = f"the encoder does not give a state of each token: {first_line(error)}"
            fix = "use a BERT-like encoder, or a method that reads no states: `amalgam methods`"
            raise ModelError(what, where="student.encoder", fix=fix) from error

    def name_states(self, names: Sequence[str]) -> Array:
        """Returns the states of label names: [names, width], each of length 1."""
        new = self.classifier
        return self.pooled(encode(new.tokenizer, [(label_words(name),) for name in names], new.limit, types=new.types))


def feature_table(encoder: Encoder, keys: Any, tokens: TokenRows) -> pa.Table:
    values = encoder.pooled(tokens).astype(np.float16)
    return build_table(FEATURES, {"key": keys, "features": values})


# ---- teachers


def shares(layers: int, blocks: int) -> list[range]:
    """Returns consecutive layers for each block, as even as possible; with more blocks than layers, layers repeat.

    LAST_LAYER blocks: the last layer alone.
    """
    if blocks == LAST_LAYER:
        return [range(layers - 1, layers)]
    ends = [block * layers // blocks for block in range(blocks + 1)]
    return [range(start, max(start + 1, stop)) for start, stop in pairwise(ends)]


def in_blocks(states: Sequence[torch.Tensor], blocks: int) -> torch.Tensor:
    """Returns [T, L, B, W] from the states after each layer, without the embedding layer."""
    parts = [torch.stack([states[layer] for layer in share]).mean(0) for share in shares(len(states), blocks)]
    return torch.stack(parts, dim=2)


def reserve(path: Path) -> None:
    """Allocates the blocks of a sparse file: on a full disk, a write into its map would end the process (SIGBUS)."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
            return
        for start in range(0, size, CHUNK):  # macOS: the file is written over itself
            file.seek(start)
            content = file.read(CHUNK)
            file.seek(start)
            file.write(content)


def write_states(  # noqa: PLR0913 - each a separate input of the states
    folder: Path, teacher: Teacher, keys: list[bytes], tokens: TokenRows, *, blocks: int, by_token: bool
) -> int:
    """Writes keys.parquet and states.npy, which readers map into memory; returns how many numbers were clipped."""
    lengths = tokens.lengths if by_token else np.ones(len(tokens), np.int64)
    starts, clipped = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]), 0
    with _state_file(folder, keys, lengths, (max(1, blocks), teacher.width)) as mapped:
        at_once, equal = tokens_at_once(teacher.device, teacher.width), reads_padding(teacher.model.config)
        for rows in token_batches(tokens.lengths, at_once, equal=equal):
            states = _states(teacher, keys, tokens, rows, blocks=blocks, by_token=by_token)
            for row, values in zip(rows, states, strict=True):
                mapped[starts[row] : starts[row + 1]] = values[: lengths[row]]
                clipped += _count_clipped(values[: lengths[row]])
    return clipped


def write_pooled(folder: Path, keys: list[bytes], states: Array) -> int:
    """Does the same as `write_states` with the last layer's states of texts [texts, width]."""
    with _state_file(folder, keys, np.ones(len(keys), np.int64), (1, states.shape[1])) as mapped:
        mapped[:] = states[:, None]
    return _count_clipped(states)


def _count_clipped(states: Array) -> int:
    """Returns how many numbers in fp16 are the largest, to which larger ones are clipped."""
    return int(np.count_nonzero((states.view(np.uint16) & 0x7FFF) == np.float16(LARGEST).view(np.uint16)))


@contextmanager
def _state_file(folder: Path, keys: list[bytes], lengths: RowNumbers, shape: tuple[int, int]) -> Iterator[Array]:
    """Yields the map of states.npy, rows of [blocks, width]; then writes keys.parquet."""
    mapped = np.lib.format.open_memmap(folder / "states.npy", "w+", np.float16, (int(lengths.sum()), *shape))
    reserve(folder / "states.npy")
    yield mapped
    mapped.flush()
    write_table(build_table(STATES, {"key": keys, "rows": lengths}), folder / "keys.parquet")


def _states(  # noqa: PLR0913 - as write_states
    teacher: Teacher, keys: list[bytes], tokens: TokenRows, rows: Any, *, blocks: int, by_token: bool
) -> Array:
    """Returns [T, L or 1, B, W] of these rows."""
    batch = Rows([tokens[int(row)] for row in rows], [keys[row] for row in rows], np.full(len(rows), DROPOUT_OFF))
    states = in_blocks(teacher.states(batch), blocks).float()
    if not by_token:
        mask = torch.arange(states.shape[1]) < torch.from_numpy(tokens.lengths[rows])[:, None]
        states = mean_over_tokens(states.flatten(2), mask.to(states.device)).reshape(len(rows), 1, max(1, blocks), -1)
    if states.shape[3] != teacher.width:
        what = f"teacher {teacher.name}: its states are {states.shape[3]} wide, its config has {teacher.width}"
        raise ModelError(what, fix="use a transformer whose layers all have the width in its config")
    if not bool(states.isfinite().all()):
        where = f"one of the texts {', '.join(keys[row].hex() for row in rows[:5])}"
        raise WorkError(f"teacher {teacher.name}: a state is not a number", where=where, fix="set cache.dtype=fp32")
    return states.clamp(-LARGEST, LARGEST).half().cpu().numpy()
