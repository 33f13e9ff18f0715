"""The gateway's process: the picker, the poller, and Envoy as a child."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import tempfile
import time
from pathlib import Path

from stoker_gateway.directory import Directory
from stoker_gateway.envoy.files import EnvoyFiles
from stoker_gateway.envoy.process import EnvoyError, EnvoyProcess
from stoker_gateway.envoy.settings import EnvoySettings
from stoker_gateway.hearing import listener
from stoker_gateway.picker.deciding import RequestLimits
from stoker_gateway.picker.server import PickerServer
from stoker_gateway.picking.picker import EndpointPicker
from stoker_gateway.polling import PollerThread


async def run(directory: Directory, host: str, port: int, max_body_bytes: int, drain_s: float) -> None:
    """Serves until SIGTERM or SIGINT, then lets requests under way end.

    Raises:
        EnvoyError: Envoy cannot serve, or has ended by itself.
        OSError: a file cannot be written, or a socket not made.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    limits = RequestLimits(max_body_bytes=max_body_bytes)
    identity = f"{socket.gethostname()} {os.getpid()}"
    pickers = {name: EndpointPicker(identity=identity) for name in directory.endpoints}
    for name, endpoint in directory.endpoints.items():
        pickers[name].set_servers(endpoint.servers, time.monotonic())

    with tempfile.TemporaryDirectory(prefix="stoker-") as folder:
        settings = EnvoySettings(host, port, Path(folder), limits.max_wait_s, max_body_bytes)
        EnvoyFiles(settings).write(directory)
        picker = PickerServer(directory, pickers, limits)
        picker.listen(f"unix:{settings.picker_socket}")
        envoy, poller = EnvoyProcess(settings), PollerThread(listener(directory, pickers, picker.wake))
        poller.poller.set_servers(server for endpoint in directory.endpoints.values() for server in endpoint.servers)
        await picker.start()
        poller.start()
        try:
            await envoy.start()
            print(f"stoker gateway: http://{host}:{await envoy.port()}", flush=True)  # noqa: T201
            ended, asked = asyncio.create_task(envoy.ended()), asyncio.create_task(stop.wait())
            await asyncio.wait({ended, asked}, return_when=asyncio.FIRST_COMPLETED)
            asked.cancel()
            if ended.done():
                raise EnvoyError(ended.result())
            await envoy.drain(drain_s)
        finally:
            await envoy.end()
            await poller.stop()
            await picker.stop()
