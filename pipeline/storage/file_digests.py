"""Digests of files outside the workspace (sources, models), remembered so that `plan` need not read gigabytes again.

A digest is remembered for the exact file that was read: device, inode, size, and both times to the nanosecond. This is
a memo and never an identity: a moved, copied or touched file is simply read again.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
from pathlib import Path

from amalgam.pipeline.storage.fingerprint import file_digest

SETTLED_SECONDS = 2.0  # a file changed this recently could change again within the clock's grain: not remembered


class FileDigests:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, str] | None = None
        self._fresh: dict[str, str] = {}

    def __call__(self, path: Path) -> str:
        found = path.stat()
        mark = f"{found.st_dev}:{found.st_ino}:{found.st_size}:{found.st_mtime_ns}:{found.st_ctime_ns}"
        known = self._read()
        if mark not in known:
            known[mark] = file_digest(path)
            if time.time() - max(found.st_mtime, found.st_ctime) > SETTLED_SECONDS:
                self._fresh[mark] = known[mark]
        return known[mark]

    def save(self) -> None:
        """Best effort: losing the memo costs time, never truth."""
        if not self._fresh:
            return
        temporary = self._path.with_name(f".tmp-{os.getpid()}-{uuid.uuid4().hex[:12]}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps({**self._on_disk(), **self._fresh}))
            temporary.replace(self._path)
        except OSError:
            with contextlib.suppress(OSError):  # it fails too where nothing can be written
                temporary.unlink(missing_ok=True)
        self._fresh = {}

    def _read(self) -> dict[str, str]:
        if self._known is None:
            self._known = self._on_disk()
        return self._known

    def _on_disk(self) -> dict[str, str]:
        try:
            raw = json.loads(self._path.read_text())
        except (OSError, ValueError, RecursionError):
            return {}
        return {str(k): str(v) for k, v in raw.items()} if isinstance(raw, dict) else {}
