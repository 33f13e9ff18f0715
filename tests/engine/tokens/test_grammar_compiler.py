"""Grammars are compiled in a process that can be killed: hostile ones are limited, and affect no others. Processes are
real.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from tokenizers import Tokenizer as Backend

from stoker_common.errors import OverloadedError, RequestError, RequestFailedError
from stoker_engine.core.structured_outputs import StructuredOutputs
from stoker_engine.grammar.limits import COMPILE_CPU_S, COMPILE_MEMORY, COMPILE_TIMEOUT_S
from stoker_engine.tokens import tokenizer_process
from stoker_engine.tokens.grammar_cache import GrammarCache
from stoker_engine.tokens.tokenizer_process import TokenizerProcess

from ...support.waiting import until_async
from ..grammar.malformed_grammars import constraints, growing

#: A constraint whose compilation exceeds the limits.
ENDLESS: dict[str, Any] = {
    "json": {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(1, 30)]}
}
#: A worker that cannot read a vocabulary.
BROKEN = """
from stoker_engine.tokens import grammar_compiler, tokenizer_worker
def fail(*_):
    print("read", flush=True)
    raise ZeroDivisionError
grammar_compiler.GrammarCompiler.__init__ = fail
tokenizer_worker.main(__import__("sys").argv[1:])
"""
#: A constraint whose compilation crashes its process.
CRASHING = {"grammar": "start: r0\n" + "".join(f'r{i}: r{i + 1} r{i + 1} | "x"\n' for i in range(3000)) + 'r3000: "y"'}


@pytest.fixture(scope="module")
def folder(byte_level: Backend, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_level.save(str(folder / "tokenizer.json"))
    return folder


def run(folder: Path, check: Callable[[TokenizerProcess], Awaitable[None]]) -> None:
    async def checked() -> None:
        tokenizer = TokenizerProcess(folder)
        try:
            await tokenizer.load()
            await check(tokenizer)
        finally:
            tokenizer.close()

    asyncio.run(checked())


async def outcome(tokenizer: TokenizerProcess, constraint: dict[str, Any]) -> RequestError | None:
    try:
        await tokenizer.compile_grammar(StructuredOutputs(**constraint))
    except RequestError as error:
        assert error.status == 400, (constraint, error)
        assert error.message
        assert error.param is not None
        assert error.param.startswith("structured_outputs")
        return error
    return None


def test_compiled_and_refused_grammars_are_cached(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(tokenizer: TokenizerProcess) -> None:
        good = StructuredOutputs(json={"type": "object"})
        bad: dict[str, Any] = {"json": {"not": {}}}
        first, second = await asyncio.gather(*(tokenizer.compile_grammar(good) for _ in range(2)))
        assert first == second
        error = await outcome(tokenizer, bad)
        assert error is not None
        monkeypatch.setattr(tokenizer, "_do", None)  # nothing is compiled twice
        assert await tokenizer.compile_grammar(StructuredOutputs(json={"type": "object"}, begins_after="a")) == first
        again = await outcome(tokenizer, bad)
        assert again is not None
        assert again is not error
        assert again.message == error.message

    run(folder, check)


def test_grammars_over_the_limits_are_ended(folder: Path) -> None:
    async def check(tokenizer: TokenizerProcess) -> None:
        await tokenizer.compile_grammar(StructuredOutputs(json_object=True))
        assert tokenizer._process is not None
        parent = psutil.Process(tokenizer._process.pid)
        assert parent.num_threads() == 1, "a process that forks has one thread"
        memory = parent.memory_info().rss
        endless = asyncio.create_task(outcome(tokenizer, ENDLESS))
        await until_async(parent.children, "a grammar is compiled")
        for number in range(5):
            assert (await tokenizer.encode([f"hello {number}"]))[0]
            await tokenizer.compile_grammar(StructuredOutputs(json_object=True))  # cached
        assert not endless.done(), "a request waited for the endless grammar"
        for error in (await endless, await outcome(tokenizer, CRASHING)):
            assert error is not None
            assert error.code == tokenizer_process.TOO_COMPLEX
            # Beside other work the clock may be first: a compilation has a low priority.
            assert f"{COMPILE_CPU_S} s" in error.message or f"{COMPILE_TIMEOUT_S:g} s" in error.message
        assert await outcome(tokenizer, {"regex": "a+"}) is None
        assert parent.is_running()
        assert parent.memory_info().rss < memory + COMPILE_MEMORY // 8

    run(folder, check)


def test_grammar_of_a_killed_worker_is_compiled_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(tokenizer: TokenizerProcess) -> None:
        fork, forked = tokenizer._fork, []

        async def killed_at_first(limits: bytes) -> Any:
            worker = await fork(limits)
            forked.append(worker.pid)
            if len(forked) == 1:
                os.kill(worker.pid, signal.SIGKILL)
            return worker

        monkeypatch.setattr(tokenizer, "_fork", killed_at_first)
        assert await outcome(tokenizer, {"regex": "a+"}) is None
        assert len(forked) == 2

    run(folder, check)


def endless(number: int) -> StructuredOutputs:
    """Return an endless grammar, different for each number."""
    return StructuredOutputs(json={**ENDLESS["json"], "title": f"{number}"})


def test_quick_grammars_do_not_wait_for_slow_ones(folder: Path) -> None:
    async def check(tokenizer: TokenizerProcess) -> None:
        await tokenizer.compile_grammar(StructuredOutputs(json_object=True))
        slow = [asyncio.create_task(tokenizer.compile_grammar(endless(number))) for number in range(3)]
        await asyncio.sleep(0)
        assert await outcome(tokenizer, {"regex": "a+"}) is None
        assert not any(task.done() for task in slow)
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        assert all(lane.waiting == 0 for lane in tokenizer._lanes.values())

    run(folder, check)


@pytest.mark.parametrize("lane", ["grammars", "slow"])
def test_waiting_compilations_are_limited(folder: Path, lane: str) -> None:
    async def check(tokenizer: TokenizerProcess) -> None:
        tokenizer._lanes[lane].max_jobs = 2
        waiting = [asyncio.create_task(tokenizer.compile_grammar(endless(number % 2))) for number in range(4)]
        waiting.append(asyncio.create_task(tokenizer.compile_grammar(endless(2))))
        done, pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert done == {waiting[-1]}, "equal grammars did not share a job"
        error = waiting[-1].exception()
        assert isinstance(error, OverloadedError)
        assert error.param == "structured_outputs.json"
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        assert await outcome(tokenizer, {"regex": "a+"}) is None

    run(folder, check)


def test_failures_of_the_compiler_are_server_errors(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async def check(tokenizer: TokenizerProcess) -> None:
        for regex in ("a", "b", "a"):
            with pytest.raises(RequestFailedError, match="log"):
                await tokenizer.compile_grammar(StructuredOutputs(regex=regex))
        assert (await tokenizer.encode(["hello"]))[0]

    monkeypatch.setattr(tokenizer_process, "PROGRAM", ("-c", BROKEN))
    run(folder, check)
    stdout, logged = capfd.readouterr()
    assert stdout.count("read") == 1
    assert "ZeroDivisionError" in logged


def test_hostile_constraints_are_answered(folder: Path) -> None:
    async def check(tokenizer: TokenizerProcess) -> None:
        outcomes: Counter[bool] = Counter()
        for constraint in (*constraints(seed=1, count=150), *growing(12)):
            try:
                outcomes[await outcome(tokenizer, constraint) is None] += 1
            except RequestError as error:
                pytest.fail(f"{constraint}: {error}")
        assert min(outcomes.values()) > 30, outcomes
        assert await outcome(tokenizer, {"json_object": True}) is None

    run(folder, check)


@pytest.mark.slow
def test_thousands_of_hostile_constraints_are_answered(folder: Path, part_of: Callable[[int], int]) -> None:
    async def check(tokenizer: TokenizerProcess) -> None:
        for constraint in (*constraints(seed=2, count=part_of(3000)), *growing(5), *growing(30)):
            await outcome(tokenizer, constraint)

    run(folder, check)


def test_grammar_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker_engine.tokens.grammar_cache._MAX_LENGTH", 1000)
    compiled = []

    async def compile_grammar(structured: StructuredOutputs) -> str:
        compiled.append(structured.regex)
        if structured.regex == "full":
            raise OverloadedError("come again")
        if structured.regex == "busy":
            raise RequestError("it took too much", None, "grammar_too_complex")
        return "x" * 300

    async def check() -> None:
        cache = GrammarCache()
        for regex in ("a", "b", "c", "a", "c"):  # three are too many
            await cache.get(StructuredOutputs(regex=regex), compile_grammar)
        assert compiled == ["a", "b", "c", "a"]
        for _ in range(2):  # a grammar that exceeded the limits is tried again
            with pytest.raises(RequestError):
                await cache.get(StructuredOutputs(regex="busy"), compile_grammar)
        assert compiled[-2:] == ["busy", "busy"]
        for _ in range(2):
            with pytest.raises(OverloadedError):
                await cache.get(StructuredOutputs(regex="full"), compile_grammar)

    asyncio.run(check())
