"""A gateway whose replicas report what a test sets: HTTP servers on loopback addresses, all on one port."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from apiserver import free_ports

Object = dict[str, Any]
#: Handles a request instead of the replica.
Answer = Callable[[BaseHTTPRequestHandler], None]


def send(handler: BaseHTTPRequestHandler, body: bytes, status: int = 200, **headers: str) -> None:
    """Send a response with `body`."""
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


class ScriptedReplica:
    """A replica of the gateway.

    Attributes:
        address: address that it listens on, without the port.
        reports: reported values by namespace and name of the endpoint.
        answer: handler that replaces the report; None for the report.
        num_requests: number of requests received.
    """

    def __init__(self, address: str, port: int) -> None:
        self.address = address
        self.reports: dict[tuple[str, str], Object] = {}
        self.answer: Answer | None = None
        self.num_requests = 0
        replica = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                replica.num_requests += 1
                with suppress(OSError):  # the operator closes the connection after its timeout
                    (replica.answer or replica.report)(self)

            def log_message(self, *_: Any) -> None:
                """Log nothing."""

        self._server = ThreadingHTTPServer((address, port), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def report(self, handler: BaseHTTPRequestHandler) -> None:
        """Respond as a gateway does."""
        send(handler, self.body() if handler.path == "/scaling" else b"", 200 if handler.path == "/scaling" else 404)

    def body(self) -> bytes:
        """Return the report's body."""
        endpoints = [{"namespace": key[0], "name": key[1], **each} for key, each in self.reports.copy().items()]
        return json.dumps({"gateway": self.address, "uptimeSeconds": 1e6, "endpoints": endpoints}).encode()

    def stop(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


class ScriptedGateway:
    """The replicas, and a file with their addresses.

    Args:
        file: file to which the addresses are written.
    """

    HOST = "gateway.scripted"

    def __init__(self, file: Path) -> None:
        (self.port,) = free_ports(1)
        self.file = file
        self.replicas: list[ScriptedReplica] = []
        self.resize(2)

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of `named_operator.py`."""
        return {"NAMED_HOST": self.HOST, "NAMED_FILE": str(self.file)}

    @property
    def options(self) -> list[str]:
        """Return the operator's command line arguments for this gateway."""
        return [
            "--gateway-url=http://gateway.example", "--gateway-namespace=default", "--gateway-service-account=gateway",
            f"--gateway-signals={self.HOST}:{self.port}",
        ]  # fmt: skip

    def resize(self, count: int) -> None:
        """Start or stop replicas until there are `count`, all of which report."""
        for number in range(len(self.replicas), count):
            self.replicas.append(ScriptedReplica(f"127.0.0.{number + 1}", self.port))
        temporary = self.file.with_suffix(".new")
        temporary.write_text("\n".join(each.address for each in self.replicas[:count]))
        temporary.replace(self.file)
        for each in self.replicas[count:]:
            each.stop()
        del self.replicas[count:]
        for each in self.replicas:
            each.answer = None

    def stop(self) -> None:
        """Stop all replicas."""
        self.resize(0)
