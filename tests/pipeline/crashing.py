"""A process that dies, as by SIGKILL, just before the n-th change it makes to the files under a folder."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from amalgam.pipeline.storage.object_store import ObjectStorage
from amalgam.tests.forking import LIGHT, Forked
from amalgam.tests.workspaces import finish

KILLED = 137
CHANGES = {"os.rename", "os.link", "os.mkdir", "os.remove", "os.rmdir", "os.truncate"}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def fork(work: Callable[[], object]) -> int:
    """Do the work in a child; its exit code is 0, or 1 after an exception."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # pytest may have threads; the child uses none of theirs
        child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    except BaseException:  # noqa: BLE001 - the child must end here, whatever happens
        traceback.print_exc()
    os._exit(code)


def in_small_process(function: Callable[[Path], None], folder: Path) -> None:
    """Call a function of a test module of this folder in a process without torch, which forks in far less time."""
    words = [Path(function.__code__.co_filename).stem, function.__name__, str(folder)]
    result = finish(Forked(words, folder, os.environ, "amalgam.tests.pipeline.crashing", LIGHT))
    assert result.code == 0, result.err


def wait(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_at(event: int, root: Path, work: Callable[[], object]) -> bool:
    """True if the child died before its n-th change; False if it came to its end without so many."""

    def dying() -> None:
        _die_at(event, str(root))
        work()

    code = wait(fork(dying))
    assert code in (0, KILLED)
    return code == KILLED


def _die_at(event: int, root: str) -> None:
    """Opening a file to write it is two events: before, and after the empty file exists."""
    seen = 0

    def hook(name: str, args: tuple[Any, ...]) -> None:
        nonlocal seen
        if seen >= event or not _changes(name, args, root):
            return
        seen += 1
        if seen == event:
            os._exit(KILLED)
        if name == "open":
            seen += 1
            if seen == event:
                os.open(args[0], args[2], 0o666)
                os._exit(KILLED)

    sys.addaudithook(hook)


def _changes(name: str, args: tuple[Any, ...], root: str) -> bool:
    if name == "open":
        path, _, flags = args
        return isinstance(path, str) and path.startswith(root) and bool(flags & WRITING)
    if name not in CHANGES:
        return False
    path = os.fspath(args[0])
    return isinstance(path, str) and (path.startswith(root) or not path.startswith("/"))  # relative: rmtree's


# ---- in an object store


class KilledError(BaseException):
    """Ends the work as SIGKILL does: amalgam does not catch it. Only local temporary files are removed on its path."""


def changing(number: int, work: Callable[[], object], patch: pytest.MonkeyPatch) -> bool:
    """True if the work ended before its n-th change to the store."""
    left = number
    for name in ("_put", "put_if_absent", "delete"):
        inner = getattr(ObjectStorage, name)

        def dying(*arguments: object, inner: Callable[..., object] = inner) -> object:
            nonlocal left
            left -= 1
            if left <= 0:
                raise KilledError
            return inner(*arguments)

        patch.setattr(ObjectStorage, name, dying)
    try:
        work()
    except KilledError:
        return True
    return False


if __name__ == "__main__":
    getattr(importlib.import_module(f"amalgam.tests.pipeline.{sys.argv[1]}"), sys.argv[2])(Path(sys.argv[3]))
