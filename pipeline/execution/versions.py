"""Versions of the libraries that results are made with."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from amalgam.pipeline.storage.store import Record

LIBRARIES = ("torch", "transformers", "tokenizers", "polars")


@cache
def library_versions() -> dict[str, str]:
    found = {}
    for library in ("amalgam", *LIBRARIES):
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            found[library] = "not installed"
    return found


def version_warnings(manifest: Record) -> Iterator[str]:
    """A library update does not rerun anything by itself; it is said, and `execution.versions=strict` acts on it."""
    now = library_versions()
    for library, before in manifest.made.get("libraries", {}).items():
        if library in LIBRARIES and now.get(library) != before:
            yield f"made with {library} {before}, now {now.get(library)}"
