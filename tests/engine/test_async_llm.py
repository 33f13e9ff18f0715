"""The engine behind an event loop: streams, disconnects, idle costs. Real processes, on a tiny model."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file, save_file

from stoker_common.errors import EngineDeadError, RequestError, RequestFailedError
from stoker_engine import SamplingParams, StructuredOutputs
from stoker_engine.async_llm import AsyncLLM
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.core.finish_reason import FinishReason
from stoker_engine.core.outputs import OutputDelta, TokenDelta
from stoker_engine.core.step_report import StepReport
from stoker_engine.grammar.token_table import TokenTable
from stoker_engine.tokens.tokenizer import Tokenizer

from ..support.waiting import until_async

LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@asynccontextmanager
async def running(
    model: Path, num_blocks: int = 1024, ranks: int = 1
) -> AsyncIterator[tuple[AsyncLLM, list[StepReport]]]:
    """Run an engine, and record its steps' reports."""
    llm = AsyncLLM(EngineArgs(str(model), num_gpu_blocks_override=num_blocks, tensor_parallel_size=ranks))
    reports: list[StepReport] = []
    llm.on_step = reports.append
    try:
        await llm.load()
        yield llm, reports
    finally:
        llm.shutdown()


async def collect(
    llm: AsyncLLM, name: str, params: SamplingParams = SHORT, prompt: tuple[int, ...] = (5, 6, 7)
) -> list[int]:
    return [token async for delta in llm.generate(name, list(prompt), params) for token in delta.token_ids]


async def until_free(reports: list[StepReport]) -> None:
    """Wait until the engine reports that nothing runs and no block is held."""
    async with asyncio.timeout(60):
        await until_async(lambda: bool(reports and reports[-1].stats.num_running == reports[-1].stats.num_waiting == 0))
    assert reports[-1].stats.kv_cache_usage == 0


def test_one_engine_passes_all_checks(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting a process takes seconds, so these checks share one."""

    # Loading a tokenizer blocks all threads of a process, including probes: the server must not do it.
    monkeypatch.setattr(Tokenizer, "load", None)

    async def run() -> None:
        async with running(tiny_llama) as (llm, reports):
            for check in (
                many_streams_at_once,
                a_closed_stream_frees_its_blocks_and_affects_no_other,
                an_invalid_request_is_refused_before_it_starts,
                an_unsendable_request_affects_no_other,
                a_stop_string_ends_one_sequence,
                several_sequences,
                a_request_whose_text_fails_affects_no_other,
                bad_words_are_encoded_once,
                outputs_satisfy_their_grammars,
                shutdown_ends_streams,
            ):
                await check(llm, reports)

    asyncio.run(run())


async def many_streams_at_once(llm: AsyncLLM, reports: list[StepReport]) -> None:
    alone = await collect(llm, "alone")
    together = await asyncio.gather(*(collect(llm, str(i)) for i in range(64)))
    assert together == [alone] * 64
    await until_free(reports)


async def a_closed_stream_frees_its_blocks_and_affects_no_other(llm: AsyncLLM, reports: list[StepReport]) -> None:
    alone = await collect(llm, "alone", LONG)
    survivor = asyncio.create_task(collect(llm, "survivor", LONG))
    stream: Any = llm.generate("leaver", [8, 9], LONG)
    await anext(stream)
    await stream.aclose()
    cancelled = asyncio.create_task(collect(llm, "cancelled", LONG))
    await until_async(lambda: reports[-1].stats.num_running >= 2)
    cancelled.cancel()
    assert await survivor == alone
    await until_free(reports)
    assert sum(len(report.finished) for report in reports) >= 3


async def an_invalid_request_is_refused_before_it_starts(llm: AsyncLLM, reports: list[StepReport]) -> None:
    with pytest.raises(RequestError):
        await anext(llm.generate("bad", [], SHORT))
    stream: Any = llm.generate("twice", [5], LONG)
    await anext(stream)
    with pytest.raises(RequestError, match="choose another"):
        await anext(llm.generate("twice", [5], SHORT))
    assert sum([len(delta.token_ids) async for delta in stream]) > 300, "the first stream continues"
    assert len(await collect(llm, "good")) == 8


async def an_unsendable_request_affects_no_other(llm: AsyncLLM, reports: list[StepReport]) -> None:
    alone = asyncio.create_task(collect(llm, "fine", LONG))

    class Unpicklable(str):
        def __reduce__(self) -> Any:
            raise MemoryError("no room for the pickle")

    with pytest.raises(MemoryError):
        await anext(llm.generate("unpicklable", [5], LONG, cache_salt=Unpicklable("salt")))
    assert len(await alone) == 400
    assert not llm.engines[0].streams


async def a_stop_string_ends_one_sequence(llm: AsyncLLM, reports: list[StepReport]) -> None:
    whole = [delta async for delta in llm.generate("whole", [5, 6, 7], LONG)]
    text = "".join(delta.text for delta in whole)
    stop = text[20:23]
    params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True, stop=(stop,))
    deltas = [delta async for delta in llm.generate("stopped", [5, 6, 7], params)]
    assert "".join(delta.text for delta in deltas) == text[: text.index(stop)]
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert deltas[-1].stop_reason == stop
    await until_free(reports)


async def several_sequences(llm: AsyncLLM, reports: list[StepReport]) -> None:
    params = SamplingParams(n=5, seed=3, max_tokens=6, ignore_eos=True)
    deltas = [delta async for delta in llm.generate("five", [5, 6, 7], params)]
    for index in range(5):
        sequence_deltas = [delta for delta in deltas if delta.index == index]
        assert sum(len(delta.token_ids) for delta in sequence_deltas) == 6
        assert [delta.finish_reason for delta in sequence_deltas].count(FinishReason.LENGTH) == 1
    await until_free(reports)


async def a_request_whose_text_fails_affects_no_other(llm: AsyncLLM, reports: list[StepReport]) -> None:
    assert llm.engines[0].outputs is not None
    process = llm.engines[0].outputs.process

    def failing(delta: TokenDelta) -> tuple[OutputDelta | None, bool]:
        if delta.request_id == "poison":
            raise ValueError("a tokenizer's error")
        return process(delta)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engines[0].outputs, "process", failing)
        alone = asyncio.create_task(collect(llm, "fine", LONG))
        with pytest.raises(RequestFailedError, match="failed at this request"):
            await collect(llm, "poison", LONG)
        assert len(await alone) == 400
    await until_free(reports)


def test_nan_logits_end_a_request_and_are_counted(tiny_llama: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_llama, tmp_path / "overflows")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "model.norm.weight": tensors["model.norm.weight"] * 1e38}, file, {"format": "pt"})

    async def run() -> None:
        async with running(folder) as (llm, reports):
            for name in ("first", "second"):
                with pytest.raises(RequestFailedError, match="NaN or infinite logits") as failed:
                    await collect(llm, name)
                assert (failed.value.status, failed.value.type) == (500, "internal_error")
            await until_free(reports)
            assert llm.is_ready
            assert reports[-1].stats.num_corrupted == 2

    asyncio.run(run())


async def bad_words_are_encoded_once(llm: AsyncLLM, reports: list[StepReport]) -> None:
    words = [f"word {number}" for number in range(250)]
    encode, encoded = llm.tokenizer.encode, list[int]()

    async def counted(texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        encoded.append(len(texts))
        return await encode(texts, add_special_tokens)

    def params(*bad: str) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, bad_words=bad)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.tokenizer, "encode", counted)
        alike = await asyncio.gather(*(collect(llm, f"bad {i}", params(*words)) for i in range(20)))
        assert alike == [alike[0]] * 20
        assert encoded == [2 * len(words)]
        plain = [delta async for delta in llm.generate("plain", [5, 6, 7], SHORT)]
        # Compared by tokens: a busy machine merges deltas.
        spoken = {token: llm.tokenizer.vocabulary.token_text(token) for delta in plain for token in delta.token_ids}
        token, bad_text = next((token, text) for token, text in spoken.items() if text.strip() and "\ufffd" not in text)
        without = [delta async for delta in llm.generate("without", [5, 6, 7], params(bad_text))]
        assert token not in [each for delta in without for each in delta.token_ids]
        for _ in range(2):
            with pytest.raises(RequestError, match="bad_words"):
                await collect(llm, "too many", params(*(f"{i}" for i in range(1001))))
    await until_free(reports)


def choosing(*choices: str, **params: Any) -> SamplingParams:
    """Return parameters for an output that is one of these choices."""
    outputs = StructuredOutputs(choice=choices)
    return SamplingParams(**{"temperature": 1.5, "max_tokens": 40, "structured_outputs": outputs, **params})


async def chosen(llm: AsyncLLM, name: str, params: SamplingParams) -> str:
    deltas = [delta async for delta in llm.generate(name, [5, 6, 7], params)]
    assert deltas[-1].finish_reason is FinishReason.STOP
    return "".join(delta.text for delta in deltas)


async def outputs_satisfy_their_grammars(llm: AsyncLLM, reports: list[StepReport]) -> None:
    token_table, calls = llm.tokenizer.token_table, list[int]()

    async def counted() -> TokenTable:
        calls.append(1)
        return await token_table()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.tokenizer, "token_table", counted)
        beside = asyncio.create_task(collect(llm, "beside", LONG))
        answers = [chosen(llm, f"choice {i}", choosing(f"red {i}", f"green {i}", seed=i)) for i in range(12)]
        found = await asyncio.gather(*answers)
        assert all(text in (f"red {i}", f"green {i}") for i, text in enumerate(found))
        assert len(await beside) == 400
        assert not calls, "the engine knows the vocabulary before it serves"
    bad = dataclasses.replace(LONG, structured_outputs=StructuredOutputs(regex="a{3,2}["))
    with pytest.raises(RequestError) as refused:
        await collect(llm, "bad", bad)
    assert refused.value.param == "structured_outputs.regex"
    await until_free(reports)


def test_a_restarted_engine_gets_the_vocabulary(tiny_llama: Path) -> None:
    async def run() -> None:
        async with running(tiny_llama) as (llm, _):
            assert await chosen(llm, "first", choosing("one")) == "one"
            os.kill(llm.engines[0].process.pid, signal.SIGKILL)
            await llm.wait_dead()
            with pytest.raises(EngineDeadError):
                await chosen(llm, "dead", choosing("one"))
            await llm.load()
            assert await asyncio.gather(*(chosen(llm, word, choosing(word)) for word in ("one", "two"))) == [
                "one",
                "two",
            ]

    asyncio.run(run())


async def shutdown_ends_streams(llm: AsyncLLM, reports: list[StepReport]) -> None:
    stream: Any = llm.generate("in flight", [5], LONG)
    await anext(stream)
    llm.shutdown()
    with pytest.raises(EngineDeadError):
        async for _ in stream:
            pass
    with pytest.raises(EngineDeadError):
        await anext(llm.generate("late", [5], LONG))


def test_an_abort_storm_leaves_a_balanced_pool_and_exact_survivors(tiny_llama: Path) -> None:
    async def run() -> None:
        chance = random.Random(0)
        # 60 blocks of 16 tokens, for 200 requests of up to 60 tokens: most of them are preempted at times.
        async with running(tiny_llama, num_blocks=60) as (llm, reports):
            params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
            alone = {first: await collect(llm, f"alone-{first}", params, (first, 9)) for first in range(5, 9)}

            async def one(number: int) -> None:
                first = 5 + number % 4
                task = asyncio.create_task(collect(llm, f"r{number}", params, (first, 9)))
                if chance.random() < 0.5:
                    await asyncio.sleep(chance.random())  # sleeps: random moment of the abort
                    task.cancel()
                    await asyncio.wait([task])
                else:
                    assert await task == alone[first]

            await asyncio.gather(*(one(number) for number in range(200)))
            await until_free(reports)
            assert reports[-1].stats.num_preemptions > 0

    asyncio.run(run())


@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.parametrize("seconds", [3, pytest.param(60, marks=pytest.mark.slow)])
def test_an_idle_engine_uses_almost_no_cpu(
    tiny_llama: Path, ranks: int, seconds: int, part_of: Callable[[int], int]
) -> None:
    """At most 0.5% of one core for all processes together, also right after work."""
    seconds = max(3, part_of(seconds))

    async def run() -> float:
        async with running(tiny_llama, ranks=max(1, ranks)) as (llm, _):
            await asyncio.gather(*(collect(llm, str(i), LONG) for i in range(4)))
            await asyncio.sleep(1)  # sleeps: OpenMP's threads spin a little after their work
            engine = psutil.Process(llm.engines[0].process.pid)
            processes = [engine, *engine.children()]
            assert len(processes) == 1 + ranks
            before = time.process_time() + sum(map(_cpu_seconds, processes))
            await asyncio.sleep(seconds)  # sleeps: measures idle time
            return time.process_time() + sum(map(_cpu_seconds, processes)) - before

    used = asyncio.run(run())
    # The kernel counts in ticks of 10 ms. Threads left by other tests also count.
    assert used <= 0.005 * seconds + 0.01 * (1 + ranks), sorted(thread.name for thread in threading.enumerate())


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system
