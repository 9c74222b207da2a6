"""A Hub on 127.0.0.1: as much of its API as huggingface_hub needs to resolve and download a model.

Point a new process at it with `env`, and this one with `answer_this_process`. It counts requests, moves branches,
closes gates, and can be too busy.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import unquote

if TYPE_CHECKING:
    import pytest

INFO = re.compile(r"/api/(models/)?(?P<id>(datasets/)?[^/]+/[^/?]+)(/revision/(?P<revision>[^/?]+))?(\?.*)?")
TREE = re.compile(r"/api/models/(?P<id>[^/]+/[^/]+)/tree/(?P<revision>[^/?]+)(\?.*)?")
WRITE = re.compile(r"/api/models/(?P<id>[^/]+/[^/]+)/(?P<what>preupload|commit)/main(\?.*)?")
BATCH = re.compile(r"/(?P<id>[^/]+/[^/]+)\.git/info/lfs/objects/batch")
FILE = re.compile(r"/(?P<id>(datasets/)?[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<name>.+)")
LARGE = (".safetensors", ".bin")


@dataclass
class Repository:
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: bool = False
    private: bool = False


@dataclass
class FakeHub:
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    busy: bool = False
    nothing: Path = Path("/nonexistent")
    large: dict[str, bytes] = field(default_factory=dict)
    """Files that did not come with a commit, by the sha256 of their bytes."""

    def __enter__(self) -> Self:
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (_Handler,), {"hub": self}))
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def push(self, model_id: str, folder: Path, *, branch: str = "main", gated: bool = False) -> str:
        """A commit of the folder's files as they are now, which the branch then points to."""
        files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        commit = hashlib.sha1(repr(sorted(files.items())).encode(), usedforsecurity=False).hexdigest()
        repository = self.repositories.setdefault(model_id, Repository())
        repository.commits[commit] = files
        repository.branches[branch] = commit
        repository.gated = gated
        return commit

    def env(self, home: Path, **more: str) -> dict[str, str]:
        """The environment of a process whose Hub this is, with a cache of its own and nothing of the caller's."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
        return {**kept, "HF_ENDPOINT": self.address, "HF_HOME": str(home), "DO_NOT_TRACK": "1", **more}

    def answer_this_process(self, patch: pytest.MonkeyPatch, home: Path) -> None:
        """Make this the Hub of the process, without a stored token."""
        from huggingface_hub import constants

        settings = {
            "HF_HUB_OFFLINE": False,
            "ENDPOINT": self.address,
            "HUGGINGFACE_CO_URL_TEMPLATE": f"{self.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
            "HF_HUB_CACHE": str(home / "cache"),
            "HF_TOKEN_PATH": str(home / "no-token"),
            "HF_HUB_DISABLE_XET": True,  # large files then go by LFS, which the fake Hub has
        }
        for name, value in settings.items():
            patch.setattr(constants, name, value)

    def downloads(self) -> list[str]:
        return [path.rpartition("/")[2] for path in self.requests if path.startswith("GET") and "/resolve/" in path]


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        """Serve an upload: check the card, make the repository, return the way to send each file, take the files."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.hub.requests.append(f"{self.command} {self.path}")
        if self.headers.get("Authorization") != "Bearer writer":
            return self._refuse(403, "Forbidden", "this token may not write")
        if self.path == "/api/validate-yaml" or BATCH.fullmatch(self.path):
            return self._check_card(body) if "validate" in self.path else self._json(self._places(json.loads(body)))
        if self.path == "/api/repos/create":
            wish = json.loads(body)
            model_id = f"{wish['organization']}/{wish['name']}" if wish.get("organization") else wish["name"]
            commit = self.hub.push(model_id, self.hub.nothing)
            self.hub.repositories[model_id].private = wish.get("visibility", wish.get("private")) in {"private", True}
            return self._json({"url": f"{self.hub.address}/{model_id}", "id": model_id, "sha": commit})
        match = WRITE.fullmatch(self.path)
        if match is None:
            return self._refuse(404, "NotFound", "no such question")
        if match["what"] == "preupload":
            names = [file["path"] for file in json.loads(body)["files"]]
            kinds = {name: "lfs" if name.endswith(LARGE) else "regular" for name in names}
            modes = [{"path": name, "uploadMode": kind, "shouldIgnore": False} for name, kind in kinds.items()]
            return self._json({"files": modes})
        lines = [json.loads(line)["value"] for line in body.splitlines()]
        files = {
            line["path"]: base64.b64decode(line["content"]) if "content" in line else self.hub.large[line["oid"]]
            for line in lines
            if "path" in line
        }
        self.hub.repositories[match["id"]].commits["main"] = files
        return self._json({"success": True, "commitOid": "c" * 40, "commitUrl": f"{self.hub.address}/{match['id']}"})

    def _check_card(self, body: bytes) -> None:
        errors = [{"message": "license must be one of apache-2.0, mit"}] if b"license: unheard" in body else []
        content = json.dumps({"errors": errors, "warnings": []}).encode()
        self._send(400 if errors else 200, content, {"Content-Type": "application/json"})

    def _places(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Where each large file is to be put; nowhere if it is here already."""
        objects = [
            one if one["oid"] in self.hub.large else {**one, "actions": {"upload": {"href": self._place(one["oid"])}}}
            for one in batch["objects"]
        ]
        return {"transfer": "basic", "objects": objects}

    def _place(self, oid: str) -> str:
        return f"{self.hub.address}/lfs/{oid}"

    def do_PUT(self) -> None:
        self.hub.requests.append(f"{self.command} {self.path}")
        content = self.rfile.read(int(self.headers["Content-Length"]))
        oid = hashlib.sha256(content).hexdigest()
        if self.path != f"/lfs/{oid}":
            return self._refuse(400, "BadRequest", "these are other bytes")
        self.hub.large[oid] = content
        return self._send(200, b"", {})

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's parameter name
        """Print nothing: requests are counted instead."""

    def _answer(self) -> None:
        self.hub.requests.append(f"{self.command} {self.path}")
        if self.hub.busy:
            return self._refuse(503, "Busy", "try again later")
        match = TREE.fullmatch(self.path) or INFO.fullmatch(self.path) or FILE.fullmatch(self.path)
        repository = self.hub.repositories.get(match["id"]) if match else None
        if match is None or repository is None:
            return self._refuse(404, "RepoNotFound", "Repository not found")
        if repository.private and "Authorization" not in self.headers:
            return self._refuse(401, "RepoNotFound", "Repository not found")
        revision = unquote(match["revision"] or "main")
        commit = repository.branches.get(revision, revision)
        if commit not in repository.commits:
            return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if match.re is FILE and repository.gated:
            authorised = "Authorization" in self.headers
            return self._refuse(
                403 if authorised else 401, "GatedRepo", f"Access to model {match['id']} is restricted."
            )
        return self._serve(match, repository, commit)

    def _serve(self, match: re.Match[str], repository: Repository, commit: str) -> None:
        files = repository.commits[commit]
        if match.re is INFO:
            siblings = [{"rfilename": name} for name in files]
            gate = "auto" if repository.gated else False
            return self._json(
                {"id": match["id"], "sha": commit, "siblings": siblings, "gated": gate, "private": repository.private}
            )
        if match.re is TREE:
            return self._json([_entry(name, content) for name, content in files.items()])
        name = unquote(match["name"])
        if name not in files:
            return self._refuse(404, "EntryNotFound", "Entry not found")
        content = files[name]
        headers = {"ETag": f'"{_entry(name, content)["etag"]}"', "X-Repo-Commit": commit}
        return self._send(200, content, headers)

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str, message: str) -> None:
        body = json.dumps({"error": message}).encode()
        self._send(status, body, {"X-Error-Code": code, "X-Error-Message": message})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _entry(name: str, content: bytes) -> dict[str, Any]:
    """Large files are known by the sha256 of their bytes, small ones by git's sha1."""
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    entry: dict[str, Any] = {"type": "file", "path": name, "size": len(content), "oid": blob, "etag": blob}
    if name.endswith(LARGE):
        sha256 = hashlib.sha256(content).hexdigest()
        entry |= {"lfs": {"oid": sha256, "size": len(content), "pointerSize": 134}, "etag": sha256}
    return entry


def small_model(
    folder: Path, *, labels: tuple[str, ...] = ("a", "b"), numbers: bytes = b"12345678", **more: Any
) -> Path:
    """A folder that looks like a model to everything short of loading it; no torch needed."""
    folder.mkdir(parents=True, exist_ok=True)
    id2label = {str(index): label for index, label in enumerate(labels)}
    config = {"model_type": "bert", "architectures": ["BertForSequenceClassification"], "id2label": id2label, **more}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "model.safetensors").write_bytes(safetensors_bytes(numbers, rows=len(labels)))
    return folder


def safetensors_bytes(numbers: bytes, *, rows: int = 2) -> bytes:
    """One tensor with these bytes, and a head of so many rows."""
    end = len(numbers)
    tensors = {"w": (end, 0, end), "classifier.bias": (rows, end, end + rows)}
    header = {
        name: {"dtype": "U8", "shape": [size], "data_offsets": [start, stop]}
        for name, (size, start, stop) in tensors.items()
    }
    content = json.dumps(header).encode()
    return len(content).to_bytes(8, "little") + content + numbers + bytes(rows)
