"""Limits of keys, as the picker's clients see them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from prometheus_client import CollectorRegistry

from stoker_common.errors import RequestError
from stoker_gateway.ext_proc.metrics import PickerMetrics
from stoker_gateway.ext_proc.request import read_request
from stoker_gateway.ext_proc.request_handler import RequestHandler
from stoker_gateway.ext_proc.request_limits import RequestLimits
from stoker_gateway.ext_proc.server import Processor
from stoker_gateway.keys.key import Key, Limits, digest_of
from stoker_gateway.keys.keyring import Keyring
from stoker_gateway.limits.limiter import LocalLimiter
from stoker_gateway.limits.ratelimit_headers import Denial, Grant
from stoker_gateway.scheduling.load import ServerLoad

from ...support.waiting import until_async
from .proxy import Outcome, Picking, chat, head, model_registry, pickers_of, picking

SERVERS = ("10.0.0.1:80", "10.0.0.2:80")
CHAT = "/v1/chat/completions"
TEXT = "sk-stoker-tenant-0123"
OTHER = "sk-stoker-other-0123"


@asynccontextmanager
async def limited(of: Limits, **more: Any) -> AsyncIterator[Picking]:
    """Run a picker with a key that has these limits, and another key without limits."""
    keyring = Keyring([Key("tenant", digest_of(TEXT), limits=of), Key("other", digest_of(OTHER))])
    async with picking({"a": SERVERS}, keyring=keyring, **more) as made:
        yield made


async def post(picker: Picking, body: Any, text: str = TEXT, path: str = CHAT) -> Any:
    return await picker.proxy.post(path, body, headers={"authorization": f"Bearer {text}"})


def test_requests_beyond_the_limit_are_refused_in_openais_format() -> None:
    async def main() -> None:
        async with limited(Limits(requests_per_minute=3)) as picker:
            for remaining in (2, 1, 0):
                outcome = await post(picker, chat("a", "x"))
                assert outcome.metadata["x-ratelimit-limit-requests"] == "3"
                assert outcome.metadata["x-ratelimit-remaining-requests"] == str(remaining)
                assert (outcome.metadata["key"], outcome.metadata["model"]) == ("tenant", "a")
                assert outcome.metadata["grant"]
            refused = await post(picker, chat("a", "x"))
            error = refused.json["error"]
            assert (refused.status, error["type"], error["code"]) == (429, "requests", "rate_limit_exceeded")
            assert (
                "'tenant' on requests per min (RPM): Limit 3, Used 3, Requested 1. Please try again in"
                in (error["message"])
            )
            assert 1 <= int(refused.headers["retry-after"]) <= 61
            assert refused.headers["x-ratelimit-remaining-requests"] == "0"
            assert "x-ratelimit-limit-tokens" not in refused.headers
            anthropic = await post(picker, chat("a", "x", max_tokens=1), path="/v1/messages")
            assert (anthropic.status, anthropic.json["error"]["type"]) == (429, "rate_limit_error")
            assert (await post(picker, chat("a", "x"), OTHER)).servers  # another key, with its own limits
            assert picker.count("requests_total", model="a", outcome="limited") == 2

    asyncio.run(main())


def test_tokens_are_reserved_and_oversized_requests_are_not_retriable() -> None:
    async def main() -> None:
        async with limited(Limits(tokens_per_minute=100)) as picker:
            body = {"model": "a", "prompt": list(range(30)), "max_tokens": 20, "n": 2}
            outcome = await post(picker, body, path="/v1/completions")
            assert outcome.metadata["x-ratelimit-remaining-tokens"] == "30"
            refused = await post(picker, body, path="/v1/completions")
            assert "Limit 100, Used 70, Requested 70" in refused.json["error"]["message"]
            assert refused.json["error"]["type"] == "tokens" and "retry-after" in refused.headers
            never = await post(picker, body | {"max_tokens": 36}, path="/v1/completions")
            assert never.status == 429 and "retry-after" not in never.headers
            assert never.headers["x-should-retry"] == "false"
            assert "must be reduced" in never.json["error"]["message"]
            # A request without a maximum length is not refused because of the default, once the full limit is
            # available.
            waits = await post(picker, chat("a", "x"))
            assert "retry-after" in waits.headers

    asyncio.run(main())


@pytest.mark.parametrize("how", ["saturated", "cancelled", "no server"])
def test_unsent_requests_return_their_tokens_and_slot(how: str) -> None:
    async def main() -> None:
        limits = RequestLimits(max_wait_s=0.2 if how == "saturated" else 60)
        async with limited(Limits(tokens_per_minute=1000, concurrency=1), limits=limits) as picker:
            subset = None
            if how == "no server":
                subset = ["10.9.9.9:80"]
            else:
                picker.say(ServerLoad(running=8, waiting=100, kv_usage=1.0))
            asking = asyncio.create_task(
                picker.proxy.post(
                    CHAT, chat("a", "x", max_tokens=900), headers={"authorization": f"Bearer {TEXT}"}, subset=subset
                )
            )
            if how == "cancelled":
                await picker.until_waiting("a", 1)
                asking.cancel()
                await picker.until_waiting("a", 0)
            else:
                assert (await asking).status == {"saturated": 429, "no server": 503}[how]
            picker.say(ServerLoad())

            async def served() -> Outcome | None:
                outcome = await post(picker, chat("a", "x", max_tokens=900))
                return outcome if outcome.servers else None

            outcome = await until_async(served, every=0.02)  # the cancellation takes time
            assert outcome is not None
            assert 0 <= int(outcome.metadata["x-ratelimit-remaining-tokens"]) <= 100
            busy = await post(picker, chat("a", "x", max_tokens=1))
            assert "requests at once: Limit 1, Used 1" in busy.json["error"]["message"]

    asyncio.run(main())


class _EndsEarly:
    """A stream that its proxy ends while the route is being written, before or after reading it."""

    def __init__(self, body: bytes, *, read: bool) -> None:
        self.messages = [
            head("POST", CHAT, {"authorization": f"Bearer {TEXT}"}, ends=False),
            ext_proc.ProcessingRequest(request_body=ext_proc.HttpBody(body=body, end_of_stream=True)),
        ]
        self.writing, self.may_end = asyncio.Event(), asyncio.Event()
        self._was_read = read

    async def read(self) -> Any:
        return self.messages.pop(0)

    async def write(self, response: Any) -> None:
        if response.HasField("dynamic_metadata"):
            self.writing.set()
            await self.may_end.wait()
            if not self._was_read:
                raise grpc.aio.UsageError("the stream has ended")


@pytest.mark.parametrize("read", [True, False])
def test_stream_that_ends_early_frees_only_grants_the_proxy_did_not_read(read: bool) -> None:
    async def main() -> None:
        known, limits = model_registry({"a": SERVERS}), RequestLimits()
        metrics, limiter = PickerMetrics(CollectorRegistry()), LocalLimiter()
        key = Key("tenant", digest_of(TEXT), limits=Limits(tokens_per_minute=1000, concurrency=1))
        handler = RequestHandler(
            known, pickers_of(known, 0), limits, metrics, lambda: 0.0, keyring=Keyring([key]), limiter=limiter
        )
        stream = _EndsEarly(json.dumps(chat("a", "x", max_tokens=900)).encode(), read=read)
        deciding = asyncio.create_task(Processor(handler, limits, metrics).Process(None, stream))
        await stream.writing.wait()
        deciding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await deciding
        stream.may_end.set()
        for _ in range(3):
            await asyncio.sleep(0)
        again = await limiter.reserve(key, 900, 0.0)
        if read:  # its tokens count, and it does not stay in flight forever
            assert isinstance(again, Denial) and again.what == "tokens"
            again = await limiter.reserve(key, 10, 0.0)
        assert isinstance(again, Grant)
        await handler.close()

    asyncio.run(main())


def _reserved(path: str, **fields: Any) -> int:
    request = read_request(path, json.dumps({"model": "m", **fields}).encode())
    return request.prompt_tokens + request.max_output_tokens


def test_reserved_tokens_follow_prompt_and_output_limits() -> None:
    completions, responses, messages = "/v1/completions", "/v1/responses", "/v1/messages"
    assert _reserved(completions, prompt="x" * 400) == 100 + 16
    assert _reserved(completions, prompt="", max_tokens=7) == 1 + 7
    assert _reserved(completions, prompt=[1, 2, 3], max_tokens=7, n=3, best_of=5) == 3 + 35
    assert _reserved(completions, prompt=["xxxx", "yyyyyyy"], max_tokens=10) == 3 + 20
    assert _reserved(completions, prompt=[[1, 2], [3]], max_tokens=10) == 3 + 20
    assert _reserved(CHAT, messages=[{"role": "user", "content": "x" * 4000}], max_completion_tokens=5) in range(
        1005, 1010
    )
    assert _reserved(CHAT, messages=[], max_tokens=5, max_completion_tokens=50) == 51
    assert _reserved(CHAT, messages=[]) == 1 + 1024
    assert _reserved(responses, input="x" * 400, max_output_tokens=11) in range(111, 114)
    assert _reserved(messages, messages=[], max_tokens=11, system="x" * 40) in range(21, 25)
    assert _reserved("/tokenize", prompt="x" * 4000) == 0
    assert _reserved("/v1/embeddings", input="x" * 4000) in range(1000, 1020)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 90_000}}
    assert _reserved(CHAT, messages=[{"role": "user", "content": [image]}], max_tokens=0) in range(1, 1030)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_output_tokens", "n", "best_of"])
@pytest.mark.parametrize(
    "number", ["-1", "1e400", "1e300", "9" * 400, "true", '"5"', "null", "[]", "{}", "0.5", "-1e400", "1e1"]
)
def test_hostile_numbers_reserve_a_bounded_token_count(name: str, number: str) -> None:
    for path in (CHAT, "/v1/completions"):
        body = f'{{"model": "m", "prompt": "x", "{name}": {number}}}'.encode()
        try:
            request = read_request(path, body)
        except RequestError:
            continue  # not valid JSON for any parser
        assert type(request.max_output_tokens) is int
        assert 1 <= request.prompt_tokens + request.max_output_tokens < 2**50
