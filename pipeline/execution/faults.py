"""Faults during a run: transient I/O errors, a full disk or memory, and exceptions of libraries."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from typing import Any, TypeVar

from amalgam.pipeline import errors
from amalgam.pipeline.console import Console, size
from amalgam.pipeline.errors import AmalgamError, DiskFullError, FaultError, ModelError, WorkError
from amalgam.pipeline.secrets import masked
from amalgam.pipeline.signals import interrupted
from amalgam.pipeline.storage.backend import TEMPORARY
from amalgam.pipeline.storage.fingerprint import library_versions
from amalgam.pipeline.storage.store import Store

ATTEMPTS = 3

AGAIN = "then run the same command again: committed units stay"

NO_MEMORY = ("allocate memory", "out of memory", "not enough memory", "std::bad_alloc")
"""Parts of the messages of libraries that have no MemoryError."""

FORWARD = ("forward", "_call_impl")
"""Functions of torch modules that a forward pass runs in; the second one refuses unknown arguments."""

OF_DEVICE = {"torch": " --index-url https://download.pytorch.org/whl/cpu; for a GPU, use its index (pytorch.org)"}
"""Options of pip for a distribution that differs by device, as docs/install.md has them."""

T = TypeVar("T")


def with_retries(work: Callable[[], T], what: str, store: Store, console: Console) -> T:
    """Runs the work again after a transient I/O error; a full disk ends the run at once."""
    attempt = 1
    while True:
        try:
            return work()
        except Exception as error:
            transient = isinstance(error, OSError) and error.errno in errors.PASSING
            if errors.is_disk_full(error) or (transient and attempt == ATTEMPTS):
                raise storage_error(error, what, store.root) from error
            if not transient:
                raise
            console.note(f"{what}: {errors.reason_of(error)}; trying again ({attempt} of {ATTEMPTS - 1})")
            time.sleep(0.1 * 4**attempt)
            attempt += 1


# ---- errors for the user


def storage_error(error: Exception, what: str, folder: Path) -> WorkError:
    """Returns the error with a fix; `what` names the work that failed, and `folder` has its files."""
    unloadable = None if errors.number_of(error) else _import_error(error)
    if unloadable is not None:
        return unloadable
    kind, reason, where = WorkError, errors.reason_of(error), getattr(error, "filename", None) or folder
    if errors.is_disk_full(error):
        present = next(level for level in (folder, *folder.parents) if level.exists())
        free = size(shutil.disk_usage(present).free)
        kind, reason, where = DiskFullError, errors.no_room(error, free), folder
    return kind(f"{what}: {reason}", where=errors.short_path(where), fix=f"{errors.fix_of(error)}, {AGAIN}")


def as_error(error: BaseException) -> AmalgamError:
    """Returns an error with a place and a fix; one that amalgam did not expect becomes a FaultError with a file."""
    expected = expected_error(error)
    if expected is not None:
        return expected
    fix = "report it with this file; --debug prints the traceback instead"
    what = f"this is a fault of amalgam: {masked(errors.first_line(error, named=True))}"
    return FaultError(what, where=_write_traceback(error), fix=fix)


def expected_error(error: BaseException) -> AmalgamError | None:
    """Returns an error with a place and a fix; None for one that amalgam did not expect.

    It reads the traceback, so it runs in the process of the error.
    """
    if isinstance(error, AmalgamError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return interrupted(signal.SIGINT)
    if is_out_of_memory(error):
        fix = f"close other programs, lower execution.batch_tokens, or in a training raise student.accumulate, {AGAIN}"
        return WorkError(f"out of memory: {errors.first_line(error)}", fix=fix)
    if isinstance(error, OSError) and error.errno is not None:
        is_ours = TEMPORARY in str(error.filename)  # a temporary file that was renamed or copied
        path = error.filename2 if error.filename2 and (is_ours or errors.is_disk_full(error)) else error.filename
        place = None if path is None else errors.short_path(path)
        name = f"{place.rpartition('/')[2]}: " if place else ""
        kind = DiskFullError if errors.is_disk_full(error) else WorkError
        return kind(f"{name}{errors.reason_of(error)}", where=place, fix=f"{errors.fix_of(error)}, {AGAIN}")
    model = _model_of(error)
    if model is None:
        return _import_error(error)
    what = f"{type(model).__name__} fails in its own code: {masked(errors.first_line(error, named=True))}"
    fix = "lower max_tokens, update transformers, or use another model; --debug prints the traceback"
    return ModelError(what, where=model.name_or_path, fix=fix)


def is_out_of_memory(error: BaseException) -> bool:
    is_named = isinstance(error, RuntimeError) and any(part in str(error).lower() for part in NO_MEMORY)
    return is_named or isinstance(error, MemoryError)


def _import_error(error: BaseException) -> WorkError | None:
    """Returns an error that names the package during whose import the error was raised; None for any other error.

    The loader of transformers has the error of the import as its cause.
    """
    for raised in filter(None, (error.__cause__, error)):
        module = _imported_module(raised)
        package = module.partition(".")[0]
        distribution = next(iter(packages_distributions().get(package, ())), None) if package else None
        if isinstance(raised, ModuleNotFoundError) and distribution is None and package not in {"", "amalgam"}:
            return WorkError(f"the module {package} is not installed", fix="install the package that has it")
        if distribution is not None and package != "amalgam":
            with suppress(PackageNotFoundError):
                package = f"{package} {version(distribution)}"
            what = f"{package} cannot be imported: {masked(errors.first_line(raised, named=True))}"
            fix = f"reinstall it: pip install --force-reinstall {distribution}{OF_DEVICE.get(distribution, '')}"
            return WorkError(what, fix=fix)
    return None


def _imported_module(error: BaseException) -> str:
    """Returns the missing module, or the innermost one outside amalgam that was being imported; empty for none."""
    module = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
    for frame, _ in () if module else traceback.walk_tb(error.__traceback__):
        name = str(frame.f_globals.get("__name__"))
        if name.startswith("amalgam."):
            module = ""
        elif frame.f_code.co_name == "<module>":
            module = name
    return module


def _model_of(error: BaseException) -> Any:
    """Returns the model of transformers in whose forward pass the error was raised, outside the code of amalgam."""
    model = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        name, owner = frame.f_code.co_name, frame.f_locals.get("self")
        if str(frame.f_globals.get("__name__")).startswith("amalgam.") and name != "__torch_function__":
            model = None
        elif name in FORWARD and hasattr(owner, "name_or_path") and hasattr(owner, "config"):
            model = model or owner
    return model


def _write_traceback(error: BaseException) -> str | None:
    """Writes versions, command and traceback without secrets; returns the path, or None on a full disk."""
    versions = {"python": platform.python_version(), "system": platform.platform(), **library_versions()}
    parts = [" ".join(sys.argv), *(f"{name} {version}" for name, version in versions.items())]
    text = masked("\n".join([*parts, "", "".join(traceback.format_exception(error))]))
    try:
        descriptor, path = tempfile.mkstemp(".txt", "amalgam-fault-")
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError:
        return None
    return path
