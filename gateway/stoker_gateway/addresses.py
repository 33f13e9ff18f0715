"""Where something listens."""

from __future__ import annotations

import socket


def check_free(host: str, port: int) -> None:
    """Envoy would share a port with another Envoy, and requests would go to either.

    Raises:
        OSError: nothing can listen there, as where something does.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except OSError as error:
            raise OSError(f"cannot listen at {netloc(host, port)}: {error.strerror}") from None


def netloc(host: str, port: int) -> str:
    """Host and port as a URL has them."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
