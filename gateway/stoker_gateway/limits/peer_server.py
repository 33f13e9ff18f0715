"""Where a replica hears what others say and ask: one method of gRPC, with JSON in it."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Any, Final

import grpc

from stoker_gateway.limits.messages import Message, MessageError, Reply

#: Service and method.
SERVICE: Final = "stoker.gateway.Limits"
METHOD: Final = "Tell"


class PeerServer:
    """Hears other replicas.

    Args:
        token: that all replicas know; who does not say it is refused.
        hear: what answers a message.
    """

    def __init__(self, token: str, hear: Callable[[Message], Reply]) -> None:
        self._expected = credentials(token).encode()
        self._hear = hear
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        handler = grpc.unary_unary_rpc_method_handler(self._handle)
        self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler})])

    def listen(self, address: str) -> int:
        """Takes connections at ``HOST:PORT``, once started; port 0 is any that is free.

        Returns:
            the port.

        Raises:
            OSError: it cannot be listened there.
        """
        try:
            return int(self._server.add_insecure_port(address))
        except RuntimeError as error:
            raise OSError(f"cannot listen for other replicas at {address}: {error}") from error

    async def start(self) -> None:
        """Begins to hear."""
        await self._server.start()

    async def stop(self) -> None:
        """Ends."""
        await self._server.stop(0)

    async def _handle(self, data: bytes, context: Any) -> bytes:
        authorization = str(dict(context.invocation_metadata()).get("authorization", ""))
        if not hmac.compare_digest(authorization.encode(), self._expected):
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED, "all replicas of a gateway must have the same peer token"
            )
        try:
            return self._hear(Message.decode(data)).encode()
        except MessageError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise  # not reached


def credentials(token: str) -> str:
    """What a replica says to prove that it is one."""
    return f"Bearer {token}"
