"""gRPC server for messages of other replicas: one method with JSON payloads."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Any, Final

import grpc

from stoker_gateway.limits.messages import Message, MessageError, Reply

#: Names of the gRPC service and method. Replicas of other versions use them too.
SERVICE: Final = "stoker.gateway.Limits"
METHOD: Final = "Tell"


class PeerServer:
    """Receives messages of other replicas.

    Args:
        token: shared secret of all replicas; messages without it are rejected.
        on_message: processes a message and returns the reply.
    """

    def __init__(self, token: str, on_message: Callable[[Message], Reply]) -> None:
        self._expected = credentials(token).encode()
        self._on_message = on_message
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        handler = grpc.unary_unary_rpc_method_handler(self._handle)
        self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler})])

    def listen(self, address: str) -> int:
        """Bind ``HOST:PORT``; port 0 chooses a free one. The server accepts connections after `start`.

        Returns:
            The port.

        Raises:
            OSError: the address cannot be bound.
        """
        try:
            return int(self._server.add_insecure_port(address))
        except RuntimeError as error:
            raise OSError(f"cannot listen for other replicas at {address}: {error}") from error

    async def start(self) -> None:
        """Start the server."""
        await self._server.start()

    async def stop(self) -> None:
        """Stop the server at once."""
        await self._server.stop(0)

    async def _handle(self, data: bytes, context: Any) -> bytes:
        authorization = str(dict(context.invocation_metadata()).get("authorization", ""))
        if not hmac.compare_digest(authorization.encode(), self._expected):
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED, "all replicas of a gateway must have the same peer token"
            )
        try:
            return self._on_message(Message.decode(data)).encode()
        except MessageError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise  # not reached


def credentials(token: str) -> str:
    """Return the ``authorization`` metadata by which a replica authenticates itself."""
    return f"Bearer {token}"
