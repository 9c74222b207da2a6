"""A workspace in an object store: S3, Google Cloud Storage or Azure, through obstore.

Each object is one put of complete bytes; records are put only if absent, so that the first of two writers wins. Nothing
is renamed, and listings only save requests. Files are copied to this machine once and read there: their digests tell
whether a copy is what was written.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from amalgam.pipeline.errors import AmalgamError, ExperimentError
from amalgam.pipeline.storage.backend import QUARANTINE, FileInfo
from amalgam.pipeline.storage.fingerprint import fingerprint
from amalgam.pipeline.storage.local import temporary_path

ENDPOINTS = {"s3://": "AWS_ENDPOINT_URL", "gs://": "GOOGLE_BASE_URL", "az://": "AZURE_STORAGE_ENDPOINT"}
"""Where the environment names a server other than the maker's own."""

PROBE = "put-if-absent.json"
"""Put anew by every command that works: that it stands already is the answer which is hoped for."""

AT_ONCE = 32
"""Requests."""

FEW = 16
"""So many files of a folder are asked for one by one; of more, a listing is taken first."""

ONE_PUT = 1 << 30
"""A larger file is put in parts, which appear together once the last is there."""


RECENT_SECONDS = 30.0
"""As long as this a listing is believed; what it does not show is asked for by name, and what we remove ends it."""


T = TypeVar("T")


def is_object_store(workspace: str) -> bool:
    return workspace.startswith(tuple(ENDPOINTS))


class ObjectStorage:
    far = True

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        if "@" in address or "?" in address or not address.partition("://")[2].strip("/"):
            raise ExperimentError(
                "the workspace's address is not BUCKET/PREFIX",
                where="execution.workspace",
                fix="s3://bucket/prefix; keys come from the environment (AWS_ACCESS_KEY_ID, ...), never from the file",
            )
        try:
            import obstore  # noqa: F401
        except ImportError as error:
            scheme = self.address.partition(":")[0]
            raise ExperimentError(
                f"a workspace in {scheme}:// needs obstore", where=self.address, fix=f"pip install 'amalgam[{scheme}]'"
            ) from error
        self.root = cache_folder(self.address)
        self._seen: dict[str, tuple[float, dict[str, int]]] = {}

    # ---- the connection

    @cached_property
    def _client(self) -> Any:
        from obstore.store import from_url

        plain = (_endpoint(self.address) or "").startswith("http://")
        return from_url(self.address, client_options={"allow_http": plain})

    def _ask(self, inside: str, work: Callable[[Any], T]) -> T | None:
        """None where there is no such object. A store that does not answer is no store without it."""
        from obstore.exceptions import BaseError, NotFoundError, PermissionDeniedError, UnauthenticatedError

        try:
            return work(self._client)
        except (NotFoundError, FileNotFoundError):
            return None
        except (PermissionDeniedError, UnauthenticatedError, BaseError) as error:
            said = re.sub(r"\?\S+", "", str(error).strip().partition("\n")[0])[:300]  # a query may hold a signature
            raise AmalgamError(
                f"the object store does not do what is asked ({type(error).__name__}): {said}",
                where=f"{self.address}/{inside}",
                fix="check the address, AWS_ENDPOINT_URL and the keys in the environment, then run it again",
            ) from error

    def _all(self, work: Callable[[str], T], insides: Sequence[str]) -> list[T]:
        if len(insides) < 2:
            return [work(inside) for inside in insides]
        with ThreadPoolExecutor(min(AT_ONCE, len(insides))) as workers:
            return list(workers.map(work, insides))

    def check(self) -> None:
        """A store that overwrites where it was asked to put if absent would let the last writer win in silence."""
        if self.create(PROBE, "{}\n") and self.create(PROBE, "{}\n"):
            raise ExperimentError(
                "this object store does not put if absent (If-None-Match: *)",
                where=self.address,
                fix="a store that does (S3, Google Cloud Storage, Azure, MinIO, newer Ceph), or a shared disk",
            )
        self.root.mkdir(parents=True, exist_ok=True)

    # ---- reading

    def read(self, inside: str) -> bytes | None:
        import obstore

        return self._ask(inside, lambda client: bytes(obstore.get(client, inside).bytes()))

    def texts(self, insides: Sequence[str]) -> dict[str, bytes]:
        asked = list(insides)
        if len(asked) > FEW:
            listed = self._listed(asked)
            asked = [inside for inside in asked if inside in listed]
        found = zip(asked, self._all(self.read, asked), strict=True)
        return {inside: text for inside, text in found if text is not None}

    def sizes(self, insides: Sequence[str]) -> dict[str, int]:
        listed = self._listed(insides) if len(insides) > FEW else {}
        found = {inside: listed[inside] for inside in insides if inside in listed}
        rest = [inside for inside in insides if inside not in found]
        asked = zip(rest, self._all(self._size, rest), strict=True)
        return found | {inside: size for inside, size in asked if size is not None}

    def _size(self, inside: str) -> int | None:
        import obstore

        return self._ask(inside, lambda client: int(obstore.head(client, inside)["size"]))

    def _listed(self, insides: Iterable[str]) -> dict[str, int]:
        """Sizes by the folders that these files stand in, each listed once."""
        now = time.monotonic()
        folders = sorted({inside.rpartition("/")[0] for inside in insides})
        recent = {folder: sizes for folder, (when, sizes) in list(self._seen.items()) if now - when < RECENT_SECONDS}
        known = {folder: recent[folder] for folder in folders if folder in recent}
        old = [folder for folder in folders if folder not in recent]
        for folder, found in zip(old, self._all(self.files_under, old), strict=True):
            known[folder] = {entry.inside: entry.bytes for entry in found}
            self._seen[folder] = now, known[folder]
        return {inside: size for sizes in known.values() for inside, size in sizes.items()}

    def files_under(self, folder: str) -> list[FileInfo]:
        import obstore

        def entries(client: Any) -> list[FileInfo]:
            return [_entry(meta) for chunk in obstore.list(client, folder or None, chunk_size=1000) for meta in chunk]

        return self._ask(folder, entries) or []

    def local_path(self, inside: str) -> Path | None:
        path = self.root / inside
        return path if path.exists() or self._fetch(inside) else None

    def _fetch(self, inside: str) -> bool:
        import obstore

        path = self.root / inside
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_path(path.parent)

        def fetch(client: Any) -> bool:
            with temporary.open("wb") as file:
                for chunk in obstore.get(client, inside).stream():
                    file.write(chunk)
            return True

        try:
            found = self._ask(inside, fetch)
            if found:
                temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        return bool(found)

    def fetch(self, insides: Sequence[str]) -> None:
        self._all(self.local_path, insides)

    def refetch(self, inside: str) -> bool:
        (self.root / inside).unlink(missing_ok=True)
        return self._fetch(inside)

    def names(self, folder: str) -> list[str]:
        import obstore

        found = self._ask(folder, lambda client: obstore.list_with_delimiter(client, folder))
        paths = [*(meta["path"] for meta in found["objects"]), *found["common_prefixes"]] if found else []
        return sorted(PurePosixPath(path).name for path in paths)

    def walk(self, folder: str = "") -> Iterator[FileInfo]:
        """Folder by folder of the second level, several at once: a listing goes a page at a time."""
        import obstore

        folders, found = [folder], list[FileInfo]()
        for _ in range(2):
            levels = self._all(
                lambda one: self._ask(one, lambda c: obstore.list_with_delimiter(c, one or None)), folders
            )
            found += [_entry(meta) for level in levels if level for meta in level["objects"]]
            folders = [prefix for level in levels if level for prefix in level["common_prefixes"]]
        found += [entry for under in self._all(self.files_under, folders) for entry in under]
        yield from sorted(found, key=lambda entry: entry.inside)

    # ---- writing

    def publish(self, places: Mapping[Path, str], folder: str) -> None:  # noqa: ARG002  a name is a name
        sources = {inside: path for path, inside in places.items()}
        self._all(lambda inside: self._put(inside, sources[inside]), list(sources))
        for inside, path in sources.items():
            (self.root / inside).parent.mkdir(parents=True, exist_ok=True)
            path.replace(self.root / inside)

    def _put(self, inside: str, path: Path) -> None:
        import obstore

        parts = path.stat().st_size > ONE_PUT
        self._ask(inside, lambda client: obstore.put(client, inside, path, use_multipart=parts))

    def create(self, inside: str, text: str | bytes) -> bool:
        """A put whose answer was lost and that is tried again finds itself: whoever is told False compares digests."""
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        content = text.encode() if isinstance(text, str) else text

        def put(client: Any) -> bool:
            with contextlib.suppress(AlreadyExistsError, PreconditionError, FileExistsError):
                obstore.put(client, inside, content, mode="create")
                return True
            return False

        return bool(self._ask(inside, put))

    def replace(self, inside: str, text: str) -> None:
        import obstore

        self._ask(inside, lambda client: obstore.put(client, inside, text.encode(), use_multipart=False))

    def quarantine(self, insides: Iterable[str]) -> None:
        import obstore

        def move(inside: str) -> None:
            target = f"{QUARANTINE}/{uuid.uuid4().hex[:8]}-{PurePosixPath(inside).name}"
            self._ask(inside, lambda client: obstore.copy(client, inside, target))
            self.remove([inside])
            (self.root / inside).unlink(missing_ok=True)

        self._all(move, list(insides))

    def remove(self, insides: Iterable[str]) -> None:
        """Copies on this machine stay: a reader may have been told of them."""
        self._seen.clear()
        gone = list(insides)
        for start in range(0, len(gone), 1000):
            some = gone[start : start + 1000]
            if not self._delete(some) and len(some) > 1:  # Google's stops at the first that is not there
                self._all(lambda inside: self._delete([inside]), some)

    def _delete(self, insides: Sequence[str]) -> bool:
        """False: one of them was not there."""
        import obstore

        def delete(client: Any) -> bool:
            obstore.delete(client, insides)
            return True

        return bool(self._ask(insides[0], delete))

    def tidy(self) -> None:
        """There are no folders."""


def cache_folder(address: str) -> Path:
    """On this machine's own disk; it may be deleted whenever nothing runs."""
    said = os.environ.get("AMALGAM_CACHE")
    home = Path(said) if said else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "amalgam"
    known = fingerprint([address, _endpoint(address)])[:8]
    return (home / f"{PurePosixPath(address).name}-{known}").absolute()


def _endpoint(address: str) -> str | None:
    """None on a disk, and where no other server is named."""
    return next((os.environ.get(name) for scheme, name in ENDPOINTS.items() if address.startswith(scheme)), None)


def _entry(meta: Any) -> FileInfo:
    return FileInfo(str(meta["path"]), int(meta["size"]), meta["last_modified"].timestamp())
