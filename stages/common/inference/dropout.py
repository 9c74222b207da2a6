"""Keyed dropout: every mask is a pure function of (seed, teacher, text, pass, site).

A torch function mode intercepts each active dropout call of a model in train(), attention included. So every site of
any architecture is covered, and a site that cannot be keyed raises an error. A mask is a window in a bank of random
numbers; a hashed word gives its start. It is the same on every device, in every dtype, for any batch and any padding.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from amalgam.pipeline.errors import ModelError

Words: TypeAlias = NDArray[np.uint64]


# A window has 2**23 possible starts, so two windows are the same with probability 2**-23 = 1.2e-7.
# Other windows overlap at a shift, so equal positions of a model never use the same draw.
BANK_BITS = 23
BANK_SIZE = 1 << BANK_BITS
LONGEST_WINDOW = 1 << 16
LEVELS = 1 << 16

GOLDEN = 0x9E3779B97F4A7C15
MIX_A = 0xBF58476D1CE4E5B9
MIX_B = 0x94D049BB133111EB


class Axis(NamedTuple):
    """rows: `size` entries a row (heads folded into the batch); tokens: as long as the batch; fixed: `size` long."""

    role: Literal["rows", "tokens", "fixed"]
    size: int


def mixed(words: Words) -> Words:
    """The finaliser of splitmix64, on arrays (numpy wraps arrays silently, scalars with a warning)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(MIX_A)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(MIX_B)
    return words ^ (words >> np.uint64(31))


def row_words(seed: int, digest: str, keys: Sequence[bytes], passes: NDArray[np.int64]) -> Words:
    """One word per (text, pass). A key is 16 bytes; an all-zero key means no text (shared sites)."""
    stream = np.frombuffer(hashlib.blake2b(f"{seed}\n{digest}".encode(), digest_size=16).digest(), "<u8")
    text = np.frombuffer(b"".join(keys), "<u8").reshape(-1, 2)
    words = mixed(text[:, 0] ^ stream[:1]) + np.uint64(GOLDEN)
    words = mixed(words ^ text[:, 1] ^ stream[1:]) + np.uint64(GOLDEN)
    return mixed(words + passes.astype(np.uint64) * np.uint64(MIX_B))


def site_words(rows: Words, sites: int) -> Words:
    """[sites, rows]: a word for each site of each row."""
    numbers = mixed(np.arange(1, sites + 1, dtype=np.uint64) * np.uint64(GOLDEN))
    return mixed(rows[None, :] ^ numbers[:, None])


@lru_cache(maxsize=1)
def bank_levels(seed: int) -> NDArray[np.uint16]:
    """Returns 128 blocks, each with all 65,536 numbers of 16 bits in random order, so every threshold's share is exact.

    Raw Philox draws are replaced by their ranks: unlike distributions, these are the same in every numpy release.
    """
    raw = np.random.Philox(key=seed % (1 << 128)).random_raw(BANK_SIZE // 4).astype("<u8").view("<u2")
    ranks, levels = np.arange(LEVELS, dtype=np.uint16), np.empty((BANK_SIZE // LEVELS, LEVELS), np.uint16)
    for block, draws in zip(levels, raw.reshape(-1, LEVELS), strict=True):  # one at a time stays in the CPU's cache
        block[np.argsort(draws, kind="stable")] = ranks
    return levels.reshape(-1)


@lru_cache(maxsize=2)
@torch.inference_mode(mode=False)
def bank_values(seed: int, rate: float, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Returns the values of a bank's masks, which teachers share."""
    dropped = min(max(round(rate * LEVELS), 1), LEVELS)  # never no level: a rate does not silently become zero
    kept = bank_levels(seed) >= dropped
    mask = torch.from_numpy(np.concatenate([kept, kept[:LONGEST_WINDOW]])).to(device)
    share = dropped / LEVELS
    return mask.to(dtype).mul_(1 / (1 - share) if share < 1 else 0.0)


@lru_cache(maxsize=2)
@torch.inference_mode(mode=False)
def bank_bits(seed: int, rate: float, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, float]:
    """Returns the same masks with 32 units in an int32, and the value of a unit that is kept."""
    values = bank_values(seed, rate, device, dtype)
    words = (values > 0).view(-1, 32).long() << torch.arange(32, device=device)
    return torch.cat([words.sum(1), words.new_zeros(2)]).to(torch.int32), float(values.max())


class Kernels(Protocol):
    """Steps of a layer together with their dropout: module `kernels`. A result of None: the call is not supported.

    A claim of None drops nothing.
    """

    def attend(
        self, attention: Attention, claim: MaskClaim | None, out: torch.Tensor | None = None
    ) -> torch.Tensor | None: ...

    def add_norm(
        self, norm: nn.LayerNorm, hidden: torch.Tensor, rows: torch.Tensor, claim: MaskClaim | None, *, keep: bool
    ) -> torch.Tensor | None: ...

    def gate(self, wide: torch.Tensor, claim: MaskClaim | None, out: torch.Tensor) -> torch.Tensor | None: ...

    def multiply(self, rows: torch.Tensor, claim: MaskClaim) -> torch.Tensor | None: ...

    def offsets(self, words: torch.Tensor, places: torch.Tensor) -> torch.Tensor: ...


@dataclass(eq=False)
class Bank:
    """Masks (0 where dropped, else 1 / (1 - rate)) on one device and in one dtype, all from the same numbers."""

    seed: int
    device: torch.device
    dtype: torch.dtype
    kernels: Kernels | None = None
    """Used instead of separate steps, if there are any for this device."""
    _masks: dict[float, torch.Tensor] = field(default_factory=dict)
    _bits: dict[float, tuple[torch.Tensor, float]] = field(default_factory=dict)
    _steps: dict[int, torch.Tensor] = field(default_factory=dict)

    def mask(self, words: torch.Tensor, axes: Sequence[Axis], rate: float, shape: Sequence[int]) -> torch.Tensor:
        """The mask of one site for rows with these words."""
        return self.at(self.offsets(words[None], axes, shape)[0], axes, rate, shape)

    def offsets(self, words: torch.Tensor, axes: Sequence[Axis], shape: Sequence[int]) -> torch.Tensor:
        """Returns the starts [sites, rows, ...] of the windows of sites of one form, from their words [sites, rows].

        Each head, query and token has its own window, by its hashed number, so values do not depend on batch length.
        """
        lead = leading(axes)
        length = math.prod(shape[lead:])
        if length > LONGEST_WINDOW:
            raise ModelError(
                f"a dropout site is {length} wide; the widest that can be keyed is {LONGEST_WINDOW}",
                fix="set a lower max_tokens for this teacher, cache.passes: 0, or leave it out",
            )
        sizes: list[int] = []
        view: list[int] = []
        for axis, size in zip(axes[:lead], shape[:lead], strict=True):
            rows = axis.role == "rows"  # rows that carry heads are spread over two axes
            sizes += [1, axis.size] if rows else [size]
            view += [-1, 1] if rows else [1]
        start = words.reshape(len(words), *view)
        terms = [self._step(i, size, len(sizes)) for i, size in enumerate(sizes) if size > 1]
        if not terms:
            return scattered(start)
        places = sum(terms[1:], terms[0])  # the small terms first: only the last sum has a row axis
        if self.kernels is not None and view[0] == -1 and -1 not in view[1:]:
            return self.kernels.offsets(words, places).view(len(words), -1, *sizes[1:])
        return scattered(places + start)

    def at(
        self,
        offsets: torch.Tensor,
        axes: Sequence[Axis],
        rate: float,
        shape: Sequence[int],
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The mask of one site whose windows start there."""
        length = math.prod(shape[leading(axes) :])
        windows = self.values(rate).as_strided((BANK_SIZE, length), (1, 1))
        out = None if out is None else out.view(-1, length)
        return torch.index_select(windows, 0, offsets.reshape(-1), out=out).view(*shape)

    def values(self, rate: float) -> torch.Tensor:
        """The whole bank at a rate; from any offset on, a window fits."""
        if rate not in self._masks:
            self._masks[rate] = bank_values(self.seed, rate, self.device, self.dtype)
        return self._masks[rate]

    def bits(self, rate: float) -> tuple[torch.Tensor, float]:
        """The bank at a rate with 32 units in an int32, and the value of a unit that is kept."""
        if rate not in self._bits:
            self._bits[rate] = bank_bits(self.seed, rate, self.device, self.dtype)
        return self._bits[rate]

    def _step(self, number: int, size: int, dims: int) -> torch.Tensor:
        """Axis `number` of `dims`: place * an odd constant of the axis, wrapping."""
        steps = self._steps.get(number)
        if steps is None or len(steps) < size:
            odd = int(mixed(np.array([number + 1], np.uint64)).view(np.int64)[0]) | 1
            steps = self._steps[number] = torch.arange(1 << (size - 1).bit_length(), device=self.device).mul_(odd)
        return steps[:size].view([size if i == number else 1 for i in range(dims)])


def leading(axes: Sequence[Axis]) -> int:
    """How many axes come before the window: the last axis, and the fixed ones before it while they fit."""
    lead = len(axes)
    length = 1
    while lead and axes[lead - 1].role == "fixed" and length * axes[lead - 1].size <= LONGEST_WINDOW:
        lead -= 1
        length *= axes[lead].size
    return lead - 1 if lead == len(axes) and axes[-1].role == "tokens" else lead


def scattered(words: torch.Tensor) -> torch.Tensor:
    """Words to places in the bank: two rounds of multiply and fold. int64 wraps; its shift is arithmetic, so masked."""
    words = words ^ ((words >> 32) & 0xFFFFFFFF)
    words = words.mul_(MIX_A - (1 << 64))
    words.bitwise_xor_((words >> 29).bitwise_and_((1 << 35) - 1))
    return words.mul_(MIX_B - (1 << 64)).bitwise_right_shift_(64 - BANK_BITS).bitwise_and_(BANK_SIZE - 1)


SCORES_AT_ONCE = {"cpu": 1 << 19, "accelerator": 1 << 27}
"""On a CPU a block stays in cache and in mapped memory, which plain attention does not."""

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

    def fits(self, shape: tuple[int, ...], *, rows: int) -> bool:
        """Returns whether a call with this shape may be this site in a launch of so many rows."""
        return len(shape) == len(self.axes) and all(
            axis.role == "tokens" or size == (rows * axis.size if axis.role == "rows" else axis.size)
            for axis, size in zip(self.axes, shape, strict=True)
        )


class Call(NamedTuple):
    """One dropout call, as a probe recorded it."""

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
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    return Attention(query, key, value, attn_mask, dropout_p, scale)


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


def _plain_attention(attention: Attention) -> torch.Tensor:
    query, key, value, mask = attention[:4]
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=attention.scale)


def gated(wide: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """GEGLU: GELU of the first half of each row, times the second."""
    first, second = wide.chunk(2, dim=-1)
    return torch.mul(functional.gelu(first), second, out=out)


def hide(scores: torch.Tensor, mask: torch.Tensor) -> None:
    """Hidden keys get the lowest finite score instead of -inf: a row without any key then stays finite."""
    lowest = torch.finfo(scores.dtype).min
    if mask.dtype == torch.bool:
        scores.masked_fill_(mask.logical_not(), lowest)
    else:
        scores.add_(mask).clamp_(min=lowest)


def scores_at_once(device: torch.device) -> int:
    return SCORES_AT_ONCE.get(device.type, SCORES_AT_ONCE["accelerator"])


DROPOUT = {functional.dropout, torch.dropout, torch.dropout_}

CHANNEL_DROPOUT: set[Any] = {functional.dropout1d, functional.dropout2d, functional.dropout3d}
CHANNEL_DROPOUT |= {torch.feature_dropout, torch.feature_dropout_}
"""These drop whole channels: the mask has one value for each."""

RANDOM = re.compile(
    r"rand\w*|(bernoulli|exponential|geometric|multinomial|normal|poisson|uniform)_?"
    r"|(feature_)?alpha_dropout_?|native_dropout|gumbel_softmax"
)
"""Names of functions that draw random numbers, other than those above."""

REFUSED = {
    getattr(module, name)
    for module in (torch, torch.Tensor, functional)
    for name in dir(module)
    if RANDOM.fullmatch(name)
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
        if func is functional.scaled_dot_product_attention:
            rate = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
            return self.attention(_attention_call(*args, **kwargs)) if rate else func(*args, **kwargs)
        if func in REFUSED:
            raise unsupported_dropout(getattr(func, "__name__", str(func)))
        return func(*args, **kwargs)

    def dropped(self, x: torch.Tensor, rate: float, shape: tuple[int, ...], *, inplace: bool) -> torch.Tensor:
        raise NotImplementedError

    def attention(self, attention: Attention) -> torch.Tensor:
        raise NotImplementedError


class UnkeyedDropoutError(ModelError):
    """A model whose dropout masks cannot be keyed by text and pass."""


def unsupported_dropout(what: str) -> ModelError:
    return UnkeyedDropoutError(f"this model draws random numbers that amalgam cannot key: {what}", fix=WITHOUT_DROPOUT)


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
        return _plain_attention(attention)


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
    """Masks for one launch: `words` is [sites, rows], of which shared sites use the first row alone.

    Calls before site `first` leave their numbers as they are.
    """

    def __init__(self, bank: Bank, sites: Sequence[Site], words: torch.Tensor, first: int = 0) -> None:
        super().__init__()
        self._bank = bank
        self._sites = sites
        self._words = words
        self._first = first
        self._next = 0
        self._offsets: dict[tuple[tuple[Axis, ...], tuple[int, ...]], torch.Tensor] = {}

    def skip(self) -> None:
        """Continues at site `first`: the caller leaves out the layers before it."""
        self._next = self._first

    def _is_early(self) -> bool:
        """Returns whether the next call is before site `first`, and counts it if so."""
        early = self._next < self._first
        self._next += early
        return early

    def dropped(self, x: torch.Tensor, rate: float, shape: tuple[int, ...], *, inplace: bool) -> torch.Tensor:
        if self._is_early():
            return x
        claim = self.claim(shape, rate)
        if self._bank.kernels is not None and not inplace and shape == tuple(x.shape):
            product = self._bank.kernels.multiply(x, claim)
            if product is not None:
                return product
        mask = claim.whole()
        if inplace:
            return x.mul_(mask)
        return mask.mul_(x) if mask.shape == x.shape and mask.dtype == x.dtype else x * mask

    def attention(self, attention: Attention) -> torch.Tensor:
        if self._is_early():
            return _plain_attention(attention)
        shape = attention.scores_shape
        claim = self.claim(shape, attention.rate)
        mixed = self._bank.kernels.attend(attention, claim) if self._bank.kernels is not None else None
        if mixed is not None:
            return mixed
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
        number, self._next = self._next, self._next + 1
        site = self._sites[number] if number < len(self._sites) else None
        if site is None or site.rate != rate or not site.fits(shape, rows=self._words.shape[1]):
            seen = f"call {number + 1} of {len(self._sites)}, shape {list(shape)}, rate {rate:g}"
            expected = f"expected {site.kind} at {site.name}, rate {site.rate:g}" if site else "expected no more"
            raise site_mismatch(f"{seen}; {expected}")
        words = self._words[:, :1] if site.kind == "shared" else self._words
        kind = site.axes, shape
        if kind not in self._offsets:
            self._offsets[kind] = self._bank.offsets(words, site.axes, shape)
        return MaskClaim(self._bank, site, self._offsets[kind][number], shape)

    def finish(self) -> None:
        if self._next != len(self._sites):
            raise site_mismatch(f"{self._next} dropout calls instead of {len(self._sites)}")


def site_mismatch(where: str) -> ModelError:
    what = "this model's dropout calls change from text to text, so they cannot be keyed"
    return UnkeyedDropoutError(what, where=where, fix=WITHOUT_DROPOUT)


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
    raise UnkeyedDropoutError(
        "this model's dropout follows neither texts nor tokens, so it cannot be keyed",
        where=f"{call.name}: an axis of {sizes[0]} for {rows[0]} x {tokens[0]} tokens, {sizes[1]} "
        f"for {rows[1]} x {tokens[1]}",
        fix=WITHOUT_DROPOUT,
    )
