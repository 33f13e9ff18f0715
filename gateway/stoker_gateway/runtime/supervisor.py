"""The gateway's main process, which supervises Envoy and the picker.

    stoker gateway ─┬─ Envoy     forwards requests; if it exits, the gateway exits
                    └─ picker    routes requests; if it is killed, it is restarted

Responses in progress pass through Envoy alone, so the death of the picker does not affect them. Requests that arrive
until the next picker is ready get status 503 with Retry-After, or with `fail_open` go to any server. The kernel kills
both processes if this one dies.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Final, NoReturn

from stoker_common.subprocesses.death import cause_of_death
from stoker_gateway.envoy.admin import EnvoyError
from stoker_gateway.envoy.files import EnvoyFiles
from stoker_gateway.envoy.process import EnvoyProcess
from stoker_gateway.registry.addresses import check_free
from stoker_gateway.registry.model_registry import ModelRegistry
from stoker_gateway.settings import GatewaySettings
from stoker_gateway.tasks import first_of

logger = logging.getLogger(__name__)

#: Interval of checks whether the picker's socket exists, in seconds.
_CHECK_INTERVAL_S: Final = 0.02
#: Minimum time between the starts of two pickers, in seconds.
_PAUSE_S: Final = 1.0
#: The picker's module. Its arguments are Envoy's folder, the id of this process, the number of earlier pickers, and the
#: arguments of the command.
_PICKER: Final = "stoker_gateway.cli.picker"


async def run(settings: GatewaySettings, model_registry: ModelRegistry | None, argv: Sequence[str]) -> int:
    """Run the gateway until SIGTERM or SIGINT, then wait up to `settings.drain_s` seconds for active requests; a second
    signal aborts them.

    Args:
        model_registry: models to serve at the start; None means that the models are not known yet.
        argv: command line, which the picker parses again.

    Returns:
        The exit code of the picker, which reports the cause of a failure; 0 if it was killed at shutdown.

    Raises:
        GatewayError: Envoy cannot serve, or has exited.
        OSError: a file cannot be written, or the address cannot be bound.
    """
    check_free(settings.host, settings.port)
    with tempfile.TemporaryDirectory(prefix="stoker-") as folder:
        return await _Supervisor(settings, Path(folder), model_registry or ModelRegistry(), argv).run()


class _Supervisor:
    """Runs Envoy and the picker."""

    def __init__(
        self, settings: GatewaySettings, folder: Path, model_registry: ModelRegistry, argv: Sequence[str]
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._argv = argv
        self._stop, self._stop_now = asyncio.Event(), asyncio.Event()
        self._picker: asyncio.subprocess.Process | None = None
        self._code = 0
        envoy = settings.envoy(folder)
        EnvoyFiles(envoy).write(model_registry)
        self._envoy = EnvoyProcess(envoy)

    async def run(self) -> int:
        """See `run`."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._signalled)
        try:
            await first_of(self._run_envoy(), self._run_pickers())
            return self._code
        finally:
            if self._picker is not None and self._picker.returncode is None:
                self._picker.kill()
                await self._picker.wait()
            await self._envoy.end()

    async def _run_envoy(self) -> NoReturn:
        # Envoy starts after the picker's socket exists, because it would retry a failed connection only later.
        while not self._settings.envoy(self._folder).picker_socket.exists():  # noqa: ASYNC110
            await asyncio.sleep(_CHECK_INTERVAL_S)
        await self._envoy.start()
        raise EnvoyError(await self._envoy.ended())

    async def _run_pickers(self) -> None:
        """Run the picker, and restart it if it is killed, until it exits by itself or the gateway stops."""
        loop = asyncio.get_running_loop()
        arguments = [str(self._folder), str(os.getpid())]
        for number in count():
            began = loop.time()
            command = [sys.executable, "-m", _PICKER, *arguments, str(number), *self._argv]
            # In a new session, so that signals of the terminal reach only this process, which forwards them.
            self._picker = await asyncio.create_subprocess_exec(*command, start_new_session=True)
            if self._stop.is_set():  # the signal came while there was no picker
                _send(self._picker, signal.SIGTERM)
            code = await self._picker.wait()
            if code >= 0:
                self._code = code
                return
            cause = cause_of_death(code, None, killed_for_memory=False, subject="the picker").message
            if not self._stop.is_set():
                until = "are rejected" if self._settings.fail_open is None else "go to any server"
                logger.error("%s; a new picker is started, and requests %s until it is ready", cause, until)
                await asyncio.sleep(began + _PAUSE_S - loop.time())
            if self._stop.is_set():
                logger.warning("%s; the gateway waits for active requests to end", cause)
                with suppress(EnvoyError):  # Envoy may not have started
                    await first_of(self._envoy.drain(self._settings.drain_s), self._stop_now.wait())
                return

    def _signalled(self) -> None:
        is_second = self._stop.is_set()
        (self._stop_now if is_second else self._stop).set()
        if self._picker is not None and self._picker.returncode is None:
            # Send a different second signal, because the kernel merges two equal pending signals.
            _send(self._picker, signal.SIGINT if is_second else signal.SIGTERM)


def _send(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """Send a signal to a process; does nothing if it has ended.

    `Process.send_signal` also waits for a process that has just ended. asyncio then loses its exit status
    (https://github.com/python/cpython/issues/87744), and the gateway would end instead of waiting for active requests.
    """
    with suppress(ProcessLookupError):
        os.kill(process.pid, number)
