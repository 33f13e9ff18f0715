"""``stoker gateway --kubernetes`` with real Envoy, and an API server that the test controls."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import pytest

from stoker_gateway.cli.gateway import main
from stoker_gateway.keys import manifests
from stoker_gateway.keys.key import Key, digest_of

from ...support.waiting import until_async
from ..behind_envoy import CHAT, Server
from .stand_in_api import ENDPOINTS, KEYS, SLICES, Object, StandInApi, endpoint, secret, slice_of

_MAIN = "import sys; from stoker_gateway.cli.gateway import main; sys.exit(main(sys.argv[1:]))"


class Command:
    """The running command, with a client."""

    def __init__(self, url: str, client: aiohttp.ClientSession, process: asyncio.subprocess.Process) -> None:
        self.url, self.client, self.process = url, client, process

    async def status(self, model: str, key: str = "one", prompt: str = "") -> int:
        """Return the status of a request's response."""
        return (await self.ask(model, key, prompt))[0]

    async def ask(self, model: str, key: str = "one", prompt: str = "") -> tuple[int, Object]:
        """Return status and body of a request's response."""
        headers = {"Authorization": f"Bearer {text(key)}"}
        messages = {"messages": [{"role": "user", "content": prompt}]} if prompt else {}
        data = json.dumps({"model": model, **messages}).encode()
        async with self.client.post(self.url + CHAT, data=data, headers=headers) as answer:
            return answer.status, await answer.json()

    async def ready(self) -> int:
        """Return the status of the readiness probe."""
        async with self.client.get(f"{self.url}/ready") as answer:
            return answer.status


def text(key: str) -> str:
    return f"sk-stoker-{key}-{'0' * 48}"


def key_secret(key: str) -> Object:
    made = manifests.write(Key(key, digest_of(text(key))))
    data = secret("-", **made["stringData"])["data"]
    return {"metadata": {**made["metadata"], "namespace": "gate"}, "type": made["type"], "data": data}


@asynccontextmanager
async def command(api: StandInApi, folder: Path) -> AsyncIterator[Command]:
    env = {**os.environ, "KUBECONFIG": str(api.kubeconfig(folder))}
    words = ("--kubernetes", "--namespace", "gate", "--port", "0")
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _MAIN, *words, stdout=asyncio.subprocess.PIPE, stderr=log, env=env
        )
    try:
        assert process.stdout is not None
        url = (await asyncio.wait_for(process.stdout.readline(), 60)).decode().split()[-1]
        async with aiohttp.ClientSession() as client:
            yield Command(url, client, process)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        with suppress(Exception):
            api.stop()


@asynccontextmanager
async def servers(number: int) -> AsyncIterator[list[Server]]:
    made = [Server("abcdefgh"[each]) for each in range(number)]
    for each in made:
        await each.start()
    try:
        yield made
    finally:
        for each in made:
            await each.stop()


def test_a_key_of_servers_is_rotated_and_no_request_fails(tmp_path: Path) -> None:
    """One server reads its key at start, like vLLM, and is restarted at the end; the other reads it late."""

    async def run() -> None:
        api = StandInApi()
        async with servers(2) as (a, b):
            a.wants = b.wants = "Bearer k1"
            api.put(ENDPOINTS, endpoint("a", auth={"apiKeysSecretRef": {"name": "s"}}))
            api.put(SLICES, slice_of("a", a.address))
            second_slice = slice_of("a", b.address)
            second_slice["metadata"]["name"] = "a-y"
            second_slice["endpoints"][0]["targetRef"] = {"uid": "another pod"}
            api.put(SLICES, second_slice)
            api.put("secrets", secret("s", api_key="k1"))
            api.put(KEYS, key_secret("one"))
            api.start()
            async with command(api, tmp_path) as gateway:
                await until_async(lambda: _is(gateway.status("org/a"), 200))
                statuses: list[int] = []

                async def until_asked(server: Server, key: str) -> None:
                    header = f"authorization: Bearer {key}\r\n".encode()
                    server.requests.clear()

                    async def was_told() -> bool:
                        statuses.append(await gateway.status("org/a", prompt=str(len(statuses))))
                        return any(header in head for head in server.requests)

                    await until_async(was_told)

                for server in (a, b):
                    await until_asked(server, "k1")
                await until_async(lambda: a.listed and b.listed)
                num_reads = api.requests.count(("/api/v1/namespaces/one/secrets/s", False))
                api.put("secrets", secret("s", api_key="k2"))
                api.put(ENDPOINTS, api.kinds[ENDPOINTS][("one", "a")] | {"metadata": _next(api, "one", "a")})
                await until_async(lambda: api.requests.count(("/api/v1/namespaces/one/secrets/s", False)) > num_reads)
                for server in (a, b):
                    await until_asked(server, "k1")
                assert set(statuses) == {200}, statuses
                b.wants = "Bearer k2"
                await until_asked(b, "k2")
                statuses.clear()
                for server, key in ((a, "k1"), (b, "k2")):
                    await until_asked(server, key)
                assert set(statuses) == {200}, statuses
                a.wants = "Bearer k2"
                await until_asked(a, "k2")

    asyncio.run(run())


def test_gateway_follows_the_cluster_and_interrupts_no_request(tmp_path: Path) -> None:
    async def run() -> None:
        api = StandInApi()
        api.refused[SLICES] = 403
        async with servers(2) as (a, b):
            api.put(ENDPOINTS, endpoint("a"))
            api.put(SLICES, slice_of("a", a.address))
            api.put(KEYS, key_secret("one"))
            api.start()
            async with command(api, tmp_path) as gateway:
                await until_async(lambda: (SLICES, False) in api.requests)
                assert await gateway.ready() == 503
                assert await gateway.status("org/a") == 503
                del api.refused[SLICES]
                await until_async(lambda: _is(gateway.ready(), 200))
                assert await gateway.ask("org/a") == (200, {"server": "a", "size": 18})
                assert b"authorization" not in a.requests[-1].lower()
                assert [await gateway.status("org/b"), await gateway.status("org/a", "two")] == [404, 401]

                api.put(ENDPOINTS, endpoint("b", "two", auth={"apiKeysSecretRef": {"name": "s"}}))
                api.put(SLICES, slice_of("b", b.address, namespace="two"))
                api.put(KEYS, key_secret("two"))
                await until_async(lambda: _is(gateway.status("org/a", "two"), 200))
                await until_async(lambda: _is(gateway.status("org/b"), 503))
                assert "API key of the model's servers" in str(await gateway.ask("org/b"))
                assert not b.requests
                api.put("secrets", secret("s", "two", api_key="k1"))
                api.put(ENDPOINTS, api.kinds[ENDPOINTS][("two", "b")] | {"metadata": _next(api, "two", "b")})
                await until_async(lambda: _is(gateway.status("org/b"), 200))
                assert b"authorization: Bearer k1\r\n" in b.requests[-1]

                a.does = "stream"
                headers, body = {"Authorization": f"Bearer {text('two')}"}, b'{"model": "org/a"}'
                async with gateway.client.post(gateway.url + CHAT, data=body, headers=headers) as under_way:
                    a.does = "answer"
                    api.delete(KEYS, "gate", "stoker-key-two")
                    api.delete(SLICES, "one", "a-x")
                    await until_async(lambda: _is(gateway.status("org/a"), 503))
                    api.delete(ENDPOINTS, "one", "a")
                    await until_async(lambda: _is(gateway.status("org/a"), 404))
                    await until_async(lambda: _is(gateway.status("org/b", "two"), 401))
                    api.stop()
                    assert await gateway.status("org/b") == 200
                    a.last = True
                    a.more.set()
                    assert await under_way.read() == b"data: 1\n\ndata: [DONE]\n\n"
                api.delete(ENDPOINTS, "two", "b")
                api.put(ENDPOINTS, endpoint("c", served="c"))
                api.put(SLICES, slice_of("c", b.address))
                api.start()
                await until_async(lambda: _is(gateway.status("c"), 200))
                assert await gateway.status("org/b") == 404
                gateway.process.terminate()
                assert await asyncio.wait_for(gateway.process.wait(), 60) == 0
        log = (tmp_path / "log").read_text()
        assert log.count("EndpointSlices cannot be watched") >= 1 and "Traceback" not in log, log

    asyncio.run(run())


def test_no_request_fails_while_servers_come_and_go(tmp_path: Path) -> None:
    async def run() -> None:
        api = StandInApi()
        async with servers(4) as every:
            api.put(ENDPOINTS, endpoint("a"))
            api.put(SLICES, slice_of("a", every[0].address))
            api.put(KEYS, key_secret("one"))
            api.start()
            async with command(api, tmp_path) as gateway:
                await until_async(lambda: _is(gateway.ready(), 200))
                statuses, going = list[int](), True

                async def ask() -> None:
                    while going:
                        statuses.append(await gateway.status("org/a"))

                asking = [asyncio.create_task(ask()) for _ in range(4)]
                for number in range(1, 13):  # exactly one exists at any time
                    at = every[number % 4]
                    before, seen = len(at.requests), slice_of("a", at.address)
                    api.put(SLICES, seen)
                    await asyncio.wait_for(at.until_requests(before + 2), 60)
                going = False
                await asyncio.gather(*asking)
                assert set(statuses) == {200}

    asyncio.run(run())


async def _is(answer: Awaitable[int], status: int) -> bool:
    return await answer == status


def _next(api: StandInApi, namespace: str, name: str) -> Object:
    metadata = api.kinds[ENDPOINTS][(namespace, name)]["metadata"]
    return {**metadata, "generation": metadata["generation"] + 1}


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--endpoint", "a=http://127.0.0.1:1"], "--endpoint"),
        (["--keys", "keys.yaml"], "--keys"),
        (["--session-header", "x-session"], "--session-header"),
        (["--namespace", "Ünfug"], "--namespace"),
        (["--namespace", "gate", "--max-held", "0"], "--max-held"),
        (["--namespace", "gate", "--max-held-bytes", "many"], "--max-held-bytes"),
        (["--namespace", "gate", "--max-held-bytes", "1000"], "--max-body-size"),
        (["--namespace", "../x"], "--namespace"),
        (["--namespace", ""], "--namespace"),
        ([], "--namespace"),
    ],
)
def test_flags_that_conflict_with_kubernetes_are_refused(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker_gateway.cli.cluster_flags._OWN_NAMESPACE", Path("/nowhere"))
    with pytest.raises(SystemExit) as ended:
        main(["--kubernetes", *words])
    assert ended.value.code == 2 and named in capsys.readouterr().err


def test_missing_cluster_is_reported(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "KUBERNETES_SERVICE_HOST"}
    words = [sys.executable, "-c", _MAIN, "--kubernetes", "--namespace", "gate"]
    env["KUBECONFIG"] = str(tmp_path / "none")  # read on import of the client
    ended = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1 and ended.stderr.startswith("stoker gateway: no cluster") and ended.stdout == ""
