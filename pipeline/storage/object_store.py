"""A workspace in an object store: S3, Google Cloud Storage or Azure, through obstore.

Each object is one put of complete bytes, nothing is renamed; records and HEAD.json use conditional puts. Files are
copied once to this machine's cache and read there; digests verify the copies.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError, PreconditionError
from obstore.store import from_url

from amalgam.pipeline.errors import AmalgamError, ExperimentError
from amalgam.pipeline.storage.aws_profile import profile_options
from amalgam.pipeline.storage.backend import PROBE, FileInfo
from amalgam.pipeline.storage.local import replacing
from amalgam.pipeline.storage.packing import cache_folder, endpoint
from amalgam.pipeline.storage.paths import check_path, inside

AT_ONCE = 32
"""Number of parallel requests."""

FEW = 16
"""Up to this number of files one request each is sent; for more, their folders are listed first."""

MULTIPART_BYTES = 1 << 30
"""Larger files are uploaded in parts, which become visible together."""

MOST_CONFLICTS = 200
"""Largest number of tries of one change while other writers replace the object."""

SETTINGS = {
    "s3://": "AWS_ENDPOINT_URL and the keys",
    "gs://": "GOOGLE_APPLICATION_CREDENTIALS",
    "az://": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
"""The variables of the environment that a request needs, by the start of the address."""

KEY_SERVICE = "169.254.169.254/latest/api/token"
"""Address from which the client gets the keys of a machine in AWS, if the environment has none."""

RECENT_SECONDS = 30.0
"""Lifetime of a cached listing, which is for sizes: files that it lacks are requested by name; a deletion clears it."""


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
        keys: Any = profile_options(self.address)
        return from_url(self.address, config=keys, client_options={"allow_http": plain})

    def _requests(self, paths: Sequence[str], request: Callable[[str], T]) -> dict[str, T]:
        """Sends a request for each path, in parallel, and returns the answers; objects that do not exist have none.

        Any other failure raises, so an outage is not an empty store.
        """

        def send(path: str) -> T | None:
            try:
                return request(path)
            except (NotFoundError, FileNotFoundError):
                return None
            except BaseError as error:
                message = str(error).strip().partition("\n")[0]
                if KEY_SERVICE in message:
                    fix = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
                    raise ExperimentError("there are no S3 keys", where=self.address, fix=fix) from error
                message = re.sub(r"\?\S+", "", message)[:300]  # a query may hold a signature
                raise AmalgamError(
                    f"the object store refused a request ({type(error).__name__}): {message}",
                    where=f"{self.address}/{path}",
                    fix=f"check the address and, in the environment, {SETTINGS[self.address[:5]]}, then run it again",
                ) from error

        if len(paths) < 2:
            answers = [send(path) for path in paths]
        else:
            with ThreadPoolExecutor(min(AT_ONCE, len(paths))) as workers:
                answers = list(workers.map(send, paths))
        return {path: answer for path, answer in zip(paths, answers, strict=True) if answer is not None}

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
        listed = self._listed(paths, fresh=True) if len(paths) > FEW else paths
        existing = [path for path in paths if path in listed]
        return self._requests(existing, lambda path: bytes(obstore.get(self._client, path).bytes()))

    def sizes(self, paths: Sequence[str]) -> dict[str, int]:
        listed = self._listed(paths) if len(paths) > FEW else {}
        sizes = {path: listed[path] for path in paths if path in listed}
        rest = [path for path in paths if path not in sizes]
        return sizes | self._requests(rest, lambda path: int(obstore.head(self._client, path)["size"]))

    def _listed(self, paths: Sequence[str], *, fresh: bool = False) -> dict[str, int]:
        """Returns the sizes of all files in the folders of these paths; each folder is listed once.

        `fresh`: a cached listing may lack files that were written after it, so it is not used.
        """
        now = time.monotonic()
        folders = {path.rpartition("/")[0] for path in paths}
        # A copy: another thread may clear the listings at any time.
        cached = {} if fresh else dict(self._listings)
        recent = {folder: sizes for folder, (when, sizes) in cached.items() if now - when < RECENT_SECONDS}
        listings = {folder: recent[folder] for folder in folders & recent.keys()}
        for folder, entries in self._requests(sorted(folders - recent.keys()), self.files_below).items():
            listings[folder] = {entry.path: entry.bytes for entry in entries}
            self._listings[folder] = now, listings[folder]
        return {path: size for listing in listings.values() for path, size in listing.items()}

    def files_below(self, folder: str) -> list[FileInfo]:
        pages = obstore.list(self._client, folder or None, chunk_size=1000)
        return [_entry(meta) for page in pages for meta in page]

    def list(self, folder: str = "") -> Iterator[FileInfo]:
        """Lists the folders of the second level in parallel, because one listing returns page after page."""
        folders = [folder]
        for _ in range(2):
            levels = self._requests(folders, lambda path: obstore.list_with_delimiter(self._client, path or None))
            yield from [_entry(meta) for level in levels.values() for meta in level["objects"]]
            folders = sorted(prefix for level in levels.values() for prefix in level["common_prefixes"])
        for start in range(0, len(folders), AT_ONCE):
            below = self._requests(folders[start : start + AT_ONCE], self.files_below)
            yield from [entry for entries in below.values() for entry in entries]

    def names(self, folder: str) -> set[str]:
        level = self._requests([folder], lambda path: obstore.list_with_delimiter(self._client, path))[folder]
        paths = [*level["common_prefixes"], *(entry["path"] for entry in level["objects"])]
        return {path.rstrip("/").rpartition("/")[2] for path in paths}

    def get(self, paths: Sequence[str]) -> set[str]:
        copied = set(self._requests(paths, self._download))
        for path in set(paths) - copied:
            inside(self.root, path).unlink(missing_ok=True)
        return copied

    def _download(self, path: str) -> bool:
        target = inside(self.root, path)
        target.parent.mkdir(parents=True, exist_ok=True)
        content = obstore.get(self._client, path)
        with replacing(target) as temporary, temporary.open("wb") as file:
            for chunk in content.stream():
                file.write(chunk)
        return True

    # ---- writing

    def put_if_absent(self, path: str, content: bytes) -> bool:
        """A retried put whose first answer was lost returns False; the caller then compares digests."""

        def put(path: str) -> bool:
            with contextlib.suppress(AlreadyExistsError, PreconditionError, FileExistsError):
                obstore.put(self._client, path, content, mode="create")
                return True
            return False

        return self._written([path], put)[path]

    def change(self, path: str, edit: Callable[[bytes | None], bytes | None]) -> None:
        for _ in range(MOST_CONFLICTS):
            if self._written([path], lambda path: self._changed(path, edit))[path]:
                return
        what, fix = "the object store refuses every conditional write (If-Match)", "use a store that supports them"
        raise AmalgamError(what, where=f"{self.address}/{path}", fix=fix)

    def _changed(self, path: str, edit: Callable[[bytes | None], bytes | None]) -> bool:
        """Returns False if another writer changed the object after it was read."""
        text: bytes | None = None
        mode: Any = "create"
        with contextlib.suppress(NotFoundError, FileNotFoundError):
            stored = obstore.get(self._client, path)
            text = bytes(stored.bytes())
            mode = {name: value for name in ("e_tag", "version") if (value := stored.meta[name])}
        content = edit(text)
        with contextlib.suppress(AlreadyExistsError, PreconditionError, FileExistsError):
            if content is not None:
                self._put(path, content, mode)
            return True
        return False

    def _written(self, paths: Sequence[str], request: Callable[[str], T]) -> dict[str, T]:
        """Sends the requests; a write that is answered by "not found" has no bucket."""
        answers = self._requests(paths, request)
        for path in set(paths) - answers.keys():
            what, fix = "the object store has no such bucket or container", "check the address, then run it again"
            raise AmalgamError(what, where=f"{self.address}/{path}", fix=fix)
        return answers

    def put(self, files: Mapping[str, bytes | Path]) -> None:
        """Uploads the files; a local file then moves into the cache."""
        self._written(list(files), lambda path: self._put(path, files[path]))
        for path, content in files.items():
            if isinstance(content, Path):
                target = inside(self.root, path)
                target.parent.mkdir(parents=True, exist_ok=True)
                content.replace(target)

    def _put(self, path: str, content: bytes | Path, mode: Any = None) -> Any:
        parts = isinstance(content, Path) and content.stat().st_size > MULTIPART_BYTES
        return obstore.put(self._client, check_path(path), content, mode=mode, use_multipart=parts)

    def delete(self, paths: Sequence[str]) -> None:
        """Local copies stay, because another process may be about to read them."""
        try:
            for start in range(0, len(paths), 1000):
                self._delete([check_path(path) for path in paths[start : start + 1000]])
        finally:
            self._listings.clear()  # not before: another thread may list them meanwhile

    def _delete(self, batch: Sequence[str]) -> None:
        """Sends one request; Google's stops at the first object that does not exist, and then each has its own."""

        def delete(paths: Sequence[str]) -> bool:
            obstore.delete(self._client, paths)
            return True

        if not self._requests(batch[:1], lambda _: delete(batch)) and len(batch) > 1:
            self._requests(batch, lambda path: delete([path]))


def _entry(meta: Any) -> FileInfo:
    return FileInfo(str(meta["path"]), int(meta["size"]), meta["last_modified"].timestamp())
