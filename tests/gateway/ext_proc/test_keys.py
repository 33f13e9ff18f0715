"""Keys at the picker: which requests they permit, and the key with which servers are polled."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc

from stoker_gateway.ext_proc.request_limits import RequestLimits
from stoker_gateway.ext_proc.server_keys import ServerKeys
from stoker_gateway.keys.key import Key, digest_of
from stoker_gateway.keys.keyring import Keyring
from stoker_gateway.registry.model_registry import Endpoint
from stoker_gateway.scheduling.load import ServerLoad

from .proxy import Outcome, chat, head, picking

MODELS = {"org/a": ("10.0.0.1:80",), "b": ("10.0.1.1:80",), "org/sub/c": ("10.0.2.1:80",)}
CHAT = "/v1/chat/completions"


def key(name: str, *models: str, priority: int = 0, expires: float | None = None) -> Key:
    """Return a key whose text is its name."""
    return Key(name, digest_of(name), models, priority=priority, expires=expires)


KEYS = Keyring([key("all"), key("org", "org/*"), key("b", "b"), key("none", "zzz"), key("old", expires=1.0)])


def bearer(text: str) -> dict[str, str]:
    return {"authorization": f"Bearer {text}"}


@pytest.mark.parametrize("mode", ["buffered", "streamed"])
@pytest.mark.parametrize(
    ("headers", "says"),
    [
        ({}, "no API key was sent"),
        ({"authorization": ""}, "no API key was sent"),
        ({"authorization": "Bearer"}, "no API key was sent"),
        ({"authorization": "Bearer   "}, "no API key was sent"),
        ({"authorization": "Basic YWxsOmFsbA=="}, "no API key was sent"),
        ({"authorization": "all"}, "no API key was sent"),
        ({"authorization": "Bearer all,Bearer org"}, "unknown, or was revoked"),
        ({"authorization": "Bearer ключ"}, "unknown, or was revoked"),
        ({"x-api-key": "Bearer all"}, "unknown, or was revoked"),
        (bearer("al"), "unknown, or was revoked"),
        (bearer("old"), "'old' expired at 1970-01-01T00:00:01Z"),
        ({**bearer("old"), "x-api-key": "unknown"}, "unknown, or was revoked"),
    ],
)
def test_requests_without_a_valid_key_are_refused(mode: str, headers: dict[str, str], says: str) -> None:
    async def main() -> None:
        async with picking(MODELS, keyring=KEYS) as picker:
            answers = [
                await picker.proxy.post(CHAT, chat("b", "x"), mode, headers=headers),
                await picker.proxy.post(CHAT, b"no JSON", mode, headers=headers),
                await picker.proxy.post("/v1/messages", chat("b", "x"), mode, headers=headers),
                await picker.proxy.get("/v1/models", headers=headers),
                await picker.proxy.get("/v1/models/b", headers=headers),
                await picker.proxy.get("/v1/responses/resp_x", headers=headers),
                await picker.proxy.get("/nowhere", headers=headers),
                await picker.proxy.ask("PUT", CHAT, b"", mode, headers=headers),
            ]
            for each in answers:
                assert each.status == 401 and each.headers["www-authenticate"] == "Bearer"
                assert says in each.json["error"]["message"]
            assert answers[0].json["error"]["type"] == "invalid_request_error"
            assert answers[0].json["error"]["code"] == "invalid_api_key"
            assert answers[2].json["type"] == "error" and answers[2].json["error"]["type"] == "authentication_error"
            assert picker.count("requests_total", model="", outcome="unauthorized") == len(answers)

    asyncio.run(main())


@pytest.mark.parametrize("mode", ["buffered", "streamed"])
def test_no_body_is_read_before_the_key_is_known(mode: str) -> None:
    async def main() -> None:
        async with picking(MODELS, RequestLimits(max_body_bytes=10), keyring=KEYS) as picker:
            for headers in ({}, {"content-length": "1000000"}):
                call = picker.proxy.stub.Process()
                await call.write(head("POST", CHAT, headers, mode, ends=False))
                answer: ext_proc.ProcessingResponse = await call.read()
                assert answer.immediate_response.status.code == 401
                call.cancel()

    asyncio.run(main())


@pytest.mark.parametrize("authorization", [None, "Bearer of-the-servers"])
@pytest.mark.parametrize("mode", ["buffered", "streamed"])
@pytest.mark.parametrize(
    "headers",
    [
        bearer("all"),
        {"authorization": "bearer  all "},
        {"x-api-key": "all"},
        {"x-api-key": "all", "authorization": "Bearer wrong"},
        {"x-api-key": "wrong", "authorization": "Bearer all"},
        {"x-api-key": "all", "authorization": "Basic wrong"},
    ],
)
def test_servers_get_their_own_key_and_never_a_clients_key(
    headers: dict[str, str], mode: str, authorization: str | None
) -> None:
    async def main() -> None:
        async with picking(MODELS, keyring=KEYS, authorization=authorization) as picker:
            outcome = await picker.proxy.post(CHAT, chat("b", "x"), mode, headers=headers)
            assert outcome.servers == ["10.0.1.1:80"]
            if authorization is None:
                assert not outcome.headers and set(outcome.removed) == {"authorization", "x-api-key"}
            else:
                assert outcome.headers == {"authorization": authorization} and outcome.removed == ("x-api-key",)
            picker.server.set_keyring(None)  # credentials pass through
            outcome = await picker.proxy.post(CHAT, chat("b", "x"), mode, headers=headers)
            assert not outcome.headers and not outcome.removed

    asyncio.run(main())


def test_each_server_gets_a_key_that_it_accepts_and_a_request_only_one(caplog: pytest.LogCaptureFixture) -> None:
    one, two, three = servers = ("10.0.1.1:80", "10.0.1.2:80", "10.0.1.3:80")
    endpoint = Endpoint("m", "c", servers, authorization="k3", earlier_authorizations=("k2", "k1"))
    now = 0.0
    keys = ServerKeys(lambda: now)
    assert keys.alike(endpoint, servers) == (servers, "k3")  # unknown servers
    for _ in range(2):
        keys.accepted(one, "k1", [endpoint])
        keys.accepted(two, "k3", [endpoint])
    [warning] = caplog.messages
    assert one in warning and "k1" not in warning and "k3" not in warning
    keys.accepted(three, "k0")  # it is no longer remembered
    assert keys.alike(endpoint, servers) == ((one,), "k1")
    assert keys.alike(endpoint, (two, one, three)) == ((two, three), "k3")
    keys.keep(servers[1:])
    keys.keep(servers)  # the server has returned
    assert keys.alike(endpoint, servers) == ((one,), "k1")
    keys.keep(servers[1:])
    now = 301.0
    keys.keep(servers[1:])  # another server may have its address by now
    assert keys.alike(endpoint, servers) == (servers, "k3")
    open_to_all = Endpoint("m", "c", servers)
    keys.accepted(one, "")
    assert keys.alike(open_to_all, servers) == (servers, None)


@pytest.mark.parametrize(
    ("name", "sees"), [("all", set(MODELS)), ("org", {"org/a", "org/sub/c"}), ("b", {"b"}), ("none", set())]
)
def test_models_outside_the_key_look_like_unknown_models(name: str, sees: set[str]) -> None:
    async def main() -> None:
        async with picking(MODELS, keyring=KEYS) as picker:

            async def about(model: str) -> list[Outcome]:
                spelled = [model, model.replace("/", "%2F")]
                return [
                    await picker.proxy.post(CHAT, chat(model, "x"), headers=bearer(name)),
                    await picker.proxy.post("/v1/messages", chat(model, "x"), headers=bearer(name)),
                    await picker.proxy.post("/tokenize", {"model": model, "prompt": "x"}, headers=bearer(name)),
                    *[await picker.proxy.get(f"/v1/models/{each}", headers=bearer(name)) for each in spelled],
                ]

            listed = await picker.proxy.get("/v1/models", headers=bearer(name))
            assert {each["id"] for each in listed.json["data"]} == sees
            unknown = await about("org/unknown")
            assert {each.status for each in unknown} == {404}
            for model in MODELS:
                outcomes = await about(model)
                if model in sees:
                    assert [bool(each.servers) for each in outcomes] == [True, True, True, False, False]
                    assert [each.json["id"] for each in outcomes[3:]] == [model, model]
                    continue
                for each, like in zip(outcomes, unknown, strict=True):
                    text = like.text.replace(b"org/unknown", model.encode())
                    assert (each.status, each.headers, each.text) == (404, like.headers, text)

    asyncio.run(main())


def test_stored_responses_are_found_only_with_the_key_that_made_them() -> None:
    async def main() -> None:
        async with picking(MODELS, keyring=KEYS) as picker:
            body: dict[str, Any] = {"model": "b", "input": "x"}
            await picker.proxy.post("/v1/responses", body, headers={**bearer("all"), "x-request-id": "r"})
            path = "/v1/responses/resp_r_0123abcd"
            assert (await picker.proxy.get(path, headers={"x-api-key": "all"})).servers == list(MODELS["b"])
            assert (await picker.proxy.get(path, headers=bearer("b"))).status == 404
            # The key may lose its permission for the model meanwhile.
            picker.server.set_keyring(Keyring([key("all", "org/*")]))
            assert (await picker.proxy.get(path, headers=bearer("all"))).status == 404

    asyncio.run(main())


def test_new_keyring_applies_to_requests_whose_body_arrives_late() -> None:
    async def main() -> None:
        async with picking(MODELS, keyring=KEYS) as picker:
            call = picker.proxy.stub.Process()
            await call.write(head("POST", CHAT, bearer("b"), ends=False))
            assert (await call.read()).HasField("request_headers")
            picker.server.set_keyring(Keyring([key("another")]))
            assert (await picker.proxy.post(CHAT, chat("b", "x"), headers=bearer("b"))).status == 401
            assert (await picker.proxy.post(CHAT, chat("b", "x"), headers=bearer("another"))).servers
            body = ext_proc.HttpBody(body=b'{"model": "b"}', end_of_stream=True)
            await call.write(ext_proc.ProcessingRequest(request_body=body))
            assert (await call.read()).immediate_response.status.code == 401

    asyncio.run(main())


def test_queued_requests_are_admitted_by_their_keys_priority() -> None:
    async def main() -> None:
        keyring = Keyring([key("low", priority=-5), key("usual"), key("high", priority=5)])
        async with picking(MODELS, keyring=keyring) as picker:
            full = ServerLoad(waiting=64)
            picker.say(full)
            done, tasks = asyncio.Queue[str](), list[asyncio.Task[None]]()

            async def ask(name: str) -> None:
                outcome = await picker.proxy.post(CHAT, chat("b", "x"), headers=bearer(name))
                assert outcome.servers
                done.put_nowait(name)

            for number, name in enumerate(["low", "usual", "low", "high", "usual", "high"], 1):
                tasks.append(asyncio.create_task(ask(name)))
                await picker.until_waiting("b", number)
            order = list[str]()
            for _ in tasks:
                picker.say(ServerLoad(waiting=63))  # room for one
                picker.server.wake("b")
                order.append(await done.get())
            assert order == ["high", "high", "usual", "usual", "low", "low"]

    asyncio.run(main())


def test_queued_requests_of_a_revoked_key_are_refused() -> None:
    async def main() -> None:
        async with picking(MODELS, keyring=KEYS) as picker:
            picker.say(ServerLoad(waiting=64))
            waiting = [
                asyncio.create_task(picker.proxy.post(CHAT, chat("b", "x"), headers=bearer(name)))
                for name in ("b", "all", "b")
            ]
            await picker.until_waiting("b", 3)
            picker.server.set_keyring(Keyring([key("all")]))
            picker.say(ServerLoad())
            picker.server.wake("b")
            outcomes = await asyncio.gather(*waiting)
            assert [each.status or each.servers for each in outcomes] == [401, list(MODELS["b"]), 401]
            assert sum(picker.count("picks_total", model="b", why=why) for why in ("home", "prefix", "load")) == 1

    asyncio.run(main())


@pytest.mark.parametrize("at_first", [True, False])
def test_credentials_are_removed_while_keys_are_enabled_or_disabled(at_first: bool) -> None:
    async def main() -> None:
        async with picking(MODELS, keyring=KEYS if at_first else None) as picker:
            picker.say(ServerLoad(waiting=64))
            waiting = asyncio.create_task(picker.proxy.post(CHAT, chat("b", "x"), headers=bearer("b")))
            await picker.until_waiting("b", 1)
            picker.server.set_keyring(None if at_first else KEYS)
            picker.say(ServerLoad())
            picker.server.wake("b")
            assert set((await waiting).removed) == {"authorization", "x-api-key"}

    asyncio.run(main())
