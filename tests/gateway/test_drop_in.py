"""The gateway answers all requests that clients send to a single server, with equal responses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from stoker_gateway.ext_proc.model_cards import ModelCards
from stoker_gateway.keys.key import Key, digest_of
from stoker_gateway.keys.keyring import Keyring
from stoker_gateway.polling.poller import HttpProbe

from .behind_envoy import gateway
from .ext_proc.proxy import picking


def _models_body(**card: Any) -> bytes:
    return json.dumps({"object": "list", "data": [{"id": "org/a", **card}, {"id": "another"}]}).encode()


def test_model_cards_match_those_of_their_servers() -> None:
    async def main() -> None:
        one, two = "10.0.0.1:80", "10.0.0.2:80"
        async with picking({"org/a": [one, two], "b": [two]}) as picker:
            for server, longest in ((one, 8192), (two, 4096)):
                answer = _models_body(
                    max_model_len=longest, root="/models/a", parent=None, permission=[{"id": "p"}], x="y"
                )
                picker.server.update_models(server, answer)
            known = {"max_model_len": 4096, "root": "/models/a", "parent": None, "permission": [{"id": "p"}]}
            card = {"id": "org/a", "object": "model", "created": 0, "owned_by": "stoker"} | known
            assert (await picker.proxy.get("/v1/models/org/a")).json == card
            listed = (await picker.proxy.get("/v1/models")).json["data"]
            assert listed[0] == card and "max_model_len" not in listed[1]

    asyncio.run(main())


@pytest.mark.parametrize(
    "answer",
    [
        b"", b"1", b"[]", b"{}", b'{"data": 1}', b'{"data": [1, {}, {"id": 2}]}', _models_body(max_model_len="8192"),
        _models_body(max_model_len=True), _models_body(max_model_len=-1),
        _models_body(root=1, parent=["x"], permission={}),
        _models_body(root="x" * 5000, permission=["x" * 5000]),
    ],
)  # fmt: skip
def test_malformed_model_cards_are_ignored(answer: bytes) -> None:
    cards = ModelCards()
    cards.update("s", answer)
    assert cards.of("org/a", ["s", "unknown"]) == {}
    cards.update("s", _models_body(max_model_len=1))
    assert cards.of("org/a", ["s"]) == {"max_model_len": 1}
    cards.keep(["other"])
    assert cards.of("org/a", ["s"]) == {}


@asynccontextmanager
async def answering(answer: Callable[[web.Request], Awaitable[web.Response]]) -> AsyncIterator[str]:
    """Run a server that answers each GET by `answer`; yield its address."""
    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def test_servers_are_queried_for_their_models_with_their_key() -> None:
    requests: list[tuple[str, str | None]] = []
    heard: list[tuple[str, bytes, str]] = []
    takes = "Bearer k"

    async def answer(request: web.Request) -> web.Response:
        requests.append((request.path, request.headers.get("authorization")))
        if request.path != "/v1/models":
            return web.Response()
        return web.Response(body=_models_body(), status=200 if request.headers.get("authorization") == takes else 401)

    async def main() -> None:
        async with answering(answer) as server, HttpProbe(lambda *news: heard.append(news)) as probe:
            probe.set_authorizations({server: ("Bearer k",)})
            for _ in range(3):
                assert (await probe(server)).ready
            assert heard == [(server, _models_body(), "Bearer k")]  # only once per period
            probe.set_authorizations({server: ("Bearer new", "Bearer k", "Bearer older")})
            for _ in range(3):
                assert (await probe(server)).ready
        assert heard == [(server, _models_body(), "Bearer k")] * 2
        assert [key for path, key in requests if path == "/v1/models"] == ["Bearer k", "Bearer new", "Bearer k"]
        assert {key for path, key in requests if path != "/v1/models"} == {None}

    asyncio.run(main())


def test_key_that_a_slow_server_accepts_is_found_in_the_end() -> None:
    heard: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        if request.path != "/v1/models":
            return web.Response()
        await asyncio.sleep(0.4)  # sleeps: too slow to try all keys before the timeout
        return web.Response(body=_models_body(), status=200 if request.headers.get("authorization") == "k1" else 403)

    async def main() -> None:
        async with answering(answer) as server, HttpProbe(lambda *news: heard.append(news[2])) as probe:
            while not heard:
                probe.set_authorizations({server: ("k4", "k3", "k2", "k1")})
                with suppress(TimeoutError):  # a busy machine
                    assert (await probe(server)).ready
                probe.set_authorizations({})  # it was removed, so it is polled again at once
        assert heard == ["k1"]

    asyncio.run(main())


def test_other_paths_respond_as_a_single_server_does() -> None:
    async def main() -> None:
        async with gateway(1) as at, aiohttp.ClientSession() as client:
            for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
                async with client.request(method, at.url + path) as answer:
                    assert (answer.status, await answer.read()) == (200, b"")
            async with client.get(at.url + "/version") as answer:
                assert await answer.json() == {"version": version("stoker")}
            for path in ("/docs", "/nowhere", "/v1", "/v1/nowhere"):
                async with client.get(at.url + path) as answer:
                    error = (await answer.json())["error"]
                    assert (answer.status, error["type"]) == (404, "not_found_error")
                    assert error.keys() == {"message", "type", "param", "code"}

    asyncio.run(main())


def test_openapi_schema_comes_from_a_server() -> None:
    async def main() -> None:
        async with (
            gateway(1) as at,  # its picker routes all requests
            aiohttp.ClientSession() as client,
            client.get(at.url + "/openapi.json") as answer,
        ):
            assert (answer.status, (await answer.json())["server"]) == (200, at.servers[0].name)
        one, two = "10.0.0.1:80", "10.0.0.2:80"
        keyring = Keyring([Key(name, digest_of(name), (name,)) for name in ("a", "b", "c")])
        async with picking({"a": [one], "b": [two]}, keyring=keyring) as picker:
            for name, servers in (("a", [one]), ("b", [two])):
                headers = {"authorization": f"Bearer {name}"}
                assert (await picker.proxy.get("/openapi.json", headers=headers)).servers == servers
                assert (await picker.proxy.post("/openapi.json", {}, headers=headers)).status == 405
            nothing = await picker.proxy.get("/openapi.json", headers={"authorization": "Bearer c"})
            assert (nothing.status, nothing.json["error"]["type"]) == (404, "not_found_error")
            assert (await picker.proxy.get("/openapi.json")).status == 401

    asyncio.run(main())
