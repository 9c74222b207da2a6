"""Shared batches of `amalgam serve`: order, fairness, the limit of the queue, and runs with little padding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from amalgam.stages.app.batcher import Batcher, EndedError, Prediction, QueueFullError, Text
from amalgam.stages.app.serve import LAUNCH_TOKENS, launches
from amalgam.tests.test_serve import Gate, by_length
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
