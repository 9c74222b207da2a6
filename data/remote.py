"""Streams remote texts into local files."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from amalgam.data.hub import ONE_AT_A_TIME, WITH_HEADER, copy_texts, fetch_texts, file_on_hub
from amalgam.data.keys import shown
from amalgam.data.lazy import pl
from amalgam.data.rows import KINDS
from amalgam.pipeline.errors import DataError, DiskFullError, InputChangedError, fix_of, is_disk_full, no_room
from amalgam.pipeline.input_files import SUFFIXES, file_digest
from amalgam.pipeline.storage.aws_profile import profile_options

HUB = "hf://"
MOST_COPIES = 3
"""Copies of a remote file that is written at the same time, before the run ends."""


def fetch_remote(url: str, folder: Path) -> Path:
    """Returns a local copy of an hf:// or s3:// address, whose rows keep their numbers.

    The clients read the usual AWS_* and HF_* variables themselves. Messages have the address without its secrets.
    """
    name, address = remote_name(url), check_remote(url)
    target = folder / blake2b(url.encode(), digest_size=6).hexdigest() / name  # two addresses may end in one name
    target.parent.mkdir(exist_ok=True)
    try:
        if url.startswith(HUB):
            fetch_texts(url, target, where=address)
        else:
            _copy_one_version(url, target)
    except InputChangedError:
        target.unlink(missing_ok=True)
        fix = "wait until it is written, then run the same command again"
        raise InputChangedError(f"{address} changed while it was read", where=address, fix=fix) from None
    except (OSError, pl.exceptions.PolarsError) as error:
        target.unlink(missing_ok=True)  # a sink that fails leaves a valid file of no rows
        if is_disk_full(error):
            fix = f"{fix_of(error)}, then run the same command again"
            what = f"{address} cannot be stored: {no_room(error)}"
            raise DiskFullError(what, where=str(folder), fix=fix) from error
        reason = shown(str(error).replace(url, address), 200)
        raise DataError(f"{address} cannot be read", where=reason, fix=_fix(error)) from error
    return target


def check_remote(url: str) -> str:
    """Returns the address without its secrets; refuses one that names no file of texts, without a request."""
    suffix, address = remote_name(url).suffix.lower(), shown(re.sub(r"//[^/@]*@", "//", url.partition("?")[0]), 200)
    is_pattern = "*" in url or (glob.has_magic(url) and not url.startswith(HUB))  # a file of the Hub may be a[1].csv
    if suffix not in SUFFIXES or (is_pattern and suffix in WITH_HEADER):
        kinds = f"name a file of one of these kinds: {KINDS}; or fetch it and name the local file"
        fix = ONE_AT_A_TIME if suffix in SUFFIXES else kinds
        raise DataError(f"{address} does not name a file that can be read", where=address, fix=fix)
    if url.startswith(HUB):
        file_on_hub(url, where=address)
    return address


def _fix(error: Exception) -> str:
    """Returns the fix for an address that cannot be read."""
    if isinstance(error, (pl.exceptions.SchemaError, pl.exceptions.ColumnNotFoundError)):
        return "name files with the same columns, or fetch them and name the local folder"
    if "invalid utf8" in str(error):
        return "fetch it, re-encode it (iconv -f cp1252 -t utf-8) and name the local file"
    return "check the address and your access (AWS_PROFILE, AWS_ACCESS_KEY_ID), or fetch it and name the local file"


def remote_name(url: str) -> Path:
    """Returns a name for the local copy of an address; its suffix is that of the address."""
    return Path(re.sub(r"[^A-Za-z0-9._-]", "_", url.rstrip("/").rpartition("/")[2]))


def _copy_one_version(url: str, target: Path) -> None:
    """Copies an object, and again if its version changed meanwhile."""
    keys = _profile(url)
    for _ in range(MOST_COPIES):
        before = _versions(url, keys)
        if before is None:  # without versions, two copies are compared
            copy_texts(url, target, storage_options=keys)
            before = file_digest(target)
        copy_texts(url, target, storage_options=keys)
        if before == (_versions(url, keys) or file_digest(target)):
            return
    raise InputChangedError(url)


def _profile(url: str) -> Any:
    """Returns the options of an AWS profile; without them and boto3, polars would take those of the first profile."""
    try:
        return profile_options(url, DataError)
    except DataError as error:
        if find_spec("boto3") is not None:  # polars reads profiles without keys through it
            return None
        error.fix = f"{error.fix}; or install boto3"
        raise


def _versions(url: str, keys: Any) -> object:
    """Returns size, ETag and version of each object that the address may match; None if the store names no versions."""
    try:  # an extra
        import obstore
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ImportError:
        return None
    scheme, _, path = url.partition("://")
    if scheme != "s3":
        return None
    bucket, _, key = path.partition("/")
    plain = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")
    try:
        store = from_url(f"s3://{bucket}", config=keys, client_options={"allow_http": plain})
        if not glob.has_magic(key):
            entries = [obstore.head(store, key)]
        else:
            prefix = re.split(r"[*?[]", key)[0].rpartition("/")[0]
            pages = obstore.list(store, prefix or None)
            entries = [entry for page in pages for entry in page if fnmatch.fnmatchcase(entry["path"], key)]
    except (BaseError, OSError, ValueError):
        return None
    marks = {entry["path"]: (entry["size"], entry["e_tag"], entry["version"]) for entry in entries}
    return marks if marks and all(mark[1] or mark[2] for mark in marks.values()) else None
