"""A picker whose decisions a test sets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as rpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio


class ScriptedPicker(rpc.ExternalProcessorServicer):
    """Sends each request to `destination` of `cluster`.

    Attributes:
        hangs: it does not respond.
        refusal: it responds with 404 and this body.
        lingers: its streams stay open after the decision.
    """

    def __init__(self, cluster: str, destination: str) -> None:
        self.cluster = cluster
        self.destination = destination
        self.hangs = False
        self.lingers = False
        self.refusal = b""

    async def Process(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:  # noqa: N802
        async for request in requests:
            while self.hangs:  # noqa: ASYNC110 - a test sets it
                await asyncio.sleep(0.05)  # sleeps: a picker that does not respond until a test permits it
            if self.refusal:
                refusal = pb.ImmediateResponse(details="picker", body=self.refusal)
                refusal.status.code = 404
                yield pb.ProcessingResponse(immediate_response=refusal)
                return
            if request.HasField("request_headers") and not request.request_headers.end_of_stream:
                yield pb.ProcessingResponse(request_headers=pb.HeadersResponse())
                continue
            named = {"x-stoker-cluster": self.cluster, "x-gateway-destination-endpoint": self.destination}
            common = pb.CommonResponse(clear_route_cache=True)
            for key, value in named.items():
                option = common.header_mutation.set_headers.add()
                option.header.CopyFrom(base_pb2.HeaderValue(key=key, raw_value=value.encode()))
            if request.HasField("request_body"):
                yield pb.ProcessingResponse(request_body=pb.BodyResponse(response=common))
            else:
                yield pb.ProcessingResponse(request_headers=pb.HeadersResponse(response=common))
            if self.lingers:
                await asyncio.Event().wait()
            return

    async def serve(self, socket: Path) -> grpc.aio.Server:
        """Start serving on a unix socket."""
        server = grpc.aio.server(options=[("grpc.max_receive_message_length", 64 << 20)])
        rpc.add_ExternalProcessorServicer_to_server(self, server)
        health = aio.HealthServicer()
        await health.set("", health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(health, server)
        server.add_insecure_port(f"unix:{socket}")
        await server.start()
        return server
