"""Queries the Hub for a model's commit and files, and downloads them into the cache.

Every request is sent once with a time limit, so that an unreachable Hub fails in seconds. Error texts never come from
the client, so that no header, token or address with a password is printed or logged.
"""

from __future__ import annotations

import errno
import glob
import logging
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

from amalgam.pipeline.errors import DiskFullError, ModelError

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError


DEFAULT_REVISION = "main"

SECONDS_TO_ANSWER = 10

COMMIT = re.compile(r"[0-9a-f]{40}")

MODEL_ID = re.compile(r"(?=.{1,96}$)[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?", re.ASCII)

BUSY = (408, 429)


@dataclass(frozen=True)
class HubModel:
    id: str
    commit: str
    names: tuple[str, ...]


def is_commit(revision: str | None) -> bool:
    return COMMIT.fullmatch(revision or "") is not None


def is_model_id(text: str) -> bool:
    return MODEL_ID.fullmatch(text) is not None and "--" not in text and ".." not in text


def ask(model_id: str, revision: str | None, *, where: str | None) -> HubModel | None:
    """Returns the current commit of the revision, or None if the Hub cannot be reached."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HTTPError  # type: ignore[attr-defined]  # httpx, whichever it uses

    try:
        with silent():
            info = HfApi().model_info(model_id, revision=revision or DEFAULT_REVISION, timeout=SECONDS_TO_ANSWER)
    except HfHubHTTPError as error:
        if error.response.status_code >= 500 or error.response.status_code in BUSY:
            return None
        raise _refusal(error, model_id, revision, where) from None
    except (HTTPError, OSError, ValueError):
        return None
    if not info.sha:
        return None
    return HubModel(model_id, info.sha, tuple(sibling.rfilename for sibling in info.siblings or ()))


def cached(model_id: str, revision: str | None) -> Path | None:
    """Returns the folder of that revision in the local cache, complete or not, without any request."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        with silent():
            folder = snapshot_download(
                model_id,
                revision=revision or DEFAULT_REVISION,
                local_files_only=True,
                allow_patterns=["config.json"],
            )
    except (LocalEntryNotFoundError, OSError):
        return None
    return Path(folder)


def fetch(model: HubModel, names: Iterable[str], *, where: str | None, revision: str | None = None) -> Path:
    """Returns the folder with these files of that commit, after downloading those that are not cached.

    With `revision` the cache also stores the commit of that name, for use offline.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HTTPError  # type: ignore[attr-defined]  # as above

    patterns = [glob.escape(name) for name in names]
    try:
        with silent():
            folder = Path(snapshot_download(model.id, revision=revision or model.commit, allow_patterns=patterns))
            if folder.name != model.commit:  # the branch has just moved
                folder = Path(snapshot_download(model.id, revision=model.commit, allow_patterns=patterns))
            return folder
    except HfHubHTTPError as error:
        raise _refusal(error, model.id, model.commit, where) from None
    except (HTTPError, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            fix = "make room, then run the command again: finished files are kept"
            raise DiskFullError(f"disk full while downloading {model.id}", where=where, fix=fix) from None
        raise ModelError(
            f"the download of {model.id} broke off ({type(error).__name__})",
            where=where,
            fix="run the command again: finished files are kept",
        ) from None


def address(model_id: str) -> str:
    """Returns the address of the model's page, without a user name or password from HF_ENDPOINT."""
    from huggingface_hub import constants

    parts = urlsplit(constants.ENDPOINT)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], path=f"{parts.path}/{model_id}"))


def _refusal(error: HfHubHTTPError, model_id: str, revision: str | None, where: str | None) -> ModelError:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    status = error.response.status_code
    login = "hf auth login"
    if isinstance(error, GatedRepoError):
        what = f"{model_id} is gated: the Hub gives it only to those who accepted its licence"
        return ModelError(what, where=where, fix=f"accept the licence at {address(model_id)}, then {login}")
    if isinstance(error, RevisionNotFoundError):
        what = f"{model_id} has no revision {revision or DEFAULT_REVISION!r} on the Hub"
        return ModelError(what, where=where, fix=f"see its branches and tags at {address(model_id)}")
    if "credentials" in (error.response.headers.get("X-Error-Message") or ""):
        return ModelError(f"the Hub refused the stored token for {model_id}", where=where, fix=login)
    if isinstance(error, RepositoryNotFoundError) or status in (401, 404):
        what = f"there is no model {model_id} on the Hub, or it is private"
        fix = f"check the spelling at {address(model_id)}; if it is private, {login}"
        return ModelError(what, where=where, fix=fix)
    what = f"the Hub refused {model_id} with status {status}"
    return ModelError(what, where=where, fix=f"look at {address(model_id)}")


@contextmanager
def silent() -> Iterator[None]:
    """Silences the client's progress bars and warnings; amalgam prints its own errors."""
    from huggingface_hub.utils import logging as hub_logging
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    verbosity, bars = hub_logging.get_verbosity(), not are_progress_bars_disabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hub_logging.set_verbosity(logging.CRITICAL)
        disable_progress_bars()
        try:
            yield
        finally:
            hub_logging.set_verbosity(verbosity)
            if bars:
                enable_progress_bars()
