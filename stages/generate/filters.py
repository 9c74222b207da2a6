"""What can be said of a text without a teacher: its length, how much it repeats itself, how near an earlier one is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

RUN = 3
"""Words of a sequence."""


Sequences = frozenset[tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Quality:
    words: int
    repetition: float
    near_duplicate: float


def sequences(words: list[str]) -> list[tuple[str, ...]]:
    """All of three words; of a shorter text, the text."""
    return [tuple(words[start : start + RUN]) for start in range(max(1, len(words) - RUN + 1))]


def qualities(texts: Iterable[str]) -> list[Quality]:
    """In the order given: a text is compared with those before it, so that more texts change nothing."""
    earlier = _Earlier()
    found = []
    for text in texts:
        words = text.lower().split()
        runs = sequences(words)
        own = frozenset(runs)
        found.append(Quality(len(words), 1 - len(own) / len(runs), earlier.nearest(own) if words else 0.0))
    return found


class _Earlier:
    """Exact: texts that share a sequence are found by it. Copies are met once, so that many of them cost little."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._holders: dict[tuple[str, ...], list[int]] = {}
        self._whole: set[Sequences] = set()

    def nearest(self, own: Sequences) -> float:
        if own in self._whole:
            return 1.0
        shared = Counter(holder for run in own for holder in self._holders.get(run, ()))
        nearest = max((n / (len(own) + self._sizes[holder] - n) for holder, n in shared.items()), default=0.0)
        self._whole.add(own)
        for run in own:
            self._holders.setdefault(run, []).append(len(self._sizes))
        self._sizes.append(len(own))
        return nearest
