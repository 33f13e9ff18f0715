"""The queue of an endpoint whose servers are saturated, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from stoker_gateway.ext_proc.request_queue import RequestQueue, WaitTerms
from stoker_gateway.scheduling.load import ServerLoad
from stoker_gateway.scheduling.picker import EndpointPicker, Pick, PickerSettings, Refusal
from stoker_gateway.scheduling.routing_request import RoutingRequest

from ...support.virtual_time import elapse

Run = Callable[[Callable[[], Coroutine[Any, Any, None]]], None]
SERVER = "10.0.0.1:80"


class _Line:
    """A queue for one server that accepts `room` requests per report."""

    def __init__(self, max_waiting: int = 10, max_wait_s: float = 5.0) -> None:
        self.clock = asyncio.get_running_loop().time
        self.picker = EndpointPicker(PickerSettings(max_waiting=64))
        self.picker.set_servers([SERVER], 0)
        self.line = RequestQueue(self.picker, max_waiting, max_wait_s, self.clock)
        self.order: list[str] = []
        self.say(room=0)

    def say(self, room: int) -> None:
        now = self.clock()
        self.picker.observe(SERVER, ServerLoad(waiting=64 - room), now, now)
        self.line.wake()

    async def ask(self, name: str, priority: int = 0) -> Pick | Refusal:
        """Send a request with the key that `name` begins with."""
        ask, terms = RoutingRequest(), WaitTerms(name[0], priority)
        choice = self.line.at_once(ask) or await self.line.wait(ask, terms)
        if isinstance(choice, Pick):
            self.order.append(name)
        return choice

    async def begin(self, *names: str, priority: int = 0) -> list[asyncio.Task[Pick | Refusal]]:
        tasks = []
        for name in names:
            tasks.append(asyncio.create_task(self.ask(name, priority)))
            await asyncio.sleep(0)
        return tasks


def test_keys_take_turns_and_nobody_overtakes(virtual_time: Run) -> None:
    async def main() -> None:
        line = _Line()
        tasks = await line.begin("a1", "a2", "a3", "a4", "b1", "b2")
        assert len(line.line) == 6
        assert line.line.at_once(RoutingRequest()) is None
        for done in range(1, 7):
            line.say(room=1)
            await elapse(0.001)
            assert len(line.order) == done
        await asyncio.gather(*tasks)
        assert line.order.index("b1") <= 2 and line.order.index("b2") <= 4
        assert [name for name in line.order if name[0] == "a"] == ["a1", "a2", "a3", "a4"]
        assert len(line.line) == 0
        line.say(room=2)
        assert isinstance(line.line.at_once(RoutingRequest()), Pick)

    virtual_time(main)


def test_higher_priorities_go_first(virtual_time: Run) -> None:
    async def main() -> None:
        line = _Line()
        tasks = await line.begin("a1", "a2", "a3") + await line.begin("b1", "b2", priority=1)
        line.say(room=5)
        await asyncio.gather(*tasks)
        assert line.order == ["b1", "b2", "a1", "a2", "a3"]

    virtual_time(main)


@pytest.mark.parametrize("max_waiting", [1, 2, 5])
def test_so_many_wait_for_so_long(virtual_time: Run, max_waiting: int) -> None:
    async def main() -> None:
        line = _Line(max_waiting, max_wait_s=5.0)
        tasks = await line.begin(*(f"a{number}" for number in range(max_waiting + 3)))
        await elapse(0.01)
        assert [task.done() for task in tasks] == [False] * max_waiting + [True] * 3
        other_key = await line.begin("b")  # the key with more requests loses its place
        assert len(line.line) == max_waiting
        await elapse(4.9)
        assert sum(not task.done() for task in tasks + other_key) == max_waiting
        await elapse(0.3)
        assert {(await task).kind for task in tasks + other_key} == {"saturated"}  # type: ignore[union-attr]
        assert len(line.line) == 0 and line.order == []

    virtual_time(main)


def test_who_goes_away_leaves_no_trace(virtual_time: Run) -> None:
    async def main() -> None:
        for cancelled in range(3):
            line = _Line()
            tasks = await line.begin("a0", "a1", "a2")
            tasks[cancelled].cancel()
            await elapse(0.001)
            assert len(line.line) == 2
            line.say(room=2)
            await elapse(0.001)
            assert line.order == [f"a{number}" for number in range(3) if number != cancelled]

    virtual_time(main)


def test_all_are_told_when_there_are_no_servers_any_more(virtual_time: Run) -> None:
    async def main() -> None:
        for end in (lambda line: line.line.close(), lambda line: line.picker.set_servers([], 0)):
            line = _Line()
            tasks = await line.begin("a1", "a2", "b1")
            end(line)
            await elapse(0.2)
            assert {(await task).kind for task in tasks} == {"none"}  # type: ignore[union-attr]
            assert len(line.line) == 0

    virtual_time(main)


@pytest.mark.parametrize(
    "wants",
    [
        RoutingRequest(held_by=SERVER),
        RoutingRequest(subset=frozenset({SERVER})),
        RoutingRequest(held_by=SERVER, subset=frozenset({SERVER})),
    ],
)
def test_who_waits_for_one_server_holds_up_nobody_else(virtual_time: Run, wants: RoutingRequest) -> None:
    async def main() -> None:
        other_server = "10.0.0.2:80"
        line = _Line()
        line.picker.set_servers([SERVER, other_server], 0)
        held = [asyncio.create_task(line.line.wait(wants, WaitTerms("a"))) for _ in range(3)]
        await elapse(0.001)
        for key in ("a", "b"):  # for all keys: they wait for that server, not for their turn
            choice = await line.line.wait(RoutingRequest(), WaitTerms(key))
            assert isinstance(choice, Pick) and choice.servers[0] == other_server
        assert len(line.line) == 3 and not any(each.done() for each in held)
        line.say(room=1)
        await elapse(0.001)
        assert [each.done() for each in held] == [True, False, False]  # in order of arrival
        line.say(room=64)
        for each in held:
            choice = await each
            assert isinstance(choice, Pick) and choice.servers[0] == SERVER

    virtual_time(main)


def test_of_those_who_wait_for_the_same_servers_nobody_overtakes(virtual_time: Run) -> None:
    async def main() -> None:
        line = _Line()
        order = list[int]()

        async def ask(number: int) -> None:
            wants = RoutingRequest(held_by=SERVER) if number % 2 else RoutingRequest()
            await line.line.wait(wants, WaitTerms("a"))
            order.append(number)

        tasks = []
        for number in range(6):
            tasks.append(asyncio.create_task(ask(number)))
            await asyncio.sleep(0)
        for _ in tasks:
            line.say(room=1)
            await elapse(0.001)
        await asyncio.gather(*tasks)
        assert order == list(range(6))

    virtual_time(main)
