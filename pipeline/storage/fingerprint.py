"""Fingerprints: the sha256 of an identity's canonical JSON, and digests of files.

An identity is plain data that a manifest shows: no pickles, paths, times or live objects.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from amalgam import __version__
from amalgam.pipeline.input_files import FileMark, file_digest
from amalgam.pipeline.storage.local import atomic_write
from amalgam.pipeline.storage.paths import small_content
from amalgam.pipeline.storage.small_files import canonical, signed, verified

ABSENT = object()  # an absent field differs from a null

ADDED, REMOVED, UNUSED = "added", "removed", "not used"
"""Words of a change for a field that only one of two identities has."""

LENGTH = 20  # hex digits: 80 bits

DIGEST = re.compile(r"[0-9a-f]{16,}")

LIBRARIES = ("torch", "transformers", "tokenizers", "polars")
"""Results depend on the versions of these libraries."""


def fingerprint(identity: Any) -> str:
    return hashlib.sha256(canonical(identity).encode()).hexdigest()[:LENGTH]


def differences(old: Any, new: Any, path: str = "", *, named: bool = False) -> Iterator[tuple[str, str]]:
    """Yields (dotted path, "old -> new") for every leaf in which two identities differ, in order.

    The path of a `named` value, such as one of a teacher, has no places in lists: a name may end in one, as `v1.5`.
    """
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in [*old, *(key for key in new if key not in old)]:
            inside = f"{path}.{key}" if path else str(key)
            yield from differences(old.get(key, ABSENT), new.get(key, ABSENT), inside, named=named)
    elif _is_named(old) and _is_named(new) and dict(old).keys() != dict(new).keys():
        yield from differences(dict(old), dict(new), path, named=True)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (before, after) in enumerate(zip(old, new, strict=True)):
            if _is_named([before]) and _is_named([after]) and before[0] == after[0]:
                yield from differences(before[1], after[1], f"{path}.{before[0]}", named=True)
            else:
                yield from differences(before, after, path if named else f"{path}.{index}", named=named)
    elif old is ABSENT or new is ABSENT or canonical(old) != canonical(new):  # to an identity, 1 is not 1.0 or true
        yield path, _change(old, new)


def values(identity: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yields (dotted path, value) for every leaf of an identity, in order."""
    if _is_named(identity):
        identity = dict(identity)
    if not isinstance(identity, Mapping):
        yield path, _shown(identity)
        return
    for key, value in identity.items():
        yield from values(value, f"{path}.{key}" if path else str(key))


def _is_named(value: Any) -> bool:
    """Returns whether a value is a list of [name, settings] with different names, such as those of teachers."""
    if not isinstance(value, list) or not all(isinstance(entry, list) and len(entry) == 2 for entry in value):
        return False
    names = {name for name, _ in value if isinstance(name, str)}
    return len(names) == len(value)


def _change(old: Any, new: Any) -> str:
    if old is ABSENT and isinstance(new, Mapping):
        return ADDED
    if new is ABSENT and isinstance(old, Mapping):
        return REMOVED
    if any(isinstance(entry, list | Mapping) for value in (old, new) if isinstance(value, list) for entry in value):
        return "changed"  # the beginnings of nested lists may be equal
    return f"{_shown(old)} -> {_shown(new)}"


def has_two_values(change: str) -> bool:
    """Returns whether a change is of a value, not that an input is new or no longer used."""
    return change not in {ADDED, REMOVED} and UNUSED not in change.split(" -> ")


def _shown(value: Any, limit: int = 40) -> str:
    if value is ABSENT:
        return UNUSED
    if isinstance(value, list) and value and all(isinstance(each, str) and DIGEST.fullmatch(each) for each in value):
        first = ", ".join(digest[:8] for digest in value[:3])
        return first if len(value) < 4 else f"{first} and {len(value) - 3} more"
    text = value if isinstance(value, str) else canonical(value)
    if DIGEST.fullmatch(text):
        return text[:8]
    return text if len(text) <= limit else text[: limit - 3] + "..."


@cache
def library_versions() -> dict[str, str]:
    versions = {"amalgam": __version__}
    for library in LIBRARIES:
        try:
            versions[library] = version(library)
        except PackageNotFoundError:
            versions[library] = "not installed"
    return versions


class FileDigests:
    """Caches digests of source and model files, so that `plan` does not read gigabytes again.

    The key of a digest is the exact file: device, inode, size, and both times to the nanosecond.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._digests = self._stored()
        self._fresh: dict[str, str] = {}

    def __call__(self, path: Path) -> str:
        mark = FileMark.of(path)
        if mark.key in self._digests:
            return self._digests[mark.key]
        digest = file_digest(path)
        if mark.is_settled and FileMark.of(path) == mark:
            self._digests[mark.key] = self._fresh[mark.key] = digest
        return digest

    @property
    def is_changed(self) -> bool:
        return bool(self._fresh)

    def save(self) -> None:
        """Stores new digests; a failure costs only time later."""
        if self._fresh:
            with contextlib.suppress(OSError), atomic_write(self._path) as temporary:
                temporary.write_bytes(signed({"files": {**self._stored(), **self._fresh}}))
        self._fresh = {}

    def _stored(self) -> dict[str, str]:
        """Returns no digest from a damaged file: all are computed again."""
        content = None
        with contextlib.suppress(OSError):
            content = verified(small_content(self._path))
        files = content.get("files") if content else None
        return {str(key): str(digest) for key, digest in files.items()} if isinstance(files, dict) else {}
