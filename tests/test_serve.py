"""`amalgam serve`: predictions as those of the student; faulty and slow clients; no accepted request is lost."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import typer.main

from amalgam.cli import app
from amalgam.stages.app import http_server, serve
from amalgam.stages.app.batcher import Batcher, Description, Limits, Prediction, Text
from amalgam.stages.app.http_server import Server
from amalgam.tests.test_bad_input import assert_three_lines
from amalgam.tests.test_export import ALONE, ROOT, exported, printed_by  # noqa: F401  a fixture
from amalgam.tests.workspaces import Workspace, finish, until

LABELS = ["short", 'a "quoted"\\label\n']
LIMITS = Limits(texts=8, characters=200, body=2000, seconds=5.0, grace=10.0)
TEXTS = ["the chef fried the onion", "the court heard the banker and the nurse"]
JSON = "Content-Type: application/json"


def by_length(texts: Sequence[Text]) -> list[Prediction]:
    """Give the first label to short texts; a text with "poison" fails."""
    if any("poison" in text[0] for text in texts):
        raise RuntimeError("/a/path/of/the/server is broken")
    shares = [0.9 if len(text[0]) < 10 else 0.2 for text in texts]
    return [
        Prediction(np.array([share, 1 - share]), share, len(text) > 1)
        for share, text in zip(shares, texts, strict=True)
    ]


@dataclass
class Running:
    """A server in a thread."""

    predict: Callable[[Sequence[Text]], Sequence[Prediction]] = by_length
    limits: Limits = LIMITS
    batch_size: int = 4
    most_waiting: int = 16
    columns: Sequence[str] = ()
    errors: list[BaseException] = field(default_factory=list)
    unanswered: int | None = None

    def __enter__(self) -> Self:
        self.batcher = Batcher(
            self.predict, batch_size=self.batch_size, most_waiting=self.most_waiting, on_error=self.errors.append
        )
        student = Description(LABELS, "abc", 32, 0.5, self.columns)
        self.server = Server(self.batcher, student, self.limits, self.errors.append)
        self._stop, listener = threading.Event(), socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, args=(listener,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._thread.join(30)
        assert not self._thread.is_alive()

    def stop(self) -> None:
        self._stop.set()

    def _serve(self, listener: socket.socket) -> None:
        with listener:
            self.unanswered = asyncio.run(self.server.run(listener, self._stop.is_set))

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def send(self, raw: bytes) -> bytes:
        """Send bytes and the end of the stream; return everything that the server sends."""
        with self.connect() as client:
            client.sendall(raw)
            client.shutdown(socket.SHUT_WR)
            return received(client)

    def request(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, dict[str, str]]:
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        client.request(method, path, content, {"Content-Type": "application/json"} | given)
        response = client.getresponse()
        text = response.read().decode()
        client.close()
        is_json = response.headers["Content-Type"] == "application/json"
        return response.status, json.loads(text) if is_json and text else text, dict(response.headers)


def received(client: socket.socket) -> bytes:
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := client.recv(65536):
            parts.append(part)
    return b"".join(parts)


def statuses(answer: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", answer)]


def post(body: bytes, *headers: str) -> bytes:
    lines = ["POST /predict HTTP/1.1", "Host: here", f"Content-Length: {len(body)}", JSON, *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


GOOD = json.dumps({"texts": ["a"]}).encode()


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with Running() as server:
        yield server


# ---- answers


def test_an_answer_has_label_probability_and_the_unknown_flag_of_each_text(running: Running) -> None:
    status, content, _ = running.request("POST", "/predict", {"texts": ["a", "a longer text", ["b", "its pair"]]})
    assert (status, content["student"]) == (200, "abc")
    assert content["predictions"][:2] == [
        {"label": "short", "probability": 0.9, "unknown": True, "unknown_score": 0.9, "truncated": False},
        {"label": LABELS[1], "probability": 0.8, "unknown": False, "unknown_score": 0.2, "truncated": False},
    ]
    assert content["predictions"][2]["truncated"] is True
    [prediction] = running.request("POST", "/predict", {"texts": ["a"], "top": 9})[1]["predictions"]
    assert [entry["label"] for entry in prediction["labels"]] == LABELS


def test_a_student_of_pairs_refuses_single_texts_and_another_one_pairs() -> None:
    with Running(columns=["premise", "hypothesis"]) as running:
        assert running.request("POST", "/predict", {"texts": [["a", "b"]]})[0] == 200
        status, content, _ = running.request("POST", "/predict", {"texts": [["a", "b"], "a"]})
    assert status == 400
    assert content["error"]["what"].startswith("texts[1] is a single text")
    assert "premise and hypothesis" in content["error"]["what"]
    assert content["error"]["fix"] == 'send ["first", "second"]'
    with Running(columns=["text"]) as running:
        status, content, _ = running.request("POST", "/predict", {"texts": ["a", ["a", "b"]]})
    assert (status, content["error"]["what"].partition(",")[0]) == (400, "texts[1] is a pair of texts")


def test_health_and_metrics(running: Running) -> None:
    running.request("POST", "/predict", {"texts": ["a"]})
    running.request("GET", "/favicon.ico")
    status, health, headers = running.request("GET", "/health")
    assert (status, health["status"], health["labels"]) == (200, "ok", LABELS)
    assert {"Date", "Content-Length", "X-Content-Type-Options"} <= headers.keys()
    assert running.request("HEAD", "/health")[:2] == (200, "")
    status, text, headers = running.request("GET", "/metrics?x=1")
    assert (status, headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    sample = re.compile(r'[a-z_]+(\{\w+="([^"\\\n]|\\["\\n])*"(,\w+="[^"]*")*\})? [0-9.]+')
    lines = text.splitlines()
    assert [line for line in lines if not line.startswith("# ") and not sample.fullmatch(line)] == []
    assert 'amalgam_predictions_total{label="a \\"quoted\\"\\\\label\\n"}' in text
    assert re.search(r'amalgam_requests_total\{path="other",status="404"\} [1-9]', text)
    assert "favicon" not in text
    [(in_buckets, count)] = re.findall(r'_bucket\{le="\+Inf"\} (\d+)\n.*\namalgam_predict_seconds_count (\d+)', text)
    assert in_buckets == count != "0"


def test_a_client_may_send_several_requests_at_once(running: Running) -> None:
    answer = running.send(post(GOOD) * 3 + b"GET /health HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
    assert statuses(answer) == [200, 200, 200, 200]


def test_chunks_a_length_of_zero_and_http_1_0_are_understood(running: Running) -> None:
    head = b"POST /predict HTTP/1.1\r\nHost: here\r\nContent-Type: application/json; charset=utf-8\r\n"
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (GOOD[:5], GOOD[5:])) + b"0\r\n\r\n"
    assert statuses(running.send(head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks)) == [200]
    assert statuses(running.send(head + b"Content-Length: 0\r\n\r\n")) == [400]
    assert statuses(running.send(b"GET /health HTTP/1.0\r\n\r\n")) == [200]


def test_a_client_that_waits_for_100_continue_gets_it_or_the_refusal(running: Running) -> None:
    with running.connect() as client:
        client.sendall(post(GOOD, "Expect: 100-continue").removesuffix(GOOD))
        assert client.recv(100).startswith(b"HTTP/1.1 100 ")
        client.sendall(GOOD)
        assert statuses(client.recv(5000)) == [200]
        client.sendall(post(b"x" * 5000, "Expect: 100-continue")[:200])
        assert statuses(client.recv(5000)) == [413]


# ---- refusals

SURROGATE = b'{"texts": ["\\ud83d"]}'
BODIES: dict[bytes, tuple[int, str]] = {
    b"": (400, "not JSON"),
    b"{": (400, "not JSON"),
    b"[" * 1900: (400, "nested too deeply" if sys.version_info < (3, 13) else "not JSON"),
    b'{"texts": ' + b"9" * 1900 + b"}": (400, "at least one text"),
    b'{"texts": "a"}': (400, "at least one text"),
    b'{"texts": []}': (400, "at least one text"),
    b'{"texts": ["a", 3]}': (400, "texts[1]"),
    b'{"texts": [["a", "b", "c"]]}': (400, "texts[0]"),
    b'{"texts": ["a", " \\n"]}': (400, "texts[1] is empty"),
    b'{"texts": ["a"], "texts": ["b"]}': (400, "twice"),
    b'{"texts": ["a"], "tops": 2}': (400, "tops"),
    b'{"texts": ["a"], "top": true}': (400, "top"),
    b'{"texts": ["a"], "top": 0}': (400, "top"),
    b"[1]": (400, "no field `texts`"),
    SURROGATE: (400, "lone surrogate"),
    b'{"texts": ["\xff"]}': (400, "not UTF-8 (byte 12)"),
    json.dumps({"texts": ["a"] * 9}).encode(): (413, "9 texts, and 8 are allowed"),
    json.dumps({"texts": ["a" * 201]}).encode(): (413, "201 characters, and 200 are allowed"),
    b"x" * 2001: (413, "2,001 bytes, and 2,000 are allowed"),
}


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_a_faulty_body_is_refused_with_its_fault_and_a_fix(running: Running, body: bytes) -> None:
    status, content, _ = running.request("POST", "/predict", body)
    expected, part = BODIES[body]
    assert status == expected
    assert part in content["error"]["what"]
    assert content["error"]["fix"]


HEADS = {
    b"POST /predict HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n\r\n": 411,
    b"POST /predict HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}": 415,
    b"POST /predict HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nContent-Type: text/plain\r\n\r\n{}": 415,
    post(GOOD, JSON): 415,
    post(GOOD, "Content-Encoding: gzip"): 415,
    post(GOOD, "Transfer-Encoding: chunked"): 400,
    post(GOOD, "Content-Length: 3"): 400,
    post(GOOD).replace(b"Length: 1", b"Length: +1"): 400,
    post(GOOD).replace(b"Length: 1", b"Length: -1"): 400,
    post(GOOD, "Transfer-Encoding: gzip, chunked"): 501,
    post(GOOD, "Transfer-Encoding : chunked"): 400,
    post(GOOD, "Host: other"): 400,
    post(GOOD).replace(b"Host: here\r\n", b""): 400,
    b"POST /predict HTTP/1.1\r\nHost: a\r\n" + JSON.encode() + b"\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n": 400,
    post(GOOD, "X: " + "x" * 40_000): 431,
    post(GOOD, "X: " + "x" * 16_400): 431,
    b"GET /../etc/passwd HTTP/1.1\r\nHost: a\r\n\r\n": 404,
    b"GET /predict HTTP/1.1\r\nHost: a\r\n\r\n": 405,
    post(GOOD).replace(b"/predict", b"/predict?top=3"): 400,
    b"DELETE /health HTTP/1.1\r\nHost: a\r\n\r\n": 405,
    b"GET /health HTTP/3.7\r\nHost: a\r\n\r\n": 505,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03": 400,
    b"\r\n\r\n\0\0": 400,
}


@pytest.mark.parametrize("raw", HEADS, ids=range(len(HEADS)))
def test_a_faulty_request_is_refused_and_nothing_behind_it_is_read(running: Running, raw: bytes) -> None:
    answer = running.send(raw + b"GET /metrics HTTP/1.1\r\nHost: smuggled\r\n\r\n")
    assert statuses(answer) == [HEADS[raw]]
    assert b"\r\nconnection: close\r\n" in answer.lower()
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert error["what"]
    assert error["fix"]
    assert HEADS[raw] != 405 or b"\r\nAllow: " in answer
    assert b".py" not in answer


def test_a_faulty_request_after_a_head_request_is_refused_with_a_body(running: Running) -> None:
    answer = running.send(b"HEAD /health HTTP/1.1\r\nHost: here\r\n\r\nnonsense\r\n\r\n")
    assert statuses(answer) == [200, 400]
    assert json.loads(answer.rpartition(b"\r\n\r\n")[2])["error"]["fix"]


def test_a_huge_body_is_refused_before_it_is_read(running: Running) -> None:
    with running.connect() as client:
        client.sendall(post(b"")[:-4].replace(b"Length: 0", b"Length: 99999999999") + b"\r\n\r\n" + b"x" * 100_000)
        client.shutdown(socket.SHUT_WR)
        assert statuses(received(client)) == [413]
    chunked = b"POST /predict HTTP/1.1\r\nHost: a\r\n" + JSON.encode() + b"\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert statuses(running.send(chunked + b"7d1\r\n" + b"x" * 2001 + b"\r\n" + b"7d1\r\n")) == [413]
    assert running.errors == []


def test_a_text_that_the_model_cannot_take_fails_alone_and_its_reason_stays_on_the_server() -> None:
    started = threading.Event()

    def slow(texts: Sequence[Text]) -> list[Prediction]:
        started.set()
        time.sleep(0.2)
        return by_length(texts)

    with Running(slow) as server:
        clients = [Client(server, {"texts": [text]}) for text in ("a", "b", "poison", "c")]
        assert [client.result()[0] for client in clients] == [200, 200, 500, 200]
        assert "path" not in json.dumps(clients[2].result()[1])
        assert [str(error) for error in server.errors] == ["/a/path/of/the/server is broken"]
        assert server.batcher.waiting == 0


@dataclass
class Client:
    """Sends one request in a thread."""

    server: Running
    body: Any

    def __post_init__(self) -> None:
        self._answers: list[tuple[int, Any, dict[str, str]]] = []
        self._thread = threading.Thread(target=self._send)
        self._thread.start()

    def _send(self) -> None:
        self._answers.append(self.server.request("POST", "/predict", self.body))

    def result(self) -> tuple[int, Any, dict[str, str]]:
        self._thread.join(30)
        return self._answers[0]


@dataclass
class Gate:
    """Predicts only once it is open."""

    entered: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)

    def __call__(self, texts: Sequence[Text]) -> list[Prediction]:
        self.entered.set()
        assert self.opened.wait(30)
        return by_length(texts)


def test_a_full_queue_is_status_503_with_a_time_to_wait() -> None:
    gate = Gate()
    with Running(gate, most_waiting=4) as server:
        first = Client(server, {"texts": ["a"]})
        gate.entered.wait(20)
        second = Client(server, {"texts": ["a"] * 4})
        until(lambda: server.batcher.waiting == 4)
        status, content, headers = server.request("POST", "/predict", {"texts": ["b"]})
        assert (status, int(headers["Retry-After"]) >= 1) == (503, True)
        assert "queue" in content["error"]["what"]
        assert server.request("GET", "/health")[0] == 200
        gate.opened.set()
        assert (first.result()[0], second.result()[0]) == (200, 200)


def test_more_connections_than_allowed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MOST_CONNECTIONS", 2)
    with Running() as server, server.connect(), server.connect(), server.connect() as third:
        assert statuses(received(third)) == [503]
        until(lambda: server.server.metrics.requests == {("other", 503): 1})


# ---- slow clients


@pytest.mark.parametrize("begin", [b"GET /hea", post(GOOD)[:-3]], ids=["head", "body"])
def test_a_slow_request_ends_with_status_408_while_others_are_answered(begin: bytes) -> None:
    limits = Limits(texts=8, characters=200, body=2000, seconds=1.5, grace=10.0)
    with Running(limits=limits) as server, server.connect() as slow:
        slow.sendall(begin)
        assert server.request("POST", "/predict", {"texts": ["a"]})[0] == 200
        began = time.monotonic()
        for byte in b"lt":  # a byte now and then extends nothing
            with contextlib.suppress(OSError):
                slow.send(bytes([byte]))
            time.sleep(0.2)
        assert statuses(received(slow)) == [408]
        assert time.monotonic() - began < 20


def test_a_client_without_a_request_or_one_that_leaves_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    with Running(gate) as server:
        with monkeypatch.context() as patch:
            patch.setattr(http_server, "IDLE_SECONDS", 0.1)
            with server.connect() as idle:
                assert received(idle) == b""
        for part in (b"", b"POST", post(GOOD)[:-3], post(GOOD)):
            with server.connect() as leaving:
                leaving.sendall(part)
        gate.entered.wait(20)
        gate.opened.set()
        assert server.request("POST", "/predict", {"texts": ["a"]})[0] == 200
    assert server.errors == []


def test_the_seconds_of_a_prediction_are_without_those_of_a_slow_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    drained = list[float]()

    async def drain(_writer: asyncio.StreamWriter) -> None:
        drained.append(time.monotonic())
        await asyncio.sleep(0.3)

    monkeypatch.setattr(asyncio.StreamWriter, "drain", drain)
    with Running() as server:
        began = time.monotonic()
        assert server.request("POST", "/predict", {"texts": ["a"]})[0] == 200
        until(lambda: sum(server.server.metrics.seconds.counts))
        assert server.server.metrics.seconds.sum <= drained[-1] - began


def test_a_client_that_reads_no_answer_is_closed() -> None:
    limits = Limits(texts=8, characters=200, body=2000, seconds=0.5, grace=10.0)
    with Running(limits=limits) as server, server.connect() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        until(lambda: len(server.server.connections) == 1)
        client.settimeout(0.1)
        with contextlib.suppress(OSError):
            while True:
                client.sendall(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n" * 100)
        until(lambda: not server.server.connections)
        assert server.errors == []


# ---- the end


def test_no_accepted_request_is_lost_at_the_end() -> None:
    """Clients send without a pause while the server ends: each request has an answer or a refused connection."""

    def slow(texts: Sequence[Text]) -> list[Prediction]:
        time.sleep(0.01)
        return by_length(texts)

    counts, broken = [0] * 8, list[str]()
    with Running(slow) as server:

        def client(number: int) -> None:
            while True:
                connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
                try:
                    connection.connect()
                except ConnectionRefusedError:
                    return
                with contextlib.closing(connection):
                    is_open, is_first = True, True
                    while is_open:
                        try:
                            connection.request("POST", "/predict", GOOD, {"Content-Type": "application/json"})
                            response = connection.getresponse()
                        except OSError as error:
                            broken.extend([] if is_first else [repr(error)])  # else the server has not accepted it
                            return
                        is_first = False
                        counts[number] += response.status == 200
                        is_open = response.getheader("Connection") != "close"
                        response.read()

        threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        until(lambda: min(counts) > 3)
        server.stop()
        for thread in threads:
            thread.join(30)
    assert broken == []
    assert (server.unanswered, server.server.metrics.requests) == (0, {("/predict", 200): sum(counts)})


def test_the_end_waits_for_an_accepted_request_and_closes_idle_connections() -> None:
    gate = Gate()
    with Running(gate) as server, server.connect() as idle:
        client = Client(server, {"texts": ["a"]})
        gate.entered.wait(20)
        server.stop()
        assert received(idle) == b""
        with pytest.raises(ConnectionRefusedError):
            server.connect()
        gate.opened.set()
        status, _, headers = client.result()
        assert (status, headers["Connection"]) == (200, "close")
    assert server.unanswered == 0


def test_requests_beyond_the_grace_are_counted() -> None:
    gate = Gate()
    limits = Limits(texts=8, characters=200, body=2000, seconds=5.0, grace=0.2)
    with Running(gate, limits) as server, server.connect() as client:
        client.sendall(post(GOOD))
        gate.entered.wait(20)
        server.stop()
        assert received(client) == b""
        gate.opened.set()
    assert server.unanswered == 1


# ---- the command


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_server_predicts_as_the_student_and_ends_on_a_signal(exported: Workspace, number: int) -> None:  # noqa: F811
    process = exported.new_process("serve", "--port", "0")
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        body = json.dumps({"texts": TEXTS, "top": 2})
        with contextlib.closing(http.client.HTTPConnection(address.removeprefix("http://"), timeout=30)) as client:
            client.request("POST", "/predict", body, {"Content-Type": "application/json"})
            content = json.loads(client.getresponse().read())
        process.send_signal(number)
        result = finish(process)
    finally:
        process.kill()
    assert result.code == 128 + number, result.err
    assert result.err.endswith(f"\nstopped by {signal.Signals(number).name}: 1 request answered, none was lost\n")
    for entry, expected in zip(
        content["predictions"], exported("predict", *TEXTS, "--top", "2", "--json").json, strict=True
    ):
        assert content["student"] == expected["student"]
        assert [one["label"] for one in entry["labels"]] == [one["label"] for one in expected["labels"]]
        for one, other in zip(entry["labels"], expected["labels"], strict=True):
            assert one["probability"] == pytest.approx(other["probability"], abs=1e-4)
        assert type(entry["unknown"]) is bool


def test_a_signal_while_the_model_loads_has_no_units(exported: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(serve, "OnnxStudent", lambda *_: signal.raise_signal(signal.SIGTERM))
    result = exported.attempt("serve", "--port", "0")
    assert result.code == 128 + signal.SIGTERM, result.err
    assert "error: stopped by SIGTERM; the server had not started\n" in result.err


def test_the_answer_in_the_docs_has_the_fields_of_the_server(running: Running) -> None:
    page = (ROOT / "docs/how-to/serve.md").read_text("utf-8")
    sent, shown = (json.loads(text) for text in re.findall(r"^.*?(\{.*\})'?$", page, re.MULTILINE)[:2])
    _, content, _ = running.request("POST", "/predict", sent)
    assert content.keys() == shown.keys()
    assert content["predictions"][0].keys() == shown["predictions"][0].keys()
    limits = dict(re.findall(r"^\| `(--[\w-]+)` \| ([\d,]+) ", page, re.MULTILINE))
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]  # a group, by its commands
    defaults = {option.opts[0]: option.default for option in command.params}
    assert {name: int(value.replace(",", "")) for name, value in limits.items()} == {
        name: defaults[name] for name in limits
    }
    assert len(limits) == 6


def test_the_server_needs_neither_torch_nor_transformers(exported: Workspace) -> None:  # noqa: F811
    script = ALONE.replace('{"amalgam", "torch"', '{"torch"') + (
        "from pathlib import Path\n"
        "from amalgam.stages.app.serve import OnnxStudent, read_export\n"
        "long, short = OnnxStudent(read_export(Path('students/student-onnx'), ''), 1)([('onion ' * 99,), ('onion',)])\n"
        "print(long.truncated, short.truncated)\n"
    )
    assert printed_by(exported, "-c", script) == "True False\n"


def test_an_absent_or_faulty_export_is_refused_with_the_command_that_makes_it(
    exported: Workspace,  # noqa: F811
    built: Workspace,
    tmp_path: Path,
) -> None:
    (tmp_path / "model").mkdir()
    for workspace, arguments, part in (
        (built, (), "run `amalgam export --onnx`"),
        (built, ("--student", "students/student"), "amalgam serve --student students/student-onnx"),
        (built, ("--student", str(tmp_path / "model")), "amalgam export --onnx"),
        (built, ("--student", "nothing"), "amalgam export --onnx"),
        (exported, ("--max-texts", "9", "--max-waiting", "8"), "--max-waiting"),
        (exported, ("--host", "256.1.1.1"), "--host"),
    ):
        result = workspace.attempt("serve", "--port", "0", *arguments)
        assert result.code == 2, result.err
        assert part in result.err
        assert_three_lines(result.err)


def test_a_damaged_export_a_taken_port_and_an_absent_library_are_refused(
    exported: Workspace,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workspace = exported.copy(tmp_path / "workspace")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = workspace.attempt("serve", "--port", str(taken.getsockname()[1]))
    assert (result.code, "--port" in result.err) == (2, True), result.err
    folder = workspace.folder / "students/student-onnx"
    (folder / "tokenizer.json").write_text("{}")
    result = workspace.attempt("serve", "--port", "0")
    assert (result.code, "tokenizer.json" in result.err) == (2, True), result.err
    for name in (".amalgam.json", ".amalgam.copy.json"):
        (folder / name).unlink()
    result = workspace.attempt("serve", "--port", "0")
    assert (result.code, "cannot load" in result.err) == (2, True), result.err
    monkeypatch.setitem(sys.modules, "h11", None)
    result = workspace.attempt("serve")
    assert (result.code, "amalgam-distill[serve]" in result.err) == (2, True), result.err
