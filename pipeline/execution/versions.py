"""Versions of the libraries that results are made with."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from amalgam.pipeline.storage.store import Record

LIBRARIES = ("torch", "transformers", "tokenizers", "polars")


@cache
def library_versions() -> dict[str, str]:
    versions = {}
    for library in ("amalgam", *LIBRARIES):
        try:
            versions[library] = version(library)
        except PackageNotFoundError:
            versions[library] = "not installed"
    return versions


def version_warnings(manifest: Record) -> Iterator[str]:
    """Yields a warning per updated library; with `execution.on_version_change=strict` an update reruns stages."""
    now = library_versions()
    for library, before in manifest.made.get("libraries", {}).items():
        if library in LIBRARIES and now.get(library) != before:
            yield f"made with {library} {before}, now {now.get(library)}"
