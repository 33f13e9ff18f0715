"""The gateway's first process, whose children are Envoy and the picker.

    stoker gateway ─┬─ Envoy     moves the bytes; its end is the gateway's
                    └─ picker    decides; where it is killed, another begins

Answers under way go through Envoy alone, so the death of a picker does not touch them; requests that come until the
next one serves are refused, with 503 and when to come again. Both end with this process, however that ends.
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

#: Seconds between looks whether the picker listens.
_LOOK_S: Final = 0.02
#: Seconds between the beginnings of two pickers, at least.
_PAUSE_S: Final = 1.0
#: The picker's program. Its arguments are Envoy's folder, this process, how many pickers there were, and the command's.
_PICKER: Final = "stoker_gateway.cli.picker"


async def run(settings: GatewaySettings, model_registry: ModelRegistry | None, argv: Sequence[str]) -> int:
    """Serves until SIGTERM or SIGINT, then lets requests under way end; a second signal ends them.

    Args:
        model_registry: what is served at first; None: nothing yet.
        argv: the command line, which the picker reads again.

    Returns:
        The exit code: the picker's, which has said why.

    Raises:
        GatewayError: Envoy cannot serve, or has ended.
        OSError: a file cannot be written, or the port is taken.
    """
    check_free(settings.host, settings.port)
    with tempfile.TemporaryDirectory(prefix="stoker-") as folder:
        return await _Supervisor(settings, Path(folder), model_registry or ModelRegistry(), argv).run()


class _Supervisor:
    """Envoy and the picker."""

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
        # Whom Envoy does not reach at first it asks again only after a while.
        while not self._settings.envoy(self._folder).picker_socket.exists():  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)
        await self._envoy.start()
        raise EnvoyError(await self._envoy.ended())

    async def _run_pickers(self) -> None:
        """One after another, until one has ended by itself."""
        loop = asyncio.get_running_loop()
        arguments = [str(self._folder), str(os.getpid())]
        for number in count():
            began = loop.time()
            command = [sys.executable, "-m", _PICKER, *arguments, str(number), *self._argv]
            # In a session of its own: signals of a terminal come through this process only.
            self._picker = await asyncio.create_subprocess_exec(*command, start_new_session=True)
            if self._stop.is_set():  # the signal came while there was no picker
                self._picker.terminate()
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
                logger.warning("%s; running requests are completed", cause)
                with suppress(EnvoyError):  # it may not have started
                    await first_of(self._envoy.drain(self._settings.drain_s), self._stop_now.wait())
                return

    def _signalled(self) -> None:
        is_second = self._stop.is_set()
        (self._stop_now if is_second else self._stop).set()
        if self._picker is not None and self._picker.returncode is None:
            # The kernel delivers two equal signals as one where the process has not yet taken the first.
            self._picker.send_signal(signal.SIGINT if is_second else signal.SIGTERM)
