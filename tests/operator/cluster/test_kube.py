"""Configuration of the client, and responses of an overloaded API server, on a socket."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from kubernetes import config

from stoker_operator.cluster import kube as kube_module
from stoker_operator.cluster.kube import Kube, KubeError

LEASE: Any = {"kind": "Lease", "metadata": {"name": "x", "namespace": "ns"}}


class Server:
    """Sends given responses, then an empty list."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, str]] = []
        self.requests: list[str] = []

        class Handler(BaseHTTPRequestHandler):
            def answer(handler) -> None:  # noqa: N805 - the names are http.server's
                handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
                self.requests.append(handler.command)
                status, after = self.answers.pop(0) if self.answers else (200, "")
                handler.send_response(status)
                if after:
                    handler.send_header("Retry-After", after)
                body = json.dumps({"message": "hm", "items": [], "metadata": {"resourceVersion": "1"}}).encode()
                handler.send_header("Content-Length", str(len(body)))
                handler.end_headers()
                handler.wfile.write(body)

            do_GET = do_PATCH = do_POST = do_PUT = do_DELETE = answer  # noqa: N815

            def log_message(handler, *args: Any) -> None:  # noqa: N805
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    made = Server()
    threading.Thread(target=made.http.serve_forever, daemon=True).start()
    cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{made.http.server_port}"}}
    context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
    document = {"clusters": [cluster], "contexts": [context], "users": [{"name": "u", "user": {}}]}
    (tmp_path / "config").write_text(yaml.safe_dump({**document, "current-context": "c"}))
    for module in ("kubernetes.config", "kubernetes.config.kube_config"):  # read on import
        monkeypatch.setattr(f"{module}.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "config"))
    yield made
    made.http.shutdown()
    made.http.server_close()


@pytest.mark.parametrize(
    ("retry_after", "seconds"), [("7", 7), ("", 0), ("soon", 0), ("Thu, 01 Jan 1970 00:00:00 GMT", 0)]
)
@pytest.mark.parametrize("status", [429, 503])
def test_overloaded_write_raises_retry_after_without_waiting(
    server: Server, status: int, retry_after: str, seconds: int
) -> None:
    kube = Kube.connect()
    writes = [
        lambda: kube.apply(LEASE, "stoker"),
        lambda: kube.create(LEASE),
        lambda: kube.replace(LEASE),
        lambda: kube.patch("Lease", "ns", "x", []),
        lambda: kube.delete("Lease", "ns", "x", "uid"),
    ]
    for write in writes:
        server.answers = [(status, retry_after)]
        with pytest.raises(KubeError) as caught:
            write()
        assert (caught.value.status, caught.value.retry_after) == (status, seconds)
    assert len(server.requests) == len(writes)


def test_list_is_retried_after_the_requested_delay(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(kube_module, "time", SimpleNamespace(sleep=waited.append))  # other threads sleep as always
    kube = Kube.connect()
    server.answers = [(429, "1"), (429, "3600")]
    assert kube.list("Lease").items == []
    assert waited == [1, 10]
    server.answers = [(429, "1")] * 10
    with pytest.raises(KubeError):
        kube.list("Lease")
    server.answers = [(500, "")]
    with pytest.raises(KubeError):
        kube.list("Lease")


@pytest.mark.parametrize(
    "files", [["config"], ["missing", "config"], ["config", ""]], ids=["one", "two", "one and an empty name"]
)
def test_kubeconfig_may_consist_of_several_files(
    server: Server, files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = os.pathsep.join(str(tmp_path / file) if file else "" for file in files)
    for module in ("kubernetes.config", "kubernetes.config.kube_config"):
        monkeypatch.setattr(f"{module}.KUBE_CONFIG_DEFAULT_LOCATION", paths)
    assert Kube.connect().list("Lease").items == []


@pytest.mark.parametrize(
    ("in_pod", "named", "expected"),
    [(True, None, None), (True, "http://named:1", "http://named:1"), (False, None, "http://way-out:3128")],
)
def test_proxy_variables_are_ignored_inside_the_cluster(
    in_pod: bool, named: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(client_configuration: Any) -> None:
        client_configuration.host = "https://10.96.0.1:443"
        if named:
            client_configuration.proxy = named

    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://way-out:3128")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    if in_pod:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    for loader in ("load_kube_config", "load_incluster_config"):
        monkeypatch.setattr(config, loader, load)
    assert Kube.connect()._api.configuration.proxy == expected
