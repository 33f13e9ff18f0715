"""The socket on which the server listens. Imports little: an address that is in use is reported before the server
starts."""

from __future__ import annotations

import socket

from stoker_common.errors import StokerError
from stoker_engine.contract.frontend_args import EVERY_ADDRESS


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket to the address, without listening, so that a port in use is reported before a model is loaded.

    ``::`` stands for all addresses, including IPv4, whatever net.ipv6.bindv6only is.

    Raises:
        StokerError: the address is not available.
    """
    every = host == EVERY_ADDRESS
    if every and not _has_ipv6():
        host = "0.0.0.0"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        try:
            if family == socket.AF_INET6 and every:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # else a restart waits for old connections
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise unavailable_address(host, port, error) from error
    return bound


def _has_ipv6() -> bool:
    """Return whether the kernel has IPv6; it can be disabled at boot."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as trial:
            trial.bind((EVERY_ADDRESS, 0))
    except OSError:
        return False
    return True


def unavailable_address(host: str, port: int, error: OSError) -> StokerError:
    """Return the error of a socket that cannot listen."""
    return StokerError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --host or --port")
