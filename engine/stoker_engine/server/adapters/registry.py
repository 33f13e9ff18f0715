"""Which adapters are served, and under which number the engines know them.

    load ──► loading ──► served ──unload──► drains ──the last request ended──► removed from the engines
                │           └──load in place──► the old number drains, new requests use the new one
                └──► refused, or failed where it ought to be served

A request holds its adapter from when it is submitted to its end (`hold`), so a number is never removed under it.
Operations on one name run one after the other, those on different names side by side.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import time
from collections.abc import Container, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final
from weakref import WeakValueDictionary

from stoker_common.errors import AdapterError, ArgumentError, NotFoundError, RequestError
from stoker_engine.contract.lora_modules import LoRAModule
from stoker_engine.core.adapter import NO_ADAPTER, AdapterSource, LoadedAdapter
from stoker_engine.server.engine.engine_client import EngineClient
from stoker_engine.server.unavailable import NotStartedError

logger = logging.getLogger(__name__)

#: Most adapters that are loaded at the same time, where many are to be.
LOADS_AT_ONCE: Final = 8


class Origin(StrEnum):
    """What asked for an adapter."""

    MODULES = "--lora-modules"
    CONFIG = "--lora-config"
    RUNTIME = "/v1/load_lora_adapter"


class AdapterState(StrEnum):
    """How an adapter that ought to be served does; a label of ``stoker:lora_adapters``."""

    LOADED = "loaded"
    LOADING = "loading"
    FAILED = "failed"


@dataclass(eq=False)
class RegisteredAdapter:
    """An adapter that is served, or drains: one load of it.

    Attributes:
        module: its name and its path, as they were given.
        source: as the engines know it.
        loaded: what the engines found in its files.
        num_requests: that hold it.
        created: when it was loaded, in Unix seconds.
    """

    module: LoRAModule
    source: AdapterSource
    loaded: LoadedAdapter
    origin: Origin
    num_requests: int = 0
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(eq=False)
class AdapterRegistry:
    """The adapters of one server. Used from the event loop only, `count` excepted.

    Attributes:
        model_names: the base model's, which no adapter may have.
    """

    client: EngineClient
    model_names: Sequence[str]
    _served: dict[str, RegisteredAdapter] = field(default_factory=dict)
    _draining: set[RegisteredAdapter] = field(default_factory=set)
    _loading: list[tuple[str, Origin]] = field(default_factory=list)  # loads that have not ended
    _failed: dict[str, str] = field(default_factory=dict)  # names that ought to be served → why they are not
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _locks: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)

    def __iter__(self) -> Iterator[RegisteredAdapter]:
        """Those that are served, in the order they were loaded."""
        return iter(list(self._served.values()))

    def get(self, name: str) -> RegisteredAdapter | None:
        """The adapter that is served under a name."""
        return self._served.get(name)

    def count(self, state: AdapterState) -> int:
        """How many adapters are in a state. Any thread may ask."""
        served = list(self._served.values())
        broken = sum(self.error_of(adapter) is not None for adapter in served)
        if state is AdapterState.LOADED:
            return len(served) - broken
        if state is AdapterState.FAILED:
            return broken + len([name for name in list(self._failed) if name not in self._served])
        return len(self._loading)

    def check(self, name: str) -> None:
        """Checks that requests may name an adapter now.

        Raises:
            NotFoundError: there is none of that name.
            NotStartedError: it ought to be served, and is being loaded, or failed.
        """
        if (adapter := self._served.get(name)) is not None:
            if (error := self.error_of(adapter)) is not None:
                raise NotStartedError(f"the adapter {name!r} cannot be served now: {error}", "model")
        elif (reason := self._failed.get(name)) is not None:
            raise NotStartedError(f"the adapter {name!r} is not served: {reason}", "model")
        elif any((name, origin) in self._loading for origin in (Origin.MODULES, Origin.CONFIG)):
            raise NotStartedError(f"the adapter {name!r} is being loaded; try again in a moment", "model")
        else:
            raise NotFoundError(f"there is no adapter {name[:200]!r}", "model", "model_not_found")

    @contextlib.contextmanager
    def hold(self, name: str) -> Iterator[int]:
        """Keeps an adapter, or the model itself, while a request uses it.

        Yields:
            its number.

        Raises:
            NotFoundError, NotStartedError: see `check`.
        """
        if name in self.model_names:
            yield NO_ADAPTER
            return
        self.check(name)
        adapter = self._served[name]
        adapter.num_requests += 1
        try:
            yield adapter.source.number
        finally:
            adapter.num_requests -= 1
            self._remove_if_drained(adapter)

    async def load(
        self, module: LoRAModule, origin: Origin, *, folder: str | None = None, in_place: bool = False
    ) -> RegisteredAdapter:
        """Loads an adapter and serves it.

        Args:
            folder: the real path of its files, where that is not the path that was given.
            in_place: it takes the place of the one of that name, if there is one, once it is loaded.

        Raises:
            RequestError: its name is the model's, or another adapter's.
            AdapterError: it cannot be loaded; what was served goes on.
            EngineDeadError: the engine died.
        """
        name = module.name
        if name in self.model_names:
            raise RequestError(f"{name!r} is the name of the model itself; choose another", "lora_name")
        with self._counted(name, origin):
            async with self._lock(name):
                before = self._served.get(name)
                self._check_owner(name, origin)
                if before is not None and not in_place:
                    raise RequestError(
                        f"the lora adapter {name!r} has already been loaded; set load_inplace to true to load it again",
                        "lora_name",
                    )
                source = AdapterSource(next(self._numbers), name, folder or module.path)
                loaded = await self.client.load_adapter(source)
                adapter = RegisteredAdapter(module, source, loaded, origin)
                self._served[name] = adapter
                if origin is Origin.CONFIG:
                    self._failed.pop(name, None)
                if before is not None:
                    self._drain(before)
                logger.info(
                    "loaded the LoRA adapter %s from %s in %.3f s: rank %d, %.1f MB",
                    name,
                    module.path,
                    loaded.seconds,
                    loaded.rank,
                    loaded.num_bytes / 1e6,
                )
                return adapter

    async def unload(self, name: str, origin: Origin) -> None:
        """Serves an adapter no longer. Requests that use it finish.

        Raises:
            NotFoundError: there is none of that name.
            RequestError: ``--lora-config`` lists it.
        """
        async with self._lock(name):
            self._check_owner(name, origin)
            adapter = self._served.get(name)
            if adapter is None:
                raise NotFoundError(f"the lora adapter {name[:300]!r} cannot be found", "lora_name")
            del self._served[name]
            self._drain(adapter)
            logger.info("unloaded the LoRA adapter %s", name)

    async def load_modules(self, modules: Sequence[LoRAModule]) -> None:
        """Loads the adapters of ``--lora-modules``.

        Raises:
            ArgumentError: one cannot be loaded.
            EngineDeadError: the engine died.
        """

        async def load(module: LoRAModule) -> None:
            # A link that leads elsewhere later must not change what is read again after an eviction.
            folder = await asyncio.to_thread(os.path.realpath, module.path)
            try:
                await self.load(module, Origin.MODULES, folder=folder)
            except AdapterError as error:
                raise ArgumentError("--lora-modules", f"{module.name}: {error}") from error

        await at_most(LOADS_AT_ONCE, [load(module) for module in modules])
        order = {module.name: index for index, module in enumerate(modules)}
        self._served = dict(sorted(self._served.items(), key=lambda item: order.get(item[0], len(order))))

    def fail(self, name: str, reason: str) -> None:
        """Takes down why an adapter that ought to be served is not."""
        self._failed[name] = reason

    def keep_failures(self, names: Container[str]) -> None:
        """Forgets failures of adapters that need not be served any more."""
        self._failed = {name: reason for name, reason in self._failed.items() if name in names}

    def error_of(self, adapter: RegisteredAdapter) -> str | None:
        """Why an adapter that was served is not any more: an engine that was restarted cannot load it."""
        return self.client.adapter_error(adapter.source.number)

    def _check_owner(self, name: str, origin: Origin) -> None:
        """Only the file that lists an adapter, served or failed, changes it: else the two would disagree."""
        adapter = self._served.get(name)
        if adapter is not None:
            owner = adapter.origin
        elif name in self._failed:
            owner = Origin.CONFIG
        else:
            return
        if Origin.CONFIG in (owner, origin) and owner is not origin:
            if owner is Origin.CONFIG:
                raise RequestError(f"the adapter {name!r} is listed in --lora-config; change it there", "lora_name")
            raise RequestError(f"the name {name!r} is taken by an adapter of {owner}", "lora_name")

    def _drain(self, adapter: RegisteredAdapter) -> None:
        self._draining.add(adapter)
        self._remove_if_drained(adapter)

    def _remove_if_drained(self, adapter: RegisteredAdapter) -> None:
        if adapter in self._draining and not adapter.num_requests:
            self._draining.remove(adapter)
            self.client.remove_adapter(adapter.source.number)

    @contextlib.contextmanager
    def _counted(self, name: str, origin: Origin) -> Iterator[None]:
        self._loading.append((name, origin))
        try:
            yield
        finally:
            self._loading.remove((name, origin))

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())


async def at_most(limit: int, work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Does all of `work`, so many at a time. The first error ends the rest."""
    slots = asyncio.Semaphore(limit)

    async def one(each: Coroutine[Any, Any, None]) -> None:
        async with slots:
            await each

    tasks = [asyncio.ensure_future(one(each)) for each in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
