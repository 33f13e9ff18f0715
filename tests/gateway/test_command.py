"""The command for users: flags, output, and what it keeps secret."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from stoker_gateway.cli.gateway import main, parser_of
from stoker_gateway.envoy.access_log_lines import FIELDS
from stoker_gateway.ext_proc.metrics import PickerMetrics
from stoker_gateway.kubernetes.cluster_watch import age_gauge
from stoker_gateway.polling.poller import Poller, PollResult
from stoker_gateway.polling.server_watch import ServerWatch
from stoker_gateway.registry.model_registry import Endpoint, ModelRegistry, Scaling
from stoker_gateway.scheduling.load import ServerLoad
from stoker_gateway.usage.metrics import UsageMetrics

DOCUMENT = Path(__file__).parents[2] / "docs" / "guides" / "gateway.md"
SERVER = "--endpoint=a=http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "--endpoint"),
        ([SERVER, "--port", "65536"], "--port"),
        ([SERVER, "--port", "-1"], "--port"),
        ([SERVER, "--port", "٣"], "--port"),
        ([SERVER, "--port", "9" * 5000], "--port"),
        ([SERVER, "--host", "1.2.3.4.5"], "--host"),
        ([SERVER, "--host", "a" * 300 + ".invalid"], "--host"),
        ([SERVER, "--host", ""], "--host"),
        ([SERVER, "--max-body-size", "0"], "--max-body-size"),
        ([SERVER, "--max-body-size", str(1 << 40)], "--max-body-size"),
        ([SERVER, "--drain-timeout", "inf"], "--drain-timeout"),
        ([SERVER, "--metrics-port", "http"], "--metrics-port"),
        ([SERVER, "--metrics-port", "8080"], "--metrics-port"),
        ([SERVER, "--session-header", "X Session"], "--session-header"),
        ([SERVER, "--session-header", "X-Gateway-Session"], "--session-header"),
        ([SERVER, "--session-header", ""], "--session-header"),
        ([SERVER, "--log-format", "xml"], "--log-format"),
        ([SERVER, "--keys", "/nonexistent"], "--keys"),
        ([SERVER, "--keys", "/dev/null"], "--keys"),
        ([SERVER, "--keys", __file__], "--keys"),
        ([SERVER, "--billing-log", ""], "--billing-log"),
        ([SERVER, "--billing-log", "-", "--access-log"], "--billing-log"),
        ([SERVER, "--picker-failure-mode", "FailOpen"], "--picker-failure-mode"),
        ([SERVER, "--endpoint=b=http://127.0.0.1:2", "--picker-failure-mode=fail-open"], "only one model, not a, b"),
        (["--kubernetes", "--namespace=x", "--picker-failure-mode=fail-open"], "--kubernetes"),
        ([SERVER, "--keys=/nonexistent", "--picker-failure-mode=fail-open"], "with --keys requests need keys"),
        ([SERVER, "--api-key", "secret"], "--api-key"),
        ([SERVER, "--max-held", "5"], "--max-held"),
        ([SERVER, "--max-held-bytes", "100000000"], "--max-held-bytes"),
        ([SERVER, "serve"], "serve"),
        *(
            (["--endpoint", text], "--endpoint")
            for text in (
                "",
                "=http://127.0.0.1:1",
                " a=http://127.0.0.1:1",
                "a\n=http://127.0.0.1:1",
                "\udcff=http://127.0.0.1:1",
                "http://127.0.0.1:1",
                "a=127.0.0.1:1",
                "a=https://127.0.0.1:1",
                "a=http://127.0.0.1",
                "a=http://127.0.0.1:0",
                "a=http://127.0.0.1:65536",
                "a=http://127.0.0.1:x",
                "a=http://127.0.0.1:1/v1",
                "a=http://127.0.0.1:1?x",
                "a=http://user:word@127.0.0.1:1",
                "a=http://[::1:1",
                "a=http://..:1",
            )
        ),
    ],
)
def test_wrong_command_line_is_refused_by_the_flags_name(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        main(words)
    assert exit.value.code == 2
    stderr = capsys.readouterr().err
    message, *hint = stderr.rpartition("stoker gateway: ")[2].splitlines()
    assert named in message
    assert hint == ["Try 'stoker gateway --help'."]


def test_servers_of_one_endpoint_name_are_parsed() -> None:
    options = parser_of().parse_args(
        [
            "--endpoint",
            "a=b=http://127.0.0.1:1",
            "--endpoint",
            "a=b=http://[::1]:2/",
            "--session-header",
            "X-Session-Id",
        ]
    )
    assert options.endpoint == [("a=b", "127.0.0.1:1"), ("a=b", "[::1]:2")]
    assert options.session_header == "x-session-id"


def test_port_in_use_is_reported_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main([SERVER, "--port", str(port)]) == 1
        assert main([SERVER, "--port", "0", "--metrics-port", str(port)]) == 1
    for line in capsys.readouterr().err.splitlines():
        assert line == f"stoker gateway: cannot listen at 127.0.0.1:{port}: Address already in use"


def test_lost_and_returning_servers_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "stoker_gateway")
    one, two = "127.0.0.1:1", "127.0.0.1:2"
    watch = ServerWatch(ModelRegistry({"a": Endpoint("a", "a", (one, two)), "b": Endpoint("b", "b", (one,))}))

    def new_records() -> list[tuple[str, str]]:
        records = [(record.levelname, record.getMessage()) for record in caplog.records]
        caplog.clear()
        return records

    watch.record(PollResult(one, ServerLoad(), 0))
    watch.record(PollResult(one, None, 1, answered=False))
    assert new_records() == []
    for time in (2, 3):
        watch.record(PollResult(one, ServerLoad(ready=False, counted=False), time, answered=False))
    [(level, lost)] = new_records()
    assert level == "WARNING" and lost.startswith(f"{one} (a, b) does not answer")
    watch.record(PollResult(two, ServerLoad(ready=False, counted=False), 4))
    watch.record(PollResult(one, ServerLoad(), 4))
    watch.record(PollResult(one, ServerLoad(), 5))
    (level, refused), back = new_records()
    assert level == "WARNING" and refused.startswith(f"{two} (a) is not ready")
    assert back == ("INFO", f"{one} (a, b) is back")
    for time in (6, 7):
        watch.record(PollResult(two, ServerLoad(counted=False), time))
    back, (level, uncounted) = new_records()
    assert back == ("INFO", f"{two} (a) is back")
    assert level == "WARNING" and uncounted.startswith(f"{two} (a) has no metrics")


def test_a_server_of_an_endpoint_with_scaling_is_not_lost_before_it_has_started(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "stoker_gateway")
    server, scaling = "127.0.0.1:1", Scaling("one", "a", 10)
    watch = ServerWatch(ModelRegistry({"a": Endpoint("a", "a", (server,), scaling=scaling)}))
    watch.record(PollResult(server, ServerLoad(ready=False, counted=False), 0, answered=False))
    watch.record(PollResult(server, ServerLoad(ready=False), 1))
    watch.record(PollResult(server, ServerLoad(), 2))
    assert not caplog.records
    watch.record(PollResult(server, ServerLoad(ready=False, counted=False), 3, answered=False))
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_poll_results_record_whether_the_server_answered() -> None:
    async def poll(server: str) -> ServerLoad:
        if server == "gone":
            raise ConnectionRefusedError
        return ServerLoad(ready=False)

    async def poll_both() -> dict[str, PollResult]:
        results = dict[str, PollResult]()
        both = asyncio.Event()

        def on_result(result: PollResult) -> None:
            results[result.server] = result
            if len(results) == 2:
                both.set()

        poller = Poller(poll, on_result)
        poller.set_servers(("gone", "there"))
        task = asyncio.create_task(poller.run())
        await both.wait()
        task.cancel()
        return results

    results = asyncio.run(poll_both())
    assert (results["gone"].answered, results["there"].answered) == (False, True)


def test_guide_names_existing_flags_and_metrics_and_shows_an_access_log() -> None:
    page = DOCUMENT.read_text(encoding="utf-8")
    flags = re.findall(r"`(--[a-z-]+)`", page.partition("## Flags")[2].partition("\n## ")[0])
    assert flags and {*flags} <= {action.option_strings[-1] for action in parser_of()._actions}
    [line] = re.findall(r"```json\n(.*?)```", page, re.S)
    assert json.loads(line).keys() == FIELDS.keys()
    registry = CollectorRegistry()
    PickerMetrics(registry)
    UsageMetrics(registry)
    age_gauge(registry)
    metrics = {sample.removesuffix("_total") for sample in re.findall(r"stoker:gateway_\w+", page)}
    assert metrics and metrics <= {family.name for family in registry.collect()}


class Server(BaseHTTPRequestHandler):
    """A stand-in for a model's server."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._say(b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self._say(b'{"answer": "private answer"}')

    def _say(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_logs_describe_requests_and_contain_no_secrets(server: str) -> None:
    program = "import sys; from stoker_gateway.cli.gateway import main; sys.exit(main(sys.argv[1:]))"
    words = ["--endpoint", f"org/ä=http://{server}", "--port", "0", "--metrics-port", "0"]
    gateway = subprocess.Popen(
        [sys.executable, "-c", program, *words, "--access-log", "--log-format", "json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TZ": "Asia/Tokyo"},
    )
    assert gateway.stdout is not None and gateway.stderr is not None
    try:
        lines = [gateway.stderr.readline(), gateway.stderr.readline()]
        records = [json.loads(line) for line in lines]
        metrics_url, url = (re.findall(r"http://\S+", line["message"])[0] for line in records)
        assert records[1]["message"] == f"{url} routes requests to org/ä (1 server)"

        secrets = {"authorization": "Bearer private-key", "x-api-key": "private-key", "x-request-id": "r-1"}
        body = {"model": "org/ä", "prompt": "private prompt"}
        answer = httpx.post(f"{url}/v1/completions?key=private-key", json=body, headers=secrets, timeout=60)
        assert answer.json() == {"answer": "private answer"}
        body["model"] = "private-model"
        assert httpx.post(f"{url}/v1/completions", json=body, headers=secrets, timeout=60).status_code == 404
        assert httpx.get(f"{url}/stats/prometheus", headers=secrets, timeout=60).status_code == 404

        metrics = httpx.get(metrics_url, timeout=60)
        names = {family.name for family in text_string_to_metric_families(metrics.text)}
        assert {"stoker:gateway_requests", "stoker:gateway_decision_seconds"} <= names
        assert {"envoy_server_live", "envoy_http_downstream_rq", "envoy_cluster_upstream_rq"} <= names
        for path in ("/", "/stats", "/quitquitquit", "/healthcheck/fail", "/metrics/../quitquitquit"):
            assert httpx.post(metrics_url.replace("/metrics", path), timeout=60).status_code in (404, 405)
    finally:
        gateway.send_signal(signal.SIGTERM)
        out, err = gateway.communicate(timeout=60)
    assert gateway.returncode == 0
    for line in [*lines, *err.splitlines()]:  # the gateway's, and Envoy's
        record = json.loads(line)
        assert {"timestamp", "level", "logger", "message"} <= record.keys()
        assert abs(datetime.now(UTC) - datetime.fromisoformat(record["timestamp"])) < timedelta(hours=1)
    assert any(json.loads(line)["logger"].startswith("envoy.") for line in err.strip("\n").split("\n"))

    served, unknown, unrouted = map(json.loads, out.strip("\n").split("\n"))
    timestamp = served.pop("timestamp")
    assert timestamp.endswith("Z") and abs(datetime.now(UTC) - datetime.fromisoformat(timestamp)) < timedelta(hours=1)
    assert served.pop("duration_ms") >= served.pop("ttfb_ms") >= 0
    assert served == {
        "level": "info",
        "logger": "envoy.access",
        "message": "POST /v1/completions 200",
        "method": "POST",
        "path": "/v1/completions",
        "model": "org/ä",
        "status": 200,
        "server": server,
        "attempts": 1,
        "bytes_received": len(answer.request.content),
        "bytes_sent": len(answer.content),
        "request_id": "r-1",
        "client": "127.0.0.1",
        "flags": "-",
    }
    assert (unknown["status"], unknown["model"], unknown["server"]) == (404, None, None)
    assert (unrouted["status"], unrouted["path"]) == (404, "/stats/prometheus")
    assert "private" not in out + err + metrics.text
