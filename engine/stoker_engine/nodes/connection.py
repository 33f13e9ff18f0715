"""One TCP connection between two nodes, on which JSON objects go back and forth.

Both sides have shown that they know the same key before anything is read that means something (`handshake`). Nothing
here is pickled: what another node says can be wrong, but it runs no code.
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

#: Most bytes of a message.
_MAX_BYTES: Final = 1 << 16

#: Seconds after which a node that does not answer on the network counts as gone. Its kernel answers, so a busy node or
#: one whose processes are stopped does.
UNREACHABLE_S: Final = 4


class NodeConnection:
    """A connection; takes `sock` over. Several threads may send.

    Attributes:
        address: of the other end.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        notice_unreachable(sock)
        self.address: str = sock.getpeername()[0]
        self._socket = sock
        self._connection = Connection(os.dup(sock.fileno()))
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """For `select`."""
        return self._connection.fileno()

    def send_bytes(self, data: bytes) -> None:
        """Raises:
        OSError: the other end is gone.
        """
        with self._sending:
            self._connection.send_bytes(data)

    def receive_bytes(self) -> bytes:
        """Raises:
        EOFError, OSError: the other end is gone, or sends what is too long.
        """
        return self._connection.recv_bytes(_MAX_BYTES)

    def send(self, **message: Any) -> None:
        """Raises:
        OSError: the other end is gone.
        """
        self.send_bytes(json.dumps(message).encode())

    def receive(self) -> dict[str, Any]:
        """Raises:
        EOFError, OSError: the other end is gone, or sends what is too long.
        ValueError: it sends what is no object.
        """
        message = json.loads(self.receive_bytes())
        if not isinstance(message, dict):
            raise ValueError("the other end sent no object")
        return message

    def wait_at_most(self, seconds: float) -> None:
        """How long it waits for the other end from now on; 0: for ever."""
        wait_at_most(self._socket, seconds)

    def release(self) -> socket.socket:
        """The socket, which is the caller's then."""
        self._connection.close()
        return self._socket

    def close(self) -> None:
        """Ends the connection, also where a thread reads from it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with contextlib.suppress(OSError):
            self._connection.close()


def notice_unreachable(sock: socket.socket) -> None:
    """Has the kernel end a connection whose other end does not answer; sends small messages at once."""
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
    """How long one read or write of a blocking socket waits; 0: for ever."""
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), 0))


def reset_on_close(sock: socket.socket) -> None:
    """Has the other end learn at once, and as an error, when this one is closed or its process ends, as it does with
    socket pairs; else that looks like "no more messages come"."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
