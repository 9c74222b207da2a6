"""Identity: canonical JSON -> sha256, the only place where a fingerprint is made.

Never pickles, paths, times or live objects: what goes in is plain data that a person can read in a manifest.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ABSENT = object()  # a field that is not there is not a field that is null

LENGTH = 20  # hex digits: 80 bits, enough for any workspace and short enough to read aloud

DIGEST = re.compile(r"[0-9a-f]{16,}")


def canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def fingerprint(identity: Any) -> str:
    return hashlib.sha256(canonical(identity).encode()).hexdigest()[:LENGTH]


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def differences(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """(dotted path, "old -> new") for every leaf in which two identities differ, in order."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in [*old, *(key for key in new if key not in old)]:
            yield from differences(old.get(key, ABSENT), new.get(key, ABSENT), f"{path}.{key}" if path else str(key))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from differences(before, after, f"{path}.{index}")
    elif old is ABSENT or new is ABSENT or canonical(old) != canonical(new):  # to an identity, 1 is not 1.0 or true
        yield path, f"{_shown(old)} -> {_shown(new)}"


def _shown(value: Any, limit: int = 40) -> str:
    if value is ABSENT:
        return "nothing"
    text = value if isinstance(value, str) else canonical(value)
    if DIGEST.fullmatch(text):
        return text[:8]  # as much as a person compares
    return text if len(text) <= limit else text[: limit - 3] + "..."
