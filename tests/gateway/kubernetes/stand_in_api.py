"""The parts of an API server that the gateway uses, over real HTTP: paginated lists, watches, expiring versions.

The end-to-end tests use a real one; this one sends wrong, slow or no responses as a test sets.
"""

from __future__ import annotations

import base64
import json
import queue
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

Object = dict[str, Any]

ENDPOINTS = "/apis/stoker.dev/v1alpha1/inferenceendpoints"
SLICES = "/apis/discovery.k8s.io/v1/endpointslices"
KEYS = "/api/v1/namespaces/gate/secrets"


class StandInApi:
    """An API server.

    Attributes:
        kinds: by path, objects by namespace and name.
        refused: by path, the status of its responses.
        refused_watches: by path, the status of its responses to watches.
        requests: paths of requests, and whether they were watches.
        page: number of objects per page of a list.
    """

    def __init__(self) -> None:
        self.kinds: dict[str, dict[tuple[str, str], Object]] = {ENDPOINTS: {}, SLICES: {}, KEYS: {}}
        self.refused: dict[str, int] = {}
        self.refused_watches: dict[str, int] = {}
        self.requests: list[tuple[str, bool]] = []
        self.page = 2
        self._lock = threading.RLock()
        self._version = 100
        self._events: dict[str, list[tuple[int, Object]]] = {path: [] for path in self.kinds}
        self._oldest = 100
        self._watchers: dict[str, list[queue.Queue[Object | None]]] = {path: [] for path in self.kinds}
        self._server: ThreadingHTTPServer | None = None
        self.port = 0

    def start(self) -> None:
        """Start to serve, at the same port as before if it was started already."""
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), self._handler())
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def stop(self) -> None:
        """Refuse connections, and end existing ones."""
        assert self._server is not None
        self._server.shutdown()
        self._server.server_close()
        self.break_off()

    def break_off(self) -> None:
        """End watches in the middle of an event."""
        with self._lock:
            for watchers in self._watchers.values():
                for each in watchers:
                    each.put(None)

    def expire(self) -> None:
        """Expire the history: no earlier version can be watched."""
        with self._lock:
            self._version += 1
            self._oldest = self._version
            self._events = {path: [] for path in self.kinds}

    def put(self, path: str, seen: Object) -> None:
        """Create or replace an object."""
        self._happens(path, "MODIFIED", seen)

    def delete(self, path: str, namespace: str, name: str) -> None:
        """Delete an object."""
        self._happens(path, "DELETED", self.kinds[path][(namespace, name)])

    def say(self, path: str, event: Object) -> None:
        """Send a raw event to current watches."""
        with self._lock:
            for each in self._watchers[path]:
                each.put(event)

    def watchers(self, path: str) -> int:
        """Return the number of watches."""
        with self._lock:
            return len(self._watchers[path])

    def kubeconfig(self, folder: Path) -> Path:
        """Write a kubeconfig for it."""
        path = folder / "kubeconfig"
        path.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "a",
                    "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}],
                    "clusters": [{"name": "a", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
                    "users": [{"name": "a", "user": {"token": "t"}}],
                }
            )
        )
        return path

    def _happens(self, path: str, kind: str, seen: Object) -> None:
        with self._lock:
            self._version += 1
            metadata = {**seen["metadata"], "resourceVersion": str(self._version)}
            seen = {**seen, "metadata": metadata}
            at = (metadata.get("namespace", ""), metadata["name"])
            objects = self.kinds.setdefault(path, {})
            if kind == "DELETED":
                del objects[at]
            else:
                objects[at] = seen
            event = {"type": kind, "object": seen}
            self._events.setdefault(path, []).append((self._version, event))
            for each in self._watchers.get(path, ()):
                each.put(event)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                parts = urlsplit(self.path)
                query = {name: values[0] for name, values in parse_qs(parts.query).items()}
                with api._lock:
                    api.requests.append((parts.path, "watch" in query))
                refused = api.refused | (api.refused_watches if "watch" in query else {})
                if (status := refused.get(parts.path)) is not None:
                    return self._answer(status, {"kind": "Status", "message": f"refused with {status}"})
                if parts.path not in api.kinds:
                    namespace, name = parts.path.split("/")[4], parts.path.rsplit("/", 1)[1]
                    found = api.kinds.get("secrets", {}).get((namespace, name))
                    return self._answer(200, found) if found else self._answer(404, {"message": f'"{name}" not found'})
                return self._watch(parts.path, query) if "watch" in query else self._list(parts.path, query)

            def _list(self, path: str, query: dict[str, str]) -> None:
                with api._lock:
                    every = [api.kinds[path][name] for name in sorted(api.kinds[path])]
                    first = int(query.get("continue", 0))
                    metadata: Object = {"resourceVersion": str(api._version)}
                    if first + api.page < len(every):
                        metadata["continue"] = str(first + api.page)
                    answer = {"metadata": metadata, "items": every[first : first + api.page]}
                self._answer(200, answer)

            def _watch(self, path: str, query: dict[str, str]) -> None:
                news: queue.Queue[Object | None] = queue.Queue()
                with api._lock:
                    since = int(query["resourceVersion"])
                    expired = since < api._oldest
                    for version, event in api._events[path]:
                        if version > since:
                            news.put(event)
                    if not expired:
                        api._watchers[path].append(news)
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                try:
                    if expired:
                        self._chunk({"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}})
                        self.wfile.write(b"0\r\n\r\n")
                        return
                    while (event := news.get()) is not None:
                        self._chunk(event)
                    self.close_connection = True
                except OSError:
                    self.close_connection = True
                finally:
                    with api._lock:
                        if news in api._watchers[path]:
                            api._watchers[path].remove(news)

            def _chunk(self, event: Object) -> None:
                line = json.dumps(event).encode() + b"\n"
                half = len(line) // 2  # events arrive in pieces of any size
                for part in (line[:half], line[half:]):
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
                    self.wfile.flush()

            def _answer(self, status: int, content: Object) -> None:
                body = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        return Handler


def endpoint(name: str, namespace: str = "one", served: str | None = None, **more: Any) -> Object:
    """Return an InferenceEndpoint that the gateway serves."""
    created = more.pop("created", "2026-01-01T00:00:00Z")
    return {
        "metadata": {"namespace": namespace, "name": name, "generation": 1, "creationTimestamp": created},
        "spec": {"model": {"source": f"hf://org/{name}", **({"servedNames": [served]} if served else {})}, **more},
        "status": {"addresses": [{"name": "gateway", "url": "http://g/v1"}], "url": "http://a/v1"},
    }


def slice_of(name: str, *servers: str, namespace: str = "one", ready: bool = True) -> Object:
    """Return an EndpointSlice of an endpoint's Service, with servers that share a port."""
    hosts = [server.rpartition(":")[0].strip("[]") for server in servers]
    ports = {int(server.rpartition(":")[2]) for server in servers} or {80}
    assert len(ports) == 1
    return {
        "metadata": {"namespace": namespace, "name": f"{name}-x", "labels": {"kubernetes.io/service-name": name}},
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": ports.pop()}],
        "endpoints": [{"addresses": [host], "conditions": {"ready": ready}} for host in hosts],
    }


def secret(name: str, namespace: str = "one", **entries: str) -> Object:
    """Return a Secret."""
    data = {entry.replace("_", "-"): base64.b64encode(text.encode()).decode() for entry, text in entries.items()}
    return {"metadata": {"namespace": namespace, "name": name}, "type": "Opaque", "data": data}
