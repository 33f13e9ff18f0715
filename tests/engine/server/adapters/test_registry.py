"""Adapters that are loaded and unloaded while requests use them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from stoker_common.errors import AdapterError, ArgumentError, EngineDeadError, NotFoundError, RequestError
from stoker_engine.contract.lora_modules import LoRAModule
from stoker_engine.server.adapters.registry import AdapterRegistry, AdapterState, Origin
from stoker_engine.server.unavailable import NotStartedError

from ....support.waiting import until_async
from ..conftest import FakeEngine

A, B = LoRAModule("a", "/adapters/a"), LoRAModule("b", "/adapters/b")


@pytest.fixture
def registry(engine: FakeEngine) -> AdapterRegistry:
    return AdapterRegistry(engine, ("tiny", "alias"))


def _run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 120))


def _names(registry: AdapterRegistry) -> list[str]:
    return [adapter.module.name for adapter in registry]


def test_each_load_gets_the_next_adapter_number(registry: AdapterRegistry, engine: FakeEngine) -> None:
    async def run() -> None:
        await registry.load(A, Origin.RUNTIME)
        await registry.load(B, Origin.RUNTIME, folder="/real/b")
        with registry.hold("a") as first, registry.hold("b") as second, registry.hold("tiny") as none:
            assert (first, second, none) == (0, 1, -1)
        await registry.unload("a", Origin.RUNTIME)
        await registry.load(A, Origin.RUNTIME)
        with registry.hold("a") as third:
            assert third == 2
        assert [(each.name, each.path) for each in engine.adapters.values()] == [("b", "/real/b"), ("a", "/adapters/a")]

    _run(run())


def test_a_replaced_adapter_stays_until_its_requests_end(registry: AdapterRegistry, engine: FakeEngine) -> None:
    async def run() -> None:
        await registry.load(A, Origin.RUNTIME)
        with registry.hold("a") as old:
            await registry.load(A, Origin.RUNTIME, in_place=True)
            with registry.hold("a") as new:
                assert new != old
                await registry.unload("a", Origin.RUNTIME)
                assert set(engine.adapters) == {old, new}
                with pytest.raises(NotFoundError), registry.hold("a"):
                    pass
            assert set(engine.adapters) == {old}
        assert not engine.adapters

    _run(run())


def test_concurrent_loads_of_a_name_load_it_once(registry: AdapterRegistry, engine: FakeEngine) -> None:
    async def run() -> None:
        engine.adapters_come.clear()
        first, second = (asyncio.create_task(registry.load(A, Origin.RUNTIME)) for _ in range(2))
        await until_async(lambda: engine.adapter_loads)
        assert registry.count(AdapterState.LOADING) == 2
        engine.adapters_come.set()
        await first
        with pytest.raises(RequestError, match="already been loaded"):
            await second
        assert len(engine.adapter_loads) == 1
        assert registry.count(AdapterState.LOADED) == 1
        assert registry.count(AdapterState.LOADING) == 0

    _run(run())


@pytest.mark.parametrize("origin", list(Origin))
def test_an_adapter_cannot_be_used_while_it_loads(
    registry: AdapterRegistry, engine: FakeEngine, origin: Origin
) -> None:
    """A listed adapter will soon be available (503); a client that loads one knows when it is (404)."""

    async def run() -> None:
        engine.adapters_come.clear()
        loading = asyncio.create_task(registry.load(A, origin))
        await until_async(lambda: engine.adapter_loads)
        with pytest.raises(NotFoundError if origin is Origin.RUNTIME else NotStartedError):
            registry.check("a")
        engine.adapters_come.set()
        await loading
        registry.check("a")

    _run(run())


def test_an_unload_during_a_load_leaves_no_adapter(registry: AdapterRegistry, engine: FakeEngine) -> None:
    async def run() -> None:
        engine.adapters_come.clear()
        loading = asyncio.create_task(registry.load(A, Origin.RUNTIME))
        await until_async(lambda: engine.adapter_loads)
        unloading = asyncio.create_task(registry.unload("a", Origin.RUNTIME))
        await asyncio.sleep(0)
        engine.adapters_come.set()
        await asyncio.gather(loading, unloading)
        assert not engine.adapters
        assert not _names(registry)

    _run(run())


@pytest.mark.parametrize("error", [AdapterError("another base model"), EngineDeadError("dead")])
def test_a_failed_load_changes_nothing(registry: AdapterRegistry, engine: FakeEngine, error: Exception) -> None:
    async def run() -> None:
        await registry.load(A, Origin.RUNTIME)
        engine.bad_adapters["other"] = error
        for name, in_place in (("a", True), ("c", False)):
            with pytest.raises(type(error)):
                await registry.load(LoRAModule(name, "/adapters/other"), Origin.RUNTIME, in_place=in_place)
        assert _names(registry) == ["a"]
        assert set(engine.adapters) == {0}
        assert registry.count(AdapterState.FAILED) == 0

    _run(run())


def test_taken_names_are_refused(registry: AdapterRegistry) -> None:
    async def run() -> None:
        for name in ("tiny", "alias"):
            with pytest.raises(RequestError, match="the name of the model itself"):
                await registry.load(LoRAModule(name, "/a"), Origin.RUNTIME)
        await registry.load(A, Origin.MODULES)
        await registry.load(B, Origin.CONFIG)
        with pytest.raises(RequestError, match="taken by an adapter of --lora-modules"):
            await registry.load(A, Origin.CONFIG, in_place=True)
        with pytest.raises(RequestError, match="listed in --lora-config"):
            await registry.load(B, Origin.RUNTIME, in_place=True)
        with pytest.raises(RequestError, match="listed in --lora-config"):
            await registry.unload("b", Origin.RUNTIME)
        await registry.load(A, Origin.RUNTIME, in_place=True)
        await registry.unload("a", Origin.RUNTIME)

    _run(run())


def test_modules_that_fail_to_load_are_named(registry: AdapterRegistry, engine: FakeEngine) -> None:
    async def run() -> None:
        engine.bad_adapters["b"] = AdapterError("it is a pickle")
        with pytest.raises(ArgumentError, match="--lora-modules: b: it is a pickle"):
            await registry.load_modules([A, B])

    _run(run())


def test_modules_keep_their_order(registry: AdapterRegistry, engine: FakeEngine) -> None:
    modules = [LoRAModule(f"a{index}", f"/adapters/{index}") for index in range(30)]
    _run(registry.load_modules(modules))
    assert _names(registry) == [module.name for module in modules]


def test_links_of_modules_are_followed_once(registry: AdapterRegistry, engine: FakeEngine, tmp_path: Path) -> None:
    (tmp_path / "v1").mkdir()
    (tmp_path / "latest").symlink_to("v1")
    _run(registry.load_modules([LoRAModule("a", str(tmp_path / "latest"))]))
    assert [Path(source.path).name for source in engine.adapter_loads] == ["v1"]
    assert [adapter.module.path for adapter in registry] == [str(tmp_path / "latest")]


def test_an_adapter_lost_by_a_restarted_engine_fails(registry: AdapterRegistry, engine: FakeEngine) -> None:
    async def run() -> None:
        await registry.load(A, Origin.RUNTIME)
        engine.lost_adapters[0] = "its files have changed"
        with pytest.raises(NotStartedError, match="its files have changed"):
            registry.check("a")
        assert [registry.count(state) for state in AdapterState] == [0, 0, 1]
        await registry.load(A, Origin.RUNTIME, in_place=True)
        registry.check("a")
        assert [registry.count(state) for state in AdapterState] == [1, 0, 0]

    _run(run())


def test_random_operations_keep_the_engine_and_the_registry_equal(
    registry: AdapterRegistry, engine: FakeEngine
) -> None:
    """Concurrent loads, in-place loads, unloads and requests of few names: used adapters are loaded, and at the end the
    engine has exactly the served adapters.
    """
    rng = random.Random(0)
    engine.bad_adapters["bad"] = AdapterError("bad")

    async def one(name: str) -> None:
        kind = rng.random()
        module = LoRAModule(name, rng.choice(["/good", "/good", "/bad"]))
        try:
            if kind < 0.3:
                await registry.load(module, Origin.RUNTIME, in_place=rng.random() < 0.7)
            elif kind < 0.5:
                await registry.unload(name, Origin.RUNTIME)
            else:
                with ExitStack() as held:
                    numbers = [held.enter_context(registry.hold(name)) for _ in range(rng.randint(1, 2))]
                    for _ in range(rng.randint(0, 5)):
                        assert set(numbers) <= set(engine.adapters)
                        await asyncio.sleep(0)
        except (AdapterError, RequestError):
            pass

    async def run() -> None:
        for _ in range(60):
            await asyncio.gather(*(one(rng.choice("abc")) for _ in range(12)))
            assert sorted(each.name for each in engine.adapters.values()) == sorted(_names(registry))
        assert len(engine.adapter_loads) > 100
        assert registry.count(AdapterState.LOADING) == 0

    _run(run())
