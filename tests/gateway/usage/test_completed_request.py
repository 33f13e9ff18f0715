"""Envoy's reports of completed requests: tokens and servers. Responses are passed on unchanged."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import socket
import time
from typing import Any

import aiohttp
from aiohttp import web

from stoker_gateway.scheduling.picker import Pick
from stoker_gateway.scheduling.routing_request import RoutingRequest
from stoker_gateway.usage.tokens import Tokens

from ...support.waiting import until_async
from .answering import Behind, behind

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
BODY = b'{"model": "m", "prompt": "abc", "messages": [], "input": ""}'
#: Texts that look like usage.
DECOYS = (
    '"usage": {"prompt_tokens": 666}',
    '\\"usage\\":{"',
    "}}]{[",
    '"',
    "\\",
    "ü\u2028",
    "usage",
    "",
    '{"usage":{}}',
)


class Drawn:
    """A seeded random response, and its reported tokens."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.path = self.chance.choice([CHAT, COMPLETIONS, RESPONSES, MESSAGES])
        self.streams = self.chance.random() < 0.5
        self.from_our_engine = self.chance.random() < 0.5
        prompt, cached, output = self.chance.randrange(5000), self.chance.randrange(5000), self.chance.randrange(9000)
        self.tokens = Tokens(prompt + cached, cached, output)
        self.usage = self._usage(prompt, cached, output)
        content = b"".join(self._events()) if self.streams else self._whole()
        cuts = sorted(self.chance.randrange(len(content) + 1) for _ in range(self.chance.choice((0, 1, 5, 30))))
        self.pieces = [content[a:b] for a, b in zip([0, *cuts], [*cuts, len(content)], strict=True) if a < b]

    def _usage(self, prompt: int, cached: int, output: int) -> dict[str, Any]:
        if self.path == MESSAGES:
            return {"input_tokens": prompt, "cache_read_input_tokens": cached, "output_tokens": output}
        if self.path == RESPONSES:
            details = {"cached_tokens": cached}
            return {"input_tokens": prompt + cached, "input_tokens_details": details, "output_tokens": output}
        return {
            "prompt_tokens": prompt + cached,
            "completion_tokens": output,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _text(self) -> str:
        return "".join(self.chance.choice(DECOYS) for _ in range(self.chance.randrange(20)))

    def _whole(self) -> bytes:
        decoys = {
            "metadata": {"usage": {"prompt_tokens": 666}, "x": self._text()},
            "choices": [{"usage": {}}, self._text()],
        }
        fields = [*decoys.items(), ("object", "usage"), ("usage", self.usage)]
        self.chance.shuffle(fields)
        indent = self.chance.choice([None, 2])
        return json.dumps(dict(fields), indent=indent, ensure_ascii=self.chance.random() < 0.5).encode()

    def _events(self) -> list[bytes]:
        messages = [
            {"type": "x.delta", "delta": self._text(), "choices": [{"usage": {"prompt_tokens": 666}}]} for _ in range(5)
        ]
        if self.path == RESPONSES:
            last: dict[str, Any] = {"response": {"usage": self.usage, "output": self._text() * 2000}}
            messages = [{"response": {"usage": None}}, *messages, last]
        elif self.path == MESSAGES:
            first = {"message": {"usage": self.usage | {"output_tokens": 1}}}
            messages = [first, *messages, {"usage": {"output_tokens": self.usage["output_tokens"]}}]
        else:
            messages = [*({**each, "usage": None} for each in messages), {"choices": [], "usage": self.usage}]
        if self.from_our_engine:
            tokens = self.tokens
            counted = {"prompt_tokens": tokens.prompt, "cached_tokens": tokens.cached}
            for number, each in enumerate(messages, 1):
                each["stoker_usage"] = counted | {"completion_tokens": tokens.output * number // len(messages)}
        end = self.chance.choice(["\n\n", "\r\n\r\n"])
        events = [f"data: {json.dumps(each, ensure_ascii=False)}{end}".encode() for each in messages]
        return [*events, f"data: [DONE]{end}".encode()]

    async def answer(self, request: web.Request) -> web.StreamResponse:
        assert request.headers.getall("x-stoker-usage") == ["1"]
        kind = "text/event-stream" if self.streams else "application/json"
        if self.chance.random() < 0.5:
            kind += "; charset=utf-8"
        answer = web.StreamResponse(headers={"content-type": kind})
        await answer.prepare(request)
        for piece in self.pieces:
            await answer.write(piece)
            for _ in range(self.chance.choice((0, 0, 10))):
                await asyncio.sleep(0)
        return answer


def test_reported_tokens_are_read_and_responses_unchanged() -> None:
    drawn = {f"r{seed}": Drawn(seed) for seed in range(120)}

    async def handler(request: web.Request) -> web.StreamResponse:
        return await drawn[request.headers["x-request-id"]].answer(request)

    async def main() -> None:
        async with behind(handler) as at, aiohttp.ClientSession() as client:
            for name, each in drawn.items():
                headers = {"X-Stoker-Usage": "0", "X-Request-Id": name}
                async with client.post(at.url + each.path, data=BODY, headers=headers) as answer:
                    assert await answer.read() == b"".join(each.pieces)
            while drawn:
                ended = await at.next_end()
                each = drawn.pop(ended.request_id)
                assert ended.tokens == each.tokens, (ended.request_id, each.pieces)
                assert (ended.model, ended.status, ended.aborted, ended.servers) == ("m", 200, False, at.servers)

    asyncio.run(main())


def test_unreadable_usage_interrupts_no_response() -> None:
    usage = b'"usage": {"prompt_tokens": 3, "completion_tokens": 4}'
    long = b'{"x": "' + b"a" * (40 << 20) + b'", ' + usage + b"}"
    json_kind, stream = "application/json", "text/event-stream"
    #: kind, body → the tokens, or None where they are estimated
    answers: list[tuple[str, bytes, dict[str, str], Tokens | None]] = [
        (json_kind, long, {}, Tokens(3, 0, 4)),
        (json_kind, b"{" * 100_000, {}, None),
        (json_kind, b"}" * 1000 + b"{" + usage + b"}", {}, None),
        (json_kind, b'{"usage": {' + b'"a": 1, ' * 10_000, {}, None),
        (json_kind, b'{"usage"', {}, None),
        (json_kind, b"\xff\x00\\", {}, None),
        (json_kind, b"", {}, None),
        (json_kind, gzip.compress(b"{" + usage + b"}"), {"content-encoding": "gzip"}, None),
        ("text/plain", b"{" + usage + b"}", {}, None),
        (stream, b"data: {" + usage + b"}\n\ndata: {" + b"x" * (3 << 20) + b"\n\n", {}, Tokens(3, 0, 4)),
        (stream, b"data: " + b"[" * 20_000 + b"\n\n", {}, None),
        (stream, b"\n\n\r\r\x00data:data:\n\n" * 50, {}, None),
        *((stream, b"data: " + each + b"\n\n", {}, None) for each in (b"1", b"null", b'"x"', b"[1]", b"{}")),
        (stream, b'data: {"usage": 1, "response": 2}\n\n', {}, None),
    ]

    async def main() -> None:
        async with behind(_fails) as at, aiohttp.ClientSession(auto_decompress=False) as client:
            for kind, body, headers, tokens in answers:

                async def handler(
                    request: web.Request, kind: str = kind, body: bytes = body, headers: dict[str, str] = headers
                ) -> web.Response:
                    return web.Response(body=body, headers={"content-type": kind, **headers})

                at.handler = handler
                async with client.post(at.url + CHAT, data=BODY) as answer:
                    assert (answer.status, await answer.read()) == (200, body)
                ended = await at.next_end()
                assert ended.tokens == tokens if tokens else ended.tokens.estimated, (kind, body[:50])
                assert ended.response_bytes == len(body)

    asyncio.run(main())


async def _fails(_: web.Request) -> web.StreamResponse:
    raise web.HTTPInternalServerError(text='{"usage": null}', content_type="application/json")


def test_requests_without_cost_report_zero_tokens() -> None:
    body = json.dumps({"id": "resp_1", "usage": {"input_tokens": 3, "output_tokens": 4}})

    async def stored(_: web.Request) -> web.Response:
        return web.Response(text=body, content_type="application/json", headers={"x-request-id": "1"})

    async def main() -> None:
        async with behind(stored) as at, aiohttp.ClientSession() as client:
            headers = {"x-request-id": "1"}
            await client.post(at.url + RESPONSES, data=BODY, headers=headers)
            assert (await at.next_end()).tokens == Tokens(3, 0, 4)
            assert (await client.get(f"{at.url}{RESPONSES}/resp_1")).status == 200
            assert (await at.next_end()).tokens == Tokens()  # the same response again
            at.handler = _fails
            await client.post(at.url + CHAT, data=BODY)
            ended = await at.next_end()
            assert (ended.status, ended.tokens) == (500, Tokens())
            await client.post(at.url + CHAT, data=b"{}")  # refused by the picker: nothing was routed
            await client.get(f"{at.url}/health")
            await client.post(at.url + CHAT, data=BODY)
            assert (await at.next_end()).status == 500
            assert not at.ended

    asyncio.run(main())


def test_picker_learns_of_ended_requests_and_dead_servers() -> None:
    async def main() -> None:
        with socket.socket() as bound_socket:
            bound_socket.bind(("127.0.0.1", 0))  # reserved, without a listener
            dead_server = f"127.0.0.1:{bound_socket.getsockname()[1]}"
            more = asyncio.Event()

            async def waits(_: web.Request) -> web.Response:
                await more.wait()
                return web.Response(text="{}")

            async with behind(waits, (dead_server,)) as at, aiohttp.ClientSession() as client:
                requests = [asyncio.create_task(_post(client, at)) for _ in range(20)]
                async with asyncio.timeout(60):
                    await until_async(lambda: at.picker.sequences >= 20)
                for task in requests[:10]:
                    task.cancel()
                more.set()
                assert await asyncio.gather(*requests[10:]) == [200] * 10
                ends = [await at.next_end() for _ in range(20)]
                assert at.picker.sequences == 0
                assert {each.servers[0] for each in ends} == {dead_server, at.servers[1]}
                assert {each.servers[-1] for each in ends if each.status == 200} == {at.servers[1]}
                picks = [at.picker.pick(RoutingRequest(), time.monotonic()) for _ in range(6)]
                assert {pick.servers[0] for pick in picks if isinstance(pick, Pick)} == {at.servers[1]}

    asyncio.run(main())


async def _post(client: aiohttp.ClientSession, at: Behind) -> int:
    async with client.post(at.url + CHAT, data=BODY) as answer:
        await answer.read()
        return answer.status
