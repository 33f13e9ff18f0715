"""Restarts dead engines, as `restarts` describes, until the server must end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from stoker_common.errors import EngineDeadError, EngineOutOfMemoryError, EngineStuckError
from stoker_engine.server.engine.engine_client import EngineClient
from stoker_engine.server.engine.restarts import Restarts

logger = logging.getLogger(__name__)


class EngineObserver(Protocol):
    """Is notified of deaths and restarts of engines."""

    def on_death(self, engine: int) -> None:
        """Record the death of an engine."""
        ...

    def on_restart(self, engine: int) -> None:
        """Record the start of a restart."""
        ...

    def on_loaded_again(self, engine: int) -> None:
        """Record that a restarted engine is loaded."""
        ...


class EngineKeeper:
    """Keeps the loaded engines of `client` alive.

    Args:
        restarts: the restarts of each engine.
    """

    def __init__(self, client: EngineClient, restarts: Sequence[Restarts], observer: EngineObserver) -> None:
        self._client, self._restarts, self._observer = client, restarts, observer
        self._serves_again = asyncio.Event()  # set briefly whenever a restarted engine serves

    async def keep(self) -> None:
        """Restart engines when they die; raise the error that ends the server."""
        engines = [asyncio.create_task(self._keep(engine)) for engine in range(self._client.num_engines)]
        try:
            await asyncio.gather(*engines)
        finally:
            for task in engines:
                task.cancel()
            for restarts in self._restarts:
                restarts.give_up()

    async def _keep(self, engine: int) -> None:
        """Restart an engine whenever it dies, until it stays dead; raise the error if the server must end."""
        while True:
            death = await self._client.wait_dead(engine)
            if not await self._load_again(engine, type(death)(f"the engine died: {death}")):
                return
            logger.info("serving again%s", self._named(engine))
            self._serves_again.set()
            self._serves_again.clear()

    async def _load_again(self, engine: int, death: EngineDeadError) -> bool:
        """Restart an engine, repeatedly if it dies while loading.

        If no restart is allowed and other engines serve, the engine stays dead. If none serves, wait until another
        engine is restarted, and try again. Raise the death if no engine will be restarted, if memory ran out, or if the
        engine was stuck.

        Returns:
            Whether the engine serves again.
        """
        client, observer = self._client, self._observer
        other_engines = [each for each in range(client.num_engines) if each != engine]
        while True:
            observer.on_death(engine)
            others_serve = any(map(client.serves, other_engines))
            if not self._restarts[engine].allowed(death, others_serve):
                self._restarts[engine].give_up()
                if others_serve:
                    logger.error("not restarting the engine%s: it died too often", self._named(engine))
                    return False
                hopeless = isinstance(death, EngineOutOfMemoryError | EngineStuckError)
                if hopeless or all(self._restarts[each].given_up for each in other_engines):
                    raise death
                await self._serves_again.wait()
                continue
            if self._restarts[engine].are_by_another_process:
                logger.info("waiting for the supervisor to start the engine again%s", self._named(engine))
            elif others_serve:
                logger.warning("loading the engine again%s; other engines serve", self._named(engine))
            else:
                logger.warning("loading the engine again%s; requests wait for it", self._named(engine))
            observer.on_restart(engine)
            try:
                with self._restarts[engine].one():
                    await client.load(engine)
                observer.on_loaded_again(engine)
                return True
            except EngineDeadError as another:
                death = another

    def _named(self, engine: int) -> str:
        """Return a suffix that names the engine in log lines, if there are several engines."""
        num_engines = self._client.num_engines
        return "" if num_engines == 1 else f", engine {engine + 1} of {num_engines} (engine {engine})"
