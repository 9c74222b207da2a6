"""Predicts the texts of many requests in shared batches, in a thread of its own.

A batch starts as soon as the previous one ends, with the texts that have arrived meanwhile. So a lone request does not
wait, and many of them fill the batches. Requests with many texts share each batch with the others.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import TypeAlias

from amalgam.data.arrays import Array

Text: TypeAlias = tuple[str, ...]
"""A text, or a pair of texts."""

SHARE = 4
"""A batch has at most one part in SHARE of its texts from one request while others wait."""
SMOOTHING = 0.1
"""Weight of the latest batch in the rate."""


@dataclass(frozen=True)
class Prediction:
    probabilities: Array
    """[labels]"""
    unknown_score: float
    truncated: bool


@dataclass(frozen=True)
class Limits:
    texts: int
    """Texts of one request."""
    characters: int
    """Characters of one text."""
    body: int
    """Bytes of one request's body."""
    seconds: float
    """Time in which a client must send a request, and read an answer."""
    grace: float
    """Time for accepted requests once the server ends."""


@dataclass(frozen=True)
class Description:
    """The facts of the served student that answers have."""

    labels: Sequence[str]
    fingerprint: str
    max_tokens: int
    unknown_threshold: float | None
    columns: Sequence[str] = ()
    """Names of the text columns that it learned; empty if they are not recorded."""


class QueueFullError(Exception):
    """The texts of a request do not fit in the queue; `seconds` is an estimate of the time until they do."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


class EndedError(Exception):
    """The batcher ended before the prediction."""


@dataclass(eq=False)
class _Job:
    texts: Sequence[Text]
    future: Future[list[Prediction]] = field(default_factory=Future)
    predictions: list[Prediction] = field(default_factory=list)
    taken: int = 0

    def fail(self, error: BaseException) -> None:
        with contextlib.suppress(InvalidStateError):
            self.future.set_exception(error)


class Batcher:
    """Collects texts and predicts them with `predict`, at most `batch_size` at a time.

    `on_error` receives the exception of a failed prediction; only the request with that text fails.
    """

    def __init__(
        self,
        predict: Callable[[Sequence[Text]], Sequence[Prediction]],
        *,
        batch_size: int,
        most_waiting: int,
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._predict, self._on_error = predict, on_error
        self._batch_size, self._most_waiting = batch_size, most_waiting
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._running: list[_Job] = []
        self._rate = 0.0
        self.waiting = 0
        """Texts in the queue."""
        self.on_batch: Callable[[float], None] = lambda _texts: None
        threading.Thread(target=self._work, name="batcher", daemon=True).start()

    def submit(self, texts: Sequence[Text]) -> Future[list[Prediction]]:
        """Puts the texts of one request in the queue; raises QueueFullError or EndedError."""
        job = _Job(texts)
        with self._changed:
            if self._ended:
                raise EndedError
            if self.waiting + len(texts) > self._most_waiting:
                raise QueueFullError(self.waiting / self._rate if self._rate else 1.0)
            self.waiting += len(texts)
            self._jobs.append(job)
            self._changed.notify()
        return job.future

    def end(self) -> None:
        """Ends the thread after its batch; requests without a prediction fail with EndedError."""
        with self._changed:
            self._ended = True
            unfinished = [*self._jobs, *self._running]
            self._jobs.clear()
            self._changed.notify()
        for job in unfinished:
            job.fail(EndedError())

    def _work(self) -> None:
        while batch := self._next_batch():
            began = time.monotonic()
            self._run(batch)
            texts = sum(len(part) for _, part in batch)
            self.on_batch(texts)
            rate = texts / max(time.monotonic() - began, 1e-6)
            self._rate += (rate - self._rate) * (SMOOTHING if self._rate else 1.0)

    def _next_batch(self) -> list[tuple[_Job, Sequence[Text]]]:
        """Waits for texts and takes them from the queue, in turn from each request; empty at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._ended)
            parts: dict[int, tuple[_Job, Sequence[Text]]] = {}
            room = 0 if self._ended else self._batch_size
            while room and self._jobs:
                job = self._jobs.popleft()
                share = room if not self._jobs else min(room, max(1, self._batch_size // SHARE))
                texts = job.texts[job.taken : job.taken + share]
                job.taken += len(texts)
                room -= len(texts)
                self.waiting -= len(texts)
                _, earlier = parts.get(id(job), (job, ()))
                parts[id(job)] = job, [*earlier, *texts]
                if job.taken < len(job.texts):
                    self._jobs.append(job)
            self._running = [job for job, _ in parts.values()]
            return list(parts.values())

    def _run(self, batch: Sequence[tuple[_Job, Sequence[Text]]]) -> None:
        """Predicts the batch; if that fails, each request alone, so that one text cannot fail the others."""
        try:
            predictions = iter(self._predict([text for _, texts in batch for text in texts]))
        except BaseException as error:  # noqa: BLE001 - a fault in the tokenizer's Rust code is no Exception
            if len(batch) > 1:
                for part in batch:
                    self._run([part])
                return
            self._on_error(error)
            self._drop(batch[0][0], error)
            return
        for job, texts in batch:
            job.predictions += [next(predictions) for _ in texts]
            if len(job.predictions) == len(job.texts):
                with contextlib.suppress(InvalidStateError):
                    job.future.set_result(job.predictions)

    def _drop(self, job: _Job, error: BaseException) -> None:
        with self._changed:
            if job in self._jobs:
                self._jobs.remove(job)
                self.waiting -= len(job.texts) - job.taken
        job.fail(error)
