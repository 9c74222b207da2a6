"""Keyed masks: a bank of random numbers, and hashed words that give the start of each window in it.

A word is 64 hashed bits of (seed, teacher, text, pass, site); heads and tokens are hashed in on the device. The same
bank and words give the same mask on every device, in every dtype, for any batch and any padding.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

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
    order = np.argsort(raw.reshape(-1, LEVELS), axis=1, kind="stable").astype(np.int64)
    levels = np.empty(order.shape, np.uint16)
    np.put_along_axis(levels, order, np.broadcast_to(np.arange(LEVELS, dtype=np.uint16), order.shape), 1)
    return levels.reshape(-1)


class Bank:
    """Masks (0 where dropped, else 1 / (1 - rate)) on one device and in one dtype, all from the same numbers."""

    def __init__(self, seed: int, *, device: torch.device, dtype: torch.dtype) -> None:
        self.seed = seed
        self.device = device
        self.dtype = dtype
        self._masks: dict[float, torch.Tensor] = {}
        self._steps: dict[int, torch.Tensor] = {}

    def mask(self, words: torch.Tensor, axes: Sequence[Axis], rate: float, shape: Sequence[int]) -> torch.Tensor:
        """The mask of one site for rows with these words."""
        return self.at(self.offsets(words[None], axes, shape)[0], axes, rate, shape)

    def offsets(self, words: torch.Tensor, axes: Sequence[Axis], shape: Sequence[int]) -> torch.Tensor:
        """Returns the starts [sites, rows, ...] of the windows of sites of one form, from their words [sites, rows].

        Each head, query and token has its own window, by its hashed number, so values do not depend on batch length.
        """
        lead = leading(axes)
        return scattered(self._spread(words, axes[:lead], shape[:lead]))

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
        return self.windows(offsets, length, rate, None if out is None else out.view(-1, length)).view(*shape)

    def windows(self, offsets: torch.Tensor, length: int, rate: float, out: torch.Tensor | None = None) -> torch.Tensor:
        """[offsets, length]: the mask values from each offset on."""
        if length > LONGEST_WINDOW:
            raise ModelError(
                f"a dropout site is {length} wide; the widest that can be keyed is {LONGEST_WINDOW}",
                fix="set a lower max_tokens for this teacher, cache.passes: 0, or leave it out",
            )
        windows = self.values(rate).as_strided((BANK_SIZE, length), (1, 1))
        return torch.index_select(windows, 0, offsets.reshape(-1), out=out)

    def values(self, rate: float) -> torch.Tensor:
        """The whole bank at a rate; from any offset on, a window fits."""
        values = self._masks.get(rate)
        if values is None:
            values = self._masks[rate] = self._whole(rate)
        return values

    def held(self) -> list[torch.Tensor]:
        """What masks are made of."""
        return [*self._masks.values(), *self._steps.values()]

    def _whole(self, rate: float) -> torch.Tensor:
        kept = bank_levels(self.seed) >= threshold(rate)
        mask = torch.from_numpy(np.concatenate([kept, kept[:LONGEST_WINDOW]])).to(self.device)
        return mask.to(self.dtype).mul_(scale(rate))

    def _spread(self, words: torch.Tensor, axes: Sequence[Axis], shape: Sequence[int]) -> torch.Tensor:
        """A word for each place on the leading axes, site by site. Rows that carry heads are spread over two axes."""
        sizes: list[int] = []
        view: list[int] = []
        for axis, size in zip(axes, shape, strict=True):
            rows = axis.role == "rows"
            sizes += [1, axis.size] if rows else [size]
            view += [-1, 1] if rows else [1]
        places = [self._step(i, size, len(sizes)) for i, size in enumerate(sizes) if size > 1]
        start = words.reshape(len(words), *view)
        # The small terms first: only the last sum has a row axis.
        return sum(places[1:], places[0]) + start if places else start

    def _step(self, number: int, size: int, dims: int) -> torch.Tensor:
        """Axis `number` of `dims`: place * an odd constant of the axis, wrapping."""
        steps = self._steps.get(number)
        if steps is None or len(steps) < size:
            odd = int(mixed(np.array([number + 1], np.uint64)).view(np.int64)[0]) | 1
            steps = self._steps[number] = torch.arange(1 << (size - 1).bit_length(), device=self.device).mul_(odd)
        return steps[:size].view([size if i == number else 1 for i in range(dims)])


def threshold(rate: float) -> int:
    """How many of the 65536 levels are dropped: never none, so that no rate silently becomes zero."""
    return min(max(round(rate * LEVELS), 1), LEVELS)


def scale(rate: float) -> float:
    dropped = threshold(rate) / LEVELS
    return 1 / (1 - dropped) if dropped < 1 else 0.0


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
