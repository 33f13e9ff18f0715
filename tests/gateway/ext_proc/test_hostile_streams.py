"""Malformed streams of a proxy: each ends with a response or a status, never with an internal error."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from google.protobuf.message import DecodeError
from prometheus_client import CollectorRegistry

from stoker_gateway.ext_proc.metrics import PickerMetrics
from stoker_gateway.ext_proc.request_handler import RequestHandler
from stoker_gateway.ext_proc.request_limits import RequestLimits
from stoker_gateway.ext_proc.server import Processor

from .proxy import MODES, head, model_registry, pickers_of, picking

_MODELS = {"a": ("10.0.0.1:80", "10.0.0.2:80"), "ü/b": ("10.0.0.3:80",), "none": ()}
_PATHS = (
    *("/v1/chat/completions", "/v1/messages?beta=true", "/v1/responses", "/v1/responses/resp_x/cancel", "/v1/models"),
    *("/v1/models/%C3%BC/b", "/v1/models/%%%", "/tokenize", "//v1", "/v1/../metrics", "*", "", "/v1/\x00"),
    *("/v1/embeddings", "/v1/completions", "/detokenize"),
)
_BODIES = (
    {"model": "a", "messages": [{"role": "user", "content": "hello " * 300}], "stream": True},
    {"model": "ü/b", "input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}], "user": "u"},
    {"model": "none", "prompt": [1, 2, 3]},
    {"model": "c", "prompt": "x"},
    {"prompt": "x"},
)


def _stream(rng: random.Random) -> list[ext_proc.ProcessingRequest]:
    """Return a random stream of messages."""
    headers = {"x-request-id": rng.choice(["r", "", "é" * 200]), "content-length": rng.choice(["7", "", "x", "9" * 99])}
    headers = {name: value for name, value in headers.items() if rng.random() < 0.5}
    subset = rng.choice([None, None, [], ["10.0.0.1:80"], [{}], "x", 1.5])
    bodyless = rng.random() < 0.2
    method, path = rng.choice(["POST", "POST", "POST", "GET", "BREW", ""]), rng.choice(_PATHS)
    stream = [head(method, path, headers, rng.choice(list(MODES)), subset, ends=bodyless)]
    if not bodyless:
        body, cut = json.dumps(rng.choice(_BODIES)).encode(), rng.randrange(60)
        for part, last in ((body[:cut], False), (body[cut:], rng.random() < 0.8)):
            data = ext_proc.HttpBody(body=part, end_of_stream=last)
            stream.append(ext_proc.ProcessingRequest(request_body=data))
        stream.append(ext_proc.ProcessingRequest(request_trailers=ext_proc.HttpTrailers()))
    return stream


def _mutated(rng: random.Random) -> list[bytes]:
    messages = [message.SerializeToString() for message in _stream(rng)]
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(messages))
        match rng.randrange(4):
            case 0:
                del messages[at]
            case 1:
                messages.insert(rng.randrange(len(messages)), messages[at])
            case 2:
                rng.shuffle(messages)
            case _:
                data = bytearray(messages[at])
                for _ in range(rng.randint(1, 4)):
                    if data:
                        data[rng.randrange(len(data))] = rng.randrange(256)
                messages[at] = bytes(data)
        if not messages:
            break
    return messages


class _StoppedError(Exception):
    """The stream was ended with a status."""


class _Stream:
    """gRPC's side of a stream."""

    def __init__(self, messages: Sequence[ext_proc.ProcessingRequest]) -> None:
        self._messages = list(messages)
        self.responses: list[ext_proc.ProcessingResponse] = []

    async def read(self) -> Any:
        return self._messages.pop(0) if self._messages else grpc.aio.EOF

    async def write(self, response: ext_proc.ProcessingResponse) -> None:
        assert response.SerializeToString()
        self.responses.append(response)

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        assert code is grpc.StatusCode.FAILED_PRECONDITION and details
        raise _StoppedError

    @property
    def outcome(self) -> str:
        last = self.responses[-1]
        if last.HasField("immediate_response"):
            status = last.immediate_response.status.code
            assert json.loads(last.immediate_response.body)
            assert status in (200, 400, 404, 405, 413, 503)
            return str(status)
        return "routed" if any(each.HasField("dynamic_metadata") for each in self.responses) else "unfinished"


def test_every_malformed_stream_gets_a_response_or_status(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        known, limits = model_registry(_MODELS), RequestLimits(max_body_bytes=100_000)
        metrics = PickerMetrics(CollectorRegistry())
        handler = RequestHandler(known, pickers_of(known, 0), limits, metrics, lambda: 0.0)
        processor, rng, outcomes = Processor(handler, limits, metrics), random.Random(0), Counter[str]()
        for _ in range(3000):
            messages = []
            for data in _mutated(rng):
                try:
                    messages.append(ext_proc.ProcessingRequest.FromString(data))
                except DecodeError:
                    outcomes["no message"] += 1
            stream = _Stream(messages)
            try:
                await processor.Process(None, stream)
            except _StoppedError:
                outcomes["stopped"] += 1
            else:
                outcomes[stream.outcome if stream.responses else "unfinished"] += 1
        await handler.close()
        for outcome in ("routed", "200", "400", "404", "405", "413", "503", "stopped", "unfinished", "no message"):
            assert outcomes[outcome] > 10, outcomes

    with caplog.at_level(logging.ERROR):
        asyncio.run(main())
    assert not [record for record in caplog.records if record.exc_info]


def test_server_survives_malformed_streams() -> None:
    async def main() -> None:
        async with picking(_MODELS) as picker:
            call = picker.proxy.channel.stream_stream("/envoy.service.ext_proc.v3.ExternalProcessor/Process")
            rng = random.Random(1)

            async def send() -> None:
                stream = call(iter(_mutated(rng)))
                try:
                    async for response in stream:
                        ext_proc.ProcessingResponse.FromString(response)
                except grpc.aio.AioRpcError as error:
                    assert error.code() in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INTERNAL)

            for _ in range(10):
                await asyncio.gather(*(send() for _ in range(20)))
            assert (await picker.proxy.post("/v1/completions", {"model": "a", "prompt": "x"})).servers

    asyncio.run(main())
