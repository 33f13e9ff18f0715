"""The gateway's process: the picker, the poller, and Envoy as a child."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final

from prometheus_client import CollectorRegistry

from stoker_gateway.directory import Directory
from stoker_gateway.envoy.ended_log import FLUSH_S, WRITTEN
from stoker_gateway.envoy.files import EnvoyFiles
from stoker_gateway.envoy.process import EnvoyProcess
from stoker_gateway.envoy.settings import EnvoySettings
from stoker_gateway.hearing import ended_listener, listener, settler
from stoker_gateway.keys.key_file import KeyFile
from stoker_gateway.keys.keyring import Keyring
from stoker_gateway.limits.limiter import LocalLimiter
from stoker_gateway.limits.peers import Peers, PeerSettings
from stoker_gateway.metrics_server import MetricsServer
from stoker_gateway.picker.deciding import RequestLimits
from stoker_gateway.picker.server import PickerServer
from stoker_gateway.picking.picker import EndpointPicker
from stoker_gateway.polling import Heard, PollerThread
from stoker_gateway.server_watch import ServerWatch
from stoker_gateway.usage.access_log_service import AccessLogService
from stoker_gateway.usage.billing import STDOUT, BillingLog
from stoker_gateway.usage.metrics import UsageMetrics

logger = logging.getLogger(__name__)

#: For how many seconds in the end Envoy may tell of requests that ended.
_TOLD_S: Final = 10.0


async def run(
    directory: Directory,
    host: str,
    port: int,
    max_body_bytes: int,
    drain_s: float,
    *,
    keys: KeyFile | None = None,
    peers: PeerSettings | None = None,
    metrics_port: int | None = None,
    access_log: bool = False,
    billing_log: str | None = None,
    json_log: bool = False,
) -> None:
    """Serves until SIGTERM or SIGINT, then lets requests under way end; a second signal ends them.

    Args:
        host, port: where clients are served; an IP address, and port 0 is one that is free.
        max_body_bytes: of a request.
        drain_s: how long requests under way may take in the end.
        keys: of clients; None: anyone may use all models.
        peers: the other replicas, with which the keys' limits are shared; None: there are none.
        metrics_port: of /metrics, on the same host; None: nowhere.
        access_log: whether each request is told on standard output.
        billing_log: the file for lines about the tokens of requests; ``-``: standard output; None: nowhere.
        json_log: whether Envoy's log is JSON.

    Raises:
        GatewayError: a part cannot serve, or has ended by itself.
        OSError: a file cannot be written, or a socket not made.
    """
    check_free(host, port)
    stop, stop_now = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, lambda: (stop_now if stop.is_set() else stop).set())
    limits = RequestLimits(max_body_bytes=max_body_bytes)
    identity = f"{socket.gethostname()} {os.getpid()}"
    pickers = {name: EndpointPicker(identity=identity) for name in directory.endpoints}
    for name, endpoint in directory.endpoints.items():
        pickers[name].set_servers(endpoint.servers, time.monotonic())

    watch, registry = ServerWatch(directory), CollectorRegistry()
    with tempfile.TemporaryDirectory(prefix="stoker-") as folder:
        settings = EnvoySettings(
            host, port, Path(folder), limits.max_wait_s, max_body_bytes, access_log=access_log, json_log=json_log
        )
        EnvoyFiles(settings).write(directory)
        shared = None if peers is None else Peers(peers)
        limiter = LocalLimiter() if shared is None else shared.limiter
        picker = PickerServer(
            directory,
            pickers,
            limits,
            registry,
            keyring=None if keys is None else keys.keyring,
            limiter=limiter,
        )
        picker.listen(f"unix:{settings.picker_socket}")
        usage = UsageMetrics(registry, () if keys is None else keys.keyring.keys)
        billing = None if billing_log is None else BillingLog(billing_log)
        hearers = [ended_listener(pickers, picker.wake), settler(limiter), usage.ended]
        ends = AccessLogService([*hearers, *([] if billing is None else [billing.ended])])
        picker.serve_also(ends.register)
        tell = listener(directory, pickers, picker.wake)

        def hear(heard: Heard) -> None:
            watch.heard(heard)
            tell(heard)

        envoy, poller = EnvoyProcess(settings), PollerThread(hear)
        poller.poller.set_servers(server for endpoint in directory.endpoints.values() for server in endpoint.servers)
        metrics = None if metrics_port is None else MetricsServer(registry, envoy.prometheus, host, metrics_port)
        await picker.start()
        poller.start()

        async def serve() -> None:
            await stop.wait()
            await envoy.drain(drain_s)
            await _all_told(envoy, ends)

        def set_keyring(keyring: Keyring) -> None:
            picker.set_keyring(keyring)
            usage.set_keys(keyring.keys)

        try:
            if shared is not None:
                await shared.start()
            if metrics is not None:
                check_free(host, metrics_port or 0)
                logger.info("metrics at http://%s/metrics", netloc(host, await metrics.start()))
            await _first(envoy.start(), stop_now.wait())
            if not stop_now.is_set():
                at = netloc(host, await envoy.port())
                if not access_log and billing_log != STDOUT:  # else nothing but that is on standard output
                    print(f"stoker gateway: http://{at}", flush=True)  # noqa: T201
                logger.info("http://%s serves %s", at, _said(directory))
                works = [envoy.watch(), poller.watch(), serve(), stop_now.wait()]
                works += [] if keys is None else [keys.watch(set_keyring)]
                works += [] if shared is None else [shared.watch()]
                await _first(*works)
        finally:
            await envoy.end()
            if metrics is not None:
                await metrics.stop()
            await poller.stop()
            await picker.stop()
            if shared is not None:
                await shared.stop()
            if billing is not None:
                await asyncio.to_thread(billing.close)


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


async def _all_told(envoy: EnvoyProcess, ends: AccessLogService) -> None:
    """Waits until Envoy has told of all requests that ended: it sends them a little later, and would forget them."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _TOLD_S
    while ends.received < await envoy.statistic(WRITTEN) and loop.time() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(FLUSH_S)


def _said(directory: Directory) -> str:
    counts = {name: len(endpoint.servers) for name, endpoint in directory.endpoints.items()}
    return ", ".join(f"{name} by {count} server{'s' * (count != 1)}" for name, count in counts.items())


async def _first(*works: Coroutine[Any, Any, object]) -> None:
    """Waits for the first that ends, ends the others, and raises what it raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
