"""Counts the texts of a part by writing system, for the page."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable
from functools import cache

from amalgam.pipeline.storage.store import Store
from amalgam.stages.common.corpus import Part, read_bucket
from amalgam.stages.report.json_types import ScriptCounts

MOST_TEXTS, MOST_LETTERS = 5_000, 300
"""Texts of a part, the first in key order, and letters of a text that are read."""

SCRIPTS = {"CJK": "Han", "HIRAGANA": "Japanese kana", "KATAKANA": "Japanese kana", "FULLWIDTH": "Latin"}


def script_counts(store: Store, part: Part) -> ScriptCounts:
    """Counts the first texts in key order by writing system."""
    texts: list[str] = []
    for bucket in part.buckets:
        texts += read_bucket(store, bucket, ["text"]).column("text").to_pylist()[: MOST_TEXTS - len(texts)]
        if len(texts) >= MOST_TEXTS:
            break
    return {"n": len(texts), "scripts": scripts_of(texts)}


def scripts_of(texts: Iterable[str]) -> dict[str, int]:
    """Counts texts by writing system, the most frequent first."""
    return dict(_by_frequency(_script(text[:MOST_LETTERS]) for text in texts))


def _script(text: str) -> str:
    """Returns the writing system of most letters of a text."""
    letters = _by_frequency(_script_of_letter(letter) for letter in text if letter.isalpha())
    return letters[0][0] if letters else "no letters"


def _by_frequency(names: Iterable[str]) -> list[tuple[str, int]]:
    return Counter(sorted(names)).most_common()  # equally frequent names are in alphabetical order


@cache
def _script_of_letter(letter: str) -> str:
    word = unicodedata.name(letter, "OTHER").split()[0]
    return SCRIPTS.get(word, word.capitalize())
