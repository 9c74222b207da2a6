"""Serves an ONNX export of the student over HTTP (`amalgam serve`). torch is not loaded."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import json
import os
import shlex
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amalgam.data.arrays import softmax, unknown_score
from amalgam.data.keys import shown
from amalgam.data.lazy import np
from amalgam.data.tokens import Ragged, by_count, encode_truncated
from amalgam.pipeline.config import proposals
from amalgam.pipeline.console import Console, counted
from amalgam.pipeline.errors import ExperimentError, ModelError, number_of, reason_of
from amalgam.pipeline.execution.faults import as_error
from amalgam.pipeline.signals import InterruptHandler
from amalgam.pipeline.storage.facts import fits
from amalgam.pipeline.user_paths import user_path
from amalgam.stages.app.batcher import Batcher, Description, Limits, Prediction, Text
from amalgam.stages.common.deliveries import STUDENTS, check_delivered, read_mark
from amalgam.stages.common.device import check_libraries
from amalgam.stages.common.models.model_folder import EXPORT_FACTS, ONNX_MODEL, end_token, reads_padding
from amalgam.stages.methods import load_with_methods

LIBRARIES = ("numpy", "onnxruntime", "h11")
"""NumPy comes first: ONNX Runtime imports it from C, and would print a signal in this import as a traceback."""
TOKENIZER, CONFIG = "tokenizer.json", "config.json"
SUFFIX = "-onnx"

LAUNCH_TOKENS = 512
"""Tokens of one run of the model, padding included; it bounds the memory of a batch."""
MOST_PADDING = 0.2
"""Share of padding above which a run is divided."""
LEAST_TOKENS = 256
"""A run of fewer tokens is not divided: its padding costs less than another run."""

BACKLOG = 512
QUIET_SECONDS = 60.0
"""Time in which a fault of the same kind is not printed again."""


# ---- the student


@dataclass(frozen=True, kw_only=True)
class ExportFolder(Description):
    folder: Path
    inputs: Sequence[str]
    pad_id: int
    reads_padding: bool
    """Whether padding changes the logits, so that a run has texts of one length."""
    end: int | None
    """The token of which all texts of a run have the same number; None: any number."""
    int8: bool = False
    """Whether runs share the threads, instead of the products of a run: those of int8 are too short to be divided."""


def export_folder(config: Path, student: Path | None, console: Console) -> ExportFolder:
    """Returns the export in `student`, or that of the experiment's student."""
    file_option = proposals.file_option(config)
    if student is not None:
        fix = f"name a folder that `amalgam export --onnx` wrote, such as {STUDENTS}/student{SUFFIX}"
        if (student / CONFIG).is_file() and not (student / EXPORT_FACTS).exists():
            given, exported = shlex.quote(str(student)), shlex.quote(f"{student}{SUFFIX}")
            fix = f"run `amalgam export --onnx --student {given}`, then `amalgam serve --student {exported}`"
        return read_export(student, fix, file_option)
    loaded = load_with_methods(config)
    source = loaded.base / STUDENTS / loaded.experiment.student.name
    fix = f"run `amalgam export --onnx{file_option}`"
    export = read_export(source.with_name(source.name + SUFFIX), fix, file_option)
    trained = read_mark(source)
    if trained and trained.fingerprint != export.fingerprint:
        command = f"amalgam export --onnx --force{file_option}"
        console.note(f"{source.name} was trained after its export: `{command}` updates it")
    return export


def read_export(folder: Path, fix: str, file_option: str = "") -> ExportFolder:
    folder = user_path(str(folder), kind=ModelError)
    where = str(folder.absolute())
    names = (ONNX_MODEL, EXPORT_FACTS, TOKENIZER, CONFIG)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        what = f"the folder has no {missing[0]}, so it is no export" if folder.is_dir() else "the export does not exist"
        raise ModelError(what, where=where, fix=fix)
    check_delivered(folder, file_option)
    mark = read_mark(folder)
    facts, config = (_read_json(folder / name) for name in (EXPORT_FACTS, CONFIG))
    threshold, columns = config.get("unknown_threshold"), facts.get("text")
    kinds = {"labels": list[str], "inputs": list[str], "max_tokens": int, "pad_id": int}
    missing = [name for name, kind in kinds.items() if not fits(facts.get(name), kind)]
    if missing:
        raise ModelError(f"{EXPORT_FACTS} lacks {missing[0]}", where=where, fix="export the student again")
    int8 = facts.get("int8")
    if isinstance(int8, dict) and not int8.get("independent_texts"):
        what = "this int8 export is of an earlier version: the texts of a batch change each other's answers"
        raise ModelError(what, where=where, fix="export the student again")
    return ExportFolder(
        folder=folder,
        labels=facts["labels"],
        inputs=facts["inputs"],
        max_tokens=facts["max_tokens"],
        fingerprint=mark.fingerprint if mark else "",
        pad_id=facts["pad_id"],
        unknown_threshold=float(threshold) if isinstance(threshold, int | float) else None,
        columns=[str(name) for name in columns] if isinstance(columns, list) else (),
        reads_padding=reads_padding(config),
        end=end_token(config),
        int8=isinstance(int8, dict),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path.name} cannot be read: {error}", where=str(path), fix="export it again") from error
    return content if isinstance(content, dict) else {}


class OnnxStudent:
    def __init__(self, export: ExportFolder, threads: int) -> None:
        from tokenizers import Tokenizer

        self.export, self._threads = export, threads
        self._pool = ThreadPoolExecutor(threads if export.int8 else 1)
        with _loading(export):
            self._tokenizer = Tokenizer.from_file(str(export.folder / TOKENIZER))
        self._tokenizer.no_padding()
        truncation = self._tokenizer.truncation or {"max_length": export.max_tokens, "direction": "right"}
        self._side = truncation["direction"]
        if truncation["max_length"] != export.max_tokens:
            what = f"{TOKENIZER} does not truncate at {export.max_tokens:,} tokens, the max_tokens of {EXPORT_FACTS}"
            raise ModelError(what, where=str(export.folder.absolute()), fix="export the student again")
        with _loading(export):
            self._session = onnx_session(export.folder / ONNX_MODEL, 1 if export.int8 else threads)
            first, _ = self([("the first run takes longer",), ("padding",)])
        outputs, labels = len(first.probabilities), len(export.labels)
        if outputs != labels:
            what = f"the model has {counted(outputs, 'output')}, and {EXPORT_FACTS} {counted(labels, 'label')}"
            raise ModelError(what, where=str(export.folder.absolute()), fix="export the student again")

    def __call__(self, texts: Sequence[Text]) -> list[Prediction]:
        inputs = [text if len(text) > 1 else text[0] for text in texts]
        encoded = list(encode_truncated(self._tokenizer, inputs, self.export.max_tokens, self._side))
        ids = Ragged.of([np.array(each) for each, _, _ in encoded])
        types = Ragged.of([np.array(each) for _, each, _ in encoded])
        share = ids.lengths.sum() // self._threads if self.export.int8 else LAUNCH_TOKENS  # a run for each thread
        parts = launches(ids.lengths, min(share, LAUNCH_TOKENS), equal=self.export.reads_padding)
        runs = [rows for part in parts for rows in by_count(ids, part, self.export.end)]
        results = self._pool.map(lambda rows: self._logits(ids.take(rows), types.take(rows)), runs)
        predictions: dict[int, Prediction] = {}
        for rows, logits in zip(runs, results, strict=True):
            for row, probabilities, score in zip(rows.tolist(), softmax(logits), unknown_score(logits), strict=True):
                predictions[row] = Prediction(probabilities, float(score), encoded[row][2])
        return [predictions[row] for row in range(len(texts))]

    def _logits(self, tokens: Ragged, types: Ragged) -> Any:
        ids, mask = tokens.padded(self.export.pad_id)
        columns = {"input_ids": ids, "attention_mask": mask.astype(np.int64), "token_type_ids": types.padded(0)[0]}
        (logits,) = self._session.run(["logits"], {name: columns[name] for name in self.export.inputs})
        return logits.astype(np.float64)


@contextmanager
def _loading(export: ExportFolder) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # both libraries raise classes of their own
        what = f"ONNX Runtime or tokenizers cannot load the export: {shown(str(error), 200)}"
        raise ModelError(what, where=str(export.folder.absolute()), fix="export the student again") from error


def onnx_session(path: Path, threads: int) -> Any:
    """Returns a session of ONNX Runtime whose threads leave the cores to other work while they wait."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 4  # errors raise
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def launches(lengths: Any, most: int = LAUNCH_TOKENS, *, equal: bool = False) -> Iterator[Any]:
    """Yields the rows of each run of the model: texts of similar length with little padding, or of one length.

    A run of several texts has at most `most` tokens.
    """
    order = np.argsort(-lengths, kind="stable")
    begin, real = 0, 0
    for index, row in enumerate(order):
        padded = int(lengths[order[begin]]) * (index - begin + 1)
        too_padded = real >= LEAST_TOKENS and padded * (1 - MOST_PADDING) > real + int(lengths[row])
        is_other = equal and lengths[row] != lengths[order[begin]]
        if index > begin and (padded > most or too_padded or is_other):
            yield order[begin:index]
            begin, real = index, 0
        real += int(lengths[row])
    if len(order):
        yield order[begin:]


# ---- the command


def serve(  # noqa: PLR0913 - the options of the command
    config: Path,
    student: Path | None,
    *,
    host: str,
    port: int,
    threads: int | None,
    batch_size: int,
    most_waiting: int,
    limits: Limits,
    quiet: bool,
) -> int:
    """Serves until a signal arrives; returns the exit code of that signal."""
    check_libraries(LIBRARIES, "serve", "amalgam serve")
    if limits.texts > most_waiting:
        what = f"--max-texts is {limits.texts}, and the queue has room for {most_waiting}"
        raise ExperimentError(what, where="amalgam serve", fix="raise --max-waiting, or lower --max-texts")
    from amalgam.stages.app.http_server import Server

    console, signals = Console(quiet=quiet), InterruptHandler()
    export = export_folder(config, student, console)
    with listen(host, port) as listener:
        model = OnnxStudent(export, threads or usable_cores())
        faults = Faults(console)
        batcher = Batcher(model, batch_size=batch_size, most_waiting=most_waiting, on_error=faults.show)
        server = Server(batcher, export, limits, faults.show)
        announce(console, export, listener)
        with signals.listening():
            unanswered = asyncio.run(server.run(listener, signals.requested))
            number = signals.arrived or signal.SIGTERM
            signals.arrived = None  # it is handled
    name, answered = signal.Signals(number).name, server.metrics.requests.total()
    lost = "none was lost"
    if unanswered:
        lost = f"{counted(unanswered, 'accepted request')} got no answer within {limits.grace:g} s"
    console.say(f"stopped by {name}: {counted(answered, 'request')} answered, {lost}")
    return 128 + number


def listen(host: str, port: int) -> socket.socket:
    """Binds the address, before the model loads."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except (OSError, UnicodeError) as error:
        fix = "name an address of this machine with --host, such as 127.0.0.1"
        if number_of(error) in {errno.EADDRINUSE, errno.EACCES}:
            fix = "choose another port with --port, such as 8080"
        what = f"the server cannot listen: {reason_of(error)}"
        raise ExperimentError(what, where=f"{shown(host)}:{port}", fix=fix) from error


def announce(console: Console, export: ExportFolder, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    made = f", fingerprint {export.fingerprint}" if export.fingerprint else ""
    console.say(f"student: {os.path.relpath(export.folder)} ({len(export.labels)} labels{made})")
    if not ipaddress.ip_address(host).is_loopback:
        console.note(
            "the server has no authentication and no TLS: every machine that reaches it may use it. Put a proxy that "
            "has both in front of it, or listen on 127.0.0.1"
        )
    console.result(f"http://{f'[{host}]' if ':' in host else host}:{port}")


def usable_cores() -> int:
    """Returns the number of cores that this process may use; macOS has no affinity."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Faults:
    """Prints faults of the server, each kind at most once a minute, so that requests cannot fill a disk."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown: dict[type[BaseException], float] = {}

    def show(self, error: BaseException) -> None:
        now, kind = time.monotonic(), type(error)
        if now - self._shown.get(kind, -QUIET_SECONDS) < QUIET_SECONDS:
            return
        self._shown[kind] = now
        self._console.say(f"error: {as_error(error)}")
