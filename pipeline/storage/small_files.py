"""Small JSON files: each carries its own digest, and a file that nothing else could replace has a copy.

HEAD.json, digests.json, pins, records and the mark of a workspace are written and read only through this module.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

COPY = ".copy.json"


def signed(content: Mapping[str, Any]) -> bytes:
    """Returns the content as JSON with its own digest."""
    raw = json.loads(canonical(content))
    return (json.dumps({**raw, "sha256": _digest(raw)}, indent=1, ensure_ascii=False) + "\n").encode()


def verified(text: bytes | str | None, *, trusted: bool = False) -> dict[str, Any] | None:
    """Returns the content without its digest; None if the text is absent or damaged.

    `trusted`: an index with a digest of its own holds the text.
    """
    try:
        raw = json.loads(text or b"null")
        digest = raw.pop("sha256", None) if isinstance(raw, dict) else None
        return raw if digest is not None and (trusted or digest == _digest(raw)) else None
    except (ValueError, RecursionError):
        return None


def copy_of(path: str) -> str:
    """Returns the path of a file's copy."""
    return str(PurePosixPath(path).with_suffix("")) + COPY


def canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _digest(raw: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical(raw).encode()).hexdigest()
