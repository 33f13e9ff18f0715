"""Keys through Envoy's real program, with popular clients."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anthropic
import httpx
import openai
import pytest
import yaml

from stoker_gateway.envoy.files import EnvoyFiles
from stoker_gateway.envoy.process import EnvoyProcess
from stoker_gateway.envoy.settings import EnvoySettings
from stoker_gateway.ext_proc.server import PickerServer
from stoker_gateway.keys import manifests
from stoker_gateway.keys.key import Key, digest_of, new_text
from stoker_gateway.keys.keyring import Keyring
from stoker_gateway.registry.model_registry import Endpoint, ModelRegistry
from stoker_gateway.scheduling.picker import EndpointPicker

from .behind_envoy import Server

_MAIN = "import sys; from stoker_gateway.cli.gateway import main; sys.exit(main(sys.argv[1:]))"
TEXTS = {name: new_text(name) for name in ("all", "org", "old", "gone")}
KEYS = Keyring(
    [
        Key("all", digest_of(TEXTS["all"])),
        Key("org", digest_of(TEXTS["org"]), ("org/*",)),
        Key("old", digest_of(TEXTS["old"]), expires=time.time() - 1),
    ]
)


@asynccontextmanager
async def gateway() -> AsyncIterator[tuple[str, Server, Server]]:
    """Yield the gateway's address, org/a's server, which requires its own key, and b's, which requires none."""
    one, two = Server("a"), Server("b")
    with tempfile.TemporaryDirectory(prefix="stoker-") as folder:
        for server in (one, two):
            await server.start()
        model_registry = ModelRegistry(
            {
                "org/a": Endpoint("org/a", "one", (one.address,), authorization="Bearer servers-own", created=5),
                "b": Endpoint("b", "two", (two.address,)),
            }
        )
        settings = EnvoySettings("127.0.0.1", 0, Path(folder), 1, threads=1)
        EnvoyFiles(settings).write(model_registry)
        pickers = {name: EndpointPicker() for name in model_registry.endpoints}
        for name, endpoint in model_registry.endpoints.items():
            pickers[name].set_servers(endpoint.servers, time.monotonic())
        picker, envoy = PickerServer(model_registry, pickers, keyring=KEYS), EnvoyProcess(settings)
        picker.listen(f"unix:{settings.picker_socket}")
        await picker.start()
        try:
            await envoy.start()
            yield f"http://127.0.0.1:{await envoy.port()}", one, two
        finally:
            await envoy.end()
            await picker.stop(0)
            for server in (one, two):
                await server.stop()


def headers(head: bytes) -> dict[bytes, bytes]:
    """Return the headers that a server got, with lower-case names."""
    return {name.lower(): value for name, _, value in (line.partition(b": ") for line in head.split(b"\r\n")[1:-2])}


def test_clients_see_permitted_models_and_servers_never_see_keys() -> None:
    async def main() -> None:
        async with gateway() as (url, one, two):

            def client(key: str) -> openai.AsyncOpenAI:
                return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=TEXTS[key], max_retries=0, timeout=60)

            for key, says in (("gone", "unknown, or was revoked"), ("old", "'old' expired at")):
                with pytest.raises(openai.AuthenticationError, match=says) as refused:
                    await client(key).completions.create(model="b", prompt="x")
                assert (refused.value.code, refused.value.type) == ("invalid_api_key", "invalid_request_error")
                assert refused.value.response.headers["www-authenticate"] == "Bearer"
                with pytest.raises(openai.AuthenticationError):
                    await client(key).models.list()
            assert not one.requests and not two.requests

            org = client("org")
            assert [(each.id, each.created) async for each in org.models.list()] == [("org/a", 5)]
            assert [each.id async for each in client("all").models.list()] == ["org/a", "b"]
            errors = []
            for model in ("b", "c"):
                for call in (org.models.retrieve(model), org.completions.create(model=model, prompt="x")):
                    with pytest.raises(openai.NotFoundError) as missing:
                        await call
                    errors.append((str(missing.value).replace("'c'", "'b'"), missing.value.code))
            assert errors[:2] == errors[2:] and errors[0][1] == "model_not_found"

            assert (await org.models.retrieve("org/a")).id == "org/a"  # it writes %2F

            for body in ("x", "x" * (1 << 20)):
                await org.completions.create(model="org/a", prompt=body)
            both = [("X-API-Key", "wrong"), ("X-API-Key", TEXTS["all"])]
            both += [("Authorization", f"Bearer {TEXTS['org']}"), ("Authorization", f"Bearer {TEXTS['all']}")]
            async with httpx.AsyncClient(timeout=60) as raw:
                for model in ("org/a", "b"):
                    answer = await raw.post(f"{url}/v1/completions", json={"model": model}, headers=both)
                    assert answer.status_code == 200
            await client("all").completions.create(model="b", prompt="x")
            assert len(one.requests) == 3 and len(two.requests) == 2
            for head in one.requests + two.requests:
                assert b"sk-stoker" not in head and b"x-api-key" not in headers(head)
                assert head.lower().count(b"authorization: ") == (head in one.requests)
            for head in one.requests:
                assert headers(head)[b"authorization"] == b"Bearer servers-own"

            claude = anthropic.AsyncAnthropic(base_url=url, api_key=TEXTS["gone"], max_retries=0, timeout=60)
            with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
                await claude.messages.create(model="b", max_tokens=1, messages=[{"role": "user", "content": "x"}])
            claude = claude.with_options(api_key=TEXTS["all"])
            with suppress(AttributeError, anthropic.APIError):  # the server's answer is no message
                await claude.messages.create(model="b", max_tokens=1, messages=[{"role": "user", "content": "x"}])
            assert b"authorization" not in headers(two.requests[2]) and b"x-api-key" not in headers(two.requests[2])

    asyncio.run(main())


def test_keys_become_valid_and_invalid_as_their_file_changes(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    documents = [manifests.write(Key(name, digest_of(TEXTS[name]))) for name in ("all", "gone")]
    path.write_text(yaml.safe_dump_all(documents))

    async def main() -> None:
        server, pipe = Server("m"), asyncio.subprocess.PIPE
        await server.start()
        words = ["--endpoint", f"m=http://{server.address}", "--port", "0", "--keys", str(path)]
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", _MAIN, *words, stdout=pipe, stderr=pipe)
        try:
            assert process.stdout is not None
            url = (await asyncio.wait_for(process.stdout.readline(), 60)).decode().split()[-1]
            async with httpx.AsyncClient(timeout=60, base_url=url) as client:

                async def status(key: str | None) -> int:
                    headers = {} if key is None else {"authorization": f"Bearer {TEXTS[key]}"}
                    return (await client.post("/v1/completions", json={"model": "m"}, headers=headers)).status_code

                assert [await status(key) for key in (None, "org", "all", "gone")] == [401, 401, 200, 200]
                assert [(await client.get(path)).status_code for path in ("/health", "/ready")] == [200, 200]
                whole = tmp_path / "whole"  # replaces the file at once, since it may be read at any time
                whole.write_text(yaml.safe_dump(documents[0]))
                whole.replace(path)
                async with asyncio.timeout(60):
                    while await status("gone") == 200:
                        pass
                assert [await status(key) for key in ("gone", "all")] == [401, 200]
                whole.write_text("not: [yaml")
                whole.replace(path)
                assert process.stderr is not None
                async with asyncio.timeout(60):
                    while b"the previous keys stay valid" not in await process.stderr.readline():
                        pass
                assert [await status(key) for key in ("gone", "all")] == [401, 200]
        finally:
            os.kill(process.pid, signal.SIGTERM)
            _, stderr = await asyncio.wait_for(process.communicate(), 60)
            await server.stop()
        assert process.returncode == 0 and b"sk-stoker" not in stderr and b"Traceback" not in stderr

    asyncio.run(main())
