"""Which writing systems texts are in: the system of most of a text's letters, by their Unicode names."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable
from functools import cache

LETTERS = 300
"""Of a text, so many are looked at."""
NAMES = {"CJK": "Han", "HIRAGANA": "Japanese kana", "KATAKANA": "Japanese kana", "FULLWIDTH": "Latin"}


def scripts_of(texts: Iterable[str]) -> dict[str, int]:
    """Texts by writing system, the most frequent first."""
    found = Counter(_script(text[:LETTERS]) for text in texts)
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def _script(text: str) -> str:
    letters: Counter[str] = Counter()
    for letter, count in Counter(text).items():
        name = _of_letter(letter)
        if name:
            letters[name] += count
    return min(letters, key=lambda name: (-letters[name], name)) if letters else "no letters"


@cache
def _of_letter(letter: str) -> str:
    if not letter.isalpha():
        return ""
    word = unicodedata.name(letter, "OTHER").split()[0]
    return NAMES.get(word, word.capitalize())
