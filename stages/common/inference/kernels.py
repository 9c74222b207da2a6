"""Triton kernels that compute dropout together with attention, with addition and LayerNorm, or alone.

They read masks from the bank, a bit for each unit, and never store them. Each row of a tensor has an offset, where its
window of the bank starts, as in `dropout.Bank.at`. They are for half precision on a GPU; sums are in float32.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager

import torch
import triton
import triton.language as tl
from torch import nn

from amalgam.stages.common.inference.dropout import BANK_BITS, BANK_SIZE, MIX_A, MIX_B, Attention, MaskClaim

HEAD_WIDTHS = {16, 32, 64, 128}
WIDEST = 1 << 14
"""Limit of a row that one program normalises."""

NOT_MASKED, BY_KEY, BY_QUERY = 0, 1, 2
"""Forms of an attention mask: none, the same for all queries, or one for each."""

UNSPECIALISED = ["queries", "keys", "mask_row", "mask_head", "mask_query", "mask_key"]
"""Arguments of any value: a kernel compiled for each kind of them would take a second each."""


FIRST_FACTOR, SECOND_FACTOR = tl.constexpr(MIX_A - (1 << 64)), tl.constexpr(MIX_B - (1 << 64))
LAST_SHIFT, LAST_PLACE = tl.constexpr(64 - BANK_BITS), tl.constexpr(BANK_SIZE - 1)
HIDDEN = tl.constexpr(-1.0e30)
"""Score of a hidden key; finite, so that a row without any visible key stays a number."""
LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def _offsets(words, places, out, number, PLACES: tl.constexpr):
    """One program: PLACES offsets of one row, as in `dropout.scattered`."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * PLACES + tl.arange(0, PLACES)
    word = tl.load(words + row) + tl.load(places + place, mask=place < number, other=0)
    word = (word ^ ((word >> 32) & 0xFFFFFFFF)) * FIRST_FACTOR
    word = (word ^ ((word >> 29) & ((1 << 35) - 1))) * SECOND_FACTOR
    tl.store(out + row * number + place, (word >> LAST_SHIFT) & LAST_PLACE, mask=place < number)


@triton.jit
def _kept(bits, windows, word: tl.constexpr):
    """Bits 32 * word to 32 * word + 31 of each window, in an int32."""
    first = windows // 32 + word
    low = tl.load(bits + first).to(tl.int64) & 0xFFFFFFFF
    high = tl.load(bits + first + 1).to(tl.int64) << 32
    return ((high | low) >> (windows % 32)).to(tl.int32)


@triton.jit(do_not_specialize=UNSPECIALISED)
def _attend(
    query, key, value, mask, bits, offsets, out, queries, keys, scale, kept_value,
    query_row, query_head, query_token, key_row, key_head, key_token, value_row, value_head, value_token,
    out_row, out_head, out_token, mask_row, mask_head, mask_query, mask_key,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One program: QUERIES queries of one head of one row, against all keys, KEYS at once (32 or 64)."""
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
    own = tl.arange(0, KEYS)
    highest = tl.full([QUERIES], HIDDEN, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, WIDTH], tl.float32)
    for first in range(0, keys, KEYS):
        key_places = first + own
        is_key = key_places < keys
        key_block = tl.load(
            key + row * key_row + head * key_head + key_places[:, None] * key_token + units[None, :],
            mask=is_key[:, None], other=0.0,
        )  # fmt: skip
        bias = tl.where(is_key, 0.0, float("-inf"))
        if MASKED == 1:  # BY_KEY
            places = mask + row * mask_row + head * mask_head + key_places * mask_key
            bias = tl.where(is_key & (tl.load(places, mask=is_key, other=1) == 0), HIDDEN, bias)
        scores = tl.dot(query_block, tl.trans(key_block)) * (scale * LOG2_E) + bias[None, :]
        if MASKED == 2:  # BY_QUERY
            visible = tl.load(
                mask + row * mask_row + head * mask_head
                + query_places[:, None] * mask_query + key_places[None, :] * mask_key,
                mask=is_query[:, None] & is_key[None, :], other=1,
            )  # fmt: skip
            scores = tl.where(visible == 0, HIDDEN, scores)
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_highest[:, None])
        scaling = tl.exp2(highest - new_highest)
        total = total * scaling + tl.sum(weights, 1)
        kept = _kept(bits, windows + first, 0)[:, None]
        if KEYS > 32:
            kept = tl.where(own[None, :] < 32, kept, _kept(bits, windows + first, 1)[:, None])
        weights = tl.where(((kept >> (own % 32)[None, :]) & 1) != 0, weights, 0.0)
        value_block = tl.load(
            value + row * value_row + head * value_head + key_places[:, None] * value_token + units[None, :],
            mask=is_key[:, None], other=0.0,
        )  # fmt: skip
        mixed = mixed * scaling[:, None] + tl.dot(weights.to(value_block.dtype), value_block)
        highest = new_highest
    tl.store(
        out + row * out_row + head * out_head + query_places[:, None] * out_token + units[None, :],
        (mixed * (kept_value / total)[:, None]).to(out.dtype.element_ty), mask=is_query[:, None],
    )  # fmt: skip


@triton.jit
def _dropped(rows, bits, offsets, row, words, units, is_unit, width, kept_value):
    """32 units of a row x mask for each of these words."""
    window = tl.load(offsets + row)
    kept = (_kept(bits, window + 32 * words, 0)[:, None] >> tl.arange(0, 32)[None, :]) & 1
    values = tl.load(rows + row * width + units, mask=is_unit, other=0.0).to(tl.float32)
    return tl.where(kept != 0, values * kept_value, 0.0)


@triton.jit
def _add_norm(hidden, rows, bits, offsets, weight, bias, out, width, eps, kept_value, WORDS: tl.constexpr):
    """One program: norm(hidden + rows x mask) of one row."""
    row = tl.program_id(0).to(tl.int64)
    words = tl.arange(0, WORDS)
    units = words[:, None] * 32 + tl.arange(0, 32)[None, :]
    is_unit = units < width
    added = _dropped(rows, bits, offsets, row, words, units, is_unit, width, kept_value)
    added += tl.load(hidden + row * width + units, mask=is_unit, other=0.0).to(tl.float32)
    centred = tl.where(is_unit, added - tl.sum(added) / width, 0.0)
    normed = centred * tl.rsqrt(tl.sum(centred * centred) / width + eps)
    normed = normed * tl.load(weight + units, mask=is_unit, other=0.0).to(tl.float32)
    normed += tl.load(bias + units, mask=is_unit, other=0.0).to(tl.float32)
    tl.store(out + row * width + units, normed.to(out.dtype.element_ty), mask=is_unit)


@triton.jit
def _multiply(rows, bits, offsets, out, width, kept_value, WORDS: tl.constexpr):
    """One program: 32 * WORDS units of one row x mask."""
    row = tl.program_id(0).to(tl.int64)
    words = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    units = words[:, None] * 32 + tl.arange(0, 32)[None, :]
    is_unit = units < width
    product = _dropped(rows, bits, offsets, row, words, units, is_unit, width, kept_value)
    tl.store(out + row * width + units, product.to(out.dtype.element_ty), mask=is_unit)


def offsets(words: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Returns the starts of windows, [sites, rows, places]."""
    number = places.numel()
    out = words.new_empty(*words.shape, number)
    block = min(triton.next_power_of_2(number), 1024)
    with _on_device_of(words):
        _offsets[words.numel(), triton.cdiv(number, block)](
            words.contiguous(), places.contiguous(), out, number, PLACES=block
        )
    return out


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
    form = NOT_MASKED if mask is None else BY_QUERY if visible.stride(2) else BY_KEY
    block = 16 if queries == 1 else _block(queries, 128)
    bits, kept_value = claim.bank.bits(claim.site.rate)
    with _on_device_of(query):
        _attend[rows * heads, triton.cdiv(queries, block)](
            query, key, value, visible, bits, claim.offsets, out, queries, keys, attention.scale, kept_value,
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *out.stride()[:3], *visible.stride(),
            HEADS=heads, WIDTH=width, QUERIES=block, KEYS=_block(keys, 64), MASKED=form,
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
    bits, kept_value = claim.bank.bits(claim.site.rate)
    with _on_device_of(rows):
        _add_norm[(rows.numel() // width,)](
            hidden, rows, bits, claim.offsets, norm.weight, norm.bias, out, width, norm.eps, kept_value,
            WORDS=_words(width), num_warps=4,
        )  # fmt: skip
    return out


def multiply(rows: torch.Tensor, claim: MaskClaim) -> torch.Tensor | None:
    """Returns rows x mask; None if the call is not supported."""
    if not _fits(rows, claim):
        return None
    width, out = rows.shape[-1], torch.empty_like(rows)
    words = min(_words(width), 32)
    bits, kept_value = claim.bank.bits(claim.site.rate)
    with _on_device_of(rows):
        _multiply[rows.numel() // width, triton.cdiv(width, 32 * words)](
            rows, bits, claim.offsets, out, width, kept_value, WORDS=words, num_warps=4
        )
    return out


def _words(width: int) -> int:
    return int(triton.next_power_of_2(triton.cdiv(width, 32)))


def _fits(rows: torch.Tensor, claim: MaskClaim) -> bool:
    """Returns whether each row of a contiguous tensor, of the bank's dtype, has its own window along the last axis."""
    windows = math.prod(rows.shape[:-1])
    return rows.is_contiguous() and rows.dtype == claim.bank.dtype and claim.offsets.numel() == windows > 0
