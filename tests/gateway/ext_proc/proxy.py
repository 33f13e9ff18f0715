"""A strict proxy that calls a picker as Envoy does, and a picker for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc
from grpc._cython import cygrpc
from prometheus_client import CollectorRegistry

from stoker_gateway.ext_proc.request_limits import RequestLimits
from stoker_gateway.ext_proc.server import PickerServer
from stoker_gateway.keys.keyring import Keyring
from stoker_gateway.registry.model_registry import Endpoint, ModelRegistry
from stoker_gateway.scheduling.load import ServerLoad
from stoker_gateway.scheduling.picker import EndpointPicker

from ...support.waiting import until_async

#: Ways to send a body.
MODES = {"buffered": ProcessingMode.BUFFERED, "streamed": ProcessingMode.FULL_DUPLEX_STREAMED}


@dataclass
class Outcome:
    """The picker's decision on a request: its servers and removed headers, or an immediate response."""

    servers: list[str] = field(default_factory=list)
    removed: tuple[str, ...] = ()
    cluster: str = ""
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    text: bytes = b""
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def json(self) -> Any:
        return json.loads(self.text)


class Proxy:
    """Calls the picker at `address`."""

    def __init__(self, address: str, credentials: grpc.ChannelCredentials | None = None) -> None:
        options = [("grpc.max_send_message_length", 64 * 2**20), ("grpc.use_local_subchannel_pool", 1)]
        self.channel = (
            grpc.aio.insecure_channel(address, options)
            if credentials is None
            else grpc.aio.secure_channel(address, credentials, options)
        )
        self.stub = external_processor_pb2_grpc.ExternalProcessorStub(self.channel)

    async def post(self, path: str, body: Any, mode: str = "buffered", **options: Any) -> Outcome:
        """Ask about a request with a body: bytes, or an object that is sent as JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.ask("POST", path, data, mode, **options)

    async def get(self, path: str, **options: Any) -> Outcome:
        """Ask about a request without a body."""
        return await self.ask("GET", path, None, **options)

    async def ask(
        self,
        method: str,
        path: str,
        body: bytes | None,
        mode: str = "buffered",
        *,
        headers: Mapping[str, str] | None = None,
        subset: Any = None,
        chunk: int = 16_384,
        trailers: bool = False,
    ) -> Outcome:
        """Ask about a request, and validate all parts of the response."""
        call = self.stub.Process()
        try:
            await call.write(head(method, path, headers or {}, mode, subset, ends=body is None))
            if mode == "buffered":
                return await self._buffered(call, body, trailers)
            return await self._streamed(call, body, chunk, trailers)
        finally:
            call.cancel()

    async def _buffered(self, call: Any, body: bytes | None, trailers: bool) -> Outcome:
        answer = await call.read()
        if body is not None and answer.WhichOneof("response") != "immediate_response":
            assert answer == ext_proc.ProcessingResponse(request_headers=ext_proc.HeadersResponse())
            await call.write(
                ext_proc.ProcessingRequest(request_body=ext_proc.HttpBody(body=body, end_of_stream=not trailers))
            )
            answer = await call.read()
        assert await call.read() is grpc.aio.EOF  # the picker ends its stream
        assert await call.code() == grpc.StatusCode.OK
        where = answer.WhichOneof("response")
        if where == "immediate_response":
            return _answered(answer.immediate_response)
        assert where == ("request_headers" if body is None else "request_body")
        return _routed(answer, getattr(answer, where).response)

    async def _streamed(self, call: Any, body: bytes | None, chunk: int, trailers: bool) -> Outcome:
        sending = asyncio.ensure_future(_send(call, body, chunk, trailers))
        answers = []
        answer = await call.read()
        while answer is not grpc.aio.EOF:
            answers.append(answer)
            answer = await call.read()
        assert await call.code() == grpc.StatusCode.OK
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        first, rest = answers[0], answers[1:]
        if first.WhichOneof("response") == "immediate_response":
            assert not rest
            return _answered(first.immediate_response)
        outcome = _routed(first, first.request_headers.response)
        if body is None:
            assert not rest
            return outcome
        if trailers:
            assert rest.pop().WhichOneof("response") == "request_trailers"
        chunks = [each.request_body.response.body_mutation.streamed_response for each in rest]
        assert all(each.ByteSize() < 65_536 for each in rest)
        assert b"".join(each.body for each in chunks) == body
        assert [each.end_of_stream for each in chunks] == [False] * (len(chunks) - 1) + [not trailers] * bool(chunks)
        assert chunks or trailers
        return outcome


def head(
    method: str, path: str, headers: Mapping[str, str], mode: str = "buffered", subset: Any = None, *, ends: bool
) -> ext_proc.ProcessingRequest:
    """Return a stream's first message."""
    message = ext_proc.ProcessingRequest()
    message.protocol_config.request_body_mode = MODES[mode]
    message.request_headers.end_of_stream = ends
    for name, value in {":method": method, ":path": path, ":authority": "gateway", **headers}.items():
        message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    if subset is not None:
        hint = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
        hint.update({"x-gateway-destination-endpoint-subset": subset})
    return message


async def _send(call: Any, body: bytes | None, chunk: int, trailers: bool) -> None:
    if body is None:
        return
    starts = range(0, max(1, len(body)), chunk)
    for start in starts:
        last = start == starts[-1] and not trailers
        data = ext_proc.HttpBody(body=body[start : start + chunk], end_of_stream=last)
        await _write(call, ext_proc.ProcessingRequest(request_body=data))
    if trailers:
        await _write(call, ext_proc.ProcessingRequest(request_trailers=ext_proc.HttpTrailers()))


async def _write(call: Any, message: ext_proc.ProcessingRequest) -> None:
    """Write a message; ignore errors if the picker has responded and ended the call, as it may after the headers.

    `call.write` sometimes makes that an error of the whole call, and so loses a response that could still be read.
    """
    with suppress(cygrpc.InternalError):
        await call._cython_call.send_serialized_message(message.SerializeToString())


def _answered(response: ext_proc.ImmediateResponse) -> Outcome:
    headers = {each.header.key: each.header.raw_value.decode() for each in response.headers.set_headers}
    return Outcome(status=response.status.code, headers=headers, text=response.body)


def _routed(response: ext_proc.ProcessingResponse, common: ext_proc.CommonResponse) -> Outcome:
    headers = {each.header.key: each.header.raw_value.decode() for each in common.header_mutation.set_headers}
    assert common.clear_route_cache
    assert not common.HasField("body_mutation")  # the body is unchanged
    destination = headers.pop("x-gateway-destination-endpoint")
    assert response.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"] == destination
    cluster = headers.pop("x-stoker-cluster")
    removed = tuple(common.header_mutation.remove_headers)
    assert not headers.keys() & set(removed)
    spaces = dict(response.dynamic_metadata)
    known = dict(spaces.pop("stoker"))
    assert list(spaces) == ["envoy.lb"]
    return Outcome(list(dict.fromkeys(destination.split(","))), removed, cluster, headers=headers, metadata=known)


@dataclass
class Picking:
    """A running picker with its objects."""

    server: PickerServer
    model_registry: ModelRegistry
    pickers: dict[str, EndpointPicker]
    registry: CollectorRegistry
    address: str
    proxy: Proxy

    def say(self, load: ServerLoad) -> None:
        """All servers report this load now."""
        now = asyncio.get_running_loop().time()
        for name, picker in self.pickers.items():
            for server in self.model_registry.endpoints[name].servers:
                picker.observe(server, load, now, now)

    async def until_waiting(self, model: str, number: int) -> None:
        """Wait until `number` requests are queued."""
        await until_async(lambda: self.count("queue_length", model=model) == number)

    def count(self, name: str, **labels: str) -> float:
        """Return a metric's value."""
        return self.registry.get_sample_value(f"stoker:gateway_{name}", labels) or 0.0


def model_registry(
    models: Mapping[str, Sequence[str]], session_header: str | None = None, authorization: str | None = None
) -> ModelRegistry:
    """Return a registry of these models, with these servers."""
    return ModelRegistry(
        {
            name: Endpoint(name, f"cluster-{number}", tuple(servers), session_header, authorization)
            for number, (name, servers) in enumerate(models.items())
        }
    )


def pickers_of(models: ModelRegistry, now: float) -> dict[str, EndpointPicker]:
    """Return one picker per model."""
    made = {name: EndpointPicker() for name in models.endpoints}
    for name, picker in made.items():
        picker.set_servers(models.endpoints[name].servers, now)
    return made


@asynccontextmanager
async def picking(
    models: Mapping[str, Sequence[str]],
    limits: RequestLimits | None = None,
    session_header: str | None = None,
    clock: Callable[[], float] | None = None,
    keyring: Keyring | None = None,
    authorization: str | None = None,
) -> AsyncIterator[Picking]:
    """Run a picker for these models, on its own port."""
    clock = clock or asyncio.get_running_loop().time
    known, registry = model_registry(models, session_header, authorization), CollectorRegistry()
    made = pickers_of(known, clock())
    server = PickerServer(known, made, limits, registry, clock, keyring)
    address = f"127.0.0.1:{server.listen('127.0.0.1:0')}"
    await server.start()
    proxy = Proxy(address)
    try:
        yield Picking(server, known, made, registry, address, proxy)
    finally:
        await proxy.channel.close()
        await server.stop(0)


def chat(model: str, *texts: str, **more: Any) -> dict[str, Any]:
    """Return a conversation with alternating user and assistant messages."""
    roles: Iterable[str] = ("user", "assistant") * len(texts)
    return {"model": model, "messages": [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)], **more}
