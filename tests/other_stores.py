"""The differences of Google Cloud Storage and Azure from S3, as far as their clients in obstore need them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from email.utils import formatdate
from pathlib import Path
from urllib.parse import unquote, urlsplit
from xml.sax.saxutils import escape

from amalgam.tests.s3_server import Request, tag

ACCOUNT = "someone"
BATCH = "batch_of_the_server"


class GoogleRequest(Request):
    COPIED_FROM = "x-goog-copy-source"
    IF_ABSENT, ABSENT = "x-goog-if-generation-match", "0"
    IF_SAME = IF_ABSENT

    def version(self, body: bytes) -> str:
        """Returns a generation."""
        return str(int(tag(body).strip('"'), 16) % 10**15)

    def more_headers(self, body: bytes) -> dict[str, str]:
        return {"x-goog-generation": self.version(body)}

    def do_DELETE(self) -> None:  # noqa: N802  the base class says so
        """Answers 404 if the object does not exist."""
        if self.key in self.server.objects:
            super().do_DELETE()
        else:
            self.answer(404)


class AzureRequest(Request):
    """Paths begin with the account."""

    COPIED_FROM = "x-ms-copy-source"
    STANDS_ALREADY = 409
    LISTS = "comp"

    @property
    def key(self) -> str:
        return _without_account(self.path)

    @property
    def source(self) -> str | None:
        header = self.headers.get(self.COPIED_FROM)
        return None if header is None else _without_account(header)

    def has_put(self, body: bytes, *, copied: bool) -> None:
        self.answer(202 if copied else 201, ETag=tag(body), x_ms_copy_status="success")

    def do_POST(self) -> None:  # noqa: N802  the base class says so
        """Deletions in one request of several parts, each with an answer of its own."""
        self.server.asked["DELETE"] += 1
        asked = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        responses = []
        for number, path in enumerate(re.findall(r"^DELETE (\S+) HTTP", asked, re.MULTILINE)):
            key = _without_account(path)
            with self.server.lock:
                status = "202 Accepted" if key in self.server.objects else "404 The specified blob does not exist."
                self.server.put(key, None)
            head = f"Content-Type: application/http\r\nContent-ID: {number}\r\n\r\nHTTP/1.1 {status}\r\n"
            responses.append(f"--{BATCH}\r\n{head}x-ms-request-id: {number}\r\n\r\n")
        body = "".join([*responses, f"--{BATCH}--\r\n"]).encode()
        self.answer(202, body, Content_Type=f"multipart/mixed; boundary={BATCH}")

    def page(self, keys: Sequence[str], folders: Sequence[str], last: str) -> str:
        body = "".join(self._blob(key) for key in keys)
        body += "".join(f"<BlobPrefix><Name>{escape(one)}</Name></BlobPrefix>" for one in folders)
        return f"<EnumerationResults><Blobs>{body}</Blobs><NextMarker>{escape(last)}</NextMarker></EnumerationResults>"

    def _blob(self, key: str) -> str:
        body, when = self.server.objects[f"{self.key}/{key}"]
        text = f"<Last-Modified>{formatdate(when, usegmt=True)}</Last-Modified><Etag>{tag(body)}</Etag>"
        text += f"<Content-Length>{len(body)}</Content-Length><Content-Type>application/octet-stream</Content-Type>"
        return f"<Blob><Name>{escape(key)}</Name><Properties>{text}</Properties></Blob>"


def _without_account(url: str) -> str:
    return unquote(urlsplit(url).path).strip("/").removeprefix(f"{ACCOUNT}/")


SPOKEN: dict[str, type[Request]] = {"s3": Request, "gs": GoogleRequest, "az": AzureRequest}


def environment(scheme: str, url: str, folder: Path) -> dict[str, str]:
    """Returns the address of a server and the credentials, as environment variables of a client."""
    if scheme == "s3":
        keys = {"AWS_ACCESS_KEY_ID": "who", "AWS_SECRET_ACCESS_KEY": "canary-4711", "AWS_REGION": "us-east-1"}
        return {**keys, "AWS_ENDPOINT_URL": url}
    if scheme == "az":
        keys = {"AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": "Y2FuYXJ5LTQ3MTE="}
        return {**keys, "AZURE_STORAGE_ENDPOINT": f"{url}/{ACCOUNT}"}
    account = folder / "account.json"
    named = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
    account.write_text(json.dumps({"disable_oauth": True, **named}))
    return {"GOOGLE_SERVICE_ACCOUNT": str(account), "GOOGLE_BASE_URL": url}
