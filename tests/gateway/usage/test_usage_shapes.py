"""Usage in all shapes: split anywhere, in several events, zero or null, after and without errors."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from stoker_gateway.protocol.paths import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from stoker_gateway.usage.tokens import Tokens, reported

from .answering import behind

BODY = b'{"model": "m", "prompt": "abc", "messages": [], "input": ""}'
ERROR = {"error": {"message": 'it says "usage": {', "type": "x"}}


class Shape:
    """A seeded random response, and its charged tokens; None if they are estimated."""

    def __init__(self, seed: int) -> None:
        chance = self.chance = random.Random(seed)
        self.path = chance.choice([CHAT, COMPLETIONS, RESPONSES, MESSAGES])
        self.streams = chance.random() < 0.7
        self.fails = chance.choice([None, None, None, "at once", "later"])
        self.prompt, self.output = chance.randrange(2, 5000), chance.randrange(1, 9000)
        self.tokens: Tokens | None = Tokens(self.prompt, 0, self.output)
        content = self._stream() if self.streams else self._whole()
        cuts = sorted(chance.randrange(len(content) + 1) for _ in range(chance.choice((0, 1, 5, len(content)))))
        self.pieces = [content[a:b] for a, b in zip([0, *cuts], [*cuts, len(content)], strict=True) if a < b]

    def _usage(self, prompt: int | None, output: int | None) -> dict[str, Any]:
        names = ("prompt_tokens", "completion_tokens") if self.path in (CHAT, COMPLETIONS) else None
        one, two = names or ("input_tokens", "output_tokens")
        return {one: prompt, two: output, f"{two}_details": {"prompt_tokens": 9, "input_tokens": 9}}

    def _whole(self) -> bytes:
        fields: dict[str, Any] = {"object": "x", "usage": self._usage(self.prompt, self.output), "error": None}
        if self.fails:
            fields, self.tokens = {**ERROR, "usage": self.chance.choice([None, {}])}, Tokens()
            if fields["usage"] is None and self.chance.random() < 0.5:
                del fields["usage"]
        return json.dumps(fields, indent=self.chance.choice([None, 2])).encode()

    def _events(self) -> list[dict[str, Any]]:
        nothing = [None, self._usage(0, 0), self._usage(None, None), {}]
        text = [{"choices": [{"delta": '\\"error": {'}], "usage": self.chance.choice(nothing)} for _ in range(3)]
        whole, late = self._usage(self.prompt, self.output), self._usage(0, self.output)
        error = {"type": "error", **ERROR} if self.path == MESSAGES else ERROR
        if self.path == MESSAGES:
            first = {"type": "message_start", "message": {"usage": self._usage(self.prompt, 1)}}
            events = [
                first,
                {"type": "ping"},
                *text,
                {"type": "message_delta", "usage": late},
                {"type": "message_stop"},
            ]
        elif self.path == RESPONSES:
            early = [{"type": "response.created", "response": {"usage": None}}, {"type": "response.in_progress"}]
            events = [*early, *text, {"type": "response.completed", "response": {"usage": whole}}]
            error = {"type": "response.failed", "response": {**ERROR, "usage": None}}
        else:
            running = [{"choices": [1], "usage": self._usage(self.prompt, part)} for part in (0, self.output // 2)]
            more = self.chance.choice([[], running])
            events = [*text, *more, {"choices": [], "usage": whole}, *self.chance.choice([[], text[:1]])]
        if self.fails == "at once":
            if self.path == MESSAGES:  # a response that starts with its usage reports what was computed
                events = self.chance.choice([[error], [{"type": "ping"}, error]])
            else:
                events = [*events[: 2 * (self.path == RESPONSES)], error]
            self.tokens = Tokens()
        elif self.fails == "later":
            at = 3 if self.path == MESSAGES else 4 if self.path == RESPONSES else 1
            events = [*events[:at], error]
            self.tokens = Tokens(self.prompt, 0, 1) if self.path == MESSAGES else None
        return events

    def _stream(self) -> bytes:
        end = self.chance.choice(["\n", "\r\n"])
        names = self.chance.random() < 0.5
        lines = []
        for each in self._events():
            name = f"event: {each.get('type', 'x')}{end}" if names else ""
            lines.append(f"{name}data:{self.chance.choice(['', ' '])}{json.dumps(each)}{end}{end}")
        content = "".join(lines)
        if self.chance.random() < 0.3:
            return (content + f"data: [DONE]{end}{end}").encode()
        return content[: len(content) - self.chance.choice((0, 1, 2)) * len(end)].encode()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        assert request.headers["accept-encoding"] == "identity"
        kind = "text/event-stream" if self.streams else "application/json"
        answer = web.StreamResponse(headers={"content-type": kind})
        await answer.prepare(request)
        for number, piece in enumerate(self.pieces):
            await answer.write(piece)
            if number < 20:
                await asyncio.sleep(0)
        return answer


def test_usage_is_read_in_every_shape() -> None:
    drawn = {f"r{seed}": Shape(seed) for seed in range(150)}

    async def handler(request: web.Request) -> web.StreamResponse:
        return await drawn[request.headers["x-request-id"]].answer(request)

    async def main() -> None:
        async with behind(handler) as at, aiohttp.ClientSession() as client:
            for name, each in drawn.items():
                headers = {"X-Request-Id": name, "Accept-Encoding": "gzip"}
                async with client.post(at.url + each.path, data=BODY, headers=headers) as answer:
                    assert await answer.read() == b"".join(each.pieces)
            for _ in range(len(drawn)):
                ended = await at.next_end()
                each = drawn[ended.request_id]
                if each.tokens is None:
                    assert ended.tokens.estimated and ended.tokens.output, each.pieces
                else:
                    assert ended.tokens == each.tokens, (ended.request_id, each.path, each.fails, each.pieces)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("message", "usage", "tokens"),
    [
        ({"input_tokens": 80, "output_tokens": 1}, {"input_tokens": 0, "output_tokens": 7}, Tokens(80, 0, 7)),
        ({"input_tokens": 0, "output_tokens": 0}, {"input_tokens": 80, "output_tokens": 7}, Tokens(80, 0, 7)),
        ({"input_tokens": 80, "output_tokens": 1}, {"input_tokens": None, "output_tokens": 0}, Tokens(80, 0, 0)),
        ({"input_tokens": 0, "output_tokens": 0}, {}, Tokens(0, 0, 0)),
    ],
)
def test_usage_objects_of_one_response_are_combined(message: Any, usage: Any, tokens: Tokens) -> None:
    assert reported({"message": json.dumps(message), "usage": json.dumps(usage)}) == tokens


ODD_PATHS = [
    "/v1/chat/completions/", "/v1/completions/", "/v1/responses/", "/v1/messages/", "/v1/chat/completions;x",
    "/v1/Chat/completions", "/v1/chat%2f%2fcompletions/", "/v1/chat/completions/x", "/v1/responses/a/chat",
    "/v1/load_lora_adapter", "/v1/unknown", "/tokenize/", "/v1/messages/count_tokens/", "/v1",
]  # fmt: skip


def test_alternative_spellings_of_api_paths_do_not_escape_usage() -> None:
    posted_paths: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        posted_paths.append(request.path)
        return web.json_response({})

    async def main() -> None:
        async with behind(handler) as at, aiohttp.ClientSession() as client:
            for path in ODD_PATHS:
                async with client.post(at.url + path, data=BODY) as answer:
                    assert answer.status == 404, path
                    assert (await answer.json())["error"]
            for path in (f"/{CHAT}", "/v1//chat/completions", "/v1/./chat/completions", "/v1/chat%2Fcompletions"):
                async with client.post(at.url + path + "?x=1", data=BODY) as answer:
                    assert answer.status == 200, path
                assert (await at.next_end()).tokens.estimated
            assert posted_paths == [CHAT] * 4

    asyncio.run(main())
