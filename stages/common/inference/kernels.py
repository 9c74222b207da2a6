"""Dropout inside its neighbours, in one Triton kernel each: a mask is read from the bank and never written.

A window of the bank starts at an offset, one for each row of the tensor, as in `dropout.Bank.at`. The kernels are for
half precision on a GPU; their sums are in float32.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import nn

    from amalgam.stages.common.inference.dropout import Attention, MaskClaim

HEAD_WIDTHS = {16, 32, 64, 128}
WIDEST = 1 << 14
"""Limit of a row that one program normalises."""


UNSPECIALISED = ["queries", "keys", "mask_row", "mask_head", "mask_query", "mask_key"]
"""Arguments of any value: a kernel compiled for each kind of them would take a second each."""


@triton.jit(do_not_specialize=UNSPECIALISED)
def _attend(
    query, key, value, mask, values, offsets, out, queries, keys, scale,
    query_row, query_head, query_token, key_row, key_head, key_token, value_row, value_head, value_token,
    out_row, out_head, out_token, mask_row, mask_head, mask_query, mask_key,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One program: QUERIES queries of one head of one row, against all keys, KEYS at once."""
    pair = tl.program_id(0).to(tl.int64)
    row, head = pair // HEADS, pair % HEADS
    places = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    units = tl.arange(0, WIDTH)
    inside = places < queries
    asked = tl.load(
        query + row * query_row + head * query_head + places[:, None] * query_token + units[None, :],
        mask=inside[:, None], other=0.0,
    )  # fmt: skip
    windows = tl.load(offsets + pair * queries + places, mask=inside, other=0)
    highest = tl.full([QUERIES], -1.0e30, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, WIDTH], tl.float32)
    for first in range(0, keys, KEYS):
        others = first + tl.arange(0, KEYS)
        present = others < keys
        keyed = tl.load(
            key + row * key_row + head * key_head + others[:, None] * key_token + units[None, :],
            mask=present[:, None], other=0.0,
        )  # fmt: skip
        scores = tl.dot(asked, tl.trans(keyed)) * scale
        seen = inside[:, None] & present[None, :]
        if MASKED:
            seen = tl.load(
                mask + row * mask_row + head * mask_head + places[:, None] * mask_query + others[None, :] * mask_key,
                mask=seen, other=0,
            ) != 0  # fmt: skip
        scores = tl.where(seen, scores, -1.0e30)
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        faded = tl.exp(highest - higher)
        total = total * faded + tl.sum(weights, 1)
        kept = tl.load(values + windows[:, None] + others[None, :])
        valued = tl.load(
            value + row * value_row + head * value_head + others[:, None] * value_token + units[None, :],
            mask=present[:, None], other=0.0,
        )  # fmt: skip
        mixed = mixed * faded[:, None] + tl.dot(weights.to(kept.dtype) * kept, valued)
        highest = higher
    tl.store(
        out + row * out_row + head * out_head + places[:, None] * out_token + units[None, :],
        (mixed / total[:, None]).to(out.dtype.element_ty), mask=inside[:, None],
    )  # fmt: skip


@triton.jit
def _add_norm(hidden, rows, values, offsets, weight, bias, out, width, eps, WIDTH: tl.constexpr):
    """One program: norm(hidden + rows x mask) of one row."""
    row = tl.program_id(0).to(tl.int64)
    units = tl.arange(0, WIDTH)
    inside = units < width
    window = tl.load(offsets + row)
    kept = tl.load(values + window + units, mask=inside, other=0.0).to(tl.float32)
    added = tl.load(rows + row * width + units, mask=inside, other=0.0).to(tl.float32) * kept
    added += tl.load(hidden + row * width + units, mask=inside, other=0.0).to(tl.float32)
    centred = tl.where(inside, added - tl.sum(added, 0) / width, 0.0)
    normed = centred * tl.rsqrt(tl.sum(centred * centred, 0) / width + eps)
    normed = normed * tl.load(weight + units, mask=inside, other=0.0).to(tl.float32)
    normed += tl.load(bias + units, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + units, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _multiply(rows, values, offsets, out, width, WIDTH: tl.constexpr):
    """One program: WIDTH units of one row x mask."""
    row = tl.program_id(0).to(tl.int64)
    units = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = units < width
    kept = tl.load(values + tl.load(offsets + row) + units, mask=inside, other=0.0)
    tl.store(out + row * width + units, tl.load(rows + row * width + units, mask=inside, other=0.0) * kept, mask=inside)


def attend(attention: Attention, claim: MaskClaim, out: torch.Tensor | None = None) -> torch.Tensor | None:
    """Returns attention with dropout [rows, heads, queries, width], written into `out`; None: not for this call."""
    query, key, value, mask = attention[:4]
    if query.dim() != 4 or query.shape[-1] not in HEAD_WIDTHS or value.shape[-1] != query.shape[-1]:
        return None
    rows, heads, queries, width = query.shape
    keys = key.shape[2]
    one_window_each = claim.offsets.numel() == rows * heads * queries
    last_strides = {query.stride(3), key.stride(3), value.stride(3)}
    if not one_window_each or last_strides != {1} or (mask is not None and mask.dtype != torch.bool):
        return None
    if out is None:
        out = query.new_empty(rows, queries, heads, width).transpose(1, 2)
    seen = query if mask is None else mask.expand(rows, heads, queries, keys).view(torch.uint8)
    together = 16 if queries == 1 else _block(queries, 128)
    _attend[rows * heads, triton.cdiv(queries, together)](
        query, key, value, seen, claim.bank.values(claim.site.rate), claim.offsets, out, queries, keys, attention.scale,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *out.stride()[:3], *seen.stride(),
        HEADS=heads, WIDTH=width, QUERIES=together, KEYS=_block(keys, 64), MASKED=mask is not None,
        num_warps=8 if together == 128 else 4,
    )  # fmt: skip
    return out


def _block(number: int, most: int) -> int:
    return min(max(32, 1 << (number - 1).bit_length()), most)


def add_norm(norm: nn.LayerNorm, hidden: torch.Tensor, rows: torch.Tensor, claim: MaskClaim) -> torch.Tensor | None:
    """Returns norm(hidden + rows x mask); None: not for this call."""
    width = rows.shape[-1]
    if not _fits(rows, claim) or not hidden.is_contiguous() or width > WIDEST:
        return None
    out = torch.empty_like(hidden)
    _add_norm[(rows.numel() // width,)](
        hidden, rows, claim.bank.values(claim.site.rate), claim.offsets, norm.weight, norm.bias, out, width, norm.eps,
        WIDTH=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
    return out


def multiply(rows: torch.Tensor, claim: MaskClaim) -> torch.Tensor | None:
    """Returns rows x mask; None: not for this call."""
    if not _fits(rows, claim):
        return None
    width, out = rows.shape[-1], torch.empty_like(rows)
    block = min(triton.next_power_of_2(width), 1024)
    _multiply[rows.numel() // width, triton.cdiv(width, block)](
        rows, claim.bank.values(claim.site.rate), claim.offsets, out, width, WIDTH=block, num_warps=4
    )
    return out


def _fits(rows: torch.Tensor, claim: MaskClaim) -> bool:
    """Whether each row of a contiguous tensor, of the bank's dtype, has a window of its own along the last axis."""
    windows = math.prod(rows.shape[:-1])
    return rows.is_contiguous() and rows.dtype == claim.bank.dtype and claim.offsets.numel() == windows > 0
