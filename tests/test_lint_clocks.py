"""The linter of clocks and sleeps finds all ways to write them, and nothing else."""

from __future__ import annotations

import pytest

from .lint_clocks import findings

WRONG = {
    "a call": "assert time.monotonic() - began < 5",
    "turned round": "assert 5 > time.time() - began",
    "a chain": "assert 0.5 <= time.perf_counter() - began <= 20",
    "a name": "seconds = time.process_time() - began\nassert seconds < 2",
    "a name of a name": "began = monotonic()\nafter = began + 1\nassert after < 9\nfrom time import monotonic",
    "a deadline": "deadline = time.monotonic() + 10\nwhile not done():\n    assert time.monotonic() < deadline",
    "a word": "assert elapsed < 5",
    "an attribute": "assert answer.elapsed < limit",
    "a loop": "assert asyncio.get_running_loop().time() - began <= 1",
    "equality": "assert loop.time() == 1",
    "a condition": "assert (time.monotonic() - began < 2) == stuck",
    "not": "assert not time.monotonic() > deadline",
    "if and raise": "if time.monotonic() > deadline:\n    raise AssertionError",
    "if and fail": "if time.monotonic() > deadline:\n    pytest.fail('slow')",
    "a list": "took_s = []\nfor _ in x:\n    each.append(time.thread_time() - began)\nassert max(each) < 1",
    "quantiles": "s.append(time.process_time() - began)\nassert statistics.quantiles(s, n=100)[98] < 0.05",
    "a function": "def seconds():\n    return time.thread_time() - began\nassert seconds() < 2.5 * other",
    "and": "assert ok and time.monotonic() < end",
    "a sleep": "time.sleep(1)",
    "a sleep of a loop": "async def f():\n    await asyncio.sleep(0.01)",
    "an imported sleep": "from time import sleep as nap\nnap(3)",
    "a module's other name": "import asyncio as aio\naio.sleep(1)",
    "a marker without a reason": "time.sleep(1)  # sleeps:",
    "a limit": "async with asyncio.timeout(5):\n    pass",
    "a limit of a coroutine": "asyncio.wait_for(run(), 30)",
    "an imported limit": "from asyncio import timeout\nasync with timeout(2.5):\n    pass",
    "a limit by its name": "asyncio.wait_for(run(), timeout=30)",
    "a thread's end": "thread.join(30)",
    "a future": "submitted.result(10)",
    "an event": "assert came.wait(30)",
    "a process": "subprocess.run(argv, timeout=59)",
    "a queue": "arrived.get(timeout=0.5)",
    "a constant": "LIMIT = 20\nassert came.wait(LIMIT)",
    "a typed constant": "LIMIT: Final = 20\nthread.join(timeout=LIMIT)",
    "a socket": "connection.settimeout(5)",
    "a connection": "socket.create_connection(address, 10)",
    "a default": "def until(condition, timeout: float = 30):\n    pass",
    "a keyword's default": "def until(condition, *, timeout=30):\n    pass",
    "a limit without a reason": "thread.join(5)  # limit:",
}
RIGHT = {
    "a lower bound": "assert time.monotonic() - began >= 5",
    "order": "assert first.at < second.at",
    "a clock as an argument": "assert picker.pick(RoutingRequest(), time.monotonic()).count < 3",
    "virtual time": "def test(virtual_time):\n    async def main():\n        assert loop.time() == 1",
    "a yield": "asyncio.sleep(0)",
    "a marked sleep": "time.sleep(1)  # sleeps: a server that answers late",
    "another sleep": "faults.sleep(1)",
    "a limit of the work": "if time.monotonic() > until:\n    break",
    "a long limit": "asyncio.wait_for(run(), 120)",
    "a limit that is passed on": "thread.join(seconds)",
    "no limit": "thread.join()\ncame.wait()\nqueue.get(timeout=None)",
    "a look": "thread.join(0)\nqueue.get(timeout=0)",
    "between two looks": "while not ended.wait(0.2):\n    look()",
    "a marked limit": "opener.open(url, timeout=2)  # limit: of a look, which is repeated",
    "a limit of virtual time": "def test(virtual_time):\n    async def main():\n        asyncio.timeout(4)",
    "words": "', '.join(words)\n' '.join('12')",
}


@pytest.mark.parametrize("source", WRONG.values(), ids=WRONG)
def test_code_that_fails_under_load_is_found(source: str) -> None:
    assert len(findings(source)) == 1


@pytest.mark.parametrize("source", RIGHT.values(), ids=RIGHT)
def test_code_that_cannot_fail_under_load_is_not_found(source: str) -> None:
    assert findings(source) == []


def test_reported_lines_are_those_of_the_source() -> None:
    (found,) = findings("import time\n\n\ntime.sleep(\n    1\n)\n")
    assert found.line == 4
