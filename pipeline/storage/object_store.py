"""A workspace in an object store: S3, Google Cloud Storage or Azure, through obstore.

Each object is one put of complete bytes, nothing is renamed, and records use conditional puts. Files are copied once
to this machine's cache and read there; digests verify the copies.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotFoundError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import from_url

from amalgam.pipeline.errors import AmalgamError, ExperimentError
from amalgam.pipeline.storage.backend import FileInfo
from amalgam.pipeline.storage.local import replacing
from amalgam.pipeline.storage.packing import cache_folder, endpoint

PROBE = "put-if-absent.json"
"""Object that `check` puts twice: the second put must be refused."""

AT_ONCE = 32
"""Number of parallel requests."""

FEW = 16
"""Up to this number of files one request each is sent; for more, their folders are listed first."""

MULTIPART_BYTES = 1 << 30
"""Larger files are uploaded in parts, which become visible together."""

RECENT_SECONDS = 30.0
"""Lifetime of a cached listing. Files that it lacks are requested by name; a deletion clears it."""


T = TypeVar("T")


class ObjectStorage:
    is_remote = True

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        if "@" in address or "?" in address or not address.partition("://")[2].strip("/"):
            raise ExperimentError(
                "the workspace's address is not BUCKET/PREFIX",
                where="execution.workspace",
                fix="s3://bucket/prefix; keys come from the environment (AWS_ACCESS_KEY_ID, ...), never from the file",
            )
        self.root = cache_folder(self.address)
        self._listings: dict[str, tuple[float, dict[str, int]]] = {}

    # ---- requests

    @cached_property
    def _client(self) -> Any:
        plain = (endpoint(self.address) or "").startswith("http://")
        return from_url(self.address, client_options={"allow_http": plain})

    def _request(self, path: str, work: Callable[[Any], T]) -> T | None:
        """Returns None if the object does not exist; any other failure raises, so an outage is not an empty store."""
        try:
            return work(self._client)
        except (NotFoundError, FileNotFoundError):
            return None
        except (PermissionDeniedError, UnauthenticatedError, BaseError) as error:
            message = re.sub(r"\?\S+", "", str(error).strip().partition("\n")[0])[:300]  # a query may hold a signature
            raise AmalgamError(
                f"the object store refused a request ({type(error).__name__}): {message}",
                where=f"{self.address}/{path}",
                fix="check the address, AWS_ENDPOINT_URL and the keys in the environment, then run it again",
            ) from error

    def _parallel(self, work: Callable[[str], T], paths: Sequence[str]) -> list[T]:
        if len(paths) < 2:
            return [work(path) for path in paths]
        with ThreadPoolExecutor(min(AT_ONCE, len(paths))) as workers:
            return list(workers.map(work, paths))

    def check(self) -> None:
        """Raises if the store overwrites: then the last of two writers would win unnoticed."""
        if self.put_if_absent(PROBE, b"{}\n") and self.put_if_absent(PROBE, b"{}\n"):
            raise ExperimentError(
                "this object store does not support conditional writes (If-None-Match)",
                where=self.address,
                fix="use a store that does (S3, Google Cloud Storage, Azure, MinIO, newer Ceph), or a shared disk",
            )
        self.root.mkdir(parents=True, exist_ok=True)

    # ---- reading

    def read(self, paths: Sequence[str]) -> dict[str, bytes]:
        wanted = list(paths)
        if len(wanted) > FEW:
            listed = self._listed(wanted)
            wanted = [path for path in wanted if path in listed]
        contents = zip(wanted, self._parallel(self._read, wanted), strict=True)
        return {path: content for path, content in contents if content is not None}

    def _read(self, path: str) -> bytes | None:
        return self._request(path, lambda client: bytes(obstore.get(client, path).bytes()))

    def sizes(self, paths: Sequence[str]) -> dict[str, int]:
        listed = self._listed(paths) if len(paths) > FEW else {}
        sizes = {path: listed[path] for path in paths if path in listed}
        rest = [path for path in paths if path not in sizes]
        requested = zip(rest, self._parallel(self._size, rest), strict=True)
        return sizes | {path: size for path, size in requested if size is not None}

    def _size(self, path: str) -> int | None:
        return self._request(path, lambda client: int(obstore.head(client, path)["size"]))

    def _listed(self, paths: Iterable[str]) -> dict[str, int]:
        """Returns the sizes of all files in the folders of these paths; each folder is listed once."""
        now = time.monotonic()
        folders = sorted({path.rpartition("/")[0] for path in paths})
        recent = {
            folder: sizes for folder, (when, sizes) in list(self._listings.items()) if now - when < RECENT_SECONDS
        }
        listings = {folder: recent[folder] for folder in folders if folder in recent}
        old = [folder for folder in folders if folder not in recent]
        for folder, entries in zip(old, self._parallel(self.files_below, old), strict=True):
            listings[folder] = {entry.path: entry.bytes for entry in entries}
            self._listings[folder] = now, listings[folder]
        return {path: size for sizes in listings.values() for path, size in sizes.items()}

    def files_below(self, folder: str) -> list[FileInfo]:
        def entries(client: Any) -> list[FileInfo]:
            return [_entry(meta) for chunk in obstore.list(client, folder or None, chunk_size=1000) for meta in chunk]

        return self._request(folder, entries) or []

    def list(self, folder: str = "") -> Iterator[FileInfo]:
        """Lists the folders of the second level in parallel, because one listing returns page after page."""

        def level(path: str) -> Any:
            return self._request(path, lambda client: obstore.list_with_delimiter(client, path or None))

        folders, entries = [folder], []
        for _ in range(2):
            levels = [listing for listing in self._parallel(level, folders) if listing]
            entries += [_entry(meta) for listing in levels for meta in listing["objects"]]
            folders = [prefix for listing in levels for prefix in listing["common_prefixes"]]
        entries += [entry for below in self._parallel(self.files_below, folders) for entry in below]
        yield from sorted(entries, key=lambda entry: entry.path)

    def get(self, paths: Sequence[str]) -> set[str]:
        copied = zip(paths, self._parallel(self._get, paths), strict=True)
        return {path for path, exists in copied if exists}

    def _get(self, path: str) -> bool:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)

        def download(client: Any) -> bool:
            content = obstore.get(client, path)
            with replacing(target) as temporary, temporary.open("wb") as file:
                for chunk in content.stream():
                    file.write(chunk)
            return True

        exists = bool(self._request(path, download))
        if not exists:
            target.unlink(missing_ok=True)
        return exists

    # ---- writing

    def put_if_absent(self, path: str, content: bytes) -> bool:
        """A retried put whose first answer was lost returns False; the caller then compares digests."""

        def put(client: Any) -> bool:
            with contextlib.suppress(AlreadyExistsError, PreconditionError, FileExistsError):
                obstore.put(client, path, content, mode="create")
                return True
            return False

        return bool(self._request(path, put))

    def put(self, files: Mapping[str, bytes | Path]) -> None:
        """Uploads the files; a local file then moves into the cache."""
        self._parallel(lambda path: self._put(path, files[path]), list(files))
        for path, content in files.items():
            if isinstance(content, Path):
                (self.root / path).parent.mkdir(parents=True, exist_ok=True)
                content.replace(self.root / path)

    def _put(self, path: str, content: bytes | Path) -> None:
        parts = isinstance(content, Path) and content.stat().st_size > MULTIPART_BYTES
        self._request(path, lambda client: obstore.put(client, path, content, use_multipart=parts))

    def delete(self, paths: Sequence[str]) -> None:
        """Local copies stay, because another process may be about to read them."""
        self._listings.clear()
        for start in range(0, len(paths), 1000):
            batch = paths[start : start + 1000]
            if not self._delete(batch) and len(batch) > 1:  # Google's batch stops at the first missing object
                self._parallel(lambda path: self._delete([path]), batch)

    def _delete(self, paths: Sequence[str]) -> bool:
        """Returns False if one of the objects did not exist."""

        def delete(client: Any) -> bool:
            obstore.delete(client, list(paths))
            return True

        return bool(self._request(paths[0], delete))


def _entry(meta: Any) -> FileInfo:
    return FileInfo(str(meta["path"]), int(meta["size"]), meta["last_modified"].timestamp())
