"""Divides texts into words, also where a script has no spaces between them."""

from __future__ import annotations

import re

WITHOUT_SPACES = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Burmese, Khmer
    "\u3001-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff01-\uff9f\U00020000-\U0003ffff"  # Chinese, Japanese
)
"""Characters of scripts that put no spaces between words; each counts as a word."""

WORD = re.compile(rf"[{WITHOUT_SPACES}]|[^\s{WITHOUT_SPACES}]+")


def words_of(text: str) -> list[str]:
    """Divides a text at spaces, and scripts without spaces into characters."""
    return WORD.findall(text)
