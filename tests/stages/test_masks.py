"""Masks: pure functions of their words, the same whatever the batch, at the given rate, and independent."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from amalgam.stages.common.inference.dropout import Axis, Bank, bank_levels, row_words, scattered, site_words
from amalgam.tests.stages.tiny_models import key_of

DIGEST = "5e" * 32
CPU = torch.device("cpu")
HIDDEN = (Axis("rows", 1), Axis("tokens", 1), Axis("fixed", 32))
HEADS = (Axis("rows", 1), Axis("fixed", 4), Axis("tokens", 1), Axis("tokens", 1))
POOLED = (Axis("rows", 1), Axis("fixed", 32))


def test_heads_folded_into_the_batch_get_the_masks_of_heads_of_their_own() -> None:
    bank, words = Bank(0, device=CPU, dtype=torch.float32), torch.arange(3)
    apart = bank.mask(
        words, (Axis("rows", 1), Axis("fixed", 4), Axis("tokens", 1), Axis("tokens", 1)), 0.1, (3, 4, 6, 6)
    )
    folded = bank.mask(words, (Axis("rows", 4), Axis("tokens", 1), Axis("tokens", 1)), 0.1, (12, 6, 6))
    single = bank.mask(words[1:2], (Axis("rows", 4), Axis("tokens", 1), Axis("tokens", 1)), 0.1, (4, 6, 6))
    assert torch.equal(folded[4:8], single)
    assert not torch.equal(folded.view(3, 4, 6, 6)[:, 0], folded.view(3, 4, 6, 6)[:, 1])
    assert apart.shape == (3, 4, 6, 6)


@pytest.mark.parametrize("axes", [HIDDEN, HEADS, (Axis("rows", 1), Axis("fixed", 8), Axis("tokens", 1))])
def test_a_mask_of_a_short_batch_is_the_beginning_of_that_of_a_long_one(axes: tuple[Axis, ...]) -> None:
    bank, words = Bank(0, device=CPU, dtype=torch.float32), torch.arange(100, 105)

    def mask(tokens: int, rows: slice) -> torch.Tensor:
        sizes = {"rows": len(words[rows]), "tokens": tokens}
        return bank.mask(words[rows], axes, 0.1, [sizes.get(axis.role, axis.size) for axis in axes])

    short, long = mask(5, slice(1, 4)), mask(33, slice(None))
    long = long[1:4]
    for place, axis in enumerate(axes):
        if axis.role == "tokens":
            long = long.narrow(place, 0, 5)
    assert torch.equal(short, long)


def test_seed_teacher_text_pass_and_site_each_change_the_mask() -> None:
    one = np.array([7])
    words = [
        site_words(row_words(seed, digest, [key], number), 2)
        for seed, digest, key, number in (
            (0, "aa", key_of(1), one),
            (1, "aa", key_of(1), one),
            (0, "ab", key_of(1), one),
            (0, "aa", key_of(2), one),
            (0, "aa", key_of(1)[:15] + b"x", one),
            (0, "aa", key_of(1), one + 1),
        )
    ]
    assert len(set(np.concatenate(words).ravel().tolist())) == 12


def test_masks_are_those_of_every_version_of_this_engine() -> None:
    """If these change, cached passes of old and new texts no longer belong together: raise the engine's version."""
    assert bank_levels(3)[:6].tolist() == GOLDEN_LEVELS
    words = site_words(row_words(3, DIGEST, [key_of(1), key_of(2)], np.array([0, 1])), 2).view(np.int64)
    assert words.ravel().tolist() == GOLDEN_WORDS
    assert scattered(torch.from_numpy(words)).ravel().tolist() == GOLDEN_PLACES
    kept = Bank(3, device=CPU, dtype=torch.float32).mask(torch.from_numpy(words[0]), HEADS, 0.3, (2, 4, 3, 5)) > 0
    assert int(np.packbits(kept.numpy().ravel()).astype(np.int64).sum()) == GOLDEN_KEPT


GOLDEN_LEVELS = [56512, 56477, 6997, 61224, 13314, 17625]
GOLDEN_WORDS = [-6008043535951482276, 7488737513776053662, -8496070551905165107, -8424367885832390241]
GOLDEN_PLACES = [6740081, 6869399, 138842, 3156742]
GOLDEN_KEPT = 2605


def many_words(count: int, sites: int = 1) -> torch.Tensor:
    keys = [key_of(number // 16) for number in range(count)]
    words = site_words(row_words(0, DIGEST, keys, np.arange(count) % 16), sites)
    return torch.from_numpy(words.view(np.int64))


def test_every_rate_is_exact_in_the_bank() -> None:
    levels = bank_levels(0)
    assert np.array_equal(np.bincount(levels), np.full(65536, 128))


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.5])
@pytest.mark.parametrize(("axes", "shape"), [(HIDDEN, (512, 25, 32)), (HEADS, (256, 4, 20, 20)), (POOLED, (9000, 32))])
def test_the_rate_is_the_asked_one(rate: float, axes: tuple[Axis, ...], shape: tuple[int, ...]) -> None:
    mask = Bank(0, device=CPU, dtype=torch.float64).mask(many_words(shape[0])[0], axes, rate, shape)
    dropped = (mask == 0).double()
    deviation = math.sqrt(rate * (1 - rate) / mask.numel())
    assert abs(dropped.mean() - rate) < 4 * deviation + 1 / 65536
    assert abs(mask.mean() - 1) < 4 * deviation / (1 - rate)
    assert torch.allclose(mask[mask > 0], torch.tensor(1 / (1 - rate), dtype=mask.dtype), rtol=1e-4)
    places = dropped.mean(0).sub(rate).div(math.sqrt(rate * (1 - rate) / shape[0]))
    assert abs(places.pow(2).mean() - 1) < 6 * math.sqrt(2 / places.numel())


def correlations(masks: torch.Tensor) -> torch.Tensor:
    """Between every two rows of [rows, draws], times the square root of draws: standard normal if independent."""
    matrix: torch.Tensor = torch.corrcoef(masks.flatten(1).double()) * math.sqrt(masks[0].numel())
    return matrix[torch.ones_like(matrix, dtype=torch.bool).triu(1)]


def test_masks_of_passes_texts_sites_heads_and_tokens_are_uncorrelated() -> None:
    bank = Bank(0, device=CPU, dtype=torch.float32)
    words = many_words(64, sites=20)
    hidden = bank.mask(words[0], HIDDEN, 0.1, (64, 40, 32))
    heads = bank.mask(words[0, :16], HEADS, 0.1, (16, 4, 32, 32))
    sites = torch.stack([bank.mask(of_site[:8], HIDDEN, 0.1, (8, 40, 32)) for of_site in words])
    for masks in (
        hidden,  # 16 passes of 4 texts
        sites,
        heads.flatten(0, 1),  # heads
        heads.permute(2, 0, 1, 3),  # queries
        heads.permute(3, 0, 1, 2),  # keys
        hidden.transpose(0, 1),  # tokens
        hidden.permute(2, 0, 1),  # features
    ):
        z = correlations(masks.contiguous())
        assert z.abs().max() < 5
        assert abs(z.pow(2).mean() - 1) < 6 * math.sqrt(2 / z.numel())


def test_windows_start_everywhere_and_hardly_ever_twice_at_one_place() -> None:
    places = scattered(many_words(1 << 18)[0]).numpy()
    size = 1 << 23
    assert len(np.unique(places)) == pytest.approx(size * (1 - math.exp(-len(places) / size)), rel=1e-3)
    counts = np.bincount(places >> 13, minlength=1024)
    assert abs(((counts - 256) ** 2 / 256).sum() - 1023) < 5 * math.sqrt(2 * 1023)
