"""Which candidate comes next, of p_LM(v) p_T(c | v)^steer, and which must be scored by the teacher to know it.

With Gumbel noise g drawn once, the sample is the argmax of log p_LM + g + steer log p_T. As log p_T is at most 0,
candidates are scored in the order of log p_LM + g: once the best total beats the next bound no later one can win, and
the winner is the very one that scoring all of them gives. Where rounding could decide, that is told, and settled apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
MARGIN = 1e-3
"""Totals nearer than this, times 1 + steer, are a tie: batches of other shapes round otherwise, by far less."""

CUT = 1e-5
"""Likewise of a share of the probability, and ten times this of a logit, at the edge of what is offered."""

FIRST = 4
"""Candidates that are scored together before the first look; later as many as half of those scored before."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the language model's distribution is cut before the teacher is asked. Temperature 0: greedy, at 1."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    candidates: int = 200

    @property
    def most(self) -> int:
        return min(self.candidates, self.top_k or self.candidates)


@dataclass(frozen=True, slots=True)
class Candidates:
    """The candidates of one text's next token, the likeliest first."""

    ids: NDArray[np.int64]
    log_lm: Numbers
    """After temperature."""
    on_edge: bool
    """Rounding could have offered others."""


def offers(logits: torch.Tensor, how: Sequence[SamplingParams], banned: torch.Tensor) -> list[Candidates]:
    """Of rows [texts, vocabulary]; `banned` [texts, vocabulary] is true where a token may not come."""
    scores = logits.masked_fill(banned, float("-inf"))
    scores = scores.cpu() if scores.device.type == "mps" else scores  # which has no fp64
    most = min(max(one.most for one in how) + 1, scores.shape[1])
    best, ids = (found.cpu() for found in scores.topk(most, dim=1))
    heat = torch.tensor([one.temperature or 1.0 for one in how], dtype=torch.float64, device=scores.device)
    whole = torch.logsumexp(scores.double() / heat[:, None], 1).cpu().numpy()
    rows = zip(ids.numpy(), best.double().numpy(), how, whole, strict=True)
    return [_offer(*row) for row in rows]


def _offer(ids: NDArray[np.int64], scores: Numbers, how: SamplingParams, whole: float) -> Candidates:
    """Equal scores stand in the order of their ids; the nucleus is of the whole vocabulary's probability."""
    order = np.lexsort((ids, -scores))
    order = order[np.isfinite(scores[order])]
    more = order[how.most : how.most + 1]
    order = order[: how.most]
    on_edge = bool(len(more) and scores[order[-1]] - scores[more[0]] < 10 * CUT)
    log_lm = scores[order] / (how.temperature or 1.0) - whole
    kept = len(order)
    if how.top_p < 1:
        before = np.cumsum(np.exp(log_lm)) - np.exp(log_lm)
        kept = max(1, int((before < how.top_p).sum()))
        on_edge |= bool((np.abs(before - how.top_p) < CUT).any())
    return Candidates(ids[order[:kept]], log_lm[:kept], on_edge)


class LazySampler:
    """One token of one text: asks for scores until the winner is certain. Without `lazy`, for all: the oracle."""

    def __init__(self, log_lm: Numbers, noise: Numbers, steer: float, *, lazy: bool, most: int | None = None) -> None:
        """`most`: stop after so many scores whatever the bounds say, which is no longer exact."""
        self.bounds = log_lm + noise
        self.steer = steer
        self.lazy = lazy
        order = np.argsort(-self.bounds, kind="stable")
        self.order = order[: most or len(order)]
        self.on_edge = len(order) > len(self.order) and self._gap(order) < MARGIN
        """Rounding could have ordered others among the first `most`."""
        self.totals = np.full(len(log_lm), -np.inf)
        self.scored = 0

    def wanted(self) -> NDArray[np.int64]:
        """The places to score next; none: the winner is known."""
        if self.steer == 0:
            return self.order[:0]
        rest = self.order[self.scored :]
        if not self.lazy:
            return rest
        # One that could only tie is scored too: ties go to the likelier candidate.
        able: NDArray[np.int64] = rest[self.bounds[rest] >= self.totals.max()]
        return able[: max(FIRST, self.scored // 2)]

    def take(self, places: NDArray[np.int64], log_teacher: Numbers) -> None:
        self.totals[places] = self.bounds[places] + self.steer * np.minimum(log_teacher, 0.0)
        self.scored += len(places)

    @property
    def winner(self) -> int:
        return int(self.order[0]) if self.steer == 0 else int(self.totals.argmax())

    def contenders(self) -> NDArray[np.int64]:
        """The winner, and all that could be it but for rounding, in their own order. Mostly it is alone."""
        scored = self.order[: self.scored]
        reach = np.full(len(self.bounds), -np.inf)
        reach[self.order] = self.bounds[self.order]
        reach[scored] = self.totals[scored]
        return np.flatnonzero(reach >= reach[self.winner] - MARGIN * (1 + self.steer))

    def _gap(self, order: NDArray[np.int64]) -> float:
        last, more = order[len(self.order) - 1], order[len(self.order)]
        return float(self.bounds[last] - self.bounds[more])


def chosen_among(exact: LazySampler, most: int) -> bool:
    """Whether scoring only the first `most` would have chosen the same, seen from a choice that is settled."""
    return exact.winner in exact.order[:most]
