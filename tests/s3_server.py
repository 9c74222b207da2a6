"""A small S3 for the tests: objects in memory, over HTTP, with the faults that a test sets.

`make test-s3` runs the same tests against moto's server, an implementation from outside this project.
"""

from __future__ import annotations

import re
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from email.utils import formatdate
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

PAGE = 1000


class S3(ThreadingHTTPServer):
    """`objects` are by bucket/key, with the time when each was put."""

    daemon_threads = True

    def __init__(self, speaks: type[Request]) -> None:
        super().__init__(("127.0.0.1", 0), speaks)
        self.objects: dict[str, tuple[bytes, float]] = {}
        self.lock = threading.Lock()
        self._order: list[str] | None = None
        self.asked: Counter[str] = Counter()
        """Requests by method; LIST for a page."""
        self.puts_if_absent = True
        self.seconds = 0.0
        """That an answer takes."""
        self.breaks_puts_of = ""
        """The connection breaks in the middle of a put whose key holds this, again and again."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def restore(self, objects: dict[str, tuple[bytes, float]]) -> None:
        self.objects, self._order = dict(objects), None

    def put(self, key: str, body: bytes | None) -> None:
        """None: it is deleted. Under the lock."""
        if (key in self.objects) != (body is not None):
            self._order = None
        if body is None:
            self.objects.pop(key, None)
        else:
            self.objects[key] = body, time.time()

    def keys(self, start: str) -> list[str]:
        """In order, those that start so."""
        with self.lock:
            if self._order is None or len(self._order) != len(self.objects):
                self._order = sorted(self.objects)
            first = bisect_left(self._order, start)
            return self._order[first : bisect_left(self._order, start + "\U0010ffff", first)]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is what some tests are about."""


@contextmanager
def serving(speaks: type[Request] | None = None) -> Iterator[S3]:
    server = S3(speaks or Request)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Request(BaseHTTPRequestHandler):
    """One request, answered as S3 does."""

    COPIED_FROM = "x-amz-copy-source"
    IF_ABSENT, ABSENT = "If-None-Match", "*"
    IF_SAME = "If-Match"
    STANDS_ALREADY = 412
    LISTS = "list-type"
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: S3

    def log_message(self, format: str, *args: Any) -> None: ...  # noqa: A002  the signature of the base class

    @property
    def key(self) -> str:
        return unquote(urlsplit(self.path).path).strip("/")

    def do_PUT(self) -> None:
        self.server.asked["PUT"] += 1
        size = int(self.headers.get("Content-Length") or 0)
        if self.server.breaks_puts_of and self.server.breaks_puts_of in self.key:
            self.rfile.read(size // 2)
            self.connection.close()
            self.close_connection = True
            return
        body = self.rfile.read(size)
        source = self.source
        with self.server.lock:
            if source is not None and source not in self.server.objects:
                self.answer(404)
                return
            if source is not None:
                body = self.server.objects[source][0]
            elif self.server.puts_if_absent and (status := self.refusal()):
                self.answer(status)
                return
            self.server.put(self.key, body)
        self.has_put(body, copied=source is not None)

    def refusal(self) -> int | None:
        """Returns the status of a put whose condition fails; None if it may overwrite."""
        stored, same = self.server.objects.get(self.key), self.headers.get(self.IF_SAME)
        if self.headers.get(self.IF_ABSENT) == self.ABSENT:
            return self.STANDS_ALREADY if stored else None
        return 412 if same is not None and (stored is None or same != self.version(stored[0])) else None

    def version(self, body: bytes) -> str:
        """Returns the value of IF_SAME for an object's content."""
        return tag(body)

    @property
    def source(self) -> str | None:
        """Returns the key to copy from, or None if the request is no copy."""
        header = self.headers.get(self.COPIED_FROM)
        return None if header is None else unquote(header).strip("/")

    def has_put(self, body: bytes, *, copied: bool) -> None:
        self.answer(200, b"<CopyObjectResult/>" if copied else b"", ETag=tag(body))

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query, keep_blank_values=True)
        if self.LISTS in query:
            self._list({name: values[0] for name, values in query.items()})
            return
        self.server.asked[self.command] += 1
        stored = self.server.objects.get(self.key)
        if stored is None:
            self.answer(404)
            return
        body, when = stored
        headers = {"ETag": tag(body), "Last-Modified": formatdate(when, usegmt=True), **self.more_headers(body)}
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        if match:
            first, last = int(match[1]), min(int(match[2]), len(body) - 1)
            self.answer(206, body[first : last + 1], **headers, Content_Range=f"bytes {first}-{last}/{len(body)}")
        else:
            self.answer(200, body, **headers)

    def more_headers(self, body: bytes) -> dict[str, str]:
        return {}

    do_HEAD = do_GET  # noqa: N815  the base class says so

    def do_DELETE(self) -> None:
        self.server.asked["DELETE"] += 1
        with self.server.lock:
            self.server.put(self.key, None)
        self.answer(204)

    def do_POST(self) -> None:
        """Many deletions at once."""
        self.server.asked["DELETE"] += 1
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        keys = re.findall(r"<Key>(.*?)</Key>", body)
        with self.server.lock:
            for key in keys:
                self.server.put(f"{self.key}/{unescape(key)}", None)
        gone = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        self.answer(200, f"<DeleteResult>{gone}</DeleteResult>".encode())

    def _list(self, query: dict[str, str]) -> None:
        self.server.asked["LIST"] += 1
        bucket, prefix, delimiter = self.key, query.get("prefix", ""), query.get("delimiter")
        after = query.get("continuation-token") or query.get("marker") or query.get("start-after") or ""
        keys = [key[len(bucket) + 1 :] for key in self.server.keys(f"{bucket}/{prefix}")]
        if after:
            keys = keys[bisect_left(keys, after) :]
        contents, prefixes, last = list[str](), dict[str, None](), ""
        for key in keys:
            rest = key[len(prefix) :]
            folder = prefix + rest.partition("/")[0] + "/" if delimiter and "/" in rest else ""
            if key <= after or (folder and after.startswith(folder)):
                continue
            if len(contents) + len(prefixes) == PAGE and folder not in prefixes:
                break
            last = key
            if folder:
                prefixes[folder] = None
            else:
                contents.append(key)
        more = bool(keys) and last != "" and last != keys[-1]
        self.answer(200, self.page(contents, list(prefixes), last if more else "").encode())

    def page(self, keys: Sequence[str], folders: Sequence[str], last: str) -> str:
        """Returns a page of a listing as XML; `last`: the token of the next page, empty if there is none."""
        body = "".join(self._content(key) for key in keys)
        body += "".join(f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in folders)
        token = f"<NextContinuationToken>{escape(last)}</NextContinuationToken>" if last else ""
        more = f"<IsTruncated>{str(bool(last)).lower()}</IsTruncated>{token}<KeyCount>{len(keys)}</KeyCount>"
        return f"<ListBucketResult><Name>{self.key}</Name>{more}{body}</ListBucketResult>"

    def _content(self, key: str) -> str:
        body, when = self.server.objects[f"{self.key}/{key}"]
        changed = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(when))
        text = f"<Key>{escape(key)}</Key><LastModified>{changed}</LastModified><ETag>{tag(body)}</ETag>"
        return f"<Contents>{text}<Size>{len(body)}</Size><StorageClass>STANDARD</StorageClass></Contents>"

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        time.sleep(self.server.seconds)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def tag(body: bytes) -> str:
    return f'"{md5(body, usedforsecurity=False).hexdigest()}"' if len(body) < 1 << 16 else f'"{len(body):032x}"'
