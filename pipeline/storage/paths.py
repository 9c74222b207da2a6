"""Paths inside a workspace: which are refused, and the names that amalgam gives to its files.

Records, pins and indexes may come from another machine. Each path is checked when it is read and when it is used.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from amalgam.pipeline.errors import DamagedError

LONGEST_NAME = 255
"""Bytes of a file's name, the limit of common file systems."""

TEMPORARY_NAME = re.compile(r"\.tmp-(\d+-[0-9a-f]{12}|nonce-[0-9a-f]{32})")
FINGERPRINT = r"[0-9a-f]{16,20}"
RESULT = re.compile(rf"([a-z-]+-)?{FINGERPRINT}|remote")
"""Folder of a result, a family or a part."""
UNIT = re.compile(r"(?P<name>.+)-[0-9a-f]{8}(?P<suffix>\.(parquet|safetensors|json|csv|tsv|jsonl|ndjson))?")
"""File or folder of a unit: its name and a digest."""
PACK = re.compile(r"[0-9a-f]{20}\.pack")
QUARANTINED = re.compile(r"[0-9a-f]{8}-.+")
CACHED_TOKENS = "tokens"
"""Folder of the token cache, which has units but is no stage."""
GIVEN = "given"
"""Folder of texts that Python passed as an object."""
GIVEN_NAME = 20
"""Hexadecimal digits of the digest in the name of such a file."""
IN_UNIT = re.compile(
    r"\w[\w.-]*\.(parquet|safetensors|npy|model)|(vocab|merges)\.txt|chat_template\.jinja"
    r"|(config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|evaluation|findings)\.json"
)
"""Files in the folder of a unit."""


def check_path(path: str) -> str:
    """Returns the path of a file inside a workspace; raises ValueError if it is absolute, climbs or is no file name."""
    parts = path.split("/")
    is_short = len(path) <= LONGEST_NAME and path.isascii()
    has_long = not is_short and any(len(part.encode()) > LONGEST_NAME for part in parts)
    if has_long or "\0" in path or "" in parts or "." in parts or ".." in parts:
        raise ValueError(f"{path[:80]!r} is no path inside a workspace")
    return path


def is_name(text: str) -> bool:
    """Returns whether the text can name a file or a folder of a workspace."""
    with contextlib.suppress(ValueError):
        return "/" not in check_path(text)
    return False


def inside(root: Path, path: str) -> Path:
    """Returns where the file is on this machine; raises DamagedError if its folder is a link out of the root."""
    target = root / check_path(path)
    if not is_below(folder_of(path), root):
        what = f"{path} leaves the workspace through a link"
        raise DamagedError(what, path=path, where=str(target), fix="replace the link by a folder of its own")
    return target


def folder_of(path: str) -> str:
    """Returns the folder of a file inside a workspace; "" is the workspace itself."""
    return path.rpartition("/")[0]


def is_below(folder: str, root: Path) -> bool:
    """Returns whether a folder inside the root is still below it after links are resolved."""
    at = str(root)  # strings, because there may be a hundred thousand paths
    for name in filter(None, folder.split("/")):
        at = f"{at}/{name}"
        if os.path.islink(at):  # noqa: PTH114 - fast
            real_root = os.path.realpath(root)
            return os.path.commonpath([real_root, os.path.realpath(root / folder)]) == real_root
    return True


def regular(root: Path, path: str) -> Path | None:
    """Returns where the file is on this machine; None if there is no regular file, or a link leads out of the root."""
    target = root / check_path(path)
    return target if is_regular(target) and is_below(folder_of(path), root) else None


def is_regular(path: Path) -> bool:
    """Returns whether the path is a file: no link, folder, pipe or device."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (OSError, ValueError):
        return False


MOST_BYTES = 1 << 28
"""Size limit of a small file, which is read as a whole."""


def small_content(path: Path) -> bytes | None:
    """Returns the content of a small file; None if there is no regular file, or one larger than MOST_BYTES."""
    try:
        is_small = is_regular(path) and path.lstat().st_size <= MOST_BYTES
        return path.read_bytes() if is_small else None
    except FileNotFoundError:  # deleted meanwhile
        return None


def json_object(path: Path) -> dict[str, Any]:
    """Returns the object in a small JSON file; empty for any other content."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        content = json.loads(small_content(path) or b"{}")
        return content if isinstance(content, dict) else {}
    return {}


# ---- names


def temporary_part(parts: Sequence[str]) -> int | None:
    """Returns the position of the unfinished file or folder of amalgam on a path; None if there is none."""
    return next((index for index, part in enumerate(parts) if TEMPORARY_NAME.fullmatch(part)), None)


def is_unfinished(parts: Sequence[str], folders: Collection[str], others: Collection[str]) -> bool:
    """Returns whether this is an unfinished file, or in an unfinished folder, where amalgam makes such names."""
    place = temporary_part(parts)
    in_result = place is not None and place > 1 and parts[0] in folders and bool(RESULT.fullmatch(parts[1]))
    return place == 0 or (place == 1 and parts[0] in {*folders, *others}) or in_result


def unit_of(parts: Sequence[str], folders: Collection[str]) -> str | None:
    """Returns the unit, ROOM/RESULT/[units/]NAME, to which a file belongs by its path; None if it is no unit's file."""
    if len(parts) < 3 or parts[0] not in folders or not RESULT.fullmatch(parts[1]):
        return None
    start = 3 if parts[2] == "units" else 2
    unit, files = parts[start : start + 1], parts[start + 1 :]
    match = UNIT.fullmatch(unit[0]) if unit else None
    if match is None or bool(match["suffix"]) == bool(files):
        return None
    if len(files) > 1 or not all(IN_UNIT.fullmatch(name) for name in files):
        return None
    return "/".join([*parts[:start], match["name"]])


def is_pack(parts: Sequence[str], folders: Collection[str]) -> bool:
    return len(parts) > 3 and parts[0] in folders and parts[-2] == "packs" and bool(PACK.fullmatch(parts[-1]))
