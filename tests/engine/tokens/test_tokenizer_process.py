"""The tokenizer in its own process. Processes are real; the tokenizer is small."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from tokenizers import Tokenizer as Backend

from stoker_common.errors import ArgumentError, ModelError, RequestError
from stoker_engine.tokens import tokenizer_process
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


def test_it_says_what_the_tokenizer_says(folder: Path) -> None:
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


def test_process_that_was_started_is_the_one_that_is_loaded(folder: Path) -> None:
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


def test_what_cannot_be_loaded_is_said_as_without_a_process(tmp_path: Path, folder: Path) -> None:
    for path, template, kind in ((tmp_path, None, ModelError), (folder, "/no/such/file", ArgumentError)):
        with pytest.raises(kind) as local_result:
            Tokenizer.load(path, template)
        tokenizer = TokenizerProcess(path, template)
        with pytest.raises(kind) as there:
            asyncio.run(tokenizer.load())
        tokenizer.close()
        assert str(there.value) == str(local_result.value)


def test_it_may_fork_and_needs_no_torch(folder: Path) -> None:
    async def check(tokenizer: TokenizerProcess) -> None:
        await tokenizer.encode(["a"] * 100)
        for process in processes(tokenizer):
            assert process.num_threads() == 1, "a thread that holds a lock while the process forks holds it for ever"
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


def test_what_nobody_waits_for_is_not_begun_or_ended(folder: Path) -> None:
    async def check(tokenizer: TokenizerProcess) -> None:
        def at_work() -> int:
            return len(processes(tokenizer))

        resting = at_work()
        running, queued = (asyncio.create_task(tokenizer.encode([LARGE * 20])) for _ in range(2))
        await until(lambda: at_work() > resting)
        assert at_work() == resting + 1, "one large job at a time"
        queued.cancel()
        running.cancel()
        await asyncio.gather(running, queued, return_exceptions=True)
        await until(lambda: at_work() == resting)
        assert len((await tokenizer.encode([LARGE]))[0]) > 2**17, "the next one is not hurt"
        await until(lambda: at_work() == resting), "its memory is returned"

    run(folder, check)


def test_whatever_dies_is_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert await tokenizer.encode(["hello"]) == expected, "what is stopped is replaced too"

    run(folder, check)


HOSTILE: dict[str, str] = {
    "a number without end": "{{ 9**(9**9) }}",
    "memory": "{{ 'a'*10**10 }}",
    "memory by and by": "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x*2 %}{% endfor %}",
    "a list": "{{ [0]*10**10 }}",
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "output": "{% for i in range(99999) %}{% for j in range(99999) %}{{ 'a'*99999 }}{% endfor %}{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "nesting": "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
    "many blocks": "{% if 1 %}" * 5_000 + "{% endif %}" * 5_000,
    "an error without end": "{{ raise_exception('a'*10**8) }}",
    "format": "{{ '%1000000000d' % 1 }}",
    "width": "{{ '{:>1000000000000}'.format(1) }}",
    "the file system": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "the interpreter": "{{ cycler.__init__.__globals__.os.kill(1, 9) }}",
    "format strings": "{{ '{0.__class__.__init__.__globals__}'.format(cycler) }}",
    "an include": "{% include '/etc/passwd' %}",
    "an import": "{% import 'os' as os %}{{ os }}",
}


def test_hostile_templates_hurt_nobody(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_process, "TEMPLATE_TIMEOUT_S", 0.5)

    async def check(tokenizer: TokenizerProcess) -> None:
        resting = len(processes(tokenizer))
        for name, template in HOSTILE.items():
            chat: Any = asyncio.create_task(tokenizer.chat_text([USER], chat_template=template))
            assert await tokenizer.chat_text([USER]) == "<user>hello"
            with pytest.raises(RequestError, match="chat template") as error:
                pytest.fail(f"{name}: {(await chat)[:100]}")
            assert error.value.status == 400, name
            assert len(error.value.message) < 2000, name
        await until(lambda: len(processes(tokenizer)) == resting)

    run(folder, check)


def test_a_template_of_a_request_is_rendered_as_one_of_the_model(folder: Path) -> None:
    template = (
        "{{ strftime_now('%c')|length > 5 }}{{ {'ü': messages} | tojson(indent=2) }}{{ messages|map('upper')|join }}"
    )

    async def check(tokenizer: TokenizerProcess) -> None:
        local_result = Tokenizer.load(folder).chat_text([USER], chat_template=template)
        assert await tokenizer.chat_text([USER], chat_template=template) == local_result
        with pytest.raises(RequestError, match="Conversation roles must alternate"):
            await tokenizer.chat_text(
                [USER], chat_template="{{ raise_exception('Conversation roles must alternate') }}"
            )

    run(folder, check)


def test_a_confined_worker_can_open_nothing(folder: Path) -> None:
    """Whatever a template may gain access to."""

    async def check(tokenizer: TokenizerProcess) -> None:
        worker = await tokenizer._fork(tokenizer._lanes["untrusted"].fork)
        process = psutil.Process(worker.pid)
        await until(lambda: process.rlimit(psutil.RLIMIT_NPROC) == (0, 0))
        assert process.rlimit(psutil.RLIMIT_NOFILE) == (0, 0)
        assert process.num_fds() <= 4, "the standard streams, and its socket"
        worker.kill()

    run(folder, check)
