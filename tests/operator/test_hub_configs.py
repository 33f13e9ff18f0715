"""Fetching config.json, from an HTTP server that stands in for the hub."""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from stoker_operator.hub_configs import HubConfigs, Model

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8}
FILES = {
    "/org/model/resolve/main/config.json": json.dumps(CONFIG),
    "/org/model/resolve/a%2Fb/config.json": json.dumps({**CONFIG, "hidden_size": 16}),
    "/org/list/resolve/main/config.json": "[]",
    "/org/text/resolve/main/config.json": "<html>",
}


class Hub:
    """The stand-in: what it was asked for, and where it is."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.status = 0

        class Handler(BaseHTTPRequestHandler):
            def do_GET(handler) -> None:  # noqa: N805 - the names are http.server's
                self.asked.append(handler.path)
                body = FILES.get(handler.path)
                handler.send_response(self.status or (200 if body else 404))
                handler.end_headers()
                handler.wfile.write((body or "").encode())

            def log_message(handler, *args: Any) -> None:  # noqa: N805
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    for name in ("http_proxy", "HTTP_PROXY", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    made = Hub()
    thread = threading.Thread(target=made.server.serve_forever, daemon=True)
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_it_answers_at_once_and_tells_when_a_config_has_arrived(hub: Hub) -> None:
    arrived: queue.Queue[tuple[str, str | None]] = queue.Queue()
    configs = HubConfigs(lambda *model: arrived.put(model), hub.url + "/")
    assert configs.get("org/model", None) is None
    assert arrived.get(timeout=10) == ("org/model", None)
    assert configs.get("org/model", None) == CONFIG
    assert configs.get("org/model", "a/b") is None
    assert arrived.get(timeout=10) == ("org/model", "a/b")
    found = configs.get("org/model", "a/b")
    assert found is not None and found["hidden_size"] == 16
    assert len(hub.asked) == 2  # what is there is not asked for again


@pytest.mark.parametrize("name", ["org/missing", "org/list", "org/text"])
def test_a_failure_is_tried_again_after_a_pause_that_doubles(hub: Hub, name: str) -> None:
    clock = Clock()
    configs = HubConfigs(lambda *_: pytest.fail("nothing has arrived"), hub.url, clock)
    model = Model(name, None)
    configs.fetch(model)
    attempts = 1
    for pause in (60, 120, 240):
        clock.now += pause - 1
        assert not _asks(configs, model)
        clock.now += 1
        assert _asks(configs, model)
        configs.fetch(model)
        attempts += 1
    assert len([path for path in hub.asked if name in path]) == attempts


def test_a_hub_that_does_not_answer_costs_one_attempt_and_one_line(
    hub: Hub, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    hub.server.shutdown()
    hub.server.server_close()  # nothing listens there any more
    configs = HubConfigs(lambda *_: None, hub.url, clock)
    with caplog.at_level(logging.INFO):
        for index in range(5):
            configs.fetch(Model(f"org/{index}", None))
        clock.now += 61
        configs.fetch(Model("org/0", None))
    assert len([record for record in caplog.records if "does not answer" in record.message]) == 1
    assert len(caplog.records) == 1
    assert not _asks(configs, Model("org/6", None))
    monkeypatch.undo()


def test_offline_asks_nobody(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    configs = HubConfigs(lambda *_: None, hub.url)
    assert configs.get("org/model", None) is None
    assert not _asks(configs, Model("org/model", None))


def test_memory_is_bounded(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    configs = HubConfigs(lambda *_: None, hub.url)
    for index in range(2000):
        configs.get(f"org/{index}", None)
    assert len(configs._known) == 512


def _asks(configs: HubConfigs, model: Model) -> bool:
    """Whether asking for `model` would queue an attempt; without the thread that works the queue off."""
    configs._start = lambda: None  # type: ignore[method-assign]
    configs.get(*model)
    waits = configs._known[model].waiting
    configs._known[model].waiting = False
    return waits
