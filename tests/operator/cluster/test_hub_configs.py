"""Fetching config.json from an HTTP server that stands in for the hub."""

from __future__ import annotations

import json
import logging
import queue
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from stoker_operator.cluster import hub_configs
from stoker_operator.cluster.hub_configs import HubConfigs, Model
from stoker_operator.objects.facts import Key

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip
SPARSE = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8}
MODELOPT = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}


def _weights(dtype: str) -> bytes:
    header = json.dumps({"embed": {"dtype": dtype, "shape": [2, 2], "data_offsets": [0, 8]}}).encode()
    return len(header).to_bytes(8, "little") + header + b"numbers"


FILES: dict[str, str | bytes] = {
    "/org/sparse/resolve/main/config.json": json.dumps(SPARSE),
    "/org/sparse/resolve/main/hf_quant_config.json": json.dumps(MODELOPT),
    "/org/sparse/resolve/main/model.safetensors": _weights("F16"),
    "/org/many/resolve/main/config.json": json.dumps(SPARSE),
    "/org/many/resolve/main/model.safetensors.index.json": json.dumps(
        {"weight_map": {"b": "model-2.safetensors", "a": "model-1.safetensors"}}
    ),
    "/org/many/resolve/main/model-1.safetensors": _weights("BF16"),
    "/org/bare/resolve/main/config.json": json.dumps(SPARSE),
    "/org/dtype/resolve/main/config.json": json.dumps({**SPARSE, "dtype": "float16"}),
    "/org/method/resolve/main/config.json": json.dumps({**SPARSE, "quantization_config": {"quant_method": "fp8"}}),
    "/org/odd/resolve/main/config.json": json.dumps(SPARSE),
    "/org/odd/resolve/main/hf_quant_config.json": '{"quantization": []}',
    "/org/model/resolve/main/config.json": json.dumps(CONFIG),
    "/org/model/resolve/a%2Fb/config.json": json.dumps({**CONFIG, "hidden_size": 16}),
    "/org/marked/resolve/main/config.json": "\ufeff" + json.dumps(CONFIG),
    "/org/list/resolve/main/config.json": "[]",
    "/org/text/resolve/main/config.json": "<html>",
}


class Hub:
    """The stand-in, with its URL and received requests."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.status = 0

        class Handler(BaseHTTPRequestHandler):
            def do_GET(handler) -> None:  # noqa: N805 - the names are http.server's
                self.requests.append(handler.path)
                body = FILES.get(handler.path)
                handler.send_response(self.status or (200 if body else 404))
                handler.end_headers()
                handler.wfile.write(body if isinstance(body, bytes) else (body or "").encode())

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


def test_get_returns_at_once_and_notifies_when_the_config_has_arrived(hub: Hub) -> None:
    arrived: queue.Queue[tuple[str, str | None]] = queue.Queue()
    configs = HubConfigs(lambda model, _: arrived.put(model), hub.url + "/")
    assert configs.get("org/model", None) is None
    assert arrived.get(timeout=60) == ("org/model", None)
    assert configs.get("org/model", None) == CONFIG
    assert configs.get("org/model", "a/b") is None
    assert arrived.get(timeout=60) == ("org/model", "a/b")
    found = configs.get("org/model", "a/b")
    assert found is not None and found["hidden_size"] == 16
    assert len(hub.requests) == 2  # cached files are not requested again


QUANTIZATION, INDEX, WEIGHTS = "hf_quant_config.json", "model.safetensors.index.json", "model.safetensors"


@pytest.mark.parametrize(
    ("name", "beside", "requested"),
    [
        (
            "org/sparse",
            {"quantization_config": MODELOPT, "dtype": "float16"},
            ["config.json", QUANTIZATION, INDEX, WEIGHTS],
        ),
        ("org/many", {"dtype": "bfloat16"}, ["config.json", QUANTIZATION, INDEX, "model-1.safetensors"]),
        ("org/bare", {}, ["config.json", QUANTIZATION, INDEX, WEIGHTS]),
        ("org/dtype", {"dtype": "float16"}, ["config.json", QUANTIZATION]),
        ("org/method", {"quantization_config": {"quant_method": "fp8"}}, ["config.json", INDEX, WEIGHTS]),
        ("org/model", {"dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}}, ["config.json"]),
    ],
)
def test_files_that_complete_a_config_are_fetched_once(
    hub: Hub, name: str, beside: dict[str, Any], requested: list[str]
) -> None:
    configs = HubConfigs(lambda *_: None, hub.url)
    configs.fetch(Model(name, None))
    expected = {**SPARSE, **beside}
    assert configs.get(name, None) == expected
    # One request per file, and none for those that config.json makes unnecessary; of the weights only the header.
    assert hub.requests == [f"/{name}/resolve/main/{file}" for file in requested]
    for user in ("a", "b"):
        assert configs.get(name, None, Key("default", user)) == expected
    assert len(hub.requests) == len(requested)


@pytest.mark.parametrize("name", ["org/missing", "org/list", "org/text", "org/odd"])
def test_failed_fetch_is_retried_with_doubling_pauses(hub: Hub, name: str) -> None:
    clock, looked = Clock(), []
    configs = HubConfigs(lambda *attempt: looked.append(attempt), hub.url, clock)
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
    assert len([path for path in hub.requests if name in path and path.endswith("/config.json")]) == attempts
    assert looked == [(model, frozenset())], "only the first attempt is notified"


def test_silent_hub_costs_one_attempt_and_one_log_line(
    hub: Hub, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    hub.server.shutdown()
    hub.server.server_close()  # nothing listens on its port any more
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


def test_offline_mode_sends_no_request(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    configs = HubConfigs(lambda *_: None, hub.url)
    assert configs.get("org/model", None) is None
    assert not _asks(configs, Model("org/model", None))


def test_only_the_first_attempt_counts_as_pending(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    looked: list[tuple[Model, Any]] = []
    configs = HubConfigs(lambda *attempt: looked.append(attempt), hub.url, clock)
    configs._start = lambda: None  # type: ignore[method-assign]
    model, user = Model("org/missing", None), Key("ns", "demo")
    assert not configs.pending(*model)
    configs.get(*model, user)
    assert configs.pending(*model)
    configs.fetch(model)
    assert not configs.pending(*model)
    assert looked == [(model, {user})], "a failed attempt is notified too"
    clock.now += 61
    configs.get(*model, user)
    assert configs._known[model].waiting and not configs.pending(*model)
    slow = Model("org/slow", None)
    configs.get(*slow, user)
    clock.now += 10
    assert not configs.pending(*slow)


def test_silent_hub_makes_no_config_pending(hub: Hub) -> None:
    clock = Clock()
    hub.server.shutdown()
    hub.server.server_close()
    configs = HubConfigs(lambda *_: None, hub.url, clock)
    configs._start = lambda: None  # type: ignore[method-assign]
    configs.get("org/one", None)
    configs.get("org/two", None)
    configs.fetch(Model("org/one", None))
    assert not configs.pending("org/two", None)
    clock.now += 61
    configs.get("org/three", None)
    assert configs._known[Model("org/three", None)].waiting, "an attempt is queued"
    assert not configs.pending("org/three", None)


def test_offline_mode_makes_no_config_pending(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    configs = HubConfigs(lambda *_: None, hub.url)
    configs.get("org/model", None)
    assert not configs.pending("org/model", None)


def test_configs_in_use_are_kept_and_their_users_notified(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    downloads: list[str] = []
    monkeypatch.setattr(hub_configs._HubFiles, "download", lambda self, name, _: downloads.append(name) or CONFIG)
    users_by_model: dict[Model, Any] = {}
    configs = HubConfigs(lambda model, users: users_by_model.update({model: users}), hub.url)
    configs._start = lambda: None  # type: ignore[method-assign]
    models = [Model(f"org/{number}", None) for number in range(1500)]
    users = [Key("ns", f"endpoint-{number}") for number in range(1500)]
    for _ in range(3):
        for model, user in zip(models, users, strict=True):
            configs.get(*model, user)
        while not configs._queue.empty():
            configs.fetch(configs._queue.get())
    assert len(downloads) == 1500
    assert users_by_model == {model: {user} for model, user in zip(models, users, strict=True)}
    configs.get(*models[0], users[1])
    assert configs._known[models[0]].users == {users[0], users[1]} and not configs._known[models[1]].users
    configs.forget(users[0])
    assert configs._known[models[0]].users == {users[1]}
    configs.forget_all()
    assert len(configs._known) == 512, "the number of unused configs is limited"
    assert not configs._uses


def test_malformed_config_ends_no_thread(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FILES, "/org/deep/resolve/main/config.json", "[" * 500_000)
    configs = HubConfigs(lambda *_: None, hub.url)
    configs.fetch(Model("org/deep", None))
    assert configs._known[Model("org/deep", None)].config is None


@pytest.mark.parametrize(
    "answer", [b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"]
)
def test_answers_that_are_not_http_end_no_thread(answer: bytes) -> None:
    """As of a broken proxy. The hub counts as silent, and is tried again later."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        configs = HubConfigs(lambda *_: None, f"http://127.0.0.1:{listener.getsockname()[1]}")
        configs.fetch(Model("org/model", None))
        thread.join()
    assert configs._known[Model("org/model", None)].config is None
    assert configs._hub.pause > 0


def test_number_of_cached_configs_is_bounded(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    configs = HubConfigs(lambda *_: None, hub.url)
    for index in range(2000):
        configs.get(f"org/{index}", None)
    assert len(configs._known) == 512


def _asks(configs: HubConfigs, model: Model) -> bool:
    """Return whether a request for `model` would queue an attempt, without the worker thread."""
    configs._start = lambda: None  # type: ignore[method-assign]
    configs.get(*model)
    waits = configs._known[model].waiting
    configs._known[model].waiting = False
    return waits


def test_byte_order_mark_is_ignored(hub: Hub) -> None:
    configs = HubConfigs(lambda _model, _users: None, hub.url)
    configs.fetch(Model("org/marked", None))
    assert configs.get("org/marked", None) == CONFIG
