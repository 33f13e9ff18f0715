"""The LoRA adapters of all engines of a model. Each serving engine has loaded each adapter, or has an error for it."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Sequence

from stoker_common.errors import AdapterError, EngineDeadError
from stoker_engine.core.adapter import AdapterSource, LoadedAdapter
from stoker_engine.processes.dp_engine import DPEngine
from stoker_engine.processes.engine_pipe import EnginePipe

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class DPAdapter:
    """A LoRA adapter loaded by engines.

    Attributes:
        source: its source, with the digest that all engines must find.
        loaded_by: by engine, the process that has loaded the adapter, or has an error in `errors`.
        errors: by engine, why its process could not load the adapter in `DPAdapters.reload`.
    """

    source: AdapterSource
    loaded: LoadedAdapter
    loaded_by: dict[int, EnginePipe]
    errors: dict[int, str]


class DPAdapters:
    """The adapters of all engines, for one event loop.

    Args:
        check_serving: raises `EngineDeadError` if no engine takes requests.

    Attributes:
        by_number: the adapters that requests may use, by number.
    """

    def __init__(self, engines: Sequence[DPEngine], check_serving: Callable[[], None]) -> None:
        self.by_number: dict[int, DPAdapter] = {}
        self._engines, self._check_serving = engines, check_serving

    async def load(self, source: AdapterSource) -> LoadedAdapter:
        """See `AsyncLLM.load_adapter`."""
        adapter: DPAdapter | None = None
        try:
            while True:  # an engine may be reloaded meanwhile
                self._check_serving()
                loaded_by = {} if adapter is None else adapter.loaded_by
                missing = [e for e in self._engines if e.takes_requests and loaded_by.get(e.number) is not e.process]
                if adapter is not None and not missing:
                    self.by_number[source.number] = adapter
                    return adapter.loaded
                adapter = await self._load_into(missing, adapter, source)
        except BaseException:  # also if the caller was cancelled
            for engine in self._engines:
                engine.remove_adapter(source.number)
            raise

    async def reload(self, engine: DPEngine) -> None:
        """Load all adapters into an engine that was loaded, for the first time or again. The error of an adapter that
        cannot be loaded is logged, and added to its `errors`.

        Raises:
            EngineDeadError: the engine died meanwhile.
        """
        for adapter in self.by_number.values():
            adapter.errors.pop(engine.number, None)

        async def load(adapter: DPAdapter) -> None:
            try:
                await engine.load_adapter(adapter.source)
            except AdapterError as error:
                adapter.errors[engine.number] = str(error)
                name = engine.name or "the engine"
                logger.error("%s was reloaded without LoRA adapter %s: %s", name, adapter.source.name, error)
            adapter.loaded_by[engine.number] = engine.process

        while missing := [a for a in self.by_number.values() if a.loaded_by.get(engine.number) is not engine.process]:
            await asyncio.gather(*map(load, missing))

    def remove(self, number: int) -> None:
        """See `AsyncLLM.remove_adapter`."""
        if self.by_number.pop(number, None) is not None:
            for engine in self._engines:
                engine.remove_adapter(number)

    def error_of(self, number: int) -> str | None:
        """See `AsyncLLM.adapter_error`."""
        adapter = self.by_number.get(number)
        if adapter is None or not adapter.errors:
            return None
        errors = [adapter.errors.get(engine.number) for engine in self._engines if engine.takes_requests]
        return errors[0] if errors and None not in errors else None

    async def _load_into(
        self, engines: Sequence[DPEngine], adapter: DPAdapter | None, source: AdapterSource
    ) -> DPAdapter:
        """Load an adapter into engines, and return it. Engines that die meanwhile are skipped.

        Args:
            adapter: the adapter as loaded by other engines; None: no engine has loaded it yet.
        """
        processes = [engine.process for engine in engines]
        expected = source if adapter is None else adapter.source
        loads = [engine.load_adapter(expected) for engine in engines]
        results = await asyncio.gather(*loads, return_exceptions=True)
        for error in results:
            if isinstance(error, BaseException) and not isinstance(error, EngineDeadError):
                raise error
        for engine, process, loaded in zip(engines, processes, results, strict=True):
            if isinstance(loaded, BaseException):
                continue
            if adapter is None:
                adapter = DPAdapter(dataclasses.replace(source, digest=loaded.digest), loaded, {}, {})
            elif loaded.digest != adapter.source.digest:
                raise AdapterError(
                    f"the files of LoRA adapter {source.name} in {source.path} changed while it was loaded"
                )
            adapter.loaded_by[engine.number] = process
        if adapter is None:  # all engines died
            raise next(error for error in results if isinstance(error, EngineDeadError))
        return adapter
