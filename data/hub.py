"""Sends requests to the Hub, names the fix of a refusal, and downloads the texts of hf:// addresses.

huggingface_hub has the endpoint, the token, the offline mode and the proxies; a library with its own client has not.
"""

from __future__ import annotations

import fnmatch
import re
import shutil
import tempfile
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import unquote, urlsplit, urlunsplit

from amalgam.data.keys import shown_names
from amalgam.data.lazy import pl
from amalgam.pipeline.console import silenced
from amalgam.pipeline.errors import DataError, is_disk_full, nearest

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

Kind = Literal["model", "dataset", "space"]

NOUNS: dict[Kind, str] = {"model": "model", "dataset": "data set", "space": "space"}

DEFAULT_REVISION = "main"
SECONDS_TO_ANSWER = 10
LOGIN = "run `hf auth login`, or set HF_TOKEN"
FETCH = "fetch the file yourself and name the local one"
WITH_HEADER, ONE_AT_A_TIME = (".csv", ".tsv"), "of csv and tsv, name one file at a time"
FILE = re.compile(r"hf://(?P<kind>dataset|space)s/(?P<name>[^/@]+/[^/@]+)(@(?P<revision>[^/]+))?/(?P<path>.+)")


def address(name: str, kind: Kind = "model") -> str:
    """Returns the address of the page, without a user name or password from HF_ENDPOINT."""
    from huggingface_hub import constants

    parts = urlsplit(constants.ENDPOINT)
    folder = "" if kind == "model" else f"/{kind}s"
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], path=f"{parts.path}{folder}/{name}"))


def refusal(error: HfHubHTTPError, name: str, revision: str | None, kind: Kind = "model") -> tuple[str, str]:
    """Returns what the Hub refused, and the fix; error texts of the client can have tokens."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    page, status = address(name, kind), error.response.status_code
    if isinstance(error, GatedRepoError):
        what = f"{name} is gated: the Hub gives it only to those who accepted its licence"
        return what, f"accept the licence at {page}, then {LOGIN}"
    if isinstance(error, RevisionNotFoundError):
        what = f"{name} has no revision {revision or DEFAULT_REVISION!r} on the Hub"
        return what, f"see its branches and tags at {page}"
    if "credentials" in (error.response.headers.get("X-Error-Message") or ""):
        return f"the Hub refused the stored token for {name}", LOGIN
    if isinstance(error, RepositoryNotFoundError) or status in (401, 404):
        what = f"there is no {NOUNS[kind]} {name} on the Hub, or it is private"
        return what, f"check the spelling at {page}; if it is private, {LOGIN}"
    return f"the Hub refused {name} with status {status}", f"look at {page}"


# ---- texts


def file_on_hub(url: str, *, where: str) -> re.Match[str]:
    """Returns the kind, name, revision and path of an hf:// address; refuses any other address."""
    match = FILE.fullmatch(url)
    if match is None:
        fix = "write hf://datasets/OWNER/NAME/PATH, with @REVISION after NAME if it is not main"
        raise DataError(f"{where} is no address of a file on the Hub", where=where, fix=fix)
    return match


def fetch_texts(url: str, target: Path, *, where: str) -> None:
    """Downloads the file of an address, or joins the files of a pattern, at one commit of its revision."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError  # type: ignore[attr-defined]  # httpx, whichever it uses

    match = file_on_hub(url, where=where)
    kind: Kind = "dataset" if match["kind"] == "dataset" else "space"
    name, branch = match["name"], match["revision"] or DEFAULT_REVISION
    revision = "refs/convert/parquet" if branch == "~parquet" else unquote(branch)
    try:
        with silent(), tempfile.TemporaryDirectory(dir=target.parent) as folder:
            files = _download(name, kind, revision, match["path"], Path(folder))
            if len(files) > 1:
                copy_texts(files, target, glob=False)
            else:
                shutil.move(files[0], target)
    except HfHubHTTPError as error:
        what, fix = refusal(error, name, revision, kind)
        raise DataError(what, where=where, fix=f"{fix}; or {FETCH}") from None
    except (HTTPError, OSError, ValueError) as error:
        if is_disk_full(error):
            raise
        what = f"{name} cannot be read from the Hub ({type(error).__name__})"
        fix = f"check the network, and unset HF_HUB_OFFLINE if it is set; or {FETCH}"
        raise DataError(what, where=where, fix=fix) from None


def copy_texts(source: str | list[Path], target: Path, **options: Any) -> None:
    """Streams text formats line by line, unparsed; a line end within a quoted csv field becomes a plain newline."""
    if target.suffix.lower() == ".parquet":
        pl.scan_parquet(source, **options).sink_parquet(target)
    else:
        pl.scan_lines(source, **options).sink_csv(target, include_header=False, quote_style="never")


def _download(name: str, kind: Kind, revision: str, path: str, folder: Path) -> list[Path]:
    from huggingface_hub import HfApi, hf_hub_download

    ask = HfApi().dataset_info if kind == "dataset" else HfApi().space_info
    info = ask(name, revision=revision, timeout=SECONDS_TO_ANSWER)
    names = [file.rfilename for file in info.siblings or ()]
    chosen = [file for file in names if file == path or _fits(file, path)]
    if not chosen:
        close = nearest(path, names, 3) or names[:5]
        fix = f"name a file that it has: {shown_names(close, 5)}" if close else f"see {address(name, kind)}"
        raise DataError(f"{name} has no file {path} at {revision}", where=address(name, kind), fix=fix)
    if len(chosen) > 1 and path.lower().endswith(WITH_HEADER):
        raise DataError(f"{path} names several files", where=address(name, kind), fix=ONE_AT_A_TIME)
    download = partial(hf_hub_download, name, repo_type=kind, revision=info.sha, local_dir=folder)
    return [Path(download(file, etag_timeout=SECONDS_TO_ANSWER)) for file in sorted(chosen)]


def _fits(file: str, pattern: str) -> bool:
    """Returns whether a file matches; only ** goes through folders."""
    return fnmatch.fnmatchcase(file, pattern) and ("**" in pattern or file.count("/") == pattern.count("/"))


# ---- the client's messages


def silent() -> AbstractContextManager[None]:
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    def shows_bars() -> bool:
        return not are_progress_bars_disabled()

    return silenced("huggingface_hub", shows_bars, disable_progress_bars, enable_progress_bars)
