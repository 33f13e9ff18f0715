"""gRPC service that receives Envoy's access log of completed requests and passes the requests to listeners."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from envoy.service.accesslog.v3 import als_pb2, als_pb2_grpc

from stoker_gateway.tasks import first_of
from stoker_gateway.usage.completed_request import CompletedRequest

logger = logging.getLogger(__name__)

#: Called with each completed request, in the event loop.
EndedListener = Callable[[CompletedRequest], None]


class AccessLogService(als_pb2_grpc.AccessLogServiceServicer):  # type: ignore[misc]
    """Envoy's access log service.

    Args:
        listeners: called in this order, even if one raises an exception.
    """

    def __init__(self, listeners: Sequence[EndedListener]) -> None:
        self._listeners = listeners
        self._closed = asyncio.Event()
        #: Number of received entries.
        self.received = 0

    def register(self, server: Any) -> None:
        """Register the service with a gRPC server."""
        als_pb2_grpc.add_AccessLogServiceServicer_to_server(self, server)

    async def StreamAccessLogs(self, messages: Any, context: Any) -> Any:  # noqa: N802, gRPC's name
        """Receive entries until Envoy ends the stream, or `close` is called."""
        await first_of(self._read(messages), self._closed.wait())
        return als_pb2.StreamAccessLogsResponse()

    def close(self) -> None:
        """Stop receiving entries."""
        self._closed.set()

    async def _read(self, messages: Any) -> None:
        async for message in messages:
            for entry in message.http_logs.log_entry:
                self.received += 1
                self._notify(entry)

    def _notify(self, entry: Any) -> None:
        try:
            ended = CompletedRequest.of(entry)
        except Exception:
            logger.exception("an entry of Envoy's access log cannot be parsed")
            return
        if ended is None:
            return
        for listener in self._listeners:
            try:
                listener(ended)
            except Exception:
                logger.exception("a completed request could not be processed", extra={"request_id": ended.request_id})
