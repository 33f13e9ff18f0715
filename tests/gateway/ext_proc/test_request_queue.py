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


class _Endpoint:
    """A queue for one server; `say` reports how many more requests it accepts."""

    def __init__(self, max_waiting: int = 10, max_wait_s: float = 5.0) -> None:
        self.clock = asyncio.get_running_loop().time
        self.picker = EndpointPicker(PickerSettings(max_waiting=64))
        self.picker.set_servers([SERVER], 0)
        self.queue = RequestQueue(self.picker, max_waiting, max_wait_s, self.clock)
        self.order: list[str] = []
        self.say(room=0)

    def say(self, room: int) -> None:
        now = self.clock()
        self.picker.observe(SERVER, ServerLoad(waiting=64 - room), now, now)
        self.queue.wake()

    async def ask(self, name: str, priority: int = 0) -> Pick | Refusal:
        """Send a request; its key is the first letter of `name`."""
        ask, terms = RoutingRequest(), WaitTerms(name[0], priority)
        choice = self.queue.at_once(ask) or await self.queue.wait(ask, terms)
        if isinstance(choice, Pick):
            self.order.append(name)
        return choice

    async def begin(self, *names: str, priority: int = 0) -> list[asyncio.Task[Pick | Refusal]]:
        tasks = []
        for name in names:
            tasks.append(asyncio.create_task(self.ask(name, priority)))
            await asyncio.sleep(0)
        return tasks


def test_keys_take_turns_and_requests_of_a_key_stay_in_order(virtual_time: Run) -> None:
    async def main() -> None:
        endpoint = _Endpoint()
        tasks = await endpoint.begin("a1", "a2", "a3", "a4", "b1", "b2")
        assert len(endpoint.queue) == 6
        assert endpoint.queue.at_once(RoutingRequest()) is None
        for done in range(1, 7):
            endpoint.say(room=1)
            await elapse(0.001)
            assert len(endpoint.order) == done
        await asyncio.gather(*tasks)
        assert endpoint.order.index("b1") <= 2 and endpoint.order.index("b2") <= 4
        assert [name for name in endpoint.order if name[0] == "a"] == ["a1", "a2", "a3", "a4"]
        assert len(endpoint.queue) == 0
        endpoint.say(room=2)
        assert isinstance(endpoint.queue.at_once(RoutingRequest()), Pick)

    virtual_time(main)


def test_higher_priorities_go_first(virtual_time: Run) -> None:
    async def main() -> None:
        endpoint = _Endpoint()
        tasks = await endpoint.begin("a1", "a2", "a3") + await endpoint.begin("b1", "b2", priority=1)
        endpoint.say(room=5)
        await asyncio.gather(*tasks)
        assert endpoint.order == ["b1", "b2", "a1", "a2", "a3"]

    virtual_time(main)


@pytest.mark.parametrize("max_waiting", [1, 2, 5])
def test_number_and_time_of_waiting_requests_are_limited(virtual_time: Run, max_waiting: int) -> None:
    async def main() -> None:
        endpoint = _Endpoint(max_waiting, max_wait_s=5.0)
        tasks = await endpoint.begin(*(f"a{number}" for number in range(max_waiting + 3)))
        await elapse(0.01)
        assert [task.done() for task in tasks] == [False] * max_waiting + [True] * 3
        other_key = await endpoint.begin("b")  # the key with more requests loses its place
        assert len(endpoint.queue) == max_waiting
        await elapse(4.9)
        assert sum(not task.done() for task in tasks + other_key) == max_waiting
        await elapse(0.3)
        assert {(await task).kind for task in tasks + other_key} == {"saturated"}  # type: ignore[union-attr]
        assert len(endpoint.queue) == 0 and endpoint.order == []

    virtual_time(main)


def test_cancelled_requests_leave_the_queue(virtual_time: Run) -> None:
    async def main() -> None:
        for cancelled in range(3):
            endpoint = _Endpoint()
            tasks = await endpoint.begin("a0", "a1", "a2")
            tasks[cancelled].cancel()
            await elapse(0.001)
            assert len(endpoint.queue) == 2
            endpoint.say(room=2)
            await elapse(0.001)
            assert endpoint.order == [f"a{number}" for number in range(3) if number != cancelled]

    virtual_time(main)


def test_queued_requests_are_refused_when_no_server_is_left(virtual_time: Run) -> None:
    async def main() -> None:
        for end in (lambda endpoint: endpoint.queue.close(), lambda endpoint: endpoint.picker.set_servers([], 0)):
            endpoint = _Endpoint()
            tasks = await endpoint.begin("a1", "a2", "b1")
            end(endpoint)
            await elapse(0.2)
            assert {(await task).kind for task in tasks} == {"none"}  # type: ignore[union-attr]
            assert len(endpoint.queue) == 0

    virtual_time(main)


@pytest.mark.parametrize(
    "wants",
    [
        RoutingRequest(held_by=SERVER),
        RoutingRequest(subset=frozenset({SERVER})),
        RoutingRequest(held_by=SERVER, subset=frozenset({SERVER})),
    ],
)
def test_request_for_one_server_delays_no_other_request(virtual_time: Run, wants: RoutingRequest) -> None:
    async def main() -> None:
        other_server = "10.0.0.2:80"
        endpoint = _Endpoint()
        endpoint.picker.set_servers([SERVER, other_server], 0)
        held = [asyncio.create_task(endpoint.queue.wait(wants, WaitTerms("a"))) for _ in range(3)]
        await elapse(0.001)
        for key in ("a", "b"):  # for all keys: they wait for that server, not for their turn
            choice = await endpoint.queue.wait(RoutingRequest(), WaitTerms(key))
            assert isinstance(choice, Pick) and choice.servers[0] == other_server
        assert len(endpoint.queue) == 3 and not any(each.done() for each in held)
        endpoint.say(room=1)
        await elapse(0.001)
        assert [each.done() for each in held] == [True, False, False]  # in order of arrival
        endpoint.say(room=64)
        for each in held:
            choice = await each
            assert isinstance(choice, Pick) and choice.servers[0] == SERVER

    virtual_time(main)


def test_requests_for_the_same_servers_stay_in_order(virtual_time: Run) -> None:
    async def main() -> None:
        endpoint = _Endpoint()
        order = list[int]()

        async def ask(number: int) -> None:
            wants = RoutingRequest(held_by=SERVER) if number % 2 else RoutingRequest()
            await endpoint.queue.wait(wants, WaitTerms("a"))
            order.append(number)

        tasks = []
        for number in range(6):
            tasks.append(asyncio.create_task(ask(number)))
            await asyncio.sleep(0)
        for _ in tasks:
            endpoint.say(room=1)
            await elapse(0.001)
        await asyncio.gather(*tasks)
        assert order == list(range(6))

    virtual_time(main)
