"""Large bodies: clients take turns, abandoned bodies are not parsed, and those that take too long are refused."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from typing import Any

import pytest

from stoker_gateway.ext_proc import body_reader, request
from stoker_gateway.ext_proc.body_reader import BodyReader
from stoker_gateway.ext_proc.errors import TooLargeError, UnavailableError
from stoker_gateway.ext_proc.request import read_request
from stoker_gateway.scheduling.load import ServerLoad

from .proxy import picking

CHAT = "/v1/chat/completions"


class _Slow(BodyReader):
    """Parses one body each time it is permitted to, and records which."""

    def __init__(self, **chosen: Any) -> None:
        super().__init__(at_once=0, **chosen)
        self.read_bodies: list[bytes] = []
        self.lets = asyncio.Semaphore(0)

    async def _exchange(self, head: bytes, body: bytes) -> dict[str, Any]:
        self.read_bodies.append(body)
        await self.lets.acquire()
        return {"model": "m", "chain": []}


def test_owners_take_turns_and_abandoned_bodies_are_not_read() -> None:
    chance = random.Random(5)

    async def main() -> None:
        reader = _Slow()
        many = [f"a{number}".encode() for number in range(30)]
        first = [asyncio.create_task(reader.read(CHAT, body, owner="a")) for body in many]
        await asyncio.sleep(0)
        other_owners = [asyncio.create_task(reader.read(CHAT, name.encode(), owner=name)) for name in ("b", "c")]
        await asyncio.sleep(0)
        cancelled = chance.sample(range(1, 30), 20)
        for number in cancelled:
            first[number].cancel()
        for _ in range(12):
            reader.lets.release()
        remaining = [task for number, task in enumerate(first) if number not in cancelled]
        await asyncio.gather(*remaining, *other_owners)
        assert reader.num_waiting == 0
        assert set(reader.read_bodies[:4]) >= {b"a0", b"b", b"c"}
        assert sorted(reader.read_bodies) == sorted(
            [b"b", b"c", *(body for number, body in enumerate(many) if number not in cancelled)]
        )
        # A client that leaves while its body is parsed makes room.
        reading, waits = (asyncio.create_task(reader.read(CHAT, body, owner="a")) for body in (b"x", b"y"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert reader.read_bodies[-1] == b"x"
        reading.cancel()
        reader.lets.release()
        await waits

    asyncio.run(main())


def test_body_that_waits_too_long_is_refused_as_retriable() -> None:
    async def main() -> None:
        reader = _Slow(wait_s=0.01)
        reading = asyncio.create_task(reader.read(CHAT, b"x", owner="a"))
        await asyncio.sleep(0)
        with pytest.raises(UnavailableError, match="busy with other large request bodies"):
            await reader.read(CHAT, b"y", owner="b")
        reader.lets.release()
        await reading
        assert reader.read_bodies == [b"x"]

    asyncio.run(main())


def test_reader_process_ends_with_a_body_whose_client_left() -> None:
    body = json.dumps({"model": "m", "prompt": "x" * 10**6}).encode()

    async def main() -> None:
        reader = BodyReader()
        try:
            await reader.read(CHAT, body)
            first = reader.pid
            assert first is not None
            os.kill(first, signal.SIGSTOP)
            reading = asyncio.create_task(reader.read(CHAT, body))
            for _ in range(20):
                await asyncio.sleep(0)
            reading.cancel()
            await asyncio.wait((reading,))
            assert reading.cancelled() and reader.pid is None
            assert (await reader.read(CHAT, body)).model == "m"
            assert reader.pid != first
        finally:
            await reader.close()

    asyncio.run(main())


@pytest.mark.parametrize("unit", [b"{}", b"1", b'""', b'{"content": []}', b'{"role": "user"}'])
@pytest.mark.parametrize("field", ["messages", "input", "system"])
def test_bodies_with_too_many_items_are_refused_for_good(
    unit: bytes, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request, "MAX_ITEMS", 1000)
    listed = b"[" + b",".join([unit] * 1001) + b"]"
    with pytest.raises(TooLargeError, match="more than 1000"):
        read_request(CHAT, b'{"model": "m", "%s": %s}' % (field.encode(), listed))


def test_bodies_that_take_too_much_cpu_time_are_refused_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_reader, "MAX_CPU_S", 0.001)

    def long(path: str, body: bytes, content_type: str) -> Any:
        while True:
            pass

    monkeypatch.setattr(body_reader, "read_request", long)
    before = signal.signal(signal.SIGPROF, body_reader._too_long)
    try:
        answer = body_reader._read(CHAT, b"{}")
    finally:
        signal.signal(signal.SIGPROF, before)
    assert answer["too_large"] and "too long to parse" in answer["error"]["message"]


def test_slow_bodies_of_one_client_delay_no_other_client() -> None:
    odd = b'{"model": "a", "messages": [' + b",".join([b"{}"] * 2_000_000) + b"]}"
    prompt = {"model": "a", "prompt": "word " * 40_000}

    async def main() -> None:
        async with picking({"a": ["10.0.0.1:80"]}) as picker:
            picker.say(ServerLoad())
            odd_requests = [
                asyncio.create_task(picker.proxy.post(CHAT, odd, headers={"authorization": "Bearer odd"}))
                for _ in range(4)
            ]
            answer = await picker.proxy.post("/v1/completions", prompt, headers={"authorization": "Bearer mine"})
            assert answer.servers == ["10.0.0.1:80"]
            assert sum(each.done() for each in odd_requests) < 4
            for each in await asyncio.gather(*odd_requests):
                assert (each.status, each.json["error"]["param"]) == (413, "messages")
                assert "retry-after" not in each.headers

    asyncio.run(main())
