"""The messages of `amalgam serve`: its student, its address, and the faults of predictions."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from amalgam.pipeline.console import Console
from amalgam.stages.app.batcher import Batcher
from amalgam.stages.app.serve import ExportFolder, Faults, announce
from amalgam.tests.test_serve import LABELS, by_length

OWN: Any = {"folder": Path("model"), "pad_id": 0, "reads_padding": False, "end": None}


def test_an_address_that_others_reach_has_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    facts: Any = {"labels": LABELS, "inputs": [], "max_tokens": 32, "fingerprint": "abc", "unknown_threshold": None}
    export = ExportFolder(**OWN, **facts)
    for host, noted in (("127.0.0.1", False), ("0.0.0.0", True)):  # noqa: S104 - it is bound and never listens
        with socket.socket() as unused:
            unused.bind((host, 0))
            announce(Console(), export, unused)
            shown = capsys.readouterr()
            assert shown.out == f"http://{host}:{unused.getsockname()[1]}\n"
            assert ("no authentication" in shown.err) == noted


def test_a_student_without_a_fingerprint_is_announced_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    facts: Any = {"labels": LABELS, "inputs": [], "max_tokens": 32, "fingerprint": "", "unknown_threshold": None}
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        announce(Console(), ExportFolder(**OWN, **facts), unused)
    assert capsys.readouterr().err == "student: model (2 labels)\n"


def test_the_server_predicts_on_after_the_reader_of_its_messages_has_left() -> None:
    reader, messages = os.pipe()
    os.close(reader)
    with os.fdopen(messages, "w") as err:
        faults = Faults(Console(err=err))
        batcher = Batcher(by_length, batch_size=4, most_waiting=16, on_error=faults.show)
        with pytest.raises(RuntimeError):
            batcher.submit([("poison",)]).result(20)
        assert len(batcher.submit([("a",)]).result(20)) == 1
        batcher.end()


def test_the_same_fault_is_printed_once_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    faults = Faults(Console())
    for error in (MemoryError("one"), MemoryError("two"), OSError(24, "Too many open files")):
        faults.show(error)
    printed = capsys.readouterr().err
    assert (printed.count("error:"), "two" in printed, "Too many open files" in printed) == (2, False, True)
