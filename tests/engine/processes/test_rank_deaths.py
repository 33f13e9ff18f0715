"""Ranks that die or hang: the client learns which rank before it would give up the engine, and can restart it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from stoker_common.errors import EngineDeadError, EngineKilledError, EngineStuckError
from stoker_engine import SamplingParams
from stoker_engine.async_llm import AsyncLLM
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.contract.engine_state import EngineState
from stoker_engine.processes.engine_process import PROGRAM

from ...support.processes import command_line
from ...support.waiting import until_async

LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)

#: Runs the engine process with a hanging rank: rank `{rank}` hangs in `Runner.{method}` after `{times}` calls.
_HANGING = """
import sys
RANK = '''
import itertools, sys, time
from stoker_engine.exec.runner import Runner
from stoker_engine.exec.rank_main import main
real, count = Runner.{method}, itertools.count()
def changed(self, *args, **kwargs):
    if sys.argv[1] == "{rank}" and next(count) == {times}:
        time.sleep(1000)
    return real(self, *args, **kwargs)
Runner.{method} = changed
sys.exit(main(sys.argv[1:]))
'''
from stoker_engine.exec.rank_executor import RankExecutor
RankExecutor.__init__.__kwdefaults__["program"] = ("-c", RANK)
from stoker_engine.processes.main import main
sys.exit(main(sys.argv[1:]))
"""


@asynccontextmanager
async def _client(model: Path, step_timeout: float = 300.0, code: str = "") -> AsyncIterator[AsyncLLM]:
    args = EngineArgs(str(model), device="cpu", num_gpu_blocks_override=256, tensor_parallel_size=2)
    llm = AsyncLLM(args, step_timeout=step_timeout, program=("-c", code) if code else PROGRAM)
    try:
        yield llm
    finally:
        llm.shutdown()


async def _rank(llm: AsyncLLM, number: int) -> psutil.Process:
    """Wait for a rank's process, and return it."""

    def find() -> psutil.Process | None:
        for child in psutil.Process(llm.engines[0].process.pid).children():
            words = command_line(child)
            if "stoker_engine.exec.rank_main" in words and words[4] == str(number):
                return child
        return None

    found = await until_async(find, f"rank {number} exists")
    assert found is not None
    return found


def test_a_rank_killed_while_loading_is_reported_and_a_restart_loads(tiny_llama: Path) -> None:
    async def run() -> None:
        async with _client(tiny_llama) as llm:
            loading = asyncio.create_task(llm.load())
            (await _rank(llm, 1)).kill()
            with pytest.raises(EngineKilledError, match=r"while it loaded: rank 1 of 2 was killed by signal 9"):
                await asyncio.wait_for(loading, 120)
            (state,) = llm.engine_states
            assert (state.serves, state.ranks, state.missing_ranks) == (False, 2, (0, 1))
            assert "rank 1 of 2 was killed by signal 9" in state.message
            assert state.kv_blocks is None
            await asyncio.wait_for(llm.load(), 120)
            assert llm.is_ready
            assert llm.engine_states == [EngineState(0, True, 2, (), "serving", 256, llm.info.kv_tokens)]
            (await _rank(llm, 0)).kill()  # no request waits for it
            death = await asyncio.wait_for(llm.wait_dead(), 120)
            assert type(death) is EngineKilledError
            assert not llm.is_ready
            assert "rank 0 of 2 was killed" in llm.status
            assert llm.engine_states[0].missing_ranks == (0, 1), "ranks end together"

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("method, times", [("run", 3), ("_forward", 5), ("__init__", 0)])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_hanging_rank_is_named(method: str, times: int, rank: int, tiny_llama: Path) -> None:
    """The timeout leaves a busy machine time to load."""
    code = _HANGING.format(method=method, rank=rank, times=times)

    async def run() -> None:
        async with _client(tiny_llama, 25.0, code) as llm:
            with pytest.raises(EngineDeadError):
                await llm.load()
                async for _ in llm.generate("hangs", [5], LONG):
                    pass
            death = await asyncio.wait_for(llm.wait_dead(), 60)
            assert type(death) is EngineStuckError
            assert f"rank {rank} of 2 " in str(death)
            assert f"rank {1 - rank}" not in str(death)

    asyncio.run(run())
