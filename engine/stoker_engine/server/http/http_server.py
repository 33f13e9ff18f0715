"""The server process: socket, loading, restarts, signals.

The server listens before the engine is loaded, so that probes are answered from the start. Events drive it, such as the
end of loading, the death of an engine and signals; it does not poll.

SIGTERM starts the shutdown that `lifecycle` describes. SIGINT, which a person types, skips the grace period; a second
signal skips all waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence

import uvicorn

from stoker_common.errors import StokerError
from stoker_common.subprocesses.process_start import process_start
from stoker_engine.contract.serve_args import ServeArgs
from stoker_engine.core.engine_info import EngineInfo
from stoker_engine.core.laps import describe
from stoker_engine.server.app import create_app
from stoker_engine.server.conversation.service import Service
from stoker_engine.server.engine.engine_client import EngineClient
from stoker_engine.server.engine.engine_keeper import EngineKeeper
from stoker_engine.server.engine.peers import Peers
from stoker_engine.server.http.bind import unavailable_address
from stoker_engine.server.http.http_protocol import http_protocol
from stoker_engine.server.http.tls import DEFAULT_CIPHERS
from stoker_engine.server.observability.access_log import skip_paths
from stoker_engine.server.unavailable import UnavailableError

logger = logging.getLogger(__name__)

#: Seconds for which an idle connection stays open. Longer than the limits of most clients and proxies, so that the
#: server does not close a connection just as they use it.
_KEEP_ALIVE_S = 75
#: Maximum number of connections that wait to be accepted.
_BACKLOG = 2048
#: Maximum seconds for which clients may read the rest of their responses, once all requests have ended.
_LAST_WORDS_S = 5


def serve(args: ServeArgs, client: EngineClient, bound: socket.socket, peers: Peers | None = None) -> None:
    """Serve `client` on a socket from `bind`, until SIGTERM, SIGINT or an error.

    Args:
        peers: the other front ends that accept connections of this socket; None: there are none.

    Raises:
        ArgumentError, ModelError: the engine cannot be loaded, or a file that the server needs cannot be read.
        EngineDeadError: an engine's death ended the server.
        StokerError: the server cannot listen on the address.
    """
    service = Service(args, client, peers)
    server = Server(uvicorn_config(service), service, url_of(args, bound))
    try:
        server.run([bound])
    except OSError as error:
        host, port = bound.getsockname()[:2]
        raise unavailable_address(host, port, error) from error
    if server.failure is not None:
        raise server.failure


def url_of(args: ServeArgs, bound: socket.socket) -> str:
    """Return the URL of a server on a socket from `bind`."""
    host, port = bound.getsockname()[:2]
    return f"{'https' if args.frontend.ssl_certfile else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def log_ready(info: EngineInfo, model_names: Sequence[str], url: str) -> None:
    """Log that the server serves, and how long the parts of its start took."""
    logger.info("ready after %s", describe(process_start(), [*info.load_laps, ("tokenizer", time.monotonic())]))
    logger.info("serving %s on %s", ", ".join(model_names), url)


class Server(uvicorn.Server):
    """uvicorn's server, driven by events instead of polling.

    Attributes:
        failure: error that prevented or ended serving.
    """

    def __init__(self, config: uvicorn.Config, service: Service, url: str) -> None:
        super().__init__(config)
        self.failure: Exception | None = None
        self._service = service
        self._url = url
        self._stopping = asyncio.Event()
        self._hurried = asyncio.Event()
        self._grace_s = service.args.frontend.shutdown_grace
        self._engine_task: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and start to load the engines. A front end that replaces another one listens once it can serve:
        the others accept connections until then."""
        engine = self._engine_task = asyncio.create_task(self._engine())
        peers = self._service.peers
        if peers is not None:
            peers.on_loop_running()
        if peers is not None and peers.counts.is_started:
            others = [asyncio.create_task(event.wait()) for event in (self._stopping, self._service.loaded)]
            await asyncio.wait({engine, *others}, return_when=asyncio.FIRST_COMPLETED)
            for task in others:
                task.cancel()
        await super().startup(sockets)
        for each in (sockets or []) if peers is not None else []:
            each.listen(_BACKLOG)

    async def main_loop(self) -> None:
        """Serve until a signal or an error, then shut down."""
        engine = self._engine_task
        assert engine is not None, "startup was not called"
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({engine, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not engine.done() and self._service.is_loaded:
                await self._leave(engine)
            if engine.done():
                failure = engine.exception()
                self.failure = failure if isinstance(failure, Exception) else StokerError(str(failure))
        finally:
            engine.cancel()
            stopping.cancel()
            self.should_exit = True

    def stop(self, signum: int) -> None:
        """Start the shutdown; the second call skips all waiting."""
        if self._stopping.is_set():
            self._hurried.set()
            return
        if signum == signal.SIGINT:
            self._grace_s = 0
        self._service.lifecycle.leaving = True
        self._stopping.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals in the event loop, so that they wake it. Does nothing outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
        for signum in before:
            loop.add_signal_handler(signum, self.stop, signum)
        try:
            yield
        finally:
            for signum, handler in before.items():
                loop.remove_signal_handler(signum)
                signal.signal(signum, handler)

    async def _engine(self) -> None:
        """Load the engines and restart them when they die; raise the error that ends the server."""
        service = self._service
        info = await service.client.load()
        service.on_loaded(info)
        await service.load_modules()
        if service.peers is None:
            log_ready(info, service.model_names, self._url)
        else:
            service.peers.on_ready()
        watching = None if service.adapter_config is None else asyncio.create_task(service.adapter_config.watch())
        try:
            await EngineKeeper(service.client, service.restarts, service).keep()
        finally:
            if watching is not None:
                watching.cancel()

    async def _leave(self, engine: asyncio.Task[None]) -> None:
        """Serve during the grace period, then wait for requests in flight.

        Both together take at most the grace period plus the shutdown timeout. Requests in the grace period restart it,
        but extend it by at most half of the shutdown timeout.
        """
        service, lifecycle = self._service, self._service.lifecycle
        timeout = service.args.frontend.shutdown_timeout
        if self._grace_s:
            logger.info(
                "stopping: accepting requests for another %g s; a second signal skips all waiting", self._grace_s
            )
        clock = asyncio.get_running_loop().time
        grace_ends = clock() + self._grace_s
        end, latest = grace_ends + timeout, grace_ends + timeout / 2
        while await self._wait({engine}, grace_ends - clock()):
            again = min(lifecycle.last_came + self._grace_s, latest)
            if again <= grace_ends:
                break
            grace_ends = again
        lifecycle.closed = True
        for connection in list(self.server_state.connections):
            connection.shutdown()  # immediately if it is idle, else at the end of its response
        remaining_s = end - clock()
        if lifecycle.in_flight:
            logger.info(
                "stopping: %d requests in flight have another %g s to finish; a second signal ends them",
                lifecycle.in_flight,
                round(remaining_s),
            )
        idle = asyncio.create_task(lifecycle.wait_idle())
        await self._wait({engine, idle}, remaining_s)
        idle.cancel()
        if service.running:
            logger.warning("stopping: ending %d requests that are still running", len(service.running))
        for generation in list(service.running):
            generation.fail(UnavailableError("the server is stopping, and ended this request before it was complete"))

    async def _wait(self, tasks: set[asyncio.Task[None]], seconds: float) -> bool:
        """Wait for one of `tasks`, a second signal or the timeout; return whether the timeout came first."""
        hurried = asyncio.create_task(self._hurried.wait())
        try:
            done, _ = await asyncio.wait(
                {*tasks, hurried}, timeout=max(seconds, 0), return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            hurried.cancel()
        return not done


def uvicorn_config(service: Service) -> uvicorn.Config:
    """Return uvicorn's configuration for `service`, and set the filter of its access log.

    Raises:
        ArgumentError: see `create_app`.
    """
    args = service.args.frontend
    skip_paths(args.disable_access_log_for_endpoints)
    config = uvicorn.Config(
        create_app(service),
        http=http_protocol(args),
        ws="none",
        lifespan="off",
        log_config=None,  # the process's own logging
        log_level=args.uvicorn_log_level,
        access_log=not args.disable_uvicorn_access_log,
        # asyncio accepts up to this many connections at once, which other front ends then do not get.
        backlog=_BACKLOG if service.peers is None else 1,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_LAST_WORDS_S,
        date_header=False,  # the connection writes it: uvicorn's own date comes from a periodic tick
        server_header=False,
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        ssl_ca_certs=args.ssl_ca_certs,
        ssl_cert_reqs=args.ssl_cert_reqs,
        ssl_ciphers=args.ssl_ciphers or DEFAULT_CIPHERS,
    )
    config.load()
    return config
