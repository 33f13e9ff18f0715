"""Registry of the served adapters and their numbers in the engines.

    load ──► loading ──► served ──unload──► drains ──the last request ended──► removed from the engines
                │           └──load in place──► the old number drains, new requests use the new one
                └──► refused, or recorded as failed if --lora-config lists it

A request holds its adapter from submission to its end (`hold`), so a number is never removed while in use. Operations
on one name run one after the other; operations on different names run concurrently.
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

#: Maximum number of concurrent loads of ``--lora-modules`` or ``--lora-config``.
LOADS_AT_ONCE: Final = 8


class Origin(StrEnum):
    """Flag or endpoint by which an adapter is loaded."""

    MODULES = "--lora-modules"
    CONFIG = "--lora-config"
    RUNTIME = "/v1/load_lora_adapter"


class AdapterState(StrEnum):
    """State of an adapter; the label ``state`` of ``stoker:lora_adapters``."""

    LOADED = "loaded"
    LOADING = "loading"
    FAILED = "failed"


@dataclass(eq=False)
class RegisteredAdapter:
    """A loaded adapter that is served or draining; loading its name again creates another.

    Attributes:
        module: the adapter as the user specified it.
        source: the adapter as the engines load it.
        loaded: properties that the engines reported.
        num_requests: number of requests that hold it.
        created: time at which it was loaded, in Unix seconds.
    """

    module: LoRAModule
    source: AdapterSource
    loaded: LoadedAdapter
    origin: Origin
    num_requests: int = 0
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(eq=False)
class AdapterRegistry:
    """The adapters of one server. Used from the event loop only, except `count`.

    Attributes:
        model_names: names of the base model, which adapters must not use.
    """

    client: EngineClient
    model_names: Sequence[str]
    _served: dict[str, RegisteredAdapter] = field(default_factory=dict)
    _draining: set[RegisteredAdapter] = field(default_factory=set)
    _loading: list[tuple[str, Origin]] = field(default_factory=list)  # loads in progress
    _failed: dict[str, str] = field(default_factory=dict)  # adapters of --lora-config that could not be loaded → reason
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _locks: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)

    def __iter__(self) -> Iterator[RegisteredAdapter]:
        """Iterate over the served adapters."""
        return iter(list(self._served.values()))

    def get(self, name: str) -> RegisteredAdapter | None:
        """Return the adapter that is served under a name, or None."""
        return self._served.get(name)

    def count(self, state: AdapterState) -> int:
        """Return the number of adapters in a state. Thread-safe."""
        served = list(self._served.values())
        broken = sum(self.error_of(adapter) is not None for adapter in served)
        if state is AdapterState.LOADED:
            return len(served) - broken
        if state is AdapterState.FAILED:
            return broken + len([name for name in list(self._failed) if name not in self._served])
        return len(self._loading)

    def check(self, name: str) -> None:
        """Check that requests may name an adapter now.

        Raises:
            NotFoundError: no adapter of that name is served or configured.
            NotStartedError: the adapter has failed, or is configured and still loading.
        """
        if (adapter := self._served.get(name)) is not None:
            if (error := self.error_of(adapter)) is not None:
                raise NotStartedError(f"the adapter {name!r} is unavailable: {error}", "model")
        elif (reason := self._failed.get(name)) is not None:
            raise NotStartedError(f"the adapter {name!r} is not served: {reason}", "model")
        elif any((name, origin) in self._loading for origin in (Origin.MODULES, Origin.CONFIG)):
            raise NotStartedError(f"the adapter {name!r} is still loading; retry in a moment", "model")
        else:
            raise NotFoundError(f"there is no adapter {name[:200]!r}", "model", "model_not_found")

    @contextlib.contextmanager
    def hold(self, name: str) -> Iterator[int]:
        """Keep an adapter loaded while a request uses it. Names of the model are valid, too.

        Yields:
            The adapter's number; `NO_ADAPTER` for the model.

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
        """Load an adapter and serve it.

        Args:
            folder: real path of its files; None: `module.path`.
            in_place: whether it may replace an adapter of the same name.

        Raises:
            RequestError: the name is the model's, or that of an adapter that must not be replaced.
            AdapterError: the adapter cannot be loaded; the adapter that it should replace stays.
            EngineDeadError: no engine serves, or all that serve died meanwhile.
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
        """Stop serving an adapter. Requests that use it finish.

        Raises:
            NotFoundError: no adapter of that name is served.
            RequestError: either `origin` or the adapter's origin, but not both, is ``--lora-config``.
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
        """Load the adapters of ``--lora-modules``.

        Raises:
            ArgumentError: an adapter cannot be loaded.
            EngineDeadError: no engine serves, or all that serve died meanwhile.
        """

        async def load(module: LoRAModule) -> None:
            # Resolve the path once: a symlink that changes later must not change the files that are reread after an
            # eviction.
            folder = await asyncio.to_thread(os.path.realpath, module.path)
            try:
                await self.load(module, Origin.MODULES, folder=folder)
            except AdapterError as error:
                raise ArgumentError("--lora-modules", f"{module.name}: {error}") from error

        await at_most(LOADS_AT_ONCE, [load(module) for module in modules])
        order = {module.name: index for index, module in enumerate(modules)}
        self._served = dict(sorted(self._served.items(), key=lambda item: order.get(item[0], len(order))))

    def fail(self, name: str, reason: str) -> None:
        """Record why an adapter of ``--lora-config`` could not be loaded."""
        self._failed[name] = reason

    def keep_failures(self, names: Container[str]) -> None:
        """Forget the failures of all adapters except `names`."""
        self._failed = {name: reason for name, reason in self._failed.items() if name in names}

    def error_of(self, adapter: RegisteredAdapter) -> str | None:
        """Return the error if no serving engine could load an adapter again, else None."""
        return self.client.adapter_error(adapter.source.number)

    def _check_owner(self, name: str, origin: Origin) -> None:
        """Check that only ``--lora-config`` changes its adapters, served or failed, and that it changes no others."""
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
    """Run all of `work`, at most `limit` at a time. The first error cancels the rest."""
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
