"""Triton kernels that compute dropout together with attention, with addition and LayerNorm, with GEGLU, or alone.

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
SMALLEST_TURNED = 32
"""A product takes halves of at least 16."""
WIDEST = 1 << 14
"""Limit of a row that one program normalises."""

GATED_WORDS = 32
"""Words of 32 units that one program gates."""

NOT_MASKED, BY_KEY, BY_QUERY = 0, 1, 2
"""Forms of an attention mask: none, the same for all queries, or one for each."""

UNSPECIALISED = ["queries", "keys", "mask_row", "mask_head", "mask_query", "mask_key"]
"""Arguments of any value: a kernel compiled for each kind of them would take a second each."""


FIRST_FACTOR, SECOND_FACTOR = tl.constexpr(MIX_A - (1 << 64)), tl.constexpr(MIX_B - (1 << 64))
LAST_SHIFT, LAST_PLACE = tl.constexpr(64 - BANK_BITS), tl.constexpr(BANK_SIZE - 1)
HIDDEN = tl.constexpr(-1.0e30)
"""Score of a hidden key; finite, so that a row without any visible key stays a number."""
LOG2_E = tl.constexpr(math.log2(math.e))
HALF_ROOT = tl.constexpr(math.sqrt(0.5))
GELU_RATE = tl.constexpr(-2 * math.sqrt(2 / math.pi) * math.log2(math.e))


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


@triton.jit
def _thinned(weights, bits, windows, own, KEYS: tl.constexpr):
    """Weights x mask of KEYS keys (32 or 64), of which each query has its own window."""
    kept = _kept(bits, windows, 0)[:, None]
    if KEYS > 32:
        kept = tl.where(own[None, :] < 32, kept, _kept(bits, windows, 1)[:, None])
    return tl.where(((kept >> (own % 32)[None, :]) & 1) != 0, weights, 0.0)


@triton.jit
def _loaded(start, places, token, is_place, WIDTH: tl.constexpr):
    """Queries, keys or values of one head."""
    places = start + places[:, None] * token + tl.arange(0, WIDTH)[None, :]
    return tl.load(places, mask=is_place[:, None], other=0.0)


@triton.jit
def _hidden(
    scores, mask, query_places, key_places, is_query, is_key, mask_query, mask_key,
    MASKED: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """Scores, of which those of hidden keys are lowest, and those of no key are minus infinity."""
    bias = tl.where(is_key, 0.0, float("-inf"))
    if MASKED == 1:  # BY_KEY
        bias = tl.where(is_key & (tl.load(mask + key_places * mask_key, mask=is_key, other=1) == 0), HIDDEN, bias)
    scores += bias[None, :]
    if MASKED == 2:  # BY_QUERY
        visible = tl.load(
            mask + query_places[:, None] * mask_query + key_places[None, :] * mask_key,
            mask=is_query[:, None] & is_key[None, :], other=1,
        )  # fmt: skip
        scores = tl.where(visible == 0, HIDDEN, scores)
    if NEAR > 0:
        is_far = tl.abs(query_places[:, None] - key_places[None, :]) > NEAR
        scores = tl.where(is_far & is_key[None, :], HIDDEN, scores)
    return scores


@triton.jit
def _turned(start, places, token, is_place, cos, sin, HALF: tl.constexpr):
    """Queries or keys of one head in two halves, turned by the places of their tokens."""
    units = tl.arange(0, HALF)
    rows = start + places[:, None] * token + units[None, :]
    turns = places[:, None] * (2 * HALF) + units[None, :]
    first = tl.load(rows, mask=is_place[:, None], other=0.0)
    second = tl.load(rows + HALF, mask=is_place[:, None], other=0.0).to(tl.float32)
    cosine = tl.load(cos + turns, mask=is_place[:, None], other=0.0).to(tl.float32)
    sine = tl.load(sin + turns, mask=is_place[:, None], other=0.0).to(tl.float32)
    one = first.to(tl.float32)
    return (one * cosine - second * sine).to(first.dtype), (second * cosine + one * sine).to(first.dtype)


@triton.jit(do_not_specialize=UNSPECIALISED)
def _attend(
    query, key, value, mask, bits, offsets, out, queries, keys, scale, kept_value,
    query_row, query_head, query_token, key_row, key_head, key_token, value_row, value_head, value_token,
    out_row, out_head, out_token, mask_row, mask_head, mask_query, mask_key, cos, sin,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr,
    DROPS: tl.constexpr, TURNS: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """One program: QUERIES queries of one head of one row, against keys, KEYS at once (32 or 64).

    NEAR: the largest distance of a key, or 0 for all keys.
    """
    pair = tl.program_id(0).to(tl.int64)
    row, head = pair // HEADS, pair % HEADS
    first_query = tl.program_id(1) * QUERIES
    query_places = first_query + tl.arange(0, QUERIES)
    units = tl.arange(0, WIDTH)
    is_query = query_places < queries
    query_start, key_start = query + row * query_row + head * query_head, key + row * key_row + head * key_head
    if TURNS:
        query_first, query_second = _turned(query_start, query_places, query_token, is_query, cos, sin, WIDTH // 2)
    else:
        query_block = _loaded(query_start, query_places, query_token, is_query, WIDTH)
    windows = query_places
    if DROPS:
        windows = tl.load(offsets + pair * queries + query_places, mask=is_query, other=0)
    start, stop = 0, keys
    if NEAR > 0:
        start = tl.maximum(first_query - NEAR, 0) // KEYS * KEYS
        stop = tl.minimum(first_query + QUERIES + NEAR, keys)
    own = tl.arange(0, KEYS)
    highest = tl.full([QUERIES], HIDDEN, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, WIDTH], tl.float32)
    for first in range(start, stop, KEYS):
        key_places = first + own
        is_key = key_places < keys
        if TURNS:
            key_first, key_second = _turned(key_start, key_places, key_token, is_key, cos, sin, WIDTH // 2)
            scores = tl.dot(query_first, tl.trans(key_first))
            scores = tl.dot(query_second, tl.trans(key_second), scores)
        else:
            key_block = _loaded(key_start, key_places, key_token, is_key, WIDTH)
            scores = tl.dot(query_block, tl.trans(key_block))
        scores = _hidden(
            scores * (scale * LOG2_E), mask + row * mask_row + head * mask_head, query_places, key_places,
            is_query, is_key, mask_query, mask_key, MASKED, NEAR,
        )  # fmt: skip
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_highest[:, None])
        scaling = tl.exp2(highest - new_highest)
        total = total * scaling + tl.sum(weights, 1)
        if DROPS:
            weights = _thinned(weights, bits, windows + first, own, KEYS)
        value_block = _loaded(value + row * value_row + head * value_head, key_places, value_token, is_key, WIDTH)
        mixed = mixed * scaling[:, None] + tl.dot(weights.to(value_block.dtype), value_block)
        highest = new_highest
    tl.store(
        out + row * out_row + head * out_head + query_places[:, None] * out_token + units[None, :],
        (mixed * (kept_value / total)[:, None]).to(out.dtype.element_ty), mask=is_query[:, None],
    )  # fmt: skip


@triton.jit
def _dropped(values, bits, offsets, row, words, kept_value, DROPS: tl.constexpr):
    """32 values of a row x mask for each of these words."""
    if DROPS:
        window = tl.load(offsets + row)
        kept = (_kept(bits, window + 32 * words, 0)[:, None] >> tl.arange(0, 32)[None, :]) & 1
        values = tl.where(kept != 0, values * kept_value, 0.0)
    return values


@triton.jit
def _add_norm(
    hidden, rows, bits, offsets, weight, bias, out, width, eps, kept_value,
    WORDS: tl.constexpr, DROPS: tl.constexpr, BIASED: tl.constexpr, KEEPS: tl.constexpr,
):  # fmt: skip
    """One program: norm(hidden + rows x mask) of one row. KEEPS: `hidden` becomes the sum."""
    row = tl.program_id(0).to(tl.int64)
    words = tl.arange(0, WORDS)
    units = words[:, None] * 32 + tl.arange(0, 32)[None, :]
    is_unit = units < width
    values = tl.load(rows + row * width + units, mask=is_unit, other=0.0).to(tl.float32)
    added = _dropped(values, bits, offsets, row, words, kept_value, DROPS)
    added += tl.load(hidden + row * width + units, mask=is_unit, other=0.0).to(tl.float32)
    if KEEPS:
        rounded = added.to(hidden.dtype.element_ty)
        tl.store(hidden + row * width + units, rounded, mask=is_unit)
        added = rounded.to(tl.float32)
    centred = tl.where(is_unit, added - tl.sum(added) / width, 0.0)
    normed = centred * tl.rsqrt(tl.sum(centred * centred) / width + eps)
    normed = normed * tl.load(weight + units, mask=is_unit, other=0.0).to(tl.float32)
    if BIASED:
        normed += tl.load(bias + units, mask=is_unit, other=0.0).to(tl.float32)
    tl.store(out + row * width + units, normed.to(out.dtype.element_ty), mask=is_unit)


@triton.jit
def _multiply(rows, bits, offsets, out, width, kept_value, WORDS: tl.constexpr):
    """One program: 32 * WORDS units of one row x mask."""
    row = tl.program_id(0).to(tl.int64)
    words = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    units = words[:, None] * 32 + tl.arange(0, 32)[None, :]
    is_unit = units < width
    values = tl.load(rows + row * width + units, mask=is_unit, other=0.0).to(tl.float32)
    product = _dropped(values, bits, offsets, row, words, kept_value, True)
    tl.store(out + row * width + units, product.to(out.dtype.element_ty), mask=is_unit)


@triton.jit(do_not_specialize=["words"])
def _gate(
    wide, bits, offsets, out, words, kept_value,
    WORDS: tl.constexpr, EACH: tl.constexpr, DROPS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One program: GELU of 32 * WORDS units of rows' first halves, times those of the second halves, x mask.

    Each half of a row has EACH words of 32 units. If not EXACT, GELU has its tanh form.
    """
    number = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    is_word = number < words
    row, word = number // EACH, (number % EACH).to(tl.int32)
    lanes = tl.arange(0, 32)[None, :]
    places = ((2 * row) * EACH + word)[:, None] * 32 + lanes
    first = tl.load(wide + places, mask=is_word[:, None], other=0.0).to(tl.float32)
    second = tl.load(wide + places + 32 * EACH, mask=is_word[:, None], other=0.0).to(tl.float32)
    if EXACT:
        values = 0.5 * first * (1.0 + tl.erf(first * HALF_ROOT)) * second
    else:
        inner = first * (1.0 + 0.044715 * first * first)
        values = first * second / (1.0 + tl.exp2(inner * GELU_RATE))
    if DROPS:
        window = tl.load(offsets + row, mask=is_word, other=0) + 32 * word
        kept = (_kept(bits, window, 0)[:, None] >> lanes) & 1
        values = tl.where(kept != 0, values * kept_value, 0.0)
    tl.store(out + number[:, None] * 32 + lanes, values.to(out.dtype.element_ty), mask=is_word[:, None])


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


def attend(attention: Attention, claim: MaskClaim | None, out: torch.Tensor | None = None) -> torch.Tensor | None:
    """Returns attention [rows, heads, queries, width], written into `out`; None if not supported."""
    query, key, value, mask = attention[:4]
    if query.dim() != 4 or query.shape[-1] not in HEAD_WIDTHS or (mask is not None and mask.dtype != torch.bool):
        return None
    rows, heads, queries, width = query.shape
    keys = key.shape[2]
    if not key.shape == value.shape == (rows, heads, keys, width):
        return None
    if claim is not None and (claim.offsets.numel() != rows * heads * queries or claim.bank.dtype != query.dtype):
        return None
    if {(part.dtype, part.stride(3)) for part in (query, key, value)} != {(query.dtype, 1)}:
        return None
    if attention.turn is not None and width < SMALLEST_TURNED:
        return None
    if out is None:
        out = query.new_empty(rows, queries, heads, width).transpose(1, 2)
    visible = query if mask is None else mask.expand(rows, heads, queries, keys).view(torch.uint8)
    form = NOT_MASKED if mask is None else BY_QUERY if visible.stride(2) else BY_KEY
    block = 16 if queries == 1 else _block(queries, 128)
    bits, starts, kept_value = _masks(claim, query)
    cos, sin = attention.turn or (query, query)
    with _on_device_of(query):
        _attend[rows * heads, triton.cdiv(queries, block)](
            query, key, value, visible, bits, starts, out, queries, keys, attention.scale, kept_value,
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *out.stride()[:3], *visible.stride(), cos, sin,
            HEADS=heads, WIDTH=width, QUERIES=block, KEYS=_block(keys, 64), MASKED=form,
            DROPS=claim is not None, TURNS=attention.turn is not None,
            NEAR=attention.window if keys > attention.window + 1 else 0, num_warps=8 if block == 128 else 4,
        )  # fmt: skip
    return out


def _masks(claim: MaskClaim | None, unused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Returns a claim's bits, offsets and the value of a unit that is kept."""
    if claim is None:
        return unused, unused, 1.0
    bits, kept_value = claim.bank.bits(claim.site.rate)
    return bits, claim.offsets, kept_value


def _on_device_of(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """Triton launches on the current device, whichever the tensors are on."""
    return torch.cuda.device_of(tensor)  # type: ignore[no-untyped-call]


def _block(number: int, most: int) -> int:
    return min(max(32, 1 << (number - 1).bit_length()), most)


def add_norm(
    norm: nn.LayerNorm, hidden: torch.Tensor, rows: torch.Tensor, claim: MaskClaim | None, *, keep: bool
) -> torch.Tensor | None:
    """Returns norm(hidden + rows x mask), with `keep` the sum in `hidden`; None if the call is not supported."""
    width = rows.shape[-1]
    if not _fits(rows, claim) or not hidden.is_contiguous() or width > WIDEST:
        return None
    out = torch.empty_like(hidden)
    bits, starts, kept_value = _masks(claim, rows)
    with _on_device_of(rows):
        _add_norm[(rows.numel() // width,)](
            hidden, rows, bits, starts, norm.weight, norm.weight if norm.bias is None else norm.bias, out, width,
            norm.eps, kept_value, WORDS=_words(width), DROPS=claim is not None, BIASED=norm.bias is not None,
            KEEPS=keep, num_warps=4,
        )  # fmt: skip
    return out


def gate(wide: torch.Tensor, claim: MaskClaim | None, out: torch.Tensor) -> torch.Tensor | None:
    """Writes GELU of each row's first half, times the second x mask, into `out`; None if not supported.

    In half precision it is the tanh form, within 5e-4 of the exact one.
    """
    width = out.shape[-1]
    if width % 32 or not _fits(out, claim) or not wide.is_contiguous() or wide.dtype != out.dtype:
        return None
    words = out.numel() // 32
    bits, starts, kept_value = _masks(claim, out)
    with _on_device_of(out):
        _gate[(triton.cdiv(words, GATED_WORDS),)](
            wide, bits, starts, out, words, kept_value, WORDS=GATED_WORDS, EACH=width // 32, DROPS=claim is not None,
            EXACT=out.dtype == torch.float32, num_warps=4,
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


def _fits(rows: torch.Tensor, claim: MaskClaim | None) -> bool:
    """Returns whether each row of a contiguous tensor, of the bank's dtype, has its own window along the last axis."""
    windows = math.prod(rows.shape[:-1])
    if not rows.is_contiguous() or not windows:
        return False
    return claim is None or (rows.dtype == claim.bank.dtype and claim.offsets.numel() == windows)
