"""A teacher's states of texts, dropout off: each block the mean of its share of layers, as pooled means or by token.

Texts T, tokens L, blocks B, width W. A file holds rows [n, B, W] in fp16: one for each text, or one for each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from amalgam.data.parquet import write_table
from amalgam.data.schemas import STATES, arrow_schema
from amalgam.data.tokens import TokenRows
from amalgam.pipeline.errors import ModelError, WorkError
from amalgam.stages.common.device import tokens_at_once
from amalgam.stages.common.inference.batches import token_batches
from amalgam.stages.common.inference.teacher import DROPOUT_OFF, Rows, Teacher
from amalgam.stages.common.states.encoder import mean_over_tokens
from amalgam.stages.common.states.families import LAST

LARGEST = float(np.finfo(np.float16).max)


def shares(layers: int, blocks: int) -> list[range]:
    """Consecutive layers by block, as even as can be; more blocks than layers repeat layers. LAST: the last alone."""
    if blocks == LAST:
        return [range(layers - 1, layers)]
    ends = [block * layers // blocks for block in range(blocks + 1)]
    return [range(start, max(start + 1, stop)) for start, stop in pairwise(ends)]


def in_blocks(states: Sequence[torch.Tensor], blocks: int) -> torch.Tensor:
    """[T, L, B, W] from the states after each layer, that of the embedding left out."""
    parts = [torch.stack([states[layer] for layer in share]).mean(0) for share in shares(len(states), blocks)]
    return torch.stack(parts, dim=2)


def write_states(  # noqa: PLR0913 - what they are made of, each by name
    folder: Path, teacher: Teacher, keys: list[bytes], tokens: TokenRows, *, blocks: int, by_token: bool
) -> int:
    """keys.parquet, and states.npy, which readers map into memory. Returns the width."""
    import pyarrow as pa

    lengths = tokens.lengths if by_token else np.ones(len(tokens), np.int64)
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    shape = int(starts[-1]), max(1, blocks), teacher.width
    held = np.lib.format.open_memmap(folder / "states.npy", "w+", np.float16, shape)
    for rows in token_batches(tokens.lengths, _at_once(teacher)):
        found = _states(teacher, keys, tokens, rows, blocks=blocks, by_token=by_token)
        for row, values in zip(rows, found, strict=True):
            held[starts[row] : starts[row + 1]] = values[: lengths[row]]
    held.flush()
    columns = {"key": pa.array(keys, pa.binary(16)), "rows": pa.array(lengths, pa.int32())}
    write_table(pa.table(columns, schema=arrow_schema(STATES)), folder / "keys.parquet")
    return teacher.width


def _at_once(teacher: Teacher) -> int:

    return tokens_at_once(teacher.device, teacher.width)


def _states(  # noqa: PLR0913 - as write_states
    teacher: Teacher, keys: list[bytes], tokens: TokenRows, rows: Any, *, blocks: int, by_token: bool
) -> np.ndarray[Any, Any]:
    """[T, L or 1, B, W] of these rows."""
    asked = Rows([tokens[int(row)] for row in rows], [keys[row] for row in rows], np.full(len(rows), DROPOUT_OFF))
    found = in_blocks(teacher.states(asked), blocks).float()
    if not by_token:
        there = torch.arange(found.shape[1]) < torch.from_numpy(tokens.lengths[rows])[:, None]
        found = mean_over_tokens(found.flatten(2), there.to(found.device)).reshape(len(rows), 1, max(1, blocks), -1)
    if found.shape[3] != teacher.width:
        what = f"teacher {teacher.name}: its states are {found.shape[3]} wide, its config says {teacher.width}"
        raise ModelError(what, fix="use a transformer whose layers are all as wide as its config says")
    if not bool(found.isfinite().all()):
        where = f"one of the texts {', '.join(keys[row].hex() for row in rows[:5])}"
        raise WorkError(f"teacher {teacher.name}: a state is not a number", where=where, fix="cache.dtype=fp32")
    found = found.clamp(-LARGEST, LARGEST).half().cpu()
    return found.numpy()
