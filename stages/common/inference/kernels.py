"""Triton kernels that compute dropout together with attention, with addition and LayerNorm, or alone.

They read masks from the bank and never store them. Each row of a tensor has an offset, where its window of the bank
starts, as in `dropout.Bank.at`. They are for half precision on a GPU; sums are in float32.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager

import torch
import triton
import triton.language as tl
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
    query_places = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    units = tl.arange(0, WIDTH)
    is_query = query_places < queries
    query_block = tl.load(
        query + row * query_row + head * query_head + query_places[:, None] * query_token + units[None, :],
        mask=is_query[:, None], other=0.0,
    )  # fmt: skip
    windows = tl.load(offsets + pair * queries + query_places, mask=is_query, other=0)
    highest = tl.full([QUERIES], -1.0e30, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, WIDTH], tl.float32)
    for first in range(0, keys, KEYS):
        key_places = first + tl.arange(0, KEYS)
        is_key = key_places < keys
        key_block = tl.load(
            key + row * key_row + head * key_head + key_places[:, None] * key_token + units[None, :],
            mask=is_key[:, None], other=0.0,
        )  # fmt: skip
        scores = tl.dot(query_block, tl.trans(key_block)) * scale
        if MASKED:
            visible = tl.load(
                mask + row * mask_row + head * mask_head
                + query_places[:, None] * mask_query + key_places[None, :] * mask_key,
                mask=is_query[:, None] & is_key[None, :], other=0,
            )  # fmt: skip
            scores = tl.where(visible != 0, scores, -1.0e30)  # finite: a row without any visible key stays a number
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp(scores - new_highest[:, None])
        scaling = tl.exp(highest - new_highest)
        total = total * scaling + tl.sum(weights, 1)
        mask_values = tl.load(values + windows[:, None] + key_places[None, :])
        value_block = tl.load(
            value + row * value_row + head * value_head + key_places[:, None] * value_token + units[None, :],
            mask=is_key[:, None], other=0.0,
        )  # fmt: skip
        mixed = mixed * scaling[:, None] + tl.dot(weights.to(mask_values.dtype) * mask_values, value_block)
        highest = new_highest
    tl.store(
        out + row * out_row + head * out_head + query_places[:, None] * out_token + units[None, :],
        (mixed / total[:, None]).to(out.dtype.element_ty), mask=is_query[:, None],
    )  # fmt: skip


@triton.jit
def _add_norm(hidden, rows, values, offsets, weight, bias, out, width, eps, WIDTH: tl.constexpr):
    """One program: norm(hidden + rows x mask) of one row."""
    row = tl.program_id(0).to(tl.int64)
    units = tl.arange(0, WIDTH)
    is_unit = units < width
    window = tl.load(offsets + row)
    mask_values = tl.load(values + window + units, mask=is_unit, other=0.0).to(tl.float32)
    added = tl.load(rows + row * width + units, mask=is_unit, other=0.0).to(tl.float32) * mask_values
    added += tl.load(hidden + row * width + units, mask=is_unit, other=0.0).to(tl.float32)
    centred = tl.where(is_unit, added - tl.sum(added, 0) / width, 0.0)
    normed = centred * tl.rsqrt(tl.sum(centred * centred, 0) / width + eps)
    normed = normed * tl.load(weight + units, mask=is_unit, other=0.0).to(tl.float32)
    normed += tl.load(bias + units, mask=is_unit, other=0.0).to(tl.float32)
    tl.store(out + row * width + units, normed.to(out.dtype.element_ty), mask=is_unit)


@triton.jit
def _multiply(rows, values, offsets, out, width, WIDTH: tl.constexpr):
    """One program: WIDTH units of one row x mask."""
    row = tl.program_id(0).to(tl.int64)
    units = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    is_unit = units < width
    mask_values = tl.load(values + tl.load(offsets + row) + units, mask=is_unit, other=0.0)
    product = tl.load(rows + row * width + units, mask=is_unit, other=0.0) * mask_values
    tl.store(out + row * width + units, product, mask=is_unit)


def attend(attention: Attention, claim: MaskClaim, out: torch.Tensor | None = None) -> torch.Tensor | None:
    """Returns attention with dropout [rows, heads, queries, width], written into `out`; None if not supported."""
    query, key, value, mask = attention[:4]
    if query.dim() != 4 or query.shape[-1] not in HEAD_WIDTHS or (mask is not None and mask.dtype != torch.bool):
        return None
    rows, heads, queries, width = query.shape
    keys = key.shape[2]
    if not key.shape == value.shape == (rows, heads, keys, width) or claim.offsets.numel() != rows * heads * queries:
        return None
    if {(part.dtype, part.stride(3)) for part in (query, key, value)} != {(claim.bank.dtype, 1)}:
        return None
    if out is None:
        out = query.new_empty(rows, queries, heads, width).transpose(1, 2)
    visible = query if mask is None else mask.expand(rows, heads, queries, keys).view(torch.uint8)
    block = 16 if queries == 1 else _block(queries, 128)
    with _on_device_of(query):
        _attend[rows * heads, triton.cdiv(queries, block)](
            query, key, value, visible, claim.bank.values(claim.site.rate), claim.offsets, out,
            queries, keys, attention.scale,
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *out.stride()[:3], *visible.stride(),
            HEADS=heads, WIDTH=width, QUERIES=block, KEYS=_block(keys, 64), MASKED=mask is not None,
            num_warps=8 if block == 128 else 4,
        )  # fmt: skip
    return out


def _on_device_of(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """Triton launches on the current device, whichever the tensors are on."""
    return torch.cuda.device_of(tensor)  # type: ignore[no-untyped-call]


def _block(number: int, most: int) -> int:
    return min(max(32, 1 << (number - 1).bit_length()), most)


def add_norm(norm: nn.LayerNorm, hidden: torch.Tensor, rows: torch.Tensor, claim: MaskClaim) -> torch.Tensor | None:
    """Returns norm(hidden + rows x mask); None if the call is not supported."""
    width = rows.shape[-1]
    if not _fits(rows, claim) or not hidden.is_contiguous() or width > WIDEST or norm.bias is None:
        return None
    out = torch.empty_like(hidden)
    with _on_device_of(rows):
        _add_norm[(rows.numel() // width,)](
            hidden, rows, claim.bank.values(claim.site.rate), claim.offsets, norm.weight, norm.bias, out,
            width, norm.eps, WIDTH=triton.next_power_of_2(width), num_warps=4,
        )  # fmt: skip
    return out


def multiply(rows: torch.Tensor, claim: MaskClaim) -> torch.Tensor | None:
    """Returns rows x mask; None if the call is not supported."""
    if not _fits(rows, claim):
        return None
    width, out = rows.shape[-1], torch.empty_like(rows)
    block = min(triton.next_power_of_2(width), 1024)
    with _on_device_of(rows):
        _multiply[rows.numel() // width, triton.cdiv(width, block)](
            rows, claim.bank.values(claim.site.rate), claim.offsets, out, width, WIDTH=block, num_warps=4
        )
    return out


def _fits(rows: torch.Tensor, claim: MaskClaim) -> bool:
    """Returns whether each row of a contiguous tensor, of the bank's dtype, has its own window along the last axis."""
    windows = math.prod(rows.shape[:-1])
    return rows.is_contiguous() and rows.dtype == claim.bank.dtype and claim.offsets.numel() == windows > 0
