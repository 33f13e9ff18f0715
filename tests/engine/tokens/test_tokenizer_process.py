"""The tokenizer in its own process. Processes are real; the tokenizer is small."""

from __future__ import annotations

import asyncio
import json
import pickle
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from tokenizers import Tokenizer as Backend

from stoker_common.errors import ArgumentError, ModelError, RequestError
from stoker_engine.tokens import tokenizer_process, tokenizer_worker
from stoker_engine.tokens.tokenizer import Tokenizer
from stoker_engine.tokens.tokenizer_process import TokenizerProcess

from ...support.waiting import until_async

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ shout }}"
USER = {"role": "user", "content": "hello"}
LARGE = "the quick brown fox " * 60_000


@pytest.fixture(scope="module")
def folder(byte_level: Backend, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_level.save(str(folder / "tokenizer.json"))
    return folder


def run(folder: Path, check: Callable[[TokenizerProcess], Awaitable[None]]) -> None:
    """Run `check` with a tokenizer process, which must be gone afterwards."""

    async def checked() -> None:
        tokenizer = TokenizerProcess(folder, TEMPLATE)
        try:
            await tokenizer.load()
            await check(tokenizer)
        finally:
            family = processes(tokenizer)
            tokenizer.close()
        assert not psutil.wait_procs(family, timeout=60)[1]

    asyncio.run(checked())


def processes(tokenizer: TokenizerProcess) -> list[psutil.Process]:
    assert tokenizer._process is not None
    try:
        parent = psutil.Process(tokenizer._process.pid)
        return [parent, *parent.children()]
    except psutil.NoSuchProcess:
        return []


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        await until_async(condition)


def test_process_gives_the_results_of_the_tokenizer(folder: Path) -> None:
    reference = Tokenizer.load(folder, TEMPLATE)

    async def check(tokenizer: TokenizerProcess) -> None:
        texts = ["hello", "", "emoji 🎉<think>\u0000", LARGE]
        for special in (True, False):
            assert await tokenizer.encode(texts, special) == [reference.encode(text, special) for text in texts]
        ids = reference.encode(texts[2])
        for skip in (True, False):
            assert await tokenizer.decode(ids, skip) == reference.decode(ids, skip)
            assert tokenizer.vocabulary.decode(ids, skip) == reference.decode(ids, skip)
        assert tokenizer.vocabulary.tokens == reference.tokens
        options = {"chat_template_kwargs": {"shout": "é\ud800"}}
        assert await tokenizer.chat_text([USER], **options) == reference.chat_text([USER], **options)
        with pytest.raises(RequestError, match="surrogate") as error:
            await tokenizer.encode(["\ud800"])
        assert error.value.param == "prompt"
        with pytest.raises(RequestError) as error:
            await tokenizer.chat_text([])
        assert error.value.param == "messages"

    run(folder, check)


def test_load_uses_the_started_process(folder: Path) -> None:
    async def check() -> None:
        tokenizer = TokenizerProcess(folder)
        tokenizer.start()
        started = tokenizer._process
        try:
            vocabulary = await tokenizer.load()
            assert tokenizer._process is started
            assert vocabulary.tokens == Tokenizer.load(folder).vocabulary.tokens
        finally:
            tokenizer.close()
        assert started is not None and started.returncode is not None

    asyncio.run(check())


def test_load_errors_equal_those_without_a_process(tmp_path: Path, folder: Path) -> None:
    for path, template, kind in ((tmp_path, None, ModelError), (folder, "/no/such/file", ArgumentError)):
        with pytest.raises(kind) as local:
            Tokenizer.load(path, template)
        tokenizer = TokenizerProcess(path, template)
        with pytest.raises(kind) as remote:
            asyncio.run(tokenizer.load())
        tokenizer.close()
        assert str(remote.value) == str(local.value)


def test_processes_have_one_thread_and_no_torch(folder: Path) -> None:
    async def check(tokenizer: TokenizerProcess) -> None:
        await tokenizer.encode(["a"] * 100)
        for process in processes(tokenizer):
            assert process.num_threads() == 1, "a lock that another thread holds during a fork is never released"
            assert not [each.path for each in process.memory_maps() if "libtorch" in each.path]

    run(folder, check)


def test_small_jobs_do_not_wait_for_large_ones(folder: Path) -> None:
    async def check(tokenizer: TokenizerProcess) -> None:
        async with tokenizer._lanes["large"].lock, tokenizer._lanes["untrusted"].lock:
            large = [asyncio.create_task(tokenizer.encode([LARGE])) for _ in range(3)]
            own = asyncio.create_task(tokenizer.chat_text([USER], chat_template="{{ 1 }}"))
            assert len((await tokenizer.encode(["hello"]))[0]) < 10
            assert await tokenizer.chat_text([USER]) == "<user>hello"
            assert len((await tokenizer.encode([LARGE[: 2**17]]))[0]) > 2**14
            assert not any(task.done() for task in (*large, own))
        assert len({len(ids[0]) for ids in await asyncio.gather(*large)}) == 1
        assert await own == "1"

    run(folder, check)


def test_cancelled_jobs_are_ended_or_not_started(folder: Path) -> None:
    async def check(tokenizer: TokenizerProcess) -> None:
        def num_processes() -> int:
            return len(processes(tokenizer))

        num_idle = num_processes()
        running, queued = (asyncio.create_task(tokenizer.encode([LARGE * 20])) for _ in range(2))
        await until(lambda: num_processes() > num_idle)
        assert num_processes() == num_idle + 1, "more than one large job runs"
        queued.cancel()
        running.cancel()
        await asyncio.gather(running, queued, return_exceptions=True)
        await until(lambda: num_processes() == num_idle)
        assert len((await tokenizer.encode([LARGE]))[0]) > 2**17, "the next job was affected"
        await until(lambda: num_processes() == num_idle)  # its memory is released

    run(folder, check)


def test_dead_and_stopped_processes_are_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(tokenizer: TokenizerProcess) -> None:
        expected = await tokenizer.encode(["hello"])
        for kinds in (["worker"], ["process"], ["process", "worker"]):
            # A worker survives the process that forked it, and continues to work.
            worker = tokenizer._lanes["small"].worker
            assert worker is not None and tokenizer._process is not None
            pids = {"worker": worker.pid, "process": tokenizer._process.pid}
            victims = {kind: psutil.Process(pids[kind]) for kind in kinds}
            for victim in victims.values():
                victim.kill()
            await asyncio.to_thread(psutil.wait_procs, [each for kind, each in victims.items() if kind == "worker"])
            assert await asyncio.gather(*(tokenizer.encode(["hello"]) for _ in range(5))) == [expected] * 5
            assert len((await tokenizer.encode([LARGE]))[0]) > 2**17
        monkeypatch.setattr(tokenizer_process, "_FORK_TIMEOUT_S", 2.0)
        tokenizer._lanes["small"].timeout = 1.0
        for process in processes(tokenizer):
            process.suspend()
        assert await tokenizer.encode(["hello"]) == expected, "a stopped process was not replaced"

    run(folder, check)


HOSTILE: dict[str, str] = {
    "endless number": "{{ 9**(9**9) }}",
    "memory": "{{ 'a'*10**10 }}",
    "growing memory": "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x*2 %}{% endfor %}",
    "large list": "{{ [0]*10**10 }}",
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "output": "{% for i in range(99999) %}{% for j in range(99999) %}{{ 'a'*99999 }}{% endfor %}{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "nesting": "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
    "many blocks": "{% if 1 %}" * 5_000 + "{% endif %}" * 5_000,
    "long error": "{{ raise_exception('a'*10**8) }}",
    "format": "{{ '%1000000000d' % 1 }}",
    "width": "{{ '{:>1000000000000}'.format(1) }}",
    "the file system": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "the interpreter": "{{ cycler.__init__.__globals__.os.kill(1, 9) }}",
    "format strings": "{{ '{0.__class__.__init__.__globals__}'.format(cycler) }}",
    "an include": "{% include '/etc/passwd' %}",
    "an import": "{% import 'os' as os %}{{ os }}",
}


def test_hostile_templates_affect_no_other_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_process, "TEMPLATE_TIMEOUT_S", 0.5)

    async def check(tokenizer: TokenizerProcess) -> None:
        num_idle = len(processes(tokenizer))
        for name, template in HOSTILE.items():
            chat: Any = asyncio.create_task(tokenizer.chat_text([USER], chat_template=template))
            assert await tokenizer.chat_text([USER]) == "<user>hello"
            with pytest.raises(RequestError, match="chat template") as error:
                pytest.fail(f"{name}: {(await chat)[:100]}")
            assert error.value.status == 400, name
            assert len(error.value.message) < 2000, name
        await until(lambda: len(processes(tokenizer)) == num_idle)

    run(folder, check)


def test_template_of_a_request_is_rendered_like_the_models(folder: Path) -> None:
    template = (
        "{{ strftime_now('%c')|length > 5 }}{{ {'ü': messages} | tojson(indent=2) }}{{ messages|map('upper')|join }}"
    )

    async def check(tokenizer: TokenizerProcess) -> None:
        local = Tokenizer.load(folder).chat_text([USER], chat_template=template)
        assert await tokenizer.chat_text([USER], chat_template=template) == local
        with pytest.raises(RequestError, match="Conversation roles must alternate"):
            await tokenizer.chat_text(
                [USER], chat_template="{{ raise_exception('Conversation roles must alternate') }}"
            )

    run(folder, check)


def test_confined_worker_can_open_no_files(folder: Path) -> None:
    """This holds even if a template escapes its sandbox."""

    async def check(tokenizer: TokenizerProcess) -> None:
        worker = await tokenizer._fork(tokenizer._lanes["untrusted"].fork)
        process = psutil.Process(worker.pid)
        await until(lambda: process.rlimit(psutil.RLIMIT_NPROC) == (0, 0))
        assert process.rlimit(psutil.RLIMIT_NOFILE) == (0, 0)
        assert process.num_fds() <= 4, "only the standard streams and the socket may be open"
        worker.kill()

    run(folder, check)


def test_worker_without_memory_fails_one_job_and_logs_it(caplog: pytest.LogCaptureFixture) -> None:
    class Greedy:
        def decode(self, size: int) -> str:
            return "x" * size

    server, worker = socket.socketpair()
    with server, worker, server.makefile("rb") as results:
        for size in (sys.maxsize - 100, 1):
            tokenizer_worker._answer(worker, Greedy(), pickle.dumps(("decode", {"size": size})))
        headers = []
        for _ in range(2):
            header, data = tokenizer_worker.ANSWER.unpack(results.read(tokenizer_worker.ANSWER.size))
            headers.append(json.loads(results.read(header)))
            results.read(data)
    assert headers == [{"failed": True}, {"text": True}]
    assert caplog.messages == ["the tokenizer ran out of memory for a request"]
