"""Limits of keys through Envoy's real program, with a popular client."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import openai
import pytest

from stoker_gateway.envoy.files import EnvoyFiles
from stoker_gateway.envoy.process import EnvoyProcess
from stoker_gateway.envoy.settings import EnvoySettings
from stoker_gateway.ext_proc.server import PickerServer
from stoker_gateway.keys.key import Key, Limits, digest_of, new_text
from stoker_gateway.keys.keyring import Keyring
from stoker_gateway.registry.model_registry import Endpoint, ModelRegistry
from stoker_gateway.scheduling.picker import EndpointPicker

from .behind_envoy import Server

TEXTS = {name: new_text(name) for name in ("some", "free", "many")}
KEYS = Keyring(
    [
        Key("some", digest_of(TEXTS["some"]), limits=Limits(2, 1000)),
        Key("free", digest_of(TEXTS["free"])),
        Key("many", digest_of(TEXTS["many"]), limits=Limits(300)),
    ]
)
LIMITS = httpx.Limits(max_connections=4)
NAMES = [f"x-ratelimit-{field}-{of}" for field in ("limit", "remaining", "reset") for of in ("requests", "tokens")]


@asynccontextmanager
async def gateway(keyring: Keyring | None = KEYS) -> AsyncIterator[tuple[str, Server]]:
    """Yield the gateway's address, and the server of the model m."""
    server = Server("a")
    with tempfile.TemporaryDirectory(prefix="stoker-") as folder:
        await server.start()
        model_registry = ModelRegistry({"m": Endpoint("m", "one", (server.address,))})
        settings = EnvoySettings("127.0.0.1", 0, Path(folder), 1, threads=1)
        EnvoyFiles(settings).write(model_registry)
        pickers = {"m": EndpointPicker()}
        pickers["m"].set_servers((server.address,), time.monotonic())
        picker, envoy = PickerServer(model_registry, pickers, keyring=keyring), EnvoyProcess(settings)
        picker.listen(f"unix:{settings.picker_socket}")
        await picker.start()
        try:
            await envoy.start()
            yield f"http://127.0.0.1:{await envoy.port()}", server
        finally:
            await envoy.end()
            await picker.stop(0)
            await server.stop()


def test_responses_report_remaining_limits_and_refusals_when_to_retry() -> None:
    async def main() -> None:
        async with gateway() as (url, server):

            def client(key: str) -> openai.AsyncOpenAI:
                return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=TEXTS[key], max_retries=0, timeout=60)

            some = client("some").completions.with_raw_response
            for remaining in ("1", "0"):
                answer = await some.create(model="m", prompt="x" * 40, max_tokens=100)
                assert [answer.headers[name] for name in NAMES[:3]] == ["2", "1000", remaining]
                assert int(answer.headers[NAMES[3]]) == 1000 - 110 * (2 - int(remaining))
                assert answer.headers[NAMES[4]].startswith("1m")
            with pytest.raises(openai.RateLimitError) as refused:
                await some.create(model="m", prompt="x", max_tokens=1)
            assert (refused.value.code, refused.value.type) == ("rate_limit_exceeded", "requests")
            headers = refused.value.response.headers
            assert [headers[name] for name in NAMES[:4]] == ["2", "1000", "0", "780"]
            assert 1 <= int(headers["retry-after"]) <= 61
            assert all(len(headers.get_list(name)) == 1 for name in NAMES)
            assert len(server.requests) == 2
            free = await client("free").completions.with_raw_response.create(model="m", prompt="x", max_tokens=1)
            assert not [name for name in free.headers if name.startswith("x-ratelimit")]
            server.does = "fail"  # a server's error counts, as the request was sent there
            many = client("many").completions.with_raw_response
            with pytest.raises(openai.InternalServerError) as failed:
                await many.create(model="m", prompt="x", max_tokens=1)
            assert failed.value.response.headers["x-ratelimit-remaining-requests"] == "299"
            assert "x-ratelimit-limit-tokens" not in failed.value.response.headers

    asyncio.run(main())


def test_responses_without_keys_have_no_rate_limit_headers() -> None:
    async def main() -> None:
        async with gateway(None) as (url, _), httpx.AsyncClient(timeout=60) as client:
            for path in ("/v1/completions", "/tokenize"):
                answer = await client.post(f"{url}{path}", json={"model": "m", "prompt": "x"})
                assert answer.status_code == 200
                assert not [name for name in answer.headers if name.startswith("x-ratelimit")]

    asyncio.run(main())


def test_requests_per_minute_match_the_limit_on_few_connections() -> None:
    async def main() -> None:
        limit = 300
        async with gateway() as (url, server), httpx.AsyncClient(timeout=60, limits=LIMITS) as client:
            headers = {"authorization": f"Bearer {TEXTS['many']}"}

            async def ask() -> int:
                return (await client.post(f"{url}/v1/completions", json={"model": "m"}, headers=headers)).status_code

            began = time.monotonic()
            statuses: list[int] = []
            while len(statuses) < limit + 50:
                statuses += await asyncio.gather(*(ask() for _ in range(50)))
            if time.monotonic() - began < 60:
                assert statuses.count(200) == limit == len(server.requests)
            assert set(statuses) == {200, 429}

    asyncio.run(main())
