"""`amalgam serve` without HTTP: shared batches with their order, fairness and limits, and the messages."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from amalgam.pipeline.console import Console
from amalgam.stages.app.batcher import Batcher, EndedError, Prediction, QueueFullError, Text
from amalgam.stages.app.serve import LAUNCH_TOKENS, ExportFolder, Faults, announce, launches
from amalgam.tests.test_serve import LABELS, Gate, by_length
from amalgam.tests.workspaces import until


def test_batches_mix_requests_and_keep_the_order_of_each() -> None:
    gate, sizes = Gate(), list[float]()

    def predict(texts: Sequence[Text]) -> list[Prediction]:
        gate(texts)
        return [Prediction(np.array([float(text[0])]), 0.0, truncated=False) for text in texts]

    errors: list[BaseException] = []
    batcher = Batcher(predict, batch_size=8, most_waiting=1000, on_error=errors.append)
    batcher.on_batch = sizes.append
    numbers = [[str(number) for number in range(first, first + count)] for first, count in ((0, 1), (10, 90), (200, 1))]
    first = batcher.submit([(number,) for number in numbers[0]])
    gate.entered.wait(20)
    large, small = (batcher.submit([(number,) for number in part]) for part in numbers[1:])
    large.add_done_callback(lambda _: sizes.append(-1))
    small.add_done_callback(lambda _: sizes.append(-2))
    gate.opened.set()
    assert [float(p.probabilities[0]) for p in large.result(20)] == list(map(float, numbers[1]))
    assert (len(first.result(20)), len(small.result(20))) == (1, 1)
    until(lambda: sum(size for size in sizes if size > 0) == 92)
    assert sizes.index(-2) < sizes.index(-1), "the small request waited for the large one"
    assert (max(sizes), errors) == (8, [])
    batcher.end()
    with pytest.raises(EndedError):
        batcher.submit([("a",)])


def test_the_queue_has_room_again_after_a_failed_request() -> None:
    errors: list[BaseException] = []
    batcher = Batcher(by_length, batch_size=2, most_waiting=9, on_error=errors.append)
    with pytest.raises(RuntimeError, match="broken"):
        batcher.submit([("poison",), *[("a",)] * 8]).result(20)
    assert len(batcher.submit([("a",)] * 9).result(20)) == 9
    with pytest.raises(QueueFullError):
        batcher.submit([("a",)] * 10)
    assert len(errors) == 1
    batcher.end()


def test_runs_of_the_model_have_every_text_once_and_few_tokens_of_padding() -> None:
    random = np.random.default_rng(0)
    for count in (0, 1, 2, 31, 200):
        lengths = random.integers(3, 513, count)
        runs = list(launches(lengths))
        assert sorted(row for rows in runs for row in rows) == list(range(count))
        assert all(len(rows) == 1 or lengths[rows].max() * len(rows) <= LAUNCH_TOKENS for rows in runs)
        padded = sum(int(lengths[rows].max()) * len(rows) for rows in runs)
        assert count < 31 or lengths.sum() / padded > 0.8
        equal = list(launches(lengths, equal=True))
        assert sorted(row for rows in equal for row in rows) == list(range(count))
        assert all(len(set(lengths[rows])) == 1 for rows in equal)
        short = list(launches(lengths, 100))
        assert sorted(row for rows in short for row in rows) == list(range(count))
        assert all(len(rows) == 1 or lengths[rows].max() * len(rows) <= 100 for rows in short)


# ---- messages of the server


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
