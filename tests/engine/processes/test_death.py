"""The engine process dies, stops or hangs: waiting requests end with an error, and health reports the truth."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from stoker_common.errors import EngineDeadError, EngineOutOfMemoryError, ModelError
from stoker_engine import SamplingParams
from stoker_engine.async_llm import AsyncLLM
from stoker_engine.processes.engine_process import EngineProcess
from stoker_engine.tokens.tokenizer_process import TokenizerProcess

from ...support.processes import lives
from ...support.waiting import until, until_async

LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
SLOW_STEP = "time.sleep(0.02)"


async def _in_flight(llm: AsyncLLM) -> Any:
    """Return a stream that has started."""
    stream = llm.generate("in flight", [5], LONG)
    await anext(stream)
    return stream


async def _ends(stream: Any) -> None:
    """Wait until the stream ends with the engine's death, at most a minute: the machine may be busy."""
    async with asyncio.timeout(60):
        with pytest.raises(EngineDeadError):
            async for _ in stream:
                pass


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        await until_async(condition)


def test_a_killed_engine_ends_its_requests(make_llm: Any) -> None:
    async def run() -> None:
        llm = make_llm(step=SLOW_STEP)
        await llm.load()
        assert llm.is_ready
        stream = await _in_flight(llm)
        os.kill(llm.engines[0].process.pid, signal.SIGKILL)
        await _ends(stream)
        assert not llm.is_live
        assert not llm.is_ready
        assert "SIGKILL" in str(await asyncio.wait_for(llm.wait_dead(), 60))
        assert "SIGKILL" in llm.status
        with pytest.raises(EngineDeadError):
            await anext(llm.generate("late", [5], LONG))

    asyncio.run(run())


def test_a_restarted_engine_uses_the_same_files(make_llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub may have newer files meanwhile, or be unreachable."""

    async def run() -> None:
        llm = make_llm()
        await llm.load()
        locate = Mock(side_effect=AssertionError("the model is located again"))
        monkeypatch.setattr("stoker_engine.processes.model_files.locate_model", locate)
        os.kill(llm.engines[0].process.pid, signal.SIGKILL)
        await asyncio.wait_for(llm.wait_dead(), 60)
        await llm.load()
        assert llm.is_ready

    asyncio.run(run())


def test_shutdown_before_load_ends_the_tokenizer_process(make_llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[TokenizerProcess] = []
    start = TokenizerProcess.start

    def note(self: TokenizerProcess) -> None:
        start(self)
        started.append(self)

    monkeypatch.setattr(TokenizerProcess, "start", note)
    llm = make_llm()
    until(lambda: bool(started))
    llm.shutdown()
    process = started[0]._process
    assert process is not None
    until(lambda: process.poll() is not None)


def test_tokenizer_process_that_starts_after_shutdown_ends(make_llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    is_shut_down, started = threading.Event(), list[TokenizerProcess]()
    start = TokenizerProcess.start

    def start_late(self: TokenizerProcess) -> None:
        is_shut_down.wait()
        start(self)
        started.append(self)

    monkeypatch.setattr(TokenizerProcess, "start", start_late)
    llm = make_llm()
    llm.shutdown()
    is_shut_down.set()
    until(lambda: bool(started))
    process = started[0]._process
    assert process is not None
    until(lambda: process.poll() is not None)


def test_a_dead_process_does_not_count_as_stopped() -> None:
    """An ended process exists until it is reaped; with much memory, its end takes a while."""
    process = object.__new__(EngineProcess)
    with subprocess.Popen(["true"]) as ended:
        process.pid = ended.pid
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        assert not process.is_running
        assert not process.is_stopped


def test_a_stopped_engine_ends_its_requests(make_llm: Any) -> None:
    async def run() -> None:
        llm = make_llm(step=SLOW_STEP)
        await llm.load()
        await _stopped_while_idle(llm)
        stream = await _in_flight(llm)
        os.kill(llm.engines[0].process.pid, signal.SIGSTOP)
        stopped = asyncio.create_task(_ends(stream))
        await _until(lambda: not llm.is_live)
        assert "stopped" in llm.status
        await stopped
        assert "stopped" in str(await asyncio.wait_for(llm.wait_dead(), 60))

    asyncio.run(run())


async def _stopped_while_idle(llm: AsyncLLM) -> None:
    """Stop the idle engine: it is not killed, and may continue."""
    os.kill(llm.engines[0].process.pid, signal.SIGSTOP)
    await _until(lambda: not llm.is_ready)
    os.kill(llm.engines[0].process.pid, signal.SIGCONT)
    await _until(lambda: llm.is_ready)


def test_an_engine_with_a_hanging_step_is_killed(make_llm: Any) -> None:
    async def run() -> None:
        llm = make_llm(step="time.sleep(300 if next(count) == 3 else 0)")
        await llm.load()
        started_at = time.monotonic()
        stream = await _in_flight(llm)
        # Loading takes longer than that, and so may the first step on a busy machine.
        llm.engines[0].watchdog.step_timeout = 1.0
        await _ends(stream)
        assert time.monotonic() - started_at > 1
        assert "stuck" in str(await asyncio.wait_for(llm.wait_dead(), 60))

    asyncio.run(run())


def test_an_exception_in_a_step_is_the_cause_of_death(make_llm: Any, capfd: pytest.CaptureFixture[str]) -> None:
    async def run() -> None:
        llm = make_llm(step="next(count) != 3 or 1 / 0")
        await llm.load()
        await _ends(await _in_flight(llm))
        death = await asyncio.wait_for(llm.wait_dead(), 60)
        assert "ZeroDivisionError: division by zero" in str(death)
        assert not isinstance(death, EngineOutOfMemoryError)

    asyncio.run(run())
    assert "ZeroDivisionError" in capfd.readouterr().err


@pytest.mark.parametrize("error", ["MemoryError()", "RuntimeError('DefaultCPUAllocator: can\\'t allocate memory')"])
def test_out_of_memory_in_a_step_is_reported(make_llm: Any, error: str) -> None:
    async def run() -> None:
        llm = make_llm(step=f"raise {error}")
        await llm.load()
        with pytest.raises(EngineDeadError):
            await _in_flight(llm)
        assert isinstance(await asyncio.wait_for(llm.wait_dead(), 60), EngineOutOfMemoryError)

    asyncio.run(run())


def test_an_oom_kill_is_reported_as_out_of_memory(make_llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's counter is faked here; the end-to-end tests use a container with a limit."""
    counts = iter([4, 5])
    monkeypatch.setattr("stoker_engine.processes.engine_process.oom_kills", lambda: next(counts))

    async def run() -> None:
        llm = make_llm(step=SLOW_STEP)
        await llm.load()
        os.kill(llm.engines[0].process.pid, signal.SIGKILL)
        death = await asyncio.wait_for(llm.wait_dead(), 60)
        assert isinstance(death, EngineOutOfMemoryError)
        assert "memory ran out" in str(death)

    asyncio.run(run())


@pytest.mark.parametrize("signum, cause", [(signal.SIGKILL, "SIGKILL"), (signal.SIGSTOP, "stopped")])
def test_death_or_stop_while_loading_ends_the_load(make_llm: Any, signum: signal.Signals, cause: str) -> None:
    async def run() -> None:
        llm = make_llm()
        loading = asyncio.create_task(llm.load())
        await until_async(lambda: llm.engines and llm.engines[0].process)
        assert llm.is_live
        assert not llm.is_ready
        assert llm.status.startswith("loading")
        os.kill(llm.engines[0].process.pid, signum)
        async with asyncio.timeout(60):
            with pytest.raises(EngineDeadError, match=cause):
                await loading
        assert not llm.is_live

    asyncio.run(run())


def test_death_during_the_download_ends_the_load(make_llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    downloads = threading.Event()
    monkeypatch.setattr(
        "stoker_engine.processes.model_files.locate_model", lambda _: downloads.set() or threading.Event().wait(300)
    )

    async def run() -> None:
        llm = make_llm()
        loading = asyncio.create_task(llm.load())
        await until_async(downloads.is_set)
        os.kill(llm.engines[0].process.pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await loading

    asyncio.run(run())


def test_model_errors_reach_the_client(make_llm: Any, tmp_path: Path) -> None:
    async def run() -> None:
        with pytest.raises(ModelError, match="/no/such/folder"):
            await make_llm("/no/such/folder").load()
        with pytest.raises(ModelError, match=r"no config.json in .*; is this a Hugging Face model folder\?"):
            await make_llm(str(tmp_path)).load()
        (tmp_path / "config.json").write_text("{")
        with pytest.raises(ModelError, match=r"config.json is not valid JSON"):
            await make_llm(str(tmp_path)).load()
        (tmp_path / "config.json").write_text('{"architectures": ["NoSuchModel"], "model_type": "none"}')
        (tmp_path / "tokenizer.json").write_text("{}")
        with pytest.raises(ModelError):
            await make_llm(str(tmp_path)).load()

    asyncio.run(run())


_SERVER = """
import asyncio, sys
from stoker_engine.async_llm import AsyncLLM
from stoker_engine.contract.engine_args import EngineArgs
async def run():
    llm = AsyncLLM(EngineArgs(sys.argv[1], num_gpu_blocks_override=64))
    await llm.load()
    assert "torch" not in sys.modules and "transformers" not in sys.modules
    print(llm.engines[0].process.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(run())
"""


def test_the_server_imports_no_torch_and_its_engine_ends_with_it(tiny_llama: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER, str(tiny_llama)], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        server.kill()
        until(lambda: not lives(int(line)), "the engine ends with its server")
