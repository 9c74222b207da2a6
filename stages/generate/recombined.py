"""Recombines the texts of a corpus into new texts, for students that learn from few."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from amalgam.data.words import WITHOUT_SPACES, words_of

END = ""
"""The word before the first and after the last word of each text; no other word is empty."""

REPLACED, REPLACED_BETWEEN = 0.25, 0.5
"""Share of words that are replaced by any word, or by one that has the same two neighbours in some text."""

BETWEEN_WORDS = re.compile(rf" (?=[{WITHOUT_SPACES}])|(?<=[{WITHOUT_SPACES}]) ")


class Recombiner:
    """Makes texts of the words of other texts: each is one of them, changed in one of four ways."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = [words for words in map(words_of, texts) if words]
        self.words = [word for words in self.texts for word in words]
        self.longest = max(map(len, self.texts), default=0)
        self.after: dict[str, list[str]] = defaultdict(list)
        self.between: dict[tuple[str, str], list[str]] = defaultdict(list)
        for words in self.texts:
            around = [END, *words, END]
            for before, word in pairwise(around):
                self.after[before].append(word)
            for before, word, behind in zip(around, around[1:], around[2:], strict=False):
                self.between[before, behind].append(word)

    def text(self, place: int, key: int) -> str:
        """Returns the text at the place, changed; the key determines all draws."""
        random = np.random.default_rng(key)
        ways = [self.joined, self.continued, self.replaced_between, self.replaced]
        change = ways[random.integers(len(ways))]
        return BETWEEN_WORDS.sub("", " ".join(change(self.texts[place % len(self.texts)], random)))

    def joined(self, words: list[str], random: np.random.Generator) -> list[str]:
        """Joins the first words with the last words of another text."""
        other = self.texts[random.integers(len(self.texts))]
        return words[: random.integers(1, len(words) + 1)] + other[random.integers(len(other)) :]

    def continued(self, words: list[str], random: np.random.Generator) -> list[str]:
        """Continues the first words: each next word follows the last one in some text."""
        new = words[: random.integers(1, len(words) + 1)]
        while len(new) < self.longest and (word := _one_of(self.after[new[-1]], random)) != END:
            new.append(word)
        return new

    def replaced_between(self, words: list[str], random: np.random.Generator) -> list[str]:
        around = [END, *words, END]
        for place in range(1, len(around) - 1):
            others = self.between.get((around[place - 1], around[place + 1]))
            if others and random.random() < REPLACED_BETWEEN:
                around[place] = _one_of(others, random)
        return around[1:-1]

    def replaced(self, words: list[str], random: np.random.Generator) -> list[str]:
        return [_one_of(self.words, random) if random.random() < REPLACED else word for word in words]


def _one_of(words: list[str], random: np.random.Generator) -> str:
    return words[random.integers(len(words))]
