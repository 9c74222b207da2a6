"""Samples the next token of p_LM(v) p_T(c | v)^strength with as few teacher scores as possible.

With Gumbel noise g, the sample is the argmax of log p_LM + g + strength log p_T. Since log p_T <= 0, candidates are
scored in the order of log p_LM + g until the best total exceeds the next bound. The result equals scoring all of them.
Noise is keyed by text, position and token, so a text is independent of batches, processes and interruptions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from amalgam.pipeline.storage.fingerprint import canonical
from amalgam.stages.common.inference.dropout import GOLDEN, MIX_B, mixed

Floats = NDArray[np.float64]

Item = TypeVar("Item")

MARGIN = 1e-3
"""Totals closer than this times (1 + strength) count as a tie: other batch shapes round differently, by far less."""

CUT = 1e-5
"""The same margin for a share of the probability, and ten times this for a logit, at the cut of the candidates."""

FIRST = 4
"""Candidates scored together in the first round; later rounds score half as many as all rounds before."""

FRACTION = 2.0**-53

QUESTIONS = 1 << 32
"""Positions from here on are beyond the end of any text; they number the draws of a text's own settings."""


# ---- keyed random numbers


def key64(*parts: Any) -> int:
    """Returns a 64-bit key of a text: a hash of its seed, teacher, class and index."""
    return int.from_bytes(hashlib.blake2b(canonical(list(parts)).encode(), digest_size=8).digest(), "little")


def uniform(key: int, position: int, numbers: NDArray[np.int64]) -> Floats:
    """Returns a number strictly between 0 and 1 for each of `numbers` at one position of one text."""
    start = mixed(np.array([key], np.uint64) ^ mixed(np.array([position + 1], np.uint64) * np.uint64(GOLDEN)))
    bits = mixed(start ^ mixed((numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(MIX_B)))
    values: Floats = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * FRACTION
    return values


def gumbel(key: int, position: int, numbers: NDArray[np.int64]) -> Floats:
    """Returns standard Gumbel noise; the argmax of log-weights plus this noise is a sample."""
    noise: Floats = -np.log(-np.log(uniform(key, position, numbers)))
    return noise


def draw_option(key: int, question: int, options: Sequence[Item]) -> Item:
    """Returns the option that a text draws; `question` numbers the text's draws from 0."""
    share = uniform(key, QUESTIONS + question, np.zeros(1, np.int64))[0]
    return options[min(int(share * len(options)), len(options) - 1)]


# ---- candidates


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Limits the language model's distribution before steering. Temperature 0 is greedy decoding at temperature 1."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    candidates: int = 200

    @property
    def limit(self) -> int:
        return min(self.candidates, self.top_k or self.candidates)


@dataclass(frozen=True, slots=True)
class Candidates:
    """The candidates for one text's next token, in descending order of probability."""

    ids: NDArray[np.int64]
    log_lm: Floats
    """After temperature."""
    is_near_tie: bool
    """Rounding could change the set of candidates."""


def find_candidates(logits: torch.Tensor, params: Sequence[SamplingParams], banned: torch.Tensor) -> list[Candidates]:
    """Returns each text's candidates from logits [texts, vocabulary]; tokens where `banned` is true are excluded."""
    scores = logits.masked_fill(banned, float("-inf"))
    scores = scores.cpu() if scores.device.type == "mps" else scores  # MPS has no fp64
    limit = min(max(row.limit for row in params) + 1, scores.shape[1])
    best, ids = (tensor.cpu() for tensor in scores.topk(limit, dim=1))
    temperatures = torch.tensor([row.temperature or 1.0 for row in params], dtype=torch.float64, device=scores.device)
    normalizers = torch.logsumexp(scores.double() / temperatures[:, None], 1).cpu().numpy()
    rows = zip(ids.numpy(), best.double().numpy(), params, normalizers, strict=True)
    return [_candidates(*row) for row in rows]


def _candidates(ids: NDArray[np.int64], scores: Floats, params: SamplingParams, normalizer: float) -> Candidates:
    """Sorts equal scores by id; the nucleus is computed over the whole vocabulary."""
    order = np.lexsort((ids, -scores))
    order = order[np.isfinite(scores[order])]
    excluded = order[params.limit : params.limit + 1]
    order = order[: params.limit]
    is_near_tie = bool(len(excluded) and scores[order[-1]] - scores[excluded[0]] < 10 * CUT)
    log_lm = scores[order] / (params.temperature or 1.0) - normalizer
    kept = len(order)
    if params.top_p < 1:
        before = np.cumsum(np.exp(log_lm)) - np.exp(log_lm)
        kept = max(1, int((before < params.top_p).sum()))
        is_near_tie |= bool((np.abs(before - params.top_p) < CUT).any())
    return Candidates(ids[order[:kept]], log_lm[:kept], is_near_tie)


# ---- one token


class LazySampler:
    """Chooses one token of one text: requests teacher scores until the winner is certain."""

    def __init__(self, log_lm: Floats, noise: Floats, strength: float, *, max_scored: int | None = None) -> None:
        """Stops after `max_scored` scores even if the winner is uncertain; the sample is then inexact."""
        self.bounds = log_lm + noise
        self.strength = strength
        order = np.argsort(-self.bounds, kind="stable")
        self.order = order[: max_scored or len(order)]
        self.is_near_tie = len(order) > len(self.order) and self._gap(order) < MARGIN
        """Rounding could change the first `max_scored` candidates."""
        self.totals = np.full(len(log_lm), -np.inf)
        self.scored = 0

    def pending(self) -> NDArray[np.int64]:
        """Returns the candidates to score next; empty once the winner is known."""
        if self.strength == 0:
            return self.order[:0]
        rest = self.order[self.scored :]
        # A candidate that can only tie is scored too: a tie goes to the more probable candidate.
        able: NDArray[np.int64] = rest[self.bounds[rest] >= self.totals.max()]
        return able[: max(FIRST, self.scored // 2)]

    def take(self, positions: NDArray[np.int64], log_teacher: Floats) -> None:
        self.totals[positions] = self.bounds[positions] + self.strength * np.minimum(log_teacher, 0.0)
        self.scored += len(positions)

    @property
    def winner(self) -> int:
        return int(self.order[0]) if self.strength == 0 else int(self.totals.argmax())

    def near_ties(self) -> NDArray[np.int64]:
        """Returns the winner and every candidate that rounding could make the winner, in the candidates' order."""
        scored = self.order[: self.scored]
        reach = np.full(len(self.bounds), -np.inf)
        reach[self.order] = self.bounds[self.order]
        reach[scored] = self.totals[scored]
        return np.flatnonzero(reach >= reach[self.winner] - MARGIN * (1 + self.strength))

    def _gap(self, order: NDArray[np.int64]) -> float:
        last, excluded = order[len(self.order) - 1], order[len(self.order)]
        return float(self.bounds[last] - self.bounds[excluded])
