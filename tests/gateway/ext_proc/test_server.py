"""The picker's server, called as Envoy calls it."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import itertools
import json
import logging
import random
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stoker_common import logs
from stoker_gateway.ext_proc.request_handler import RequestHandler
from stoker_gateway.ext_proc.request_limits import RequestLimits
from stoker_gateway.ext_proc.server import PickerServer, TLSFiles
from stoker_gateway.scheduling.load import ServerLoad

from ...support.waiting import until_async
from .proxy import Proxy, chat, head, model_registry, pickers_of, picking

THREE = ("10.0.0.1:80", "10.0.0.2:80", "[fd00::3]:80")
LONG = "the same beginning of every prompt, " * 200


@pytest.mark.parametrize("mode", ["buffered", "streamed"])
@pytest.mark.parametrize("trailers", [False, True])
@pytest.mark.parametrize("size", [0, 1, 600, 64_511, 64_512, 64_513, 300_000])
def test_request_is_routed_with_its_body_unchanged(mode: str, trailers: bool, size: int) -> None:
    async def main() -> None:
        async with picking({"org/a": THREE, "b": ("10.0.1.1:80",)}) as picker:
            for model, cluster in (("org/a", "cluster-0"), ("b", "cluster-1")):
                body = chat(model, "x" * size, stream=True)
                outcome = await picker.proxy.post("/v1/chat/completions?x=1", body, mode, trailers=trailers)
                assert outcome.cluster == cluster
                assert outcome.servers and set(outcome.servers) <= {*THREE, "10.0.1.1:80"}
                assert len(set(outcome.servers)) == len(outcome.servers) <= 3
            assert picker.count("requests_total", model="b", outcome="routed") == 1

    asyncio.run(main())


@pytest.mark.parametrize("mode", ["buffered", "streamed"])
def test_conversation_returns_to_its_server(mode: str) -> None:
    async def main() -> None:
        async with picking({"a": [f"10.0.0.{n}:80" for n in range(16)]}) as picker:
            for number in range(8):
                messages, home = [f"{number} {LONG}"], ""
                for turn_number in range(4):
                    outcome = await picker.proxy.post("/v1/chat/completions", chat("a", *messages), mode)
                    picker.say(ServerLoad())
                    home = home or outcome.servers[0]
                    assert outcome.servers[0] == home
                    messages += [f"answer {turn_number} " * 50, f"and then {turn_number}? " * 50]
            assert picker.count("picks_total", model="a", why="home") == 8
            assert picker.count("picks_total", model="a", why="prefix") == 24
            assert (
                0 < picker.count("cached_prompt_bytes_total", model="a") < picker.count("prompt_bytes_total", model="a")
            )

    asyncio.run(main())


def test_a_session_stays_with_its_server() -> None:
    async def main() -> None:
        async with picking({"a": [f"10.0.0.{n}:80" for n in range(16)]}, session_header="x-session") as picker:
            servers = set()
            for number in range(8):
                body = {"model": "a", "prompt": f"{number}" * 999, "user": "mine" if number < 4 else "another"}
                headers = {} if number < 4 else {"x-session": "mine"}
                servers.add((await picker.proxy.post("/v1/completions", body, headers=headers)).servers[0])
                picker.say(ServerLoad())
            assert len(servers) == 1
            assert picker.count("picks_total", model="a", why="session") == 8

    asyncio.run(main())


def test_stored_response_is_continued_and_found_on_its_server() -> None:
    async def main() -> None:
        servers = [f"10.0.0.{n}:80" for n in range(16)]
        async with picking({"a": servers}) as picker:
            made = {}
            for number in range(12):
                name = f"request-{number}"
                body = {"model": "a", "input": f"{number} {LONG}"} | ({"request_id": "mine"} if number == 7 else {})
                outcome = await picker.proxy.post("/v1/responses", body, headers={"x-request-id": name})
                assert (outcome.headers["x-stoker-response-id"] == "mine") == (number == 7)
                made["mine" if number == 7 else f"resp_{name}_0123abcd"] = outcome.servers[0]
                made[outcome.headers["x-stoker-response-id"]] = outcome.servers[0]
            assert len(set(made.values())) > 1
            for response_id, server in made.items():
                body = {"model": "a", "input": "go on", "previous_response_id": response_id}
                assert (await picker.proxy.post("/v1/responses", body)).servers == [server]
                for path in (f"/v1/responses/{response_id}", f"/v1/responses/{response_id}/input_items?limit=3"):
                    assert (await picker.proxy.get(path)).servers == [server]
                assert (await picker.proxy.ask("DELETE", f"/v1/responses/{response_id}", None)).servers == [server]
            mine, server = next(iter(made.items()))
            name = mine.removeprefix("resp_").removesuffix("_0123abcd")
            other_client = {"authorization": "Bearer another's", "x-request-id": name}
            for number in range(8):  # another client's equal request id does not change the route
                body = {"model": "a", "input": f"another's {number} {LONG}"}
                await picker.proxy.post("/v1/responses", body, headers=other_client)
                assert (await picker.proxy.get(f"/v1/responses/{mine}")).servers == [server]
            unknown = await picker.proxy.get("/v1/responses/resp_of_another_0123abcd")
            assert (unknown.status, unknown.json["error"]["type"]) == (404, "not_found_error")

    asyncio.run(main())


@pytest.mark.parametrize("mode", ["buffered", "streamed"])
def test_only_servers_of_the_subset_are_picked(mode: str) -> None:
    async def main() -> None:
        servers = [f"10.0.0.{n}:80" for n in range(8)]
        async with picking({"a": servers}) as picker:
            rng = random.Random(0)
            for _ in range(30):
                subset = rng.sample(servers, rng.randint(1, 3))
                outcome = await picker.proxy.post("/v1/chat/completions", chat("a", LONG), mode, subset=subset)
                assert outcome.servers and set(outcome.servers) <= set(subset)
            for none in ([], ["10.9.9.9:80"], "10.0.0.1:80", None, {"10.0.0.1:80": 1}, [1, None]):
                hint = {"x-gateway-destination-endpoint-subset": none}
                message = head("POST", "/v1/completions", {}, mode, ends=False)
                message.metadata_context.filter_metadata["envoy.lb.subset_hint"].update(hint)
                body = ext_proc.HttpBody(body=b'{"model": "a", "prompt": "x"}', end_of_stream=True)
                call = picker.proxy.stub.Process(iter([message, ext_proc.ProcessingRequest(request_body=body)]))
                *_, last = [answer async for answer in call]
                assert last.immediate_response.status.code == 503, none

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/tokenize"])
@pytest.mark.parametrize("mode", ["buffered", "streamed"])
def test_bad_requests_get_errors_in_the_format_of_their_api(path: str, mode: str) -> None:
    async def main() -> None:
        async with picking({"a": THREE, "gone": ()}, RequestLimits(max_body_bytes=50_000)) as picker:
            cases: list[tuple[bytes, int, str, str | None, str]] = [
                (b"", 400, "invalid_request_error", None, "must be a JSON object"),
                (b"[]", 400, "invalid_request_error", None, "must be a JSON object"),
                (b'{"model": "a"', 400, "invalid_request_error", None, "not valid JSON"),
                (b'{"model": "a", "x": NaN}', 400, "invalid_request_error", None, "not valid JSON"),
                (b'{"model": "\\ud800"}', 400, "invalid_request_error", None, "not valid JSON"),
                (b"[" * 40_000, 400, "invalid_request_error", None, "not valid JSON"),
                (b"{}", 400, "invalid_request_error", "missing_required_parameter", "model"),
                (b'{"model": 7}', 400, "invalid_request_error", "invalid_value", "model"),
                (b'{"model": "A"}', 404, "not_found_error", "model_not_found", "'A' is not served here"),
                (b'{"model": "gone"}', 503, "service_unavailable_error", None, "no server"),
                (b" " * 50_001, 413, "invalid_request_error", None, "larger than 50000 bytes"),
            ]
            for body, status, kind, code, words in cases:
                outcome = await picker.proxy.post(path, body, mode, headers={"x-request-id": "r-1"})
                assert outcome.status == status, body[:30]
                assert outcome.headers["content-type"] == "application/json"
                assert outcome.headers["x-request-id"] == "r-1"
                assert ("retry-after" in outcome.headers) == (status == 503)
                error = outcome.json["error"]
                assert words in error["message"]
                if path.startswith("/v1/messages"):
                    names = {404: "not_found_error", 413: "request_too_large", 503: "overloaded_error"}
                    assert outcome.json["type"] == "error" and outcome.json["request_id"] == "r-1"
                    assert error["type"] == names.get(status, "invalid_request_error")
                else:
                    assert (error["type"], error["code"]) == (kind, code)
                    assert error["param"] == ("model" if code else None)
            assert picker.count("requests_total", model="gone", outcome="unavailable") == 1
            assert picker.count("requests_total", model="", outcome="too_large") == 1
            assert picker.count("requests_total", model="", outcome="not_found") == 1

    asyncio.run(main())


def test_body_with_too_large_content_length_is_refused_at_once() -> None:
    async def main() -> None:
        async with picking({"a": THREE}, RequestLimits(max_body_bytes=1000)) as picker:
            for length, status in (("1000", 0), ("1001", 413), ("9" * 5000, 413), ("-1", 0), ("²", 0)):
                call = picker.proxy.stub.Process()
                await call.write(head("POST", "/v1/completions", {"content-length": length}, ends=False))
                assert (await call.read()).immediate_response.status.code == status, length
                call.cancel()

    asyncio.run(main())


def test_models_are_listed_without_a_server() -> None:
    async def main() -> None:
        async with picking({"org/a": THREE, "b": (), "ü": ()}) as picker:
            proxy = picker.proxy
            listed = (await proxy.get("/v1/models")).json
            assert listed["object"] == "list"
            assert [card["id"] for card in listed["data"]] == ["org/a", "b", "ü"]
            assert {card["object"] for card in listed["data"]} == {"model"}
            for path, name in (("org/a", "org/a"), ("org%2Fa?x", "org/a"), ("b", "b"), ("%C3%BC", "ü")):
                assert (await proxy.get(f"/v1/models/{path}")).json["id"] == name
            for path in ("/v1/models/c", "/v1/models/", "/v1/models/%ff", "/v1/models/org", "/metrics", "/health",
                         "/v1", "/tokenize/x", ""):  # fmt: skip
                assert (await proxy.get(path)).status == 404, path
            without_prefix = await proxy.post("/chat/completions", {"model": "b"})
            assert "/v1/chat/completions" in without_prefix.json["error"]["message"]
            for method, path, allowed in (
                ("POST", "/v1/models", "GET, HEAD"), ("DELETE", "/v1/models/b", "GET, HEAD"),
                ("PUT", "/openapi.json", "GET, HEAD"), ("GET", "/v1/chat/completions", "POST"),
                ("PUT", "/v1/completions", "POST"),
            ):  # fmt: skip
                refused = await proxy.ask(method, path, None)
                assert (refused.status, refused.headers["allow"]) == (405, allowed), path
            picker.server.update(model_registry({"new": THREE}), pickers_of(model_registry({"new": THREE}), 0))
            assert [card["id"] for card in (await proxy.get("/v1/models")).json["data"]] == ["new"]
            assert (await proxy.post("/v1/completions", {"model": "b", "prompt": ""})).status == 404
            assert (await proxy.post("/v1/completions", {"model": "new", "prompt": ""})).servers

    asyncio.run(main())


FULL = ServerLoad(running=8, waiting=100, kv_usage=1.0)


def test_request_waits_while_all_servers_are_saturated() -> None:
    async def main() -> None:
        async with picking({"a": THREE}, RequestLimits(max_waiting=3, max_wait_s=60)) as picker:
            picker.say(FULL)
            waiting = [
                asyncio.ensure_future(picker.proxy.post("/v1/completions", {"model": "a", "prompt": f"{n}"}))
                for n in range(3)
            ]
            await picker.until_waiting("a", 3)
            more = await picker.proxy.post("/v1/completions", {"model": "a", "prompt": "4"})
            assert more.status == 429 and more.json["error"]["type"] == "rate_limit_error"
            assert int(more.headers["retry-after"]) >= 1
            waiting.pop(0).cancel()  # its client disconnects
            await picker.until_waiting("a", 2)
            await until_async(lambda: picker.count("requests_total", model="a", outcome="cancelled") == 1)
            assert not any(each.done() for each in waiting)
            now = asyncio.get_running_loop().time()
            picker.pickers["a"].observe(THREE[1], ServerLoad(), now, now)
            picker.server.wake("a")
            assert [(await each).servers[0] for each in waiting] == [THREE[1]] * 2
            assert picker.count("queue_length", model="a") == 0
            assert picker.count("requests_total", model="a", outcome="routed") == 2

    asyncio.run(main())


def test_waiting_request_is_refused_after_the_timeout_or_model_removal() -> None:
    async def main() -> None:
        async with picking({"a": THREE, "b": THREE}, RequestLimits(max_wait_s=0.2)) as picker:
            picker.say(FULL)
            late = await picker.proxy.post("/v1/completions", {"model": "a", "prompt": ""}, "streamed")
            assert late.status == 429 and "retry-after" in late.headers
            assert picker.count("requests_total", model="a", outcome="saturated") == 1
            waiting = asyncio.ensure_future(picker.proxy.post("/v1/completions", {"model": "b", "prompt": ""}))
            await picker.until_waiting("b", 1)
            picker.server.update(model_registry({"a": THREE}), {"a": picker.pickers["a"]})
            assert (await waiting).status in (429, 503)

    asyncio.run(main())


def test_protocol_violations_of_the_proxy_are_rejected() -> None:
    async def main() -> None:
        body = ext_proc.ProcessingRequest(request_body=ext_proc.HttpBody(body=b"{}", end_of_stream=True))
        started = head("POST", "/v1/completions", {}, ends=False)
        watching, unknown = ext_proc.ProcessingRequest(), ext_proc.ProcessingRequest()
        watching.CopyFrom(started)
        watching.observability_mode = True
        unknown.CopyFrom(started)
        unknown.protocol_config.request_body_mode = 0  # without a body mode
        wrong = [
            [body], [ext_proc.ProcessingRequest()], [started, started], [watching], [unknown],
            [ext_proc.ProcessingRequest(response_headers=ext_proc.HttpHeaders())],
        ]  # fmt: skip
        async with picking({"a": THREE}) as picker:
            for messages in wrong:
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    [answer async for answer in picker.proxy.stub.Process(iter(messages))]
                assert error.value.code() == grpc.StatusCode.FAILED_PRECONDITION
                assert error.value.details()

    asyncio.run(main())


def test_log_lines_about_requests_contain_the_request_id(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of concurrent requests, and of one with an invalid id."""

    async def main() -> None:
        async with picking({"a": THREE}) as picker:
            all_started, names = asyncio.Event(), ("r-1", "r-2", "no id")
            count = itertools.count(1)

            async def fail(*_: object) -> None:
                if next(count) == len(names):
                    all_started.set()
                await all_started.wait()
                raise ZeroDivisionError

            monkeypatch.setattr(RequestHandler, "decide", fail)
            answers = await asyncio.gather(
                *(picker.proxy.post("/v1/completions", {}, headers={"x-request-id": name}) for name in names)
            )
            assert [answer.status for answer in answers] == [500] * len(names)

    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        logs.configure("json")
        asyncio.run(main())
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    lines = [json.loads(line) for line in capfd.readouterr().err.rstrip("\n").split("\n")]
    assert sorted(line.get("request_id", "") for line in lines) == ["", "r-1", "r-2"]


def test_health_is_reported_by_service_name() -> None:
    async def main() -> None:
        async with picking({"a": THREE}) as picker:
            stub = health_pb2_grpc.HealthStub(picker.proxy.channel)

            async def check(name: str) -> int:
                return int((await stub.Check(health_pb2.HealthCheckRequest(service=name))).status)

            ready = ("", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor")
            assert {await check(name) for name in (*ready, "liveness")} == {1}
            with pytest.raises(grpc.aio.AioRpcError) as unknown:
                await check("something else")
            assert unknown.value.code() == grpc.StatusCode.NOT_FOUND
            await picker.server.drain()
            assert {await check(name) for name in ready} == {2}
            assert await check("liveness") == 1
            assert (await picker.proxy.post("/v1/completions", {"model": "a", "prompt": ""})).servers

    asyncio.run(main())


def test_picker_listens_on_a_unix_socket_and_with_tls(tmp_path: Path) -> None:
    async def main() -> None:
        known = model_registry({"a": THREE})
        server = PickerServer(known, pickers_of(known, 0))
        files = TLSFiles(tmp_path / "tls.crt", tmp_path / "tls.key")
        old = _certify(files)
        server.listen(f"unix:{tmp_path}/picker.sock")
        port = server.listen("127.0.0.1:0", files)
        await server.start()

        async def ask(proxy: Proxy) -> int:
            try:
                return len((await proxy.post("/v1/completions", {"model": "a", "prompt": "x"})).servers)
            finally:
                await proxy.channel.close()

        assert await ask(Proxy(f"unix:{tmp_path}/picker.sock"))
        assert await ask(Proxy(f"127.0.0.1:{port}", grpc.ssl_channel_credentials(old)))
        new = _certify(files)
        assert await ask(Proxy(f"127.0.0.1:{port}", grpc.ssl_channel_credentials(new)))
        with pytest.raises(grpc.aio.AioRpcError):
            await ask(Proxy(f"127.0.0.1:{port}", grpc.ssl_channel_credentials(old)))
        files.key.write_text("no key")  # partially written
        assert await ask(Proxy(f"127.0.0.1:{port}", grpc.ssl_channel_credentials(new)))
        await server.stop(0)
        with pytest.raises(OSError, match="cannot listen"):
            PickerServer(known, pickers_of(known, 0)).listen("256.0.0.1:1")

    asyncio.run(main())


def _certify(files: TLSFiles) -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "picker")])
    begin = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(begin + datetime.timedelta(days=36_500))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .sign(key, hashes.SHA256())
        .public_bytes(serialization.Encoding.PEM)
    )
    files.certificate.write_bytes(certificate)
    files.key.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return certificate
