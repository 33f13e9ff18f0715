"""A slow model hub: the operator creates pods only after the hub has answered."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from stoker_operator.plan.model_shapes import table

from .operator_process import Operator

CONFIGS = {
    "/org/large/resolve/main/config.json": table()["meta-llama/Llama-3.1-70B-Instruct"],
    "/org/small/resolve/main/config.json": table()["meta-llama/Llama-3.2-1B-Instruct"],
}


class Hub:
    """A hub that answers when the test permits."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.answers = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(handler) -> None:  # noqa: N805 - the names are http.server's
                self.requests.append(handler.path)
                self.answers.wait(120)
                handler.send_response(200 if handler.path in CONFIGS else 404)
                handler.end_headers()
                handler.wfile.write(json.dumps(CONFIGS.get(handler.path, {})).encode())

            def log_message(handler, *args: Any) -> None:  # noqa: N805
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def hub() -> Iterator[Hub]:
    made = Hub()
    threading.Thread(target=made.server.serve_forever, daemon=True).start()
    yield made
    made.answers.set()
    made.server.shutdown()
    made.server.server_close()


def test_pods_wait_for_the_models_config(
    kube: Any, ns: str, document: Any, eventually: Any, sleeping_operator: Any, hub: Hub, tmp_path: Path
) -> None:
    sleeping_operator.stop()
    operator = Operator(sleeping_operator.kubeconfig, tmp_path / "log", f"--namespace={ns}")
    operator.environment |= {"HF_ENDPOINT": hub.url, "NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": ""}
    hardware, engine = {"accelerator": "nvidia-l4", "count": 1}, {"image": "x"}
    with operator:
        for name in ("large", "small", "missing"):
            model = {"source": f"hf://org/{name}"}
            kube.create(ns, document(name, model=model, hardware=hardware, engine=engine))
            eventually(lambda: hub.requests, "the hub gets a request")
            hub.answers.set()
        for name in ("small", "missing"):
            eventually(lambda name=name: kube.deployment(ns, name), "its pods are made")
        eventually(lambda: kube.condition(ns, "large").get("reason") == "DoesNotFit", "its condition is reported")
    made = {
        event["objectRef"]["name"]
        for event in kube.server.requests()
        if event.get("objectRef", {}).get("namespace") == ns
        and event["objectRef"].get("resource") == "deployments"
        and event["verb"] == "patch"
    }
    assert made == {"small", "missing"}
