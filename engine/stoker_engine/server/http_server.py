"""From application to process: the socket, the signals, the exit code."""

from __future__ import annotations

import logging
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from stoker_engine.contract.errors import StokerError
from stoker_engine.server.engine_client import EngineClient

logger = logging.getLogger(__name__)

#: How long requests in flight may take to finish once the server is told to stop.
SHUTDOWN_TIMEOUT_S = 30

_PROBES = ("/health", "/metrics")


def bind(host: str, port: int) -> socket.socket:
    """Takes the address, so that a port in use is told before a model is loaded. Listens to nobody yet.

    Raises:
        StokerError: the address cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # else a restart waits for old connections
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise _refused(host, port, error) from error
    return bound


def serve(app: FastAPI, client: EngineClient, bound: socket.socket, name: str, log_level: str) -> int:
    """Serves `app` on a socket from `bind` until SIGTERM or SIGINT, or until the engine dies.

    Either way it listens to nobody new and lets requests in flight finish; those of a dead engine have
    already been answered with an error.

    Args:
        name: what is served, for the log.

    Returns:
        The process's exit code: 0 when told to stop, 1 when the engine died, so that it is started again.

    Raises:
        StokerError: another process has begun to listen on the address.
    """
    config = uvicorn.Config(
        app,
        log_config=None,  # the process's own logging
        log_level=log_level,
        lifespan="off",
        timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
    )
    logging.getLogger("uvicorn.access").addFilter(_is_no_probe)
    host, port = bound.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    try:
        with _stopped_by_signals():
            _Server(config, client, f"serving {name} on {url}").run([bound])
    except OSError as error:
        raise _refused(host, port, error) from error
    return 0 if client.is_healthy else 1


class _Server(uvicorn.Server):
    """Says when it serves, and stops when its engine does."""

    def __init__(self, config: uvicorn.Config, client: EngineClient, greeting: str) -> None:
        super().__init__(config)
        self._client = client
        self._greeting = greeting

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        logger.info(self._greeting)

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or not self._client.is_healthy


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """uvicorn stops on a signal, then raises it again for whoever had it before: by then all is done."""
    before = {signum: signal.signal(signum, lambda *_: None) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _is_no_probe(record: logging.LogRecord) -> bool:
    """Keeps what asks every few seconds whether we live out of the access log."""
    args = record.args
    return not (isinstance(args, tuple) and len(args) == 5 and args[2] in _PROBES and args[4] == 200)


def _refused(host: str, port: int, error: OSError) -> StokerError:
    return StokerError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --host or --port")
