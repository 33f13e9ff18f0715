"""All engines of a model have the same adapters, including restarted ones.

Faked: the model and its adapters, in `crashing_engine.py`. Real: processes, pipes, schedulers.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from stoker_common.errors import AdapterError, EngineDeadError, RequestError, RequestFailedError
from stoker_engine import SamplingParams
from stoker_engine.async_llm import AsyncLLM
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.core.adapter import AdapterSource, LoadedAdapter, root_key
from stoker_engine.core.step_report import StepReport
from stoker_engine.processes.dp_engines import DPEngines

from ...support.waiting import until_async

ENGINE = Path(__file__).with_name("crashing_engine.py")
LOADED = LoadedAdapter("content", 8, 100, 0.5)


def write(path: Path, text: str) -> None:
    """Replace a file's content atomically: an engine may be reading it."""
    beside = path.with_suffix(".new")
    beside.write_text(text)
    beside.replace(path)


@asynccontextmanager
async def running(model: Path, folder: Path, engines: int = 1, **options: int) -> AsyncIterator[AsyncLLM]:
    args = EngineArgs(str(model), enable_lora=True, data_parallel_size=engines, **options)  # type: ignore[arg-type]
    llm = AsyncLLM(args, program=(str(ENGINE), str(folder)))
    try:
        async with asyncio.timeout(120):
            await llm.load()
            yield llm
    finally:
        llm.shutdown()


async def tokens(llm: AsyncLLM, adapter: int, name: str = "r", max_tokens: int = 6) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    stream = llm.generate(name, [5, 6, 7], params, adapter=adapter)
    return [token async for delta in stream for token in delta.token_ids]


def source(number: int, path: str = "a") -> AdapterSource:
    return AdapterSource(number, f"adapter {number}", path)


async def kill(llm: AsyncLLM, engine: int = 0) -> None:
    os.kill(llm.engines[engine].process.pid, signal.SIGKILL)
    await llm.wait_dead(engine)


@pytest.fixture
def run(tiny_llama: Path, tmp_path: Path) -> Callable[..., None]:
    """Run a test with a client."""

    def run(test: Callable[[AsyncLLM], Awaitable[None]], engines: int = 1, **options: int) -> None:
        async def main() -> None:
            async with running(tiny_llama, tmp_path, engines, **options) as llm:
                await test(llm)

        asyncio.run(main())

    return run


def test_one_engine_loads_uses_and_drops_adapters(run: Callable[..., None], tmp_path: Path) -> None:
    """Starting processes takes seconds, so these checks share them."""
    write(tmp_path / "a", "content")
    write(tmp_path / "bad", "wrong: a rank of 99")

    async def test(llm: AsyncLLM) -> None:
        for check in (
            requests_use_loaded_adapters,
            prefixes_are_cached_per_load_of_an_adapter,
            a_cancelled_load_leaves_nothing,
        ):
            await check(llm, tmp_path)

    run(test)


async def requests_use_loaded_adapters(llm: AsyncLLM, folder: Path) -> None:
    reports: list[StepReport] = []
    llm.on_step = reports.append
    with pytest.raises(AdapterError, match=r"^a rank of 99$"):
        await llm.load_adapter(source(0, "bad"))
    assert await llm.load_adapter(source(1)) == LOADED
    assert [token % 2 for token in await tokens(llm, 1)] == [1] * 6
    assert [token % 2 for token in await tokens(llm, -1)] == [0] * 6
    with pytest.raises(RequestError, match="is not loaded"):
        await tokens(llm, 0)
    stats = reports[-1].stats.adapters
    assert stats is not None and (stats.loads, stats.failures) == (1, 1)
    assert sum(len(report.stats.adapters.load_seconds) for report in reports if report.stats.adapters) == 1
    llm.remove_adapter(1)
    with pytest.raises(RequestError, match="is not loaded"):
        await tokens(llm, 1)
    await until_async(lambda: dropped(folder) == [1])


async def prefixes_are_cached_per_load_of_an_adapter(llm: AsyncLLM, folder: Path) -> None:
    await llm.load_adapter(source(2))
    await llm.load_adapter(source(3))
    params = SamplingParams(max_tokens=1)
    cached = {}
    for name, adapter in (("a", 2), ("b", 2), ("c", 3), ("d", 3), ("e", -1), ("f", -1), ("g", 2)):
        async for delta in llm.generate(name, list(range(5, 40)), params, adapter=adapter):
            cached[name] = delta.num_cached_tokens
    assert cached == {"a": 0, "b": 32, "c": 0, "d": 32, "e": 0, "f": 32, "g": 32}
    assert root_key(1, "ab") != root_key(2, "ab") != root_key(1, "cd")


async def a_cancelled_load_leaves_nothing(llm: AsyncLLM, folder: Path) -> None:
    write(folder / "slow", "wait")
    loading = asyncio.create_task(llm.load_adapter(source(4, "slow")))
    await until_async(lambda: 4 in llm.engines[0]._adapter_loads)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert len(await tokens(llm, -1)) == 6
    write(folder / "slow", "content")
    await until_async(lambda: 4 in dropped(folder))
    assert 4 not in llm.adapters and not llm.engines[0]._adapter_loads


def dropped(folder: Path) -> list[int]:
    """Return the adapters that an engine's runner has dropped."""
    file = folder / "dropped"
    return [int(number) for number in file.read_text().split()] if file.exists() else []


@pytest.mark.parametrize("engines", [1, 2])
def test_a_restarted_engine_has_its_adapters(engines: int, run: Callable[..., None], tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path / name, "content")

    async def test(llm: AsyncLLM) -> None:
        for number, path in ((1, "a"), (2, "b"), (3, "a")):
            await llm.load_adapter(source(number, path))
        llm.remove_adapter(3)
        await kill(llm)
        write(tmp_path / "b", "other content")
        await llm.load(0)
        assert llm.serves(0)
        assert llm.adapter_error(1) is None
        assert llm.adapters[2].errors.keys() == {0} and "adapter 2 in b have changed" in llm.adapters[2].errors[0]
        for index in range(6):
            assert [token % 2 for token in await tokens(llm, 1, f"r{index}")] == [1] * 6
        if engines == 1:
            assert "have changed" in (llm.adapter_error(2) or "")
            with pytest.raises(RequestFailedError, match="have changed"):
                await tokens(llm, 2)
        else:  # the other engine has it
            assert llm.adapter_error(2) is None
            for index in range(6):
                assert [token % 2 for token in await tokens(llm, 2, f"s{index}")] == [1] * 6
        write(tmp_path / "b", "content")
        await kill(llm)
        await llm.load(0)
        assert not llm.adapters[2].errors and len(await tokens(llm, 2)) == 6

    run(test, engines)


def test_an_adapter_is_loaded_by_all_engines_or_none(run: Callable[..., None], tmp_path: Path) -> None:
    write(tmp_path / "a", "content")
    write(tmp_path / "a-1", "wrong: no such file here")

    async def test(llm: AsyncLLM) -> None:
        with pytest.raises(AdapterError, match=r"^no such file here$"):
            await llm.load_adapter(source(1))
        await until_async(lambda: (tmp_path / "dropped").exists())
        assert not llm.adapters
        write(tmp_path / "a-1", "other content")
        with pytest.raises(AdapterError, match="changed while it was loaded"):
            await llm.load_adapter(source(2))
        write(tmp_path / "a-1", "content")
        assert await llm.load_adapter(source(3)) == LOADED

    run(test, engines=2)


def test_an_engine_that_dies_during_a_load_has_the_adapter_after_its_restart(
    run: Callable[..., None], tmp_path: Path
) -> None:
    write(tmp_path / "a", "content")
    write(tmp_path / "a-1", "wait")

    async def test(llm: AsyncLLM) -> None:
        loading = asyncio.create_task(llm.load_adapter(source(1)))
        await until_async(lambda: 1 in llm.engines[1]._adapter_loads)
        await kill(llm, 1)
        assert await loading == LOADED
        (tmp_path / "a-1").unlink()
        await llm.load(1)
        await kill(llm, 0)
        assert [token % 2 for token in await tokens(llm, 1)] == [1] * 6
        await kill(llm, 1)
        with pytest.raises(EngineDeadError):
            await llm.load_adapter(source(2))

    run(test, engines=2)


def test_adapters_loaded_during_a_restart_reach_the_restarted_engine(run: Callable[..., None], tmp_path: Path) -> None:
    """The restarted engine has the adapter before it accepts requests."""
    for name in "ab":
        write(tmp_path / name, "content")

    async def test(llm: AsyncLLM) -> None:
        await llm.load_adapter(source(1, "a"))
        await kill(llm, 1)
        write(tmp_path / "a-1", "wait")
        back = asyncio.create_task(llm.load(1))
        await until_async(lambda: 1 in llm.engines[1]._adapter_loads)
        await llm.load_adapter(source(2, "b"))
        assert not llm.serves(1)
        write(tmp_path / "a-1", "content")
        await back
        await kill(llm, 0)
        for adapter in (1, 2):
            assert [token % 2 for token in await tokens(llm, adapter)] == [1] * 6

    run(test, engines=2)


def test_offline_engines_load_adapters_together(tiny_llama: Path, tmp_path: Path) -> None:
    write(tmp_path / "a", "content")
    write(tmp_path / "a-1", "wrong: no such file here")
    args = EngineArgs(str(tiny_llama), enable_lora=True, data_parallel_size=2)
    engines = DPEngines(args, program=(str(ENGINE), str(tmp_path)))
    try:
        for number, text in enumerate(("wrong: no such file here", "other content", "content")):
            write(tmp_path / "a-1", text)
            ready = engines.load_adapter(source(number))
            while not ready.done():
                assert engines.has_work
                engines.step()
            if text == "content":
                assert ready.result() == LOADED
            else:
                with pytest.raises(AdapterError):
                    ready.result()
        assert not engines.has_work
        pending = engines.load_adapter(source(3))
    finally:
        engines.shutdown()
    with pytest.raises(EngineDeadError):
        pending.result(timeout=0)
