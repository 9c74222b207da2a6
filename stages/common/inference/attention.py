"""Attention of one layer in separate steps: the scores, their mask, the window, and rotary embedding."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch.nn import functional

SCORES_AT_ONCE = {"cpu": 1 << 19, "accelerator": 1 << 27}
"""On a CPU a block stays in cache and in mapped memory, which plain attention does not."""


class Turn(NamedTuple):
    """Rotary embedding, [tokens, width of a head]: each query and key is turned by the place of its token."""

    cos: torch.Tensor
    sin: torch.Tensor

    def of(self, heads: torch.Tensor) -> torch.Tensor:
        """Returns queries or keys [rows, heads, tokens, width], turned; sums are in float32 or float64."""
        tokens, half = heads.shape[-2], heads.shape[-1] // 2
        exact = heads.to(torch.promote_types(heads.dtype, torch.float32))
        cos, sin = self.cos[:tokens], self.sin[:tokens]
        turned = exact * cos
        turned[..., :half].addcmul_(exact[..., half:], sin[:, :half].to(exact.dtype), value=-1)
        turned[..., half:].addcmul_(exact[..., :half], sin[:, half:].to(exact.dtype))
        return turned.to(heads.dtype)


class Attention(NamedTuple):
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    rate: float
    scale: float
    turn: Turn | None = None
    window: int = 0
    """Largest distance of a key that a query reads; 0: any."""

    def plain(self) -> Attention:
        """Returns the same attention with turned queries and keys, and the window as a part of the mask."""
        query, key = (self.turn.of(part) if self.turn else part for part in (self.query, self.key))
        mask = windowed(self.mask, self.window, query.shape[-2], key.shape[-2], key.device)
        return Attention(query, key, self.value, mask, self.rate, self.scale)

    @property
    def scores_shape(self) -> tuple[int, ...]:
        return (*self.query.shape[:-1], self.key.shape[-2])

    def rows(self, first: int, end: int) -> Attention:
        mask = self.mask
        if mask is not None and mask.dim() == self.query.dim() and mask.shape[0] > 1:
            mask = mask[first:end]
        query, key, value = (part[first:end] for part in (self.query, self.key, self.value))
        return Attention(query, key, value, mask, self.rate, self.scale)


def windowed(
    mask: torch.Tensor | None, window: int, queries: int, keys: int, device: torch.device
) -> torch.Tensor | None:
    """Returns the mask with keys hidden that are further from a query than the window; 0 hides none."""
    if not window or keys <= window + 1:
        return mask
    places = torch.arange(keys, device=device)
    near = (places[:queries, None] - places).abs_() <= window
    return near[None, None] if mask is None else mask & near


def attended(attention: Attention, dropped: torch.Tensor) -> torch.Tensor:
    """Softmax attention whose probabilities are multiplied by a mask; torch.softmax accumulates in float32 itself."""
    attention = attention.plain()
    scores = torch.matmul(attention.query * attention.scale, attention.key.transpose(-1, -2))
    if attention.mask is not None:
        hide(scores, attention.mask)
    return torch.matmul(dropped.mul_(torch.softmax(scores, -1)), attention.value)


def plain_attention(attention: Attention) -> torch.Tensor:
    query, key, value, mask = attention[:4]
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=attention.scale)


def gated(wide: torch.Tensor) -> torch.Tensor:
    """GEGLU: GELU of the first half of each row, times the second."""
    first, second = wide.chunk(2, dim=-1)
    return functional.gelu(first) * second


def hide(scores: torch.Tensor, mask: torch.Tensor) -> None:
    """Hidden keys get the lowest finite score instead of -inf: a row without any key then stays finite."""
    lowest = torch.finfo(scores.dtype).min
    if mask.dtype == torch.bool:
        scores.masked_fill_(mask.logical_not(), lowest)
    else:
        scores.add_(mask).clamp_(min=lowest)


def scores_at_once(device: torch.device) -> int:
    return SCORES_AT_ONCE.get(device.type, SCORES_AT_ONCE["accelerator"])


def attention_call(  # noqa: PLR0913  torch's own signature
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Attention:
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    return Attention(query, key, value, attn_mask, dropout_p, scale)
