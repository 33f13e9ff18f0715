"""The gateway's process: the picker, the poller, and Envoy as a child."""

from __future__ import annotations

import asyncio
import signal
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from stoker_gateway.directory import Directory
from stoker_gateway.envoy.files import EnvoyFiles
from stoker_gateway.envoy.process import EnvoyProcess
from stoker_gateway.envoy.settings import EnvoySettings
from stoker_gateway.picker.deciding import RequestLimits
from stoker_gateway.picker.server import PickerServer
from stoker_gateway.picking.picker import EndpointPicker
from stoker_gateway.polling import Heard, PollerThread


async def run(directory: Directory, host: str, port: int, max_body_bytes: int, drain_s: float) -> None:
    """Serves until SIGTERM or SIGINT, then lets requests under way end; a second signal ends them.

    Raises:
        GatewayError: a part cannot serve, or has ended by itself.
        OSError: a file cannot be written, or a socket not made.
    """
    stop, stop_now = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, lambda: (stop_now if stop.is_set() else stop).set())
    limits = RequestLimits(max_body_bytes=max_body_bytes)
    pickers = {name: EndpointPicker() for name in directory.endpoints}
    for name, endpoint in directory.endpoints.items():
        pickers[name].set_servers(endpoint.servers, time.monotonic())

    def hear(heard: Heard) -> None:
        for picker in pickers.values():
            if heard.load is None:
                picker.failed(heard.server, time.monotonic())
            else:
                picker.observe(heard.server, heard.load, heard.sent_at, time.monotonic())

    with tempfile.TemporaryDirectory(prefix="stoker-") as folder:
        settings = EnvoySettings(host, port, Path(folder), limits.max_wait_s, max_body_bytes)
        EnvoyFiles(settings).write(directory)
        picker = PickerServer(directory, pickers, limits)
        picker.listen(f"unix:{settings.picker_socket}")
        envoy, poller = EnvoyProcess(settings), PollerThread(hear)
        poller.poller.set_servers(server for endpoint in directory.endpoints.values() for server in endpoint.servers)
        await picker.start()
        poller.start()

        async def serve() -> None:
            await stop.wait()
            await envoy.drain(drain_s)

        try:
            await _first(envoy.start(), stop_now.wait())
            if not stop_now.is_set():
                print(f"stoker gateway: http://{host}:{await envoy.port()}", flush=True)  # noqa: T201
                await _first(envoy.watch(), poller.watch(), serve(), stop_now.wait())
        finally:
            await envoy.end()
            await poller.stop()
            await picker.stop()


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
