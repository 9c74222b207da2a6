"""Queries the Hub for a model's commit and files, and downloads them into the cache.

Every request is sent once with a time limit, so that an unreachable Hub fails in seconds. Error texts never come from
the client, so that no header, token or address with a password is printed or logged.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from amalgam.data.hub import DEFAULT_REVISION, SECONDS_TO_ANSWER, refusal, silent
from amalgam.pipeline.errors import DiskFullError, ModelError, fix_of, is_disk_full, no_room

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
        what, fix = refusal(error, model_id, revision)
        raise ModelError(what, where=where, fix=fix) from None
    except (HTTPError, OSError, ValueError):
        return None
    names = tuple(sibling.rfilename for sibling in info.siblings or ())
    return HubModel(model_id, info.sha, names) if info.sha else None


def cached(model_id: str, revision: str | None) -> Path | None:
    """Returns the folder of that revision in the local cache, complete or not, without any request."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    revision, patterns = revision or DEFAULT_REVISION, ["config.json"]
    try:
        with silent():
            return Path(snapshot_download(model_id, revision=revision, local_files_only=True, allow_patterns=patterns))
    except (LocalEntryNotFoundError, OSError):
        return None


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
        what, fix = refusal(error, model.id, model.commit)
        raise ModelError(what, where=where, fix=fix) from None
    except (HTTPError, OSError, ValueError) as error:
        if is_disk_full(error):
            what = f"{model.id} cannot be downloaded: {no_room(error)}"
            fix = f"{fix_of(error)}, then run the command again: finished files are kept"
            raise DiskFullError(what, where=where, fix=fix) from None
        what = f"the download of {model.id} broke off ({type(error).__name__})"
        raise ModelError(what, where=where, fix="run the command again: finished files are kept") from None
