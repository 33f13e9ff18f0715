"""``stoker gateway`` as a process: how it ends, and what ends with it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import pytest

from ..support.waiting import until_async
from .behind_envoy import CHAT, Server

_MAIN = "import sys; from stoker_gateway.cli.gateway import main; sys.exit(main(sys.argv[1:]))"
_BODY = b'{"model": "m"}'


class Command:
    """The command, with one server of the model m."""

    def __init__(self, process: asyncio.subprocess.Process, server: Server) -> None:
        self.process, self.server = process, server
        self.url = ""
        self.envoy = 0
        self.picker = 0

    async def ended(self) -> tuple[int, bytes]:
        """Wait for its end; return its exit code and standard error."""
        _, stderr = await asyncio.wait_for(self.process.communicate(), 60)
        return self.process.returncode or 0, stderr


@asynccontextmanager
async def command(*words: str) -> AsyncIterator[Command]:
    server = Server("a")
    await server.start()
    words = ("--endpoint", f"m=http://{server.address}", "--port", "0", *words)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", _MAIN, *words, stdout=pipe, stderr=pipe)
    made = Command(process, server)
    try:
        assert process.stdout is not None
        made.url = (await asyncio.wait_for(process.stdout.readline(), 60)).decode().split()[-1]
        made.envoy, made.picker = children_of(process.pid)
        yield made
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        await server.stop()


def children_of(pid: int) -> tuple[int, int]:
    """Return the process ids of Envoy and the picker; 0 for a missing one."""
    by_name = dict[str, int]()
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with suppress(FileNotFoundError, ProcessLookupError):  # a killed picker may vanish at any time
            by_name[Path(f"/proc/{child}/comm").read_text().strip()] = int(child)
    envoy = by_name.pop("envoy")
    return envoy, next(iter(by_name.values()), 0)


def _has_pending(pid: int) -> bool:
    """Return whether a process has a signal that it has not handled yet."""
    status = Path(f"/proc/{pid}/status").read_text()
    return any(int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigPnd", "ShdPnd")))


async def _until_gone(pid: int) -> None:
    await until_async(lambda: not Path(f"/proc/{pid}").exists())


def test_signal_lets_streams_end_and_refuses_new_connections() -> None:
    async def main() -> None:
        async with command() as run, aiohttp.ClientSession() as client, aiohttp.ClientSession() as idle:
            async with client.post(f"{run.url}/v1/completions", data=_BODY) as answer:
                assert (await answer.json())["server"] == "a"
            assert (await idle.get(f"{run.url}/ready")).status == 200
            run.server.does = "stream"
            async with client.post(run.url + CHAT, data=_BODY) as under_way:
                run.process.send_signal(signal.SIGTERM)
                with pytest.raises(aiohttp.ClientError):
                    while True:
                        async with aiohttp.ClientSession() as new:
                            await new.get(f"{run.url}/health")
                ready = await idle.get(f"{run.url}/ready")  # on an existing connection
                assert (ready.status, ready.headers["connection"]) == (503, "close")
                run.server.last = True
                run.server.more.set()
                assert await under_way.read() == b"data: 1\n\ndata: [DONE]\n\n"
            code, stderr = await run.ended()
            assert code == 0 and b"Traceback" not in stderr

    asyncio.run(main())


def test_connections_are_accepted_during_the_drain_delay() -> None:
    async def main() -> None:
        async with command("--drain-delay", "600") as run:

            async def ready() -> int:
                async with aiohttp.ClientSession() as new, new.get(f"{run.url}/ready") as answer:
                    return answer.status

            assert await ready() == 200
            run.process.send_signal(signal.SIGTERM)

            async def holds() -> bool:
                return await ready() == 503

            await until_async(holds)
            async with aiohttp.ClientSession() as new, new.post(f"{run.url}/v1/completions", data=_BODY) as answer:
                assert ((await answer.json())["server"], answer.headers["connection"]) == ("a", "close")
            run.process.send_signal(signal.SIGTERM)
            code, stderr = await run.ended()
            assert code == 0 and b"Traceback" not in stderr

    asyncio.run(main())


def test_a_signal_loses_no_line_for_billing(tmp_path: Path) -> None:
    log = tmp_path / "billing"

    async def main() -> None:
        async with command("--billing-log", str(log)) as run, aiohttp.ClientSession() as client:
            run.server.does = "stream"
            headers = {"X-Request-Id": "stream"}
            async with client.post(run.url + CHAT, data=_BODY, headers=headers) as under_way:
                assert await under_way.content.readuntil(b"\n\n") == b"data: 1\n\n"
                run.server.does = "answer"

                async def ask(number: int) -> None:
                    headers = {"X-Request-Id": f"r{number}"}
                    async with client.post(run.url + CHAT, data=_BODY, headers=headers) as answer:
                        assert (await answer.json())["server"] == "a"

                await asyncio.gather(*map(ask, range(50)))
                run.process.send_signal(signal.SIGTERM)
                run.server.last = True
                run.server.more.set()
                await under_way.read()
            code, stderr = await run.ended()
            assert code == 0 and b"Traceback" not in stderr

    asyncio.run(main())
    lines = [json.loads(line) for line in log.read_text().strip("\n").split("\n")]
    assert sorted(each["request_id"] for each in lines) == sorted(["stream", *(f"r{number}" for number in range(50))])
    assert not any(each["aborted"] for each in lines)


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--drain-timeout", "1")], ids=["second signal", "timeout"])
def test_second_signal_or_timeout_interrupts_streams(words: tuple[str, ...]) -> None:
    async def main() -> None:
        async with command(*words) as run, aiohttp.ClientSession() as client:
            run.server.does = "stream"
            async with client.post(run.url + CHAT, data=_BODY) as under_way:
                assert await under_way.content.readuntil(b"\n\n") == b"data: 1\n\n"
                os.kill(run.picker, signal.SIGSTOP)  # it gets both signals at once
                for _ in range(1 if words else 2):
                    run.process.send_signal(signal.SIGTERM)
                    await until_async(lambda: not _has_pending(run.process.pid))
                await until_async(lambda: _has_pending(run.picker))
                os.kill(run.picker, signal.SIGCONT)
                with pytest.raises(aiohttp.ClientError):
                    await under_way.read()
            code, stderr = await run.ended()
            assert code == 0 and b"Traceback" not in stderr
            await _until_gone(run.envoy)

    asyncio.run(main())


def test_gateway_and_envoy_end_when_either_dies() -> None:
    async def main() -> None:
        async with command() as run:
            os.kill(run.envoy, signal.SIGKILL)
            code, stderr = await run.ended()
            assert code == 1
            assert stderr.splitlines()[-1].startswith(b"stoker gateway: Envoy was killed by signal 9 (SIGKILL)")
        async with command() as run:
            run.process.kill()
            await run.ended()
            await asyncio.wait_for(_until_gone(run.envoy), 60)
            await asyncio.wait_for(_until_gone(run.picker), 60)

    asyncio.run(main())


def test_killed_picker_is_restarted_and_interrupts_no_stream() -> None:
    async def main() -> None:
        async with command() as run, aiohttp.ClientSession() as client:
            run.server.does = "stream"
            async with client.post(run.url + CHAT, data=_BODY) as under_way:
                assert await under_way.content.readuntil(b"\n\n") == b"data: 1\n\n"
                run.server.does = "answer"
                for _ in range(2):
                    os.kill(run.picker, signal.SIGKILL)
                    refused = 0
                    while True:
                        async with client.post(f"{run.url}/v1/completions", data=_BODY) as answer:
                            if answer.status == 200:
                                break
                            assert (answer.status, "retry-after" in answer.headers) == (503, True), answer
                            refused += 1
                            await asyncio.sleep(0.05)  # sleeps: a client that retries as Retry-After says
                    assert refused
                    envoy, picker = children_of(run.process.pid)
                    assert envoy == run.envoy and picker not in (0, run.picker)
                    run.picker = picker
                run.process.send_signal(signal.SIGTERM)
                run.server.last = True
                run.server.more.set()
                assert await under_way.read() == b"data: [DONE]\n\n"
            code, stderr = await run.ended()
            assert code == 0 and stderr.count(b"the picker was killed by signal 9 (SIGKILL)") == 2
            assert b"Traceback" not in stderr

    asyncio.run(main())


def test_fail_open_refuses_no_request_when_the_picker_is_killed() -> None:
    async def main() -> None:
        async with command("--picker-failure-mode", "fail-open") as run, aiohttp.ClientSession() as client:
            os.kill(run.picker, signal.SIGKILL)
            while children_of(run.process.pid)[1] in (0, run.picker) or not run.server.requests[20:]:
                async with client.post(f"{run.url}/v1/completions", data=_BODY) as answer:
                    assert answer.status == 200
                await asyncio.sleep(0.05)  # sleeps: each is logged, and the log is not read yet

            async def a_picker_answers() -> bool:
                """Return whether the picker responds; until then, the server does."""
                async with client.get(f"{run.url}/v1/models") as answer:
                    assert answer.status == 200
                    return "data" in await answer.json()

            await until_async(a_picker_answers, every=0.05)
            run.process.send_signal(signal.SIGTERM)
            code, stderr = await run.ended()
            assert code == 0 and stderr.count(b"the picker was killed") == 1

    asyncio.run(main())


def test_requests_end_even_if_the_picker_is_killed_during_shutdown() -> None:
    async def main() -> None:
        async with command() as run, aiohttp.ClientSession() as client:
            run.server.does = "stream"
            async with client.post(run.url + CHAT, data=_BODY) as under_way:
                assert await under_way.content.readuntil(b"\n\n") == b"data: 1\n\n"
                run.process.send_signal(signal.SIGTERM)
                await until_async(lambda: not _has_pending(run.process.pid))
                os.kill(run.picker, signal.SIGKILL)
                await _until_gone(run.picker)
                run.server.last = True
                run.server.more.set()
                assert await under_way.read() == b"data: [DONE]\n\n"
            code, stderr = await run.ended()
            assert code == 0 and b"waits for active requests to end" in stderr and b"Traceback" not in stderr

    asyncio.run(main())
