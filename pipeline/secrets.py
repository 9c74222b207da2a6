"""Finds passwords and access tokens in text, so that no message, file or report shows them."""

from __future__ import annotations

import itertools
import re

MASK = "(not shown)"

PATTERNS = re.compile(
    r"""
    \bhf_[A-Za-z0-9]{16,}
    | \b(?:gh[opsur]_|github_pat_)[A-Za-z0-9_]{16,}
    | \bglpat-[A-Za-z0-9_-]{16,}
    | \bsk-[A-Za-z0-9_-]*?[A-Za-z0-9]{16}[A-Za-z0-9_-]*
    | \bxox[abeprs]-[A-Za-z0-9-]{10,}
    | \bA(?:KIA|SIA)[0-9A-Z]{16}\b
    | (?i:secret_?access_?key\W{1,4})[A-Za-z0-9/+]{40}
    | (?<=://)[^/\s]*:[^/\s@]*@
    | (?<=[?&])(?i:x-(?:amz|goog)-(?:signature|credential|security-token)|sig|signature|awsaccesskeyid)=[^&\s'"]+
    | (?<=[?&])(?i:token|access_token|api_?key|password)=[^&\s'"]+
    """,
    re.VERBOSE,
)
"""Tokens of the Hub, OpenAI, GitHub, GitLab, Slack and AWS, passwords in addresses, and presigned addresses."""

SECRET_KEY = re.compile(r"(?<![A-Za-z0-9/+._-])[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=._-])")
LEAST_CHANGES = 12
"""Changes between lower case, upper case, digits and signs in the 40 characters of a secret key of AWS.

A random key has 25 on average. Digests have no upper case, words no digits, and paths change less often.
"""


def has_secret(text: str) -> bool:
    return bool(PATTERNS.search(text)) or any(map(_is_random, SECRET_KEY.findall(text)))


def masked(text: str) -> str:
    """Returns the text with `(not shown)` for each secret."""
    text = PATTERNS.sub(MASK, text)
    return SECRET_KEY.sub(lambda match: MASK if _is_random(match[0]) else match[0], text)


def _is_random(text: str) -> bool:
    kinds = [(letter.islower(), letter.isupper(), letter.isdigit()) for letter in text]
    changes = sum(before != after for before, after in itertools.pairwise(kinds))
    return changes >= LEAST_CHANGES and all(map(any, zip(*kinds, strict=True)))
