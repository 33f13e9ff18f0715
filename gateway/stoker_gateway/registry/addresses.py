"""Helpers for addresses."""

from __future__ import annotations

import socket
from typing import Final

#: Wildcard address for IPv6 and IPv4.
EVERY: Final = "::"
_EVERY_IPV4: Final = "0.0.0.0"


def usable(host: str) -> str:
    """Return `host`, or the IPv4 wildcard address if `host` is `EVERY` and IPv6 is unavailable."""
    if host != EVERY:
        return host
    try:
        with socket.socket(socket.AF_INET6) as trial:
            trial.bind((EVERY, 0))
    except OSError:
        return _EVERY_IPV4
    return host


def bind(host: str, port: int) -> socket.socket:
    """Return a TCP socket bound to an address; `EVERY` includes IPv4.

    Raises:
        OSError: the address cannot be bound, for example because it is in use.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if host == EVERY:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise OSError(f"cannot listen at {netloc(host, port)}: {error.strerror}") from None
    return bound


def check_free(host: str, port: int) -> None:
    """Check that an address is free: two Envoys could share a port, and requests would go to either.

    Raises:
        OSError: the address cannot be bound, for example because it is in use.
    """
    bind(host, port).close()


def netloc(host: str, port: int) -> str:
    """Return host and port in the notation of URLs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
