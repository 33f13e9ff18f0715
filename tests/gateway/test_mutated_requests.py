"""Mutated requests to the whole gateway: no smuggling, no 5xx of its own, bounded memory, and it keeps serving."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest
import yaml

from stoker_gateway.keys import manifests
from stoker_gateway.keys.key import Key, digest_of, new_text

from . import test_gateway
from .behind_envoy import CHAT, Server
from .http_fuzz import requests
from .test_gateway import children_of, command

_MODEL = b'{"model": "m"}'
_JSON = (
    _MODEL,
    b'{"model": "m", "model": "n"}',
    b'\xef\xbb\xbf{"model": "m"}',
    '{"model": "m"}'.encode("utf-16"),
    b'{"model": "m", "x": 1e400}',
    b'{"model": "\\ud800"}',
    b'{"model": "m", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"model": "m", "x": "\\u0000"}',
    b'{"model": ["m"]}',
    b'{"model": "m"',
    b"\x1f\x8b\x08\x00",
    b"null",
    b"",
)
_KEY = new_text("right")
#: Ways to send a key, or none. Other tests check which of them are valid; without the key no request may pass.
_CREDENTIALS = (
    b"authorization: Bearer %(key)s",
    b"Authorization: bearer   %(key)s",
    b"authorization:Bearer %(key)s ",
    b"x-api-key: %(key)s",
    b"authorization: %(key)s",
    b"authorization : Bearer %(key)s",
    b"authorization: Bearer %(key)s\r\nauthorization: Bearer sk-wrong",
    b"authorization: Bearer sk-wrong\r\nx-api-key: %(key)s",
    b"authorization: Bearer sk-wrong",
    b"authorization: Bearer",
    b"authorization: Bearer \x00",
    b"authorization: Basic %(key)s",
    b"x-api-key: sk-wrong",
    b"x-api-key: " + b"k" * 20_000,
    b"x-stoker-key: right",
    b"x: 1",
)
_INTERNAL = re.compile(
    rb"\n(x-stoker-(?!cluster: m-|usage: 1\r)|x_stoker_|x-envoy-(?!expected-rq-timeout-ms|attempt-count))",
    re.IGNORECASE,
)


class _Recording(Server):
    """Records the head of each request that Envoy forwards; the picker's polls have no X-Request-Id."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.heads: list[bytes] = []

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        readuntil = reader.readuntil

        async def recorded(separator: bytes = b"\n") -> bytes:
            head = await readuntil(separator)
            if separator == b"\r\n\r\n" and b"\r\nx-request-id:" in head.lower():
                self.heads.append(head)
            return head

        reader.readuntil = recorded  # type: ignore[method-assign, assignment]
        await super()._serve(reader, writer)


def _mutated(count: int, seed: int) -> Iterator[bytes]:
    """Yield requests, half of them invalid HTTP and half invalid JSON, each with a number in X-Number, and a key."""
    draw = random.Random(seed)
    wrong = requests(count, seed)
    for number in range(count):
        text = next(wrong).replace(b"content-length: 2", b"content-length: 14")
        text = re.sub(rb"\n2(?=[\r\n;])", b"\ne", text).replace(b"{}", _MODEL)
        if draw.random() < 0.5:
            body = draw.choice(_JSON)
            line = b"POST " + CHAT.encode() + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            text = line + b"X_Stoker_Cluster: z\r\nX-Stoker-Usage: 1\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        head, end, tail = text.partition(b"\n")
        credentials = (_CREDENTIALS[0] if draw.random() < 0.4 else draw.choice(_CREDENTIALS)).replace(
            b"%(key)s", _KEY.encode()
        )
        yield head + end + b"x-number: %d\r\n%s\r\n" % (number, credentials) + tail


def _memory(pid: int) -> int:
    """Return a process's resident memory in KiB."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1])


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("count", [200])
def test_mutated_requests_smuggle_nothing_and_harm_nothing(
    count: int, keyed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With keys in force, no request passes without the key, and none contains it at the server."""
    monkeypatch.setattr(test_gateway, "Server", _Recording)
    (tmp_path / "keys.yaml").write_text(yaml.safe_dump(manifests.write(Key("right", digest_of(_KEY)))))
    words = ("--keys", str(tmp_path / "keys.yaml")) if keyed else ()

    async def main() -> None:
        async with command(*words) as run, aiohttp.ClientSession() as client:
            port = int(run.url.rsplit(":", 1)[1])
            at_once = asyncio.Semaphore(100)
            refused: list[tuple[bytes, bytes]] = []
            answers: Counter[bytes] = Counter()
            assert run.process.stderr is not None
            log = asyncio.create_task(run.process.stderr.read())

            async def send(text: bytes) -> bytes:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                answer = b""
                with suppress(ConnectionError, TimeoutError):  # requests with an incomplete body are dropped
                    writer.write(text)
                    async with asyncio.timeout(5):  # limit: ends waits for the rest of a body
                        while part := await reader.read(1 << 20):
                            answer += part
                writer.close()
                return answer

            async def ask(text: bytes) -> None:
                async with at_once:
                    answer = await send(text)
                    # On a busy machine this process, which is also the server, may answer the gateway's polls too late.
                    while b"can take requests now; try again" in answer:
                        await asyncio.sleep(0.5)  # sleeps: like a client that retries
                        answer = await send(text)
                    statuses = re.findall(rb"HTTP/1\.[01] (\d+)", answer)
                    answers.update(statuses or [b"none"])
                    if any(status.startswith(b"5") for status in statuses):
                        refused.append((text[:2000], answer[:500]))

            everything = list(_mutated(count, seed=11))
            await asyncio.gather(*map(ask, everything[: count // 5]))
            before = [_memory(pid) for pid in (run.process.pid, run.envoy, run.picker)]
            await asyncio.gather(*map(ask, everything[count // 5 :]))
            after = [_memory(pid) for pid in (run.process.pid, run.envoy, run.picker)]
            assert not refused, refused[:3]
            assert answers[b"none"] < count / 4 and answers[b"400"] > count / 10
            assert children_of(run.process.pid) == (run.envoy, run.picker)
            assert all(new < old + 128 * 1024 for old, new in zip(before, after, strict=True)), (before, after)
            heads = run.server.heads  # type: ignore[attr-defined]
            assert len(heads) > count / (50 if keyed else 20)
            numbers: Counter[bytes] = Counter()
            for head in heads:
                line = head.split(b"\r\n", 1)[0]
                assert re.fullmatch(rb"[A-Za-z]+ /(v1/\S*|tokenize|detokenize) HTTP/1\.1", line), head
                assert b"/metrics" not in line.partition(b"?")[0] and not _INTERNAL.search(head), head
                numbers.update(re.findall(rb"\r\nx-number: (\d+)", head))
                assert not keyed or _KEY.encode() not in head, head
            assert sum(numbers.values()) == len(heads) and set(numbers.values()) == {1}
            assert not keyed or all(_KEY.encode() in everything[int(number)] for number in numbers)
            async with client.post(run.url + CHAT, data=_MODEL, headers={"x-api-key": _KEY}) as answer:
                assert answer.status == 200
            run.process.terminate()
            assert b"Traceback" not in await asyncio.wait_for(log, 60)

    asyncio.run(main())
