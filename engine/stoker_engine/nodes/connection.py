"""A TCP connection between two nodes, which exchange JSON objects.

Before the first object, both sides prove that they know the same key (`handshake`). Messages are not pickled, so a
malicious peer cannot run code.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
from multiprocessing.connection import Connection
from typing import Any, Final

#: Maximum size of a received message, in bytes.
_MAX_BYTES: Final = 1 << 16

#: Approximate seconds after which a node that does not respond on the network counts as lost. Its kernel responds, so a
#: busy node, or one with stopped processes, is not lost.
UNREACHABLE_S: Final = 4


class NodeConnection:
    """A connection to another node, which takes ownership of `sock`. Several threads may send.

    Attributes:
        address: IP address of the peer.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        notice_unreachable(sock)
        self.address: str = sock.getpeername()[0].removeprefix("::ffff:")  # IPv4 peer of a dual-stack socket
        self._socket = sock
        self._connection = Connection(os.dup(sock.fileno()))
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """Return the file descriptor, for `select`."""
        return self._connection.fileno()

    def send_bytes(self, data: bytes) -> None:
        """Send a message.

        Raises:
            OSError: it cannot be sent.
        """
        with self._sending:
            self._connection.send_bytes(data)

    def receive_bytes(self) -> bytes:
        """Receive a message.

        Raises:
            EOFError, OSError: no message can be received, or it is too long.
        """
        return self._connection.recv_bytes(_MAX_BYTES)

    def send(self, **message: Any) -> None:
        """Send a JSON object. Raises the same errors as `send_bytes`."""
        self.send_bytes(json.dumps(message).encode())

    def receive(self) -> dict[str, Any]:
        """Receive a JSON object.

        Raises:
            EOFError, OSError: see `receive_bytes`.
            ValueError: the message is not a JSON object.
        """
        message = json.loads(self.receive_bytes())
        if not isinstance(message, dict):
            raise ValueError("the peer sent a message that is not a JSON object")
        return message

    def wait_at_most(self, seconds: float) -> None:
        """See the function `wait_at_most`."""
        wait_at_most(self._socket, seconds)

    def release(self) -> socket.socket:
        """Return the socket, which the caller then owns. The connection can no longer be used."""
        self._connection.close()
        return self._socket

    def close(self) -> None:
        """Close the connection, even while a thread reads from it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with contextlib.suppress(OSError):
            self._connection.close()


def notice_unreachable(sock: socket.socket) -> None:
    """Let the kernel end a connection whose peer is unreachable, see `UNREACHABLE_S`. Also disable the delay of small
    messages."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 1),
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", UNREACHABLE_S),
        ("TCP_USER_TIMEOUT", UNREACHABLE_S * 1000),
    ):
        if hasattr(socket, name):  # Linux has all of them
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def wait_at_most(sock: socket.socket, seconds: float) -> None:
    """Set the timeout of each later read or write of a blocking socket, in whole seconds; 0: none."""
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), 0))


def reset_on_close(sock: socket.socket) -> None:
    """Let the kernel send a reset when the socket is closed or the process exits, so that the peer's reads and writes
    fail immediately. By default the peer only reads an end of file."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
