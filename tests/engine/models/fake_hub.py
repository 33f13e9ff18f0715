"""A fake model hub: the parts of the HTTP interface that downloads need, with injectable faults.

It needs only Python, so that it can run in a pod. Real: huggingface_hub as the client, TCP, the names of commit and
blobs (SHA-256 of large files, git's SHA-1 of others).
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

COMMIT = "c0ffee" + "0" * 34
#: Bytes of a piece of a transfer.
_PIECE = 64 * 1024
#: Seconds between pieces of a held transfer, short enough for the client not to give up.
_TRICKLE_S = 5


class Refusal(NamedTuple):
    """The hub's response to all requests."""

    status: int
    code: str = ""
    message: str = ""


#: The response to clients without a token.
GATED = Refusal(401, "GatedRepo", "Access to model org/model is restricted.")


class Fetched(NamedTuple):
    """A GET of a file: its path, and the first requested byte."""

    path: str
    start: int


class FakeHub:
    """One repository, ``org/model`` at `COMMIT`.

    Args:
        files: contents by path; .safetensors files and those above 10 MiB are LFS files.
        address: address to listen on.
        token: token with read access; none for public access.

    Attributes:
        url: value of HF_ENDPOINT.
        refusal: response to all requests, while it is set.
        failures: number of requests that get 503 first.
        pause_s: pause after each piece of a file, in seconds.
        num_damaged: number of transfers of large files whose first byte is changed.
        resumes: whether a transfer may start within a file; else it is sent from its start.
        hold_at: bytes after which the first transfer of a file only trickles until its connection ends.
        fetched: requested files, in order.
        tokens: received authorization headers.
    """

    def __init__(
        self, files: Mapping[str, bytes], address: tuple[str, int] = ("127.0.0.1", 0), token: str = ""
    ) -> None:
        self.files = dict(files)
        self.token = token
        self.refusal: Refusal | None = None
        self.failures = 0
        self.pause_s = 0.0
        self.num_damaged = 0
        self.resumes = True
        self.hold_at: int | None = None
        self.fetched: list[Fetched] = []
        self.tokens: set[str | None] = set()
        self.lock = threading.Lock()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self)

            def do_HEAD(self) -> None:
                hub.answer(self)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(address, Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stop serving; further connections are refused."""
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Answer a request."""
        if not request.path.startswith(("/api/models/", "/org/")):  # the library also requests other things
            _send(request, 404)
            return
        with self.lock:
            self.tokens.add(request.headers.get("authorization"))
            if self.failures:
                self.failures -= 1
                _send(request, 503)
                return
        refusal = self.refusal or self._denied(request)
        if refusal is not None:
            _send(request, refusal.status, {"X-Error-Code": refusal.code, "X-Error-Message": refusal.message})
            return
        path = request.path.partition("?")[0]
        if re.fullmatch(r"/api/models/org/model(/revision/(main|v1))?", path):
            siblings = [{"rfilename": name} for name in self.files]
            body = {"id": "org/model", "sha": COMMIT, "siblings": siblings, "tags": [], "private": False}
            _send(request, 200, {}, json.dumps(body).encode())
        elif re.fullmatch(rf"/api/models/org/model/tree/({COMMIT}|main|v1)", path):
            _send(request, 200, {}, json.dumps([_entry(path, data) for path, data in self.files.items()]).encode())
        elif match := re.fullmatch(rf"/org/model/resolve/(?:{COMMIT}|main|v1)/(.+)", path):
            self._file(request, match[1])
        elif path.startswith("/api/models/org/model/revision/"):
            _send(request, 404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"})
        else:
            _send(request, 404, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})

    def _denied(self, request: BaseHTTPRequestHandler) -> Refusal | None:
        authorization = request.headers.get("authorization")
        if not self.token or authorization == f"Bearer {self.token}":
            return None
        return Refusal(401, message="Invalid credentials in Authorization header") if authorization else GATED

    def _file(self, request: BaseHTTPRequestHandler, path: str) -> None:
        if path not in self.files:
            _send(request, 404, {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"})
            return
        data = self.files[path]
        headers = {"ETag": f'"{_etag(path, data)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if request.command == "HEAD":
            _send(request, 200, {**headers, "Content-Length": str(len(data))})
            return
        start = int(re.findall(r"bytes=(\d+)-", request.headers.get("range", "bytes=0-"))[0])
        with self.lock:
            held_at = self.hold_at if path not in {fetched.path for fetched in self.fetched} else None
            self.fetched.append(Fetched(path, start))
            if not self.resumes:
                start = 0
            if self.num_damaged and _is_large(path, data):
                self.num_damaged -= 1
                data = bytes([data[0] ^ 1]) + data[1:]
        headers["Content-Length"] = str(len(data) - start)
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        request.send_response(206 if start else 200)
        for name, value in headers.items():
            request.send_header(name, value)
        request.end_headers()
        for at in range(start, len(data), _PIECE):
            request.wfile.write(data[at : at + _PIECE])
            time.sleep(_TRICKLE_S if held_at is not None and at >= held_at else self.pause_s)  # sleeps: a slow hub


@contextmanager
def fake_hub(files: Mapping[str, bytes]) -> Iterator[FakeHub]:
    """Run a hub during the block."""
    hub = FakeHub(files)
    try:
        yield hub
    finally:
        hub.close()


def _is_large(path: str, data: bytes) -> bool:
    return path.endswith(".safetensors") or len(data) > 10 * 1024**2


def _etag(path: str, data: bytes) -> str:
    if _is_large(path, data):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _entry(path: str, data: bytes) -> dict[str, object]:
    entry: dict[str, object] = {"type": "file", "path": path, "size": len(data), "oid": _etag(path, data)}
    if _is_large(path, data):
        entry["oid"] = hashlib.sha1(path.encode()).hexdigest()
        entry["lfs"] = {"oid": _etag(path, data), "size": len(data), "pointerSize": 134}
    return entry


def _send(
    request: BaseHTTPRequestHandler, status: int, headers: Mapping[str, str] | None = None, body: bytes = b""
) -> None:
    request.send_response(status, HTTPStatus(status).phrase)
    for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
        if value:
            request.send_header(name, value)
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(body)
