"""What the report finds: of every system on the test part, and of what was taught on the training texts."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Any

from amalgam.pipeline.execution.stage import Run
from amalgam.stages.common.corpus import Part, part_of, tables
from amalgam.stages.report.evaluation import answered, evaluation_of
from amalgam.stages.report.student_quality import looked_at
from amalgam.stages.report.target_quality import taught
from amalgam.stages.report.training_texts import taught_part

Found = dict[str, Any]

LOOKED_AT = 5_000
"""Texts of a part, the first in key order, whose writing systems are told."""


def find(run: Run) -> tuple[Found | None, Found]:
    """The evaluation, where there are labelled test texts, and the rest."""
    test = part_of(run, "test")
    found = answered(run, test) if test else None
    evaluation = evaluation_of(run, test, found) if test and found else None
    judged = looked_at(run, test, found) if test and found else None
    train = taught_part(run)
    return evaluation, {
        "judged": judged,
        "taught": taught(run),
        "scripts": {part.name: _scripts(run, part) for part in (train, test) if part},
    }


def _scripts(run: Run, part: Part) -> Found:
    texts: list[str] = []
    for table in tables(run, part):
        texts += table.column("text").to_pylist()[: LOOKED_AT - len(texts)]
        if len(texts) >= LOOKED_AT:
            break
    return {"n": len(texts), "scripts": scripts_of(texts)}


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
