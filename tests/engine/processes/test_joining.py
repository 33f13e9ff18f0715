"""A client of engines that another process owns: which engines it waits for, and which it links to later."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

import pytest

from stoker_common.errors import EngineDeadError, EngineStuckError
from stoker_engine.async_llm import AsyncLLM
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.core.engine_info import EngineInfo
from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.core.sampling_params import SamplingParams
from stoker_engine.processes.engine_link import EngineLink
from stoker_engine.processes.heartbeat import Heartbeat, Phase
from stoker_engine.sizing.cache_groups import CacheGroup
from stoker_engine.tokens.output_stream import OutputStream
from stoker_engine.tokens.prompt_tokens import prompt_tokens

from ...support.waiting import until_async

INFO = EngineInfo(
    max_model_len=64,
    vocab_size=300,
    num_blocks=77,
    cache_groups=(CacheGroup(None, (0, 1), 128),),
    step_tokens=2048,
    block_size=16,
    eos_token_ids=(2,),
    max_num_seqs=8,
    sampling_defaults={},
    max_logprobs=20,
    seed=0,
)


class Owner:
    """The process that owns two engines, with engines as raw pipes."""

    def __init__(self, model: Path, opened: ExitStack) -> None:
        self.model, self.opened = model, opened
        self.links: defaultdict[int, list[EngineLink]] = defaultdict(list)
        self.failures: list[str] = []
        self.killed: list[tuple[int, int]] = []  # engine, number of the process

    def client(self, min_engines: int | None = None) -> AsyncLLM:
        args = EngineArgs(str(self.model), data_parallel_size=2)
        files: Future[EngineArgs] = Future()
        files.set_result(args)
        llm = AsyncLLM(args, start=self.link, files=files, min_engines=min_engines)
        self.opened.callback(llm.shutdown)
        return llm

    def link(self, engine: int) -> EngineLink:
        self.links[engine].append(EngineLink(self.failures.append))
        return self.links[engine][-1]

    def start(self, engine: int) -> tuple[Connection, Future[EngineDeadError]]:
        """Link the client to an engine; return the engine's end of the pipe, and the future of its death."""
        ours, theirs = socket.socketpair()
        status, death = Heartbeat(), Future[EngineDeadError]()
        status.enter(Phase.IDLE)
        process = engine, len(self.links[engine]) - 1
        self.links[engine][-1].connect(os.getpid(), ours, status, lambda _: self.killed.append(process), death)
        return self.opened.enter_context(Connection(theirs.detach())), death


@pytest.fixture
def owner(tiny_llama: Path) -> Iterator[Owner]:
    with ExitStack() as opened:
        yield Owner(tiny_llama, opened)


def test_one_engine_is_enough_and_another_one_is_used_once_it_serves(owner: Owner) -> None:
    async def run() -> None:
        llm, later = owner.client(min_engines=1), list[int]()
        llm.on_later_load = later.append
        loading = asyncio.create_task(llm.load())
        await until_async(lambda: len(owner.links) == 2)
        owner.links[1][0].report_dead(EngineDeadError("it was killed by signal 9"))
        await until_async(lambda: len(owner.links[1]) == 2, "the client waits for engine 1's next process")
        assert not llm.is_ready
        first, death = owner.start(0)
        first.send(INFO)
        await loading
        assert llm.is_ready
        assert "engine 1 (of 2): the engine is dead: it was killed by signal 9" in llm.status
        assert llm.engines[1].is_dead and not llm.engines[1].is_live, "so `is_live` depends on engine 0"
        await _add(llm, "a")
        assert (await asyncio.to_thread(first.recv)).id == "a"
        second, _ = owner.start(1)
        second.send(INFO)
        await until_async(lambda: llm.serves(1) and later == [1])
        death.set_result(EngineDeadError("it was killed by signal 15"))
        assert "signal 15" in str(await llm.wait_dead(0)), "also while the pipe is open"
        await _add(llm, "b")
        request = await asyncio.to_thread(second.recv)
        assert isinstance(request, EngineRequest) and request.id == "b"
        assert owner.failures == []

    asyncio.run(run())


def test_an_engine_that_dies_while_the_client_loads_is_awaited_again(owner: Owner) -> None:
    async def run() -> None:
        llm = owner.client()
        loading = asyncio.create_task(llm.load())
        await until_async(lambda: len(owner.links) == 2)
        for engine in (0, 1):
            pipe, death = owner.start(engine)
            death.set_result(EngineStuckError("it was stuck"))
            pipe.close()
        await until_async(lambda: [len(owner.links[engine]) for engine in (0, 1)] == [2, 2])
        pipes = [owner.start(engine)[0] for engine in (0, 1)]
        pipes[0].send(INFO)
        await until_async(lambda: llm.serves(0))
        assert not llm.is_ready and not loading.done(), "without `min_engines` all engines are awaited"
        pipes[1].send(INFO)
        await loading
        assert llm.is_ready
        assert owner.failures == []

    asyncio.run(run())


def test_an_engine_that_dies_while_the_tokenizer_loads_does_not_count(owner: Owner) -> None:
    async def run() -> None:
        llm = owner.client(min_engines=1)
        pipe, death = owner.start(0)
        pipe.send(INFO)
        death.set_result(EngineDeadError("it was killed by signal 9"))
        loading = asyncio.create_task(llm.load())
        await until_async(lambda: len(owner.links[0]) == 2 or loading.done())
        await until_async(lambda: llm.engines[0].process is owner.links[0][-1])
        assert not loading.done() and not llm.is_ready
        pipe, _ = owner.start(0)
        pipe.send(INFO)
        await loading
        assert llm.serves(0) and llm.is_ready

    asyncio.run(run())


def test_a_late_kill_does_not_affect_the_next_process(owner: Owner) -> None:
    async def run() -> None:
        llm = owner.client(min_engines=1)
        pipe, death = owner.start(0)
        pipe.send(INFO)
        loading = asyncio.create_task(llm.load())
        await loading
        kill = llm.engines[0].kill(EngineStuckError("it was stuck"))
        death.set_result(EngineDeadError("it was killed by signal 9"))
        await llm.wait_dead(0)
        loading = asyncio.create_task(llm.load(0))
        await until_async(lambda: len(owner.links[0]) == 2)
        owner.start(0)[0].send(INFO)
        await loading
        await kill
        assert owner.killed == [(0, 0)]
        assert llm.serves(0)

    asyncio.run(run())


def test_a_closed_link_ends_its_threads_although_the_engine_hangs(owner: Owner) -> None:
    link, ends = owner.link(0), SimpleQueue[EngineDeadError]()
    _hanging_engine = owner.start(0)
    link.listen(lambda message: None, ends.put)
    link.close()
    assert str(ends.get(timeout=60)) == "the link is closed"
    assert owner.failures == []


async def _add(llm: AsyncLLM, request_id: str) -> None:
    params = SamplingParams(max_tokens=4)
    await llm.add_request(OutputStream(), request_id, prompt_tokens([5, 6], None, 1, llm.info), params)
