"""Serves predictions over HTTP/1.1: parses requests, limits them, and counts them for Prometheus.

h11 parses the protocol strictly: contradictory lengths and unknown encodings are refused, so no proxy can be deceived.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from socket import socket
from typing import Any, TypeAlias

import h11

from amalgam.data.keys import shown
from amalgam.data.rows import has_surrogate
from amalgam.stages.app.batcher import Batcher, Description, EndedError, Limits, Prediction, QueueFullError, Text

PATHS: Mapping[str, Sequence[str]] = {"/predict": ("POST",), "/health": ("GET", "HEAD"), "/metrics": ("GET", "HEAD")}
OTHER = "other"
"""Other paths in the metrics: a client cannot make new rows."""
ENDPOINTS = "POST /predict, GET /health or GET /metrics"
EXAMPLE = '{"texts": ["a text", "another text"]}'

MOST_CONNECTIONS = 512
"""Open connections; a further one gets status 503."""
STATUSES = (431, 501)
"""Statuses of the parser: large headers, and an encoding other than chunked."""
MOST_HEAD = 16_384
"""Bytes of the request line and the headers."""
CHUNK = 16_384
IDLE_SECONDS = 60.0
"""Time after which a connection without a request is closed."""
LAST_SECONDS = 1.0
"""Time for the next request of an idle connection once the server ends: the client may have sent it before."""
UNREAD_SECONDS = 2.0
"""Time in which the rest of a refused body is discarded: a connection closed earlier could lose the answer."""
TICK = 0.05
DIGITS = 6
"""Decimals of a probability and a score."""
SHOWN = 100
"""Characters of a query in a message."""

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
TEXTS = (1, 2, 4, 8, 16, 32, 64, 128)
JSON, PROMETHEUS = "application/json", "text/plain; version=0.0.4; charset=utf-8"

Headers: TypeAlias = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes
    kind: str = JSON
    headers: Headers = ()
    path: str = OTHER


class Refusal(Exception):  # noqa: N818 - it is an answer
    """A request that is refused, with its status and the fix for the client."""

    def __init__(self, what: str, fix: str, status: int = HTTPStatus.BAD_REQUEST, headers: Headers = ()) -> None:
        super().__init__(what)
        self.status, self.what, self.fix, self.headers = status, what, fix, headers

    def answer(self, path: str) -> Answer:
        body = _json({"error": {"what": self.what, "fix": self.fix}})
        return Answer(self.status, body, headers=self.headers, path=path)


# ---- metrics


class MetricHistogram:
    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self, name: str) -> list[str]:
        total, lines = 0, []
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{name}_sum {self.sum:.6f}", f"{name}_count {total}"]


@dataclass
class Metrics:
    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Answers by path and status."""
    seconds: MetricHistogram = field(default_factory=lambda: MetricHistogram(SECONDS))
    batch_texts: MetricHistogram = field(default_factory=lambda: MetricHistogram(TEXTS))
    labels: Counter[str] = field(default_factory=Counter)
    truncated: int = 0
    unknown: int = 0

    def text(self, student: Description, connections: int, waiting: int) -> str:
        requests = [
            f'amalgam_requests_total{{path="{path}",status="{status}"}} {count}'
            for (path, status), count in sorted(self.requests.items())
        ]
        labels = [
            f'amalgam_predictions_total{{label="{_escaped(label)}"}} {self.labels[label]}' for label in student.labels
        ]
        info = f'amalgam_student_info{{fingerprint="{_escaped(student.fingerprint)}"}} 1'
        families = (
            ("amalgam_requests_total", "counter", "Answers by path and status.", requests),
            ("amalgam_predictions_total", "counter", "Predicted texts by their most likely label.", labels),
            ("amalgam_truncated_texts_total", "counter", "Texts longer than the student's limit.", self.truncated),
            ("amalgam_unknown_texts_total", "counter", "Texts unlike those of the training.", self.unknown),
            ("amalgam_predict_seconds", "histogram", "Seconds from a request's first byte to its predictions.",
             self.seconds.lines("amalgam_predict_seconds")),
            ("amalgam_batch_texts", "histogram", "Texts of a batch.", self.batch_texts.lines("amalgam_batch_texts")),
            ("amalgam_waiting_texts", "gauge", "Texts in the queue.", waiting),
            ("amalgam_connections", "gauge", "Open connections.", connections),
            ("amalgam_student_info", "gauge", "The fingerprint of the student.", [info]),
        )  # fmt: skip
        lines: list[str] = []
        for name, kind, meaning, samples in families:
            lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]
            lines += samples if isinstance(samples, list) else [f"{name} {samples}"]
        return "\n".join([*lines, ""])


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


# ---- requests


def read_request(body: bytes, limits: Limits, student: Description) -> tuple[list[Text], int]:
    """Returns the texts of a request to /predict, and the number of labels for each; raises Refusal."""
    try:
        content = json.loads(body.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except UnicodeDecodeError as error:
        raise Refusal(f"the body is not UTF-8 (byte {error.start})", "send JSON in UTF-8") from None
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else shown(str(error), 200)
        raise Refusal(f"the body is not JSON: {reason}", f"send {EXAMPLE}") from None
    if not isinstance(content, dict) or "texts" not in content:
        raise Refusal("the body has no field `texts`", f"send {EXAMPLE}")
    foreign = sorted(content.keys() - {"texts", "top"})
    if foreign:
        raise Refusal(f"the body has an unknown field: {shown(foreign[0])}", "send the fields `texts` and `top` only")
    top = content.get("top", 1)
    if type(top) is not int or top < 1:
        raise Refusal("`top` is not a whole number from 1 on", "send a number such as 3")
    texts = _texts(content["texts"], limits)
    _check_pairs(texts, student.columns)
    return texts, min(top, len(student.labels))


def _check_pairs(texts: Sequence[Text], columns: Sequence[str]) -> None:
    """Refuses single texts where the student learned pairs of texts, and pairs where it learned single texts."""
    wrong = next((index for index, text in enumerate(texts) if columns and len(text) != len(columns)), None)
    if wrong is not None and len(columns) == 1:
        what = f"texts[{wrong}] is a pair of texts, and the student classifies single texts ({shown(columns[0])})"
        raise Refusal(what, 'send "a text"')
    if wrong is not None:
        pairs = f"pairs of {' and '.join(map(shown, columns))}"
        what = f"texts[{wrong}] is a single text, and the student classifies {pairs}"
        raise Refusal(what, 'send ["first", "second"]')


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("a field occurs twice")
    return content


def _texts(given: Any, limits: Limits) -> list[Text]:
    if not isinstance(given, list) or not given:
        raise Refusal("`texts` is not a list with at least one text", f"send {EXAMPLE}")
    if len(given) > limits.texts:
        what = f"the request has {len(given):,} texts, and {limits.texts:,} are allowed"
        raise Refusal(what, "send several requests", HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
    return [_text(text, f"texts[{index}]", limits) for index, text in enumerate(given)]


def _text(given: Any, place: str, limits: Limits) -> Text:
    fields = (given,) if isinstance(given, str) else given
    is_text = isinstance(fields, tuple | list) and len(fields) in {1, 2} and all(isinstance(f, str) for f in fields)
    if not is_text:
        what, fix = f"{place} is neither a text nor a pair of texts", 'send "a text", or ["first", "second"]'
    elif not all(part.strip() for part in fields):
        what, fix = f"{place} is empty", "leave it out"
    elif any(map(has_surrogate, fields)):
        what, fix = f"{place} has a lone surrogate", "write the character in full; \\ud83d alone is half of one"
    elif sum(map(len, fields)) > limits.characters:
        what = f"{place} has {sum(map(len, fields)):,} characters, and {limits.characters:,} are allowed"
        raise Refusal(what, "shorten it: the student reads the beginning only", HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
    else:
        return tuple(fields)
    raise Refusal(what, fix)


def entry(prediction: Prediction, student: Description, top: int) -> dict[str, Any]:
    """Returns the answer for one text."""
    ranked = [
        {"label": student.labels[index], "probability": round(float(prediction.probabilities[index]), DIGITS)}
        for index in (-prediction.probabilities).argsort(kind="stable")[:top]
    ]
    result: dict[str, Any] = dict(ranked[0])
    if top > 1:
        result["labels"] = ranked
    if student.unknown_threshold is not None:
        result["unknown"] = prediction.unknown_score > student.unknown_threshold
        result["unknown_score"] = round(prediction.unknown_score, DIGITS)
    return result | {"truncated": prediction.truncated}


def _json(content: Any) -> bytes:
    return json.dumps(content).encode() + b"\n"


def check_head(path: str, request: h11.Request, limit: int) -> None:
    """Refuses a request by its method, path and headers, before its body is read."""
    head = len(request.target) + sum(len(name) + len(value) + 4 for name, value in request.headers)
    if head > MOST_HEAD:  # the parser refuses a larger head only if it arrives in several reads
        what = f"request line and headers have more than {MOST_HEAD:,} bytes"
        raise Refusal(what, "send fewer or shorter headers", HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
    if request.http_version not in {b"1.0", b"1.1"}:
        what = "the version of HTTP is not supported"
        raise Refusal(what, "send HTTP/1.1", HTTPStatus.HTTP_VERSION_NOT_SUPPORTED)
    if path not in PATHS:
        raise Refusal("there is nothing at this path", f"send {ENDPOINTS}", HTTPStatus.NOT_FOUND)
    method = request.method.decode("ascii", "replace")
    if method not in PATHS[path]:
        what, fix = f"{path} does not allow this method", f"send {' or '.join(PATHS[path])}"
        headers = [("Allow", ", ".join(PATHS[path]))]
        raise Refusal(what, fix, HTTPStatus.METHOD_NOT_ALLOWED, headers)
    if method == "POST" and (query := request.target.partition(b"?")[2]):
        what = f"{path} takes no query, such as {shown(query.decode('ascii', 'replace'), SHOWN)}"
        raise Refusal(what, f'send its fields in the body: {EXAMPLE[:-1]}, "top": 3}}')
    values: dict[bytes, list[bytes]] = {}
    for name, value in request.headers:
        values.setdefault(name, []).append(value)
    if b"transfer-encoding" in values and b"content-length" in values:
        raise Refusal("the request has Content-Length and Transfer-Encoding", "send one of them")
    length = int(values.get(b"content-length", [b"0"])[0])
    if length > limit:
        raise too_large(f"the body has {length:,} bytes", limit)
    if method == "POST":
        _check_body_headers(values)


def _check_body_headers(values: Mapping[bytes, Sequence[bytes]]) -> None:
    """Requires application/json, which also keeps pages of other sites from sending requests through a browser."""
    if not values.keys() & {b"content-length", b"transfer-encoding"}:
        raise Refusal("the request has no length", "send the header Content-Length", HTTPStatus.LENGTH_REQUIRED)
    kinds = [value.partition(b";")[0].strip().lower() for value in values.get(b"content-type", ())]
    if kinds != [b"application/json"]:
        what, fix = "the body is not declared as JSON", "send the header `Content-Type: application/json` once"
        raise Refusal(what, fix, HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
    if values.get(b"content-encoding", [b"identity"]) != [b"identity"]:
        what, fix = "the body is compressed", "send it without Content-Encoding"
        raise Refusal(what, fix, HTTPStatus.UNSUPPORTED_MEDIA_TYPE)


def too_large(what: str, limit: int) -> Refusal:
    fix = "send fewer texts in each request"
    return Refusal(f"{what}, and {limit:,} are allowed", fix, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)


# ---- the server


class Server:
    """Answers requests until `stop` returns True, then finishes the accepted ones."""

    def __init__(
        self, batcher: Batcher, student: Description, limits: Limits, on_error: Callable[[BaseException], None]
    ) -> None:
        self.batcher, self.student, self.limits, self._on_error = batcher, student, limits, on_error
        self.metrics = Metrics()
        batcher.on_batch = self.metrics.batch_texts.add
        self.ending = False
        self.connections: set[Connection] = set()
        """The open ones."""

    async def run(self, listener: socket, stop: Callable[[], bool]) -> int:
        """Returns the number of requests without an answer at the end of the grace."""
        asyncio.get_running_loop().set_exception_handler(self._failed)
        server = await asyncio.start_server(self._connected, sock=listener, backlog=MOST_CONNECTIONS)
        while not stop():  # noqa: ASYNC110 - a signal handler sets no asyncio.Event
            await asyncio.sleep(TICK)
        self.ending = True
        clients = _accept_queue(listener)
        server.close()
        for client in clients:
            await self._adopt(client)
        began = time.monotonic()
        while self.connections and time.monotonic() < began + self.limits.grace:
            await asyncio.sleep(TICK)
            if time.monotonic() > began + LAST_SECONDS:
                for connection in [each for each in self.connections if each.is_idle]:
                    connection.abort()
        unanswered = sum(connection.is_accepted for connection in self.connections)
        self.batcher.end()
        for connection in list(self.connections):
            connection.abort()
        while self.connections:  # noqa: ASYNC110 - once, at the end
            await asyncio.sleep(TICK)
        return unanswered

    async def _adopt(self, client: socket) -> None:
        protocol = asyncio.StreamReaderProtocol(asyncio.StreamReader(), self._connected)
        await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, client)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(self, reader, writer)
        self.connections.add(connection)
        try:
            if len(self.connections) > MOST_CONNECTIONS:
                await connection.refuse(self.overloaded("too many connections are open", 1))
            else:
                await connection.run()
        except Exception as error:  # noqa: BLE001 - one client's fault ends no other connection
            self._on_error(error)
        finally:
            self.connections.discard(connection)
            writer.close()

    def _failed(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Shows a fault of the event loop, such as too many open files."""
        self._on_error(context.get("exception") or RuntimeError(context.get("message")))

    async def answer(self, path: str, body: bytes) -> Answer:
        if path == "/health":
            return self._health()
        if path == "/metrics":
            text = self.metrics.text(self.student, len(self.connections), self.batcher.waiting)
            return Answer(HTTPStatus.OK, text.encode(), PROMETHEUS, path=path)
        texts, top = read_request(body, self.limits, self.student)
        try:
            predictions = await asyncio.wrap_future(self.batcher.submit(texts))
        except QueueFullError as error:
            raise self.overloaded("the queue of texts is full", error.seconds) from None
        except EndedError:
            raise self.overloaded("the server ends", 1) from None
        except Exception:  # noqa: BLE001 - the batcher has printed it; its text could have paths
            what, fix = "the prediction failed", "the server's messages have the reason; other texts can still be sent"
            raise Refusal(what, fix, HTTPStatus.INTERNAL_SERVER_ERROR) from None
        entries = [entry(prediction, self.student, top) for prediction in predictions]
        self.metrics.labels.update(each["label"] for each in entries)
        self.metrics.truncated += sum(each["truncated"] for each in entries)
        self.metrics.unknown += sum(each.get("unknown", False) for each in entries)
        body = _json({"student": self.student.fingerprint, "predictions": entries})
        return Answer(HTTPStatus.OK, body, path=path)

    def overloaded(self, what: str, seconds: float) -> Refusal:
        wait = str(min(60, max(1, math.ceil(seconds))))
        fix = f"send the request again after {wait} s"
        return Refusal(what, fix, HTTPStatus.SERVICE_UNAVAILABLE, [("Retry-After", wait)])

    def _health(self) -> Answer:
        status = HTTPStatus.SERVICE_UNAVAILABLE if self.ending else HTTPStatus.OK
        facts = {
            "status": "ending" if self.ending else "ok",
            "student": self.student.fingerprint,
            "labels": list(self.student.labels),
            "max_tokens": self.student.max_tokens,
        }
        return Answer(status, _json(facts), path="/health")


def _accept_queue(listener: socket) -> list[socket]:
    """Accepts the connections in the kernel's queue, which would be reset when the listener is closed."""
    clients = list[socket]()
    with contextlib.suppress(OSError):
        while len(clients) < MOST_CONNECTIONS:
            clients.append(listener.accept()[0])
    return clients


class Connection:
    """One client: reads a request, answers it, and reads the next."""

    def __init__(self, server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._server, self._reader, self._writer = server, reader, writer
        self._http = h11.Connection(h11.SERVER, MOST_HEAD)
        self._path, self._has_body = OTHER, True
        self.is_idle = True
        self.is_accepted = False
        """Whether a whole request was read and its answer is not yet written."""

    def abort(self) -> None:
        self._writer.transport.abort()

    async def run(self) -> None:
        with contextlib.suppress(OSError, h11.ProtocolError):  # the client has left, or reads nothing (TimeoutError)
            while await self._exchange():
                self._http.start_next_cycle()

    async def refuse(self, refusal: Refusal) -> None:
        with contextlib.suppress(OSError, h11.ProtocolError):
            await self._send(refusal.answer(OTHER), ends=True)

    async def _exchange(self) -> bool:
        """Answers one request; returns whether another one may follow."""
        self.is_idle, self._path, self._has_body = not self._http.trailing_data[0], OTHER, True
        if self.is_idle and not await self._receive(IDLE_SECONDS):
            return False
        self.is_idle, began = False, time.monotonic()
        answer = await self._answer()
        seconds = time.monotonic() - began
        if answer is None:
            return False
        # The connection ends after a request of which a part is unread.
        await self._send(answer, ends=not self.is_accepted or self._server.ending)
        self.is_accepted = False
        if answer.path == "/predict" and answer.status == HTTPStatus.OK:
            self._server.metrics.seconds.add(seconds)
        return self._http.our_state is h11.DONE and self._http.their_state is h11.DONE

    async def _answer(self) -> Answer | None:
        """Returns the answer to the next request, or None if the client has left."""
        seconds = self._server.limits.seconds
        try:
            async with asyncio.timeout(seconds):
                body = await self._request()
            if body is None:
                return None
            self.is_accepted = True
            return await self._server.answer(self._path, body)
        except Refusal as error:
            refusal = error
        except TimeoutError:
            what = f"the request did not arrive within {seconds:g} s"
            refusal = Refusal(what, "send it faster, or in smaller parts", HTTPStatus.REQUEST_TIMEOUT)
        except h11.RemoteProtocolError as error:
            what = f"the request is no valid HTTP/1.1: {shown(str(error))}"
            status = error.error_status_hint if error.error_status_hint in STATUSES else HTTPStatus.BAD_REQUEST
            refusal = Refusal(what, "send it with an HTTP client such as curl", status)
        return refusal.answer(self._path)

    async def _request(self) -> bytes | None:
        """Returns the body of the next request, or None if the client has left."""
        head = await self._event()
        if not isinstance(head, h11.Request):
            return None
        self._has_body = head.method != b"HEAD"
        target = head.target.decode("ascii", "replace").partition("?")[0]
        self._path = target if target in PATHS else OTHER
        limit = self._server.limits.body
        check_head(self._path, head, limit)
        if self._http.they_are_waiting_for_100_continue:
            self._write(h11.InformationalResponse(status_code=HTTPStatus.CONTINUE, headers=[]))
        parts, size = list[bytes](), 0
        while isinstance(event := await self._event(), h11.Data):
            parts.append(bytes(event.data))
            size += len(event.data)
            if size > limit:
                raise too_large("the body has too many bytes", limit)
        return b"".join(parts) if isinstance(event, h11.EndOfMessage) else None

    async def _event(self) -> Any:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._reader.read(CHUNK))
        return event

    async def _receive(self, seconds: float) -> bool:
        """Passes the first bytes of a request to the parser; returns False if the client sends none."""
        try:
            async with asyncio.timeout(seconds):
                content = await self._reader.read(CHUNK)
        except TimeoutError:
            return False
        self._http.receive_data(content)
        return bool(content)

    async def _send(self, answer: Answer, *, ends: bool) -> None:
        headers = [
            ("Date", formatdate(usegmt=True)),
            ("Content-Type", answer.kind),
            ("Content-Length", str(len(answer.body))),
            ("X-Content-Type-Options", "nosniff"),
            *answer.headers,
            *([("Connection", "close")] if ends else []),
        ]
        head = h11.Response(status_code=answer.status, headers=headers, reason=HTTPStatus(answer.status).phrase)
        self._write(head, h11.Data(data=answer.body if self._has_body else b""), h11.EndOfMessage())
        async with asyncio.timeout(self._server.limits.seconds):
            await self._writer.drain()
        self._server.metrics.requests[answer.path, int(answer.status)] += 1
        if ends:
            await self._discard_rest()

    def _write(self, *events: Any) -> None:
        self._writer.write(b"".join(self._http.send(event) or b"" for event in events))

    async def _discard_rest(self) -> None:
        """Reads the rest of the request for a short time, so that the client can read the answer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(UNREAD_SECONDS):
                self._writer.write_eof()
                while await self._reader.read(CHUNK):
                    pass
