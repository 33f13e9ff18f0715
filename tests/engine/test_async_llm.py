"""The engine behind an event loop: streams, disconnects, death."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker_engine import SamplingParams
from stoker_engine.async_llm import AsyncLLM
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.contract.errors import EngineDeadError, RequestError

LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture
def llm(tiny_llama: Path) -> Iterator[AsyncLLM]:
    llm = AsyncLLM.from_args(EngineArgs(str(tiny_llama), num_gpu_blocks_override=1024))
    llm.start()
    yield llm
    llm.shutdown()


async def _collect(llm: AsyncLLM, name: str, params: SamplingParams = SHORT) -> list[int]:
    return [token async for delta in llm.generate(name, [5, 6, 7], params) for token in delta.token_ids]


async def _until_idle(llm: AsyncLLM) -> None:
    async with asyncio.timeout(20):
        while llm.engine.has_work:  # noqa: ASYNC110 - the engine's thread has no event to await
            await asyncio.sleep(0.01)


def test_many_streams_at_once(llm: AsyncLLM) -> None:
    async def run() -> None:
        alone = await _collect(llm, "alone")
        together = await asyncio.gather(*(_collect(llm, str(i)) for i in range(64)))
        assert together == [alone] * 64

    asyncio.run(run())
    llm.engine.scheduler.check()
    assert llm.engine.scheduler.kv.usage == 0


def test_a_closed_stream_frees_its_blocks_and_hurts_nobody(llm: AsyncLLM) -> None:
    async def run() -> None:
        alone = await _collect(llm, "alone", LONG)
        survivor = asyncio.create_task(_collect(llm, "survivor", LONG))
        stream: Any = llm.generate("leaver", [8, 9], LONG)
        await anext(stream)
        await stream.aclose()
        cancelled = asyncio.create_task(_collect(llm, "cancelled", LONG))
        await asyncio.sleep(0.05)
        cancelled.cancel()
        assert await survivor == alone
        await _until_idle(llm)

    asyncio.run(run())
    llm.engine.scheduler.check()
    assert llm.engine.scheduler.kv.usage == 0


def test_an_invalid_request_is_refused_before_it_starts(llm: AsyncLLM) -> None:
    async def run() -> None:
        with pytest.raises(RequestError):
            await anext(llm.generate("bad", [], SHORT))
        assert len(await _collect(llm, "good")) == 8

    asyncio.run(run())


def test_when_a_step_raises_everyone_is_told(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        stream: Any = llm.generate("in flight", [5], LONG)
        await anext(stream)
        monkeypatch.setattr(llm.engine.runner, "run", lambda batch: 1 / 0)
        with pytest.raises(EngineDeadError):
            async for _ in stream:
                pass
        assert not llm.is_healthy
        with pytest.raises(EngineDeadError):
            await _collect(llm, "late")

    asyncio.run(run())


def test_a_request_that_arrives_as_the_loop_dies_is_told(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        llm.shutdown()
        monkeypatch.setattr(AsyncLLM, "is_healthy", True)  # as it was a moment before
        async with asyncio.timeout(5):
            with pytest.raises(EngineDeadError):
                await _collect(llm, "late")

    asyncio.run(run())


def test_shutdown_ends_streams(llm: AsyncLLM) -> None:
    async def run() -> None:
        stream: Any = llm.generate("in flight", [5], LONG)
        await anext(stream)
        llm.shutdown()
        with pytest.raises(EngineDeadError):
            async for _ in stream:
                pass

    asyncio.run(run())
