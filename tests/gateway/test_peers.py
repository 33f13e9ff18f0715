"""Two gateway processes that share the limits of keys, and the flags by which they find each other."""

from __future__ import annotations

import asyncio
import re
import socket
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import yaml

from stoker_gateway.cli.gateway import main
from stoker_gateway.keys import manifests
from stoker_gateway.keys.key import Key, Limits, digest_of, new_text

from .behind_envoy import Server

_MAIN = "import sys; from stoker_gateway.cli.gateway import main; sys.exit(main(sys.argv[1:]))"
SERVER = "--endpoint=a=http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--peer", "10.0.0.1"], "not HOST:PORT"),
        (["--peer", ":80"], "not HOST:PORT"),
        (["--peer", "http://a:80"], "not HOST:PORT"),
        (["--peer", "::1:80"], r"write the IPv6 address as \[ADDRESS\]"),
        (["--peer", "a:0"], "no port from 1 to 65535"),
        (["--peer", "a:٣"], "no port from 1 to 65535"),
        (["--peer", "a:80"], "--peer-listen is missing"),
        (["--peer-listen", "a:80"], "--peer-token-file is missing"),
        (["--peer-service", "a:80"], "--peer-listen is missing"),
        (
            ["--peer", "a:80", "--peer-service", "a:80", "--peer-listen", "a:80", "--peer-token-file", "good"],
            "--peer-service",
        ),
        (["--peer-listen", "a:80", "--peer-token-file", "none"], "--peer-token-file: none cannot be read"),
        (["--peer-listen", "a:80", "--peer-token-file", "short"], "single token of at least 16"),
        (["--peer-listen", "a:80", "--peer-token-file", "words"], "single token of at least 16"),
        (["--peer-listen", "a:80", "--peer-token-file", "bytes"], "--peer-token-file: bytes cannot be read"),
        (["--peer-listen", "a:80", "--peer-token-file", "good"], "add --keys"),
    ],
)
def test_wrong_peer_flags_are_refused(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("short", b"abc"), ("words", b"a" * 20 + b" b"), ("bytes", b"\xff\xfe"), ("good", b"a" * 32)):
        (tmp_path / name).write_bytes(text)
    with pytest.raises(SystemExit) as ended:
        main([SERVER, *words])
    assert ended.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def _free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])


@pytest.mark.slow
def test_limits_are_shared_between_gateways(tmp_path: Path) -> None:
    texts = {name: new_text(name) for name in ("spread", "one")}
    keys = [Key(name, digest_of(text), limits=Limits(requests_per_minute=300)) for name, text in texts.items()]
    (tmp_path / "keys.yaml").write_text(yaml.safe_dump_all(manifests.write(key) for key in keys))
    (tmp_path / "token").write_text("0123456789abcdef0123456789abcdef\n")

    async def main() -> None:
        server = Server("a")
        await server.start()
        ports = [_free_port(), _free_port()]
        processes: list[Process] = []
        try:
            for own_port, peer_port in (ports, ports[::-1]):
                words = [
                    "--endpoint",
                    f"m=http://{server.address}",
                    "--port",
                    "0",
                    "--keys",
                    str(tmp_path / "keys.yaml"),
                ]
                words += ["--peer", f"127.0.0.1:{peer_port}", "--peer-listen", f"127.0.0.1:{own_port}"]
                words += ["--peer-token-file", str(tmp_path / "token")]
                processes.append(
                    await asyncio.create_subprocess_exec(sys.executable, "-c", _MAIN, *words, stdout=PIPE, stderr=PIPE)
                )
            urls = []
            for process in processes:
                assert process.stdout is not None
                urls.append((await asyncio.wait_for(process.stdout.readline(), 60)).decode().split()[-1])
            for process in processes:
                assert process.stderr is not None
                while b"2 of 2 replicas" not in (line := await asyncio.wait_for(process.stderr.readline(), 60)):
                    assert line, "the gateway has exited"
            async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=8)) as client:

                async def flood(key: str, at: list[str], number: int) -> int:
                    headers, granted = {"authorization": f"Bearer {texts[key]}"}, 0
                    for _ in range(number // 10 // len(at)):
                        posts = (
                            client.post(f"{url}/v1/completions", json={"model": "m"}, headers=headers)
                            for url in at
                            for _ in range(10)
                        )
                        granted += sum(each.status_code == 200 for each in await asyncio.gather(*posts))
                    return granted

                assert 270 <= await flood("spread", urls, 400) <= 330
                assert 270 <= await flood("one", urls[:1], 400) <= 330
                assert await flood("one", urls[1:], 20) <= 30
        finally:
            for process in processes:
                with suppress(ProcessLookupError):
                    process.terminate()
            await asyncio.gather(*(asyncio.wait_for(each.communicate(), 60) for each in processes))
            await server.stop()

    asyncio.run(main())
