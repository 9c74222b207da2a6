"""Keyed dropout: every mask is a pure function of (seed, teacher, text, pass, site).

A torch function mode intercepts each active dropout call of a model in train(), attention included, and takes its mask
from masks.py. So every site of any architecture is covered, and a site that cannot be keyed raises an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from amalgam.pipeline.errors import ModelError
from amalgam.stages.common.inference.masks import Axis, Bank

# Scores computed at once. On a CPU a block stays in cache and in mapped memory, which plain attention does not.
# An accelerator is fastest with large launches.
SCORES_AT_ONCE = {"cpu": 1 << 19}

SCORES_AT_ONCE_ELSEWHERE = 1 << 27

WITHOUT_DROPOUT = "set cache.passes: 0 (uncertainty from the dropout-off pass alone), or leave this teacher out"


@dataclass(frozen=True)
class Site:
    """One dropout call of a forward pass, in call order."""

    name: str
    rate: float
    axes: tuple[Axis, ...]

    @property
    def kind(self) -> Literal["attention", "hidden", "pooled", "shared"]:
        roles = [axis.role for axis in self.axes]
        if "rows" not in roles:
            return "shared"
        return ("pooled", "hidden", "attention")[min(roles.count("tokens"), 2)]


class Call(NamedTuple):
    """What one dropout call looked like in a probe."""

    name: str
    rate: float
    shape: tuple[int, ...]


def _dropout_call(
    input: torch.Tensor,  # noqa: A002  torch's own parameter name
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    *,
    train: bool | None = None,
) -> tuple[torch.Tensor, float, bool]:
    """The arguments of every function of the dropout family: tensor, active rate, in place."""
    return input, p if (training if train is None else train) else 0.0, inplace


def _attention_call(  # noqa: PLR0913  torch's own signature
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
    return Attention(
        query, key, value, attn_mask, dropout_p, 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    )


class Attention(NamedTuple):
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    rate: float
    scale: float

    @property
    def scores_shape(self) -> tuple[int, ...]:
        return (*self.query.shape[:-1], self.key.shape[-2])

    def rows(self, first: int, end: int) -> Attention:
        mask = self.mask
        if mask is not None and mask.dim() == self.query.dim() and mask.shape[0] > 1:
            mask = mask[first:end]
        return self._replace(
            query=self.query[first:end], key=self.key[first:end], value=self.value[first:end], mask=mask
        )


def attended(attention: Attention, dropped: torch.Tensor) -> torch.Tensor:
    """Softmax attention whose probabilities are multiplied by a mask; torch.softmax accumulates in float32 itself."""
    scores = torch.matmul(attention.query * attention.scale, attention.key.transpose(-1, -2))
    if attention.mask is not None:
        hide(scores, attention.mask)
    return torch.matmul(dropped.mul_(torch.softmax(scores, -1)), attention.value)


def hide(scores: torch.Tensor, mask: torch.Tensor) -> None:
    """Hidden keys get the lowest finite score instead of -inf: a row without any key then stays finite."""
    lowest = torch.finfo(scores.dtype).min
    if mask.dtype == torch.bool:
        scores.masked_fill_(mask.logical_not(), lowest)
    else:
        scores.add_(mask).clamp_(min=lowest)


def scores_at_once(device: torch.device) -> int:
    return SCORES_AT_ONCE.get(device.type, SCORES_AT_ONCE_ELSEWHERE)


DROPOUT = {functional.dropout, torch.dropout, torch.dropout_}

# These drop whole channels: the mask has one value for each.
CHANNEL_DROPOUT = {
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
    torch.feature_dropout,
    torch.feature_dropout_,
}

ATTENTION = {functional.scaled_dot_product_attention}

REFUSED = {
    functional.alpha_dropout,
    functional.feature_alpha_dropout,
    functional.gumbel_softmax,
    torch.alpha_dropout,
    torch.feature_alpha_dropout,
    torch.native_dropout,
    torch.bernoulli,
    torch.multinomial,
    torch.normal,
    torch.poisson,
    torch.rand,
    torch.rand_like,
    torch.randint,
    torch.randint_like,
    torch.randn,
    torch.randn_like,
    torch.randperm,
    torch.Tensor.bernoulli,
    torch.Tensor.bernoulli_,
    torch.Tensor.exponential_,
    torch.Tensor.geometric_,
    torch.Tensor.multinomial,
    torch.Tensor.normal_,
    torch.Tensor.random_,
    torch.Tensor.uniform_,
}


class DropoutMode(TorchFunctionMode):
    """Catches each active dropout call of a forward pass; subclasses define the result."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in DROPOUT or func in CHANNEL_DROPOUT:
            x, rate, inplace = _dropout_call(*args, **kwargs)
            shape = (*x.shape[:2], *([1] * (x.dim() - 2))) if func in CHANNEL_DROPOUT else tuple(x.shape)
            if rate:
                return self.dropped(x, rate, shape, inplace=inplace or func in {torch.dropout_, torch.feature_dropout_})
            return x
        if func in ATTENTION:
            rate = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
            return self.attention(_attention_call(*args, **kwargs)) if rate else func(*args, **kwargs)
        if func in REFUSED:
            raise unsupported_dropout(getattr(func, "__name__", str(func)))
        return func(*args, **kwargs)

    def dropped(self, x: torch.Tensor, rate: float, shape: tuple[int, ...], *, inplace: bool) -> torch.Tensor:
        raise NotImplementedError

    def attention(self, attention: Attention) -> torch.Tensor:
        raise NotImplementedError


def unsupported_dropout(what: str) -> ModelError:
    return ModelError(
        f"this model draws random numbers that amalgam cannot key: {what}",
        fix=WITHOUT_DROPOUT,
    )


class Recorder(DropoutMode):
    """Notes each dropout call and leaves the numbers as they are: a probe."""

    def __init__(self, inside: Callable[[], str]) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._inside = inside

    def dropped(self, x: torch.Tensor, rate: float, shape: tuple[int, ...], *, inplace: bool) -> torch.Tensor:  # noqa: ARG002  a probe changes nothing
        self.calls.append(Call(self._inside(), rate, shape))
        return x

    def attention(self, attention: Attention) -> torch.Tensor:
        self.calls.append(Call(self._inside(), attention.rate, attention.scores_shape))
        return functional.scaled_dot_product_attention(
            attention.query, attention.key, attention.value, attn_mask=attention.mask, scale=attention.scale
        )


class MaskClaim(NamedTuple):
    """The masks of one site in one launch, to be fetched for all rows or for some."""

    bank: Bank
    site: Site
    offsets: torch.Tensor
    """[rows, ...]: where in the bank each window starts."""
    shape: tuple[int, ...]

    def of(self, rows: slice, out: torch.Tensor | None = None) -> torch.Tensor:
        offsets = self.offsets[rows]
        shape = (len(offsets) * self.site.axes[0].size, *self.shape[1:])
        return self.bank.at(offsets, self.site.axes, self.site.rate, shape, out)

    def whole(self) -> torch.Tensor:
        return self.bank.at(self.offsets, self.site.axes, self.site.rate, self.shape)


class KeyedDropout(DropoutMode):
    """Masks for one launch: `words` is [sites, rows], of which shared sites use the first row alone."""

    def __init__(self, bank: Bank, sites: Sequence[Site], words: torch.Tensor) -> None:
        super().__init__()
        self._bank = bank
        self._sites = sites
        self._words = words
        self._next = 0
        self._offsets: dict[tuple[tuple[Axis, ...], tuple[int, ...]], torch.Tensor] = {}

    def dropped(self, x: torch.Tensor, rate: float, shape: tuple[int, ...], *, inplace: bool) -> torch.Tensor:
        mask = self.claim(shape, rate).whole()
        if inplace:
            return x.mul_(mask)
        return mask.mul_(x) if mask.shape == x.shape and mask.dtype == x.dtype else x * mask

    def attention(self, attention: Attention) -> torch.Tensor:
        shape = attention.scores_shape
        claim = self.claim(shape, attention.rate)
        heads = claim.site.axes[0].size
        at_once = max(1, scores_at_once(attention.query.device) // math.prod(shape[1:]) // heads)
        if claim.site.axes[0].role != "rows" or at_once * heads >= shape[0]:
            return attended(attention, claim.whole())
        parts = []
        for first in range(0, shape[0] // heads, at_once):
            part = attention.rows(first * heads, (first + at_once) * heads)
            parts.append(attended(part, claim.of(slice(first, first + at_once))))
        return torch.cat(parts)

    def claim(self, shape: tuple[int, ...], rate: float) -> MaskClaim:
        """The next site's masks, for a tensor of this shape. Sites alike are hashed together, at the first of them."""
        number, site = self._site(rate, shape)
        words = self._words[:, :1] if site.kind == "shared" else self._words
        kind = site.axes, shape
        if kind not in self._offsets:
            self._offsets[kind] = self._bank.offsets(words, site.axes, shape)
        return MaskClaim(self._bank, site, self._offsets[kind][number], shape)

    def _site(self, rate: float, shape: tuple[int, ...]) -> tuple[int, Site]:
        number, self._next = self._next, self._next + 1
        site = self._sites[number] if number < len(self._sites) else None
        if site is None or site.rate != rate or not fits(site, shape, rows=self._words.shape[1]):
            seen = f"call {number + 1} of {len(self._sites)}, shape {list(shape)}, rate {rate:g}"
            expected = f"expected {site.kind} at {site.name}, rate {site.rate:g}" if site else "expected no more"
            raise site_mismatch(f"{seen}; {expected}")
        return number, site

    def finish(self) -> None:
        if self._next != len(self._sites):
            raise site_mismatch(f"{self._next} dropout calls instead of {len(self._sites)}")


def site_mismatch(what: str) -> ModelError:
    return ModelError(
        "this model's dropout calls change from text to text, so they cannot be keyed",
        where=what,
        fix=WITHOUT_DROPOUT,
    )


def fits(site: Site, shape: tuple[int, ...], *, rows: int) -> bool:
    expected = (rows * axis.size if axis.role == "rows" else axis.size for axis in site.axes)
    return len(shape) == len(site.axes) and all(
        axis.role == "tokens" or have == want for axis, have, want in zip(site.axes, shape, expected, strict=True)
    )


def sites_of(calls: Sequence[Sequence[Call]], *, rows: tuple[int, int], tokens: tuple[int, int]) -> tuple[Site, ...]:
    """The sites of a model, from two probes whose numbers of rows and of tokens all differ and share no factor."""
    first, second = calls
    if [(c.name, c.rate, len(c.shape)) for c in first] != [(c.name, c.rate, len(c.shape)) for c in second]:
        raise site_mismatch(f"{len(first)} dropout calls for one probe, {len(second)} for the other")
    return tuple(
        Site(a.name, a.rate, tuple(_axis(a, sizes, rows, tokens) for sizes in zip(a.shape, b.shape, strict=True)))
        for a, b in zip(first, second, strict=True)
    )


def _axis(call: Call, sizes: tuple[int, int], rows: tuple[int, int], tokens: tuple[int, int]) -> Axis:
    if sizes[0] == sizes[1]:
        return Axis("fixed", sizes[0])
    if sizes == tokens:
        return Axis("tokens", 1)
    if sizes[0] % rows[0] == 0 and sizes[0] // rows[0] * rows[1] == sizes[1]:
        return Axis("rows", sizes[0] // rows[0])
    raise ModelError(
        "this model's dropout follows neither texts nor tokens, so it cannot be keyed",
        where=f"{call.name}: an axis of {sizes[0]} for {rows[0]} x {tokens[0]} tokens, {sizes[1]} "
        f"for {rows[1]} x {tokens[1]}",
        fix=WITHOUT_DROPOUT,
    )
