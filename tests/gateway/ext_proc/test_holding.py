"""The queue of an endpoint with scaling, in virtual time: which requests are held, for how long, and in which order
they are sent.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from stoker_common.errors import RequestError
from stoker_gateway.ext_proc.hold import EndpointHold
from stoker_gateway.ext_proc.request_queue import RequestQueue, WaitTerms
from stoker_gateway.registry.model_registry import Phase, Scaling
from stoker_gateway.scheduling.drain import DRAIN_VALID_S
from stoker_gateway.scheduling.load import ServerLoad
from stoker_gateway.scheduling.picker import EndpointPicker, Pick, Refusal
from stoker_gateway.scheduling.routing_request import RoutingRequest
from stoker_gateway.scheduling.server_pool import FIRST_REQUESTS

from ...support.virtual_time import elapse

Run = Callable[[Callable[[], Coroutine[Any, Any, None]]], None]
SERVERS = ("10.0.0.1:80", "10.0.0.2:80")
SCALING = Scaling("one", "a", 100.0)


class _Endpoint:
    """An endpoint with scaling whose two served names share the queue. Its servers are not ready."""

    def __init__(self, max_held: int = 50, max_bytes: int = 10_000) -> None:
        self.clock = asyncio.get_running_loop().time
        self.hold = EndpointHold(SCALING, max_held, max_bytes, self.clock())
        self.pickers = [EndpointPicker(), EndpointPicker()]
        self.queues = [RequestQueue(each, 1024, 10.0, self.clock) for each in self.pickers]
        for picker, queue in zip(self.pickers, self.queues, strict=True):
            picker.careful = True
            picker.set_servers(SERVERS, 0)
            queue.hold = self.hold
        self.order: list[str] = []
        self.extensions: dict[str, list[float]] = {}
        self.ended: dict[str, tuple[str, float]] = {}

    def say(self, **changes: Any) -> None:
        self.hold.update(replace(self.hold.scaling, **changes), self.clock())
        for queue in self.queues:
            queue.wake()

    def report(self, server: str = SERVERS[0], **load: Any) -> None:
        now = self.clock()
        for picker, queue in zip(self.pickers, self.queues, strict=True):
            picker.observe(server, ServerLoad(**load), now, now)
            queue.wake()

    async def ask(
        self, name: str, size: int = 0, priority: int = 0, queue: int = 0, check: Callable[[], object] = lambda: None
    ) -> Pick | Refusal:
        async def extend(seconds: float) -> None:
            self.extensions.setdefault(name, []).append(seconds)

        def ended(outcome: str, seconds: float) -> None:
            assert name not in self.ended  # only once
            self.ended[name] = outcome, seconds

        ask = RoutingRequest()
        terms = WaitTerms(name[0], priority, size, 0.0, check, extend, ended)
        choice = self.queues[queue].at_once(ask) or await self.queues[queue].wait(ask, terms)
        if isinstance(choice, Pick):
            self.order.append(name)
        return choice

    async def begin(self, *names: str, **more: Any) -> list[asyncio.Task[Pick | Refusal]]:
        tasks = []
        for name in names:
            tasks.append(asyncio.create_task(self.ask(name, **more)))
            await elapse(0.001)
        return tasks


def kinds(tasks: list[asyncio.Task[Pick | Refusal]]) -> list[str]:
    """Return the results of requests: a refusal's kind, ``sent``, or ``waits``."""
    found = []
    for task in tasks:
        choice = task.result() if task.done() else None
        found.append("waits" if choice is None else choice.kind if isinstance(choice, Refusal) else "sent")
    return found


def test_held_requests_go_in_order_and_not_all_to_the_first_server(virtual_time: Run) -> None:
    async def main() -> None:
        at = _Endpoint()
        names = [f"a{number:02}" for number in range(40)]
        tasks = await at.begin(*names)
        await elapse(20.0)
        assert kinds(tasks) == ["waits"] * 40 and at.queues[0].num_held() == 40 and at.queues[0].num_queued() == 0
        assert all(len(each) == 1 and 99.9 < each[0] <= 100 for each in at.extensions.values())
        at.report()
        await elapse(0.01)
        assert at.order == names[:FIRST_REQUESTS]
        assert at.queues[0].num_queued() == 40 - FIRST_REQUESTS and at.queues[0].num_held() == 0
        at.report(running=4, waiting=4)  # no room for more
        await elapse(0.01)
        assert len(at.order) == FIRST_REQUESTS
        at.report(SERVERS[1])  # another server becomes ready
        await elapse(0.01)
        assert at.order == names[: 2 * FIRST_REQUESTS]
        at.report(SERVERS[1], running=8)  # it has room: it gets twice as many
        await elapse(0.01)
        assert at.order == names[: 4 * FIRST_REQUESTS]
        at.report(SERVERS[1], running=24)
        await elapse(0.01)
        assert at.order == names
        for task in tasks:
            choice = await task
            assert isinstance(choice, Pick) and choice.held_s is not None and choice.held_s >= 20.0
        assert (at.hold.num_held, at.hold.held_bytes) == (0, 0)
        assert (await at.ask("b")).held_s is None

    virtual_time(main)


def test_a_backlog_is_never_sent_all_at_once(virtual_time: Run) -> None:
    async def main() -> None:
        at = _Endpoint(max_held=500)
        tasks = await at.begin(*(f"a{number:03}" for number in range(400)))
        batches = []
        while len(at.order) < 400:
            before = len(at.order)
            at.report(running=before)  # no request waits there: it has room
            await elapse(0.2)
            batches.append(len(at.order) - before)
        assert batches == [8, 16, 32, 64, 64, 64, 64, 64, 24]
        await asyncio.gather(*tasks)
        for _ in range(2):
            at.report(running=400)
            await elapse(0.2)
        assert len(await at.begin(*(f"b{number:03}" for number in range(200)))) == 200
        assert len(at.order) == 600  # ready for long: its reports show whether it is full

    virtual_time(main)


def test_a_hold_ends_after_its_time_and_not_before(virtual_time: Run) -> None:
    async def main() -> None:
        at = _Endpoint()
        first = await at.begin("a1", size=10)
        await elapse(50.0)
        at.say(hold_s=10.0)  # for new requests
        second = await at.begin("a2")
        await elapse(12.0)
        assert kinds(first + second) == ["waits", "held"]
        await elapse(37.0)
        assert kinds(first) == ["waits"]
        await elapse(2.0)
        assert kinds(first) == ["held"]
        refusal = await first[0]
        assert isinstance(refusal, Refusal) and refusal.held_s == pytest.approx(100.0, abs=0.2)
        assert (at.hold.num_held, at.hold.held_bytes) == (0, 0)

    virtual_time(main)


def test_requests_are_held_until_the_drain_lapses(virtual_time: Run) -> None:
    async def main() -> None:
        at = _Endpoint()
        at.report()
        assert isinstance(await at.ask("a0"), Pick)
        at.say(phase=Phase.DRAINING, drain="w")
        tasks = await at.begin("a1", "a2")
        at.report()
        await elapse(DRAIN_VALID_S - 1)
        at.report()
        assert kinds(tasks) == ["waits"] * 2 and at.queues[0].num_held() == 2
        await elapse(2.1)  # the announcement is not withdrawn
        assert kinds(tasks) == ["sent"] * 2 and at.order == ["a0", "a1", "a2"]
        at.say(phase=Phase.DRAINING, drain="w2")
        tasks = await at.begin("a3")
        at.say(phase=Phase.ZERO)
        at.report(ready=False)
        await elapse(40)
        assert kinds(tasks) == ["waits"]
        at.report()
        await elapse(5)
        assert kinds(tasks) == ["waits"]  # a terminating server may report that it is ready
        at.say(phase=Phase.ACTIVE)
        await elapse(0.01)
        assert kinds(tasks) == ["sent"]

    virtual_time(main)


def test_queued_requests_become_held_when_the_endpoint_drains(virtual_time: Run) -> None:
    async def main() -> None:
        at = _Endpoint()
        at.report()
        at.report(running=4, waiting=4)
        tasks = await at.begin("a1", "a2")
        assert at.queues[0].num_queued() == 2 and not at.extensions
        await elapse(9)
        at.say(phase=Phase.DRAINING, drain="w")
        await elapse(5)
        assert kinds(tasks) == ["waits"] * 2 and at.queues[0].num_held() == 2
        assert [len(each) for each in at.extensions.values()] == [1, 1]
        at.say(phase=Phase.ACTIVE)
        at.report()
        await elapse(0.01)
        assert kinds(tasks) == ["sent"] * 2

    virtual_time(main)


def test_bounds_apply_to_all_served_names_together(virtual_time: Run) -> None:
    async def main() -> None:
        at = _Endpoint(max_held=4, max_bytes=1000)
        tasks = await at.begin("a1", "a2") + await at.begin("a3", "a4", queue=1)
        assert kinds(await at.begin("a5", queue=1)) == ["not held"]
        tasks[0].cancel()
        await elapse(0.01)
        assert at.hold.num_held == 3
        assert kinds(await at.begin("a6", size=1001)) == ["not held"]  # too large by itself: it displaces nothing
        large = await at.begin("a7", size=900)
        assert kinds(large) == ["waits"] and at.hold.held_bytes == 900
        for each in (*tasks[1:], *large):
            each.cancel()
        await elapse(0.01)
        assert (at.hold.num_held, at.hold.held_bytes) == (0, 0)

    virtual_time(main)


def test_requests_of_the_key_with_most_bytes_are_displaced(virtual_time: Run) -> None:
    async def main() -> None:
        at = _Endpoint(max_bytes=1000)
        flood = await at.begin("a1", "a2", "a3", size=300)
        assert kinds(await at.begin("a4", size=300)) == ["not held"]
        other = await at.begin("b1", size=300)
        assert kinds(flood + other) == ["waits", "waits", "not held", "waits"]
        first = await at.begin("c1", size=900, priority=1)
        assert kinds(flood + other + first) == ["not held", "not held", "not held", "not held", "waits"]
        assert (at.hold.num_held, at.hold.held_bytes) == (1, 900)

    virtual_time(main)


def test_failed_start_refuses_held_requests_and_none_of_the_next_start(virtual_time: Run) -> None:
    async def main() -> None:
        at = _Endpoint()
        tasks = await at.begin("a1", "a2") + await at.begin("a3", queue=1)
        at.say(start_failure="no image")
        await elapse(0.01)
        assert kinds(tasks) == ["not started"] * 3
        assert kinds(await at.begin("a4")) == ["not started"]
        at.say(phase=Phase.ZERO)  # the operator has given up; the next request triggers a new start
        later = await at.begin("a5")
        assert kinds(later) == ["waits"]
        at.say(phase=Phase.ACTIVE, start_failure="")
        at.report()
        await elapse(0.01)
        assert kinds(later) == ["sent"]
        at.say(start_failure="one pod crashes")
        assert isinstance(await at.ask("a6"), Pick)  # another server serves
        assert (at.hold.num_held, at.hold.held_bytes) == (0, 0)

    virtual_time(main)


def test_held_request_of_a_revoked_key_is_refused(virtual_time: Run) -> None:
    async def main() -> None:
        at = _Endpoint()

        def refuse() -> None:
            raise RequestError("revoked")

        (task,) = await at.begin("a1", check=refuse)
        at.report()
        await elapse(0.01)
        assert isinstance(task.exception(), RequestError) and at.hold.num_held == 0

    virtual_time(main)


def test_outcomes_of_held_requests_are_reported(virtual_time: Run) -> None:
    async def main() -> None:
        def refuse() -> None:
            raise RequestError("revoked")

        at = _Endpoint(max_held=3)
        left, timed_out = await at.begin("a1", "a2")
        await elapse(30.0)
        left.cancel()
        await elapse(70.5)
        assert kinds([timed_out]) == ["held"]
        await at.begin("b1", "b2")
        await at.begin("b3", check=refuse)
        await at.begin("b4")  # no room
        await at.begin("c1")  # it displaces the last request of the key with more held requests
        await elapse(20.0)
        at.report()
        await elapse(0.01)
        await at.begin("d1")  # it need not wait
        at.report(ready=False)
        at.report(running=4, waiting=4)
        await at.begin("d2")  # it waits for room, and is not held
        at.report()
        at.report(ready=False)
        await at.begin("e1")
        at.say(start_failure="no image")
        await elapse(0.01)
        await at.begin("e2")
        assert {name: outcome for name, (outcome, _) in at.ended.items()} == {
            "a1": "cancelled", "a2": "timed_out", "b1": "routed", "b2": "routed", "b3": "no_room", "b4": "no_room",
            "c1": "routed", "e1": "start_failed", "e2": "start_failed",
        }  # fmt: skip
        seconds = [at.ended[name][1] for name in ("a1", "a2", "b1", "b4", "e2")]
        assert seconds == pytest.approx([30.0, 100.0, 20.0, 0.0, 0.0], abs=0.3)
        at.say(start_failure="")
        await at.begin("f1", check=refuse)
        at.report()
        await elapse(0.01)
        assert at.ended["f1"][0] == "refused"

    virtual_time(main)


def test_unreachable_server_gets_no_requests_until_it_reports(virtual_time: Run) -> None:
    async def main() -> None:
        at = _Endpoint()
        at.report()
        assert isinstance(await at.ask("a1"), Pick)
        at.pickers[0].failed(SERVERS[0], at.clock() + 0.001)
        await elapse(0.01)
        tasks = await at.begin("a2")
        assert kinds(tasks) == ["waits"] and at.queues[0].num_held() == 1
        at.report()
        await elapse(0.01)
        assert kinds(tasks) == ["sent"]

    virtual_time(main)


def test_endpoint_that_loses_its_scaling_refuses_held_requests(virtual_time: Run) -> None:
    async def main() -> None:
        at = _Endpoint()
        tasks = await at.begin("a1", size=7)
        at.queues[0].hold = None
        at.queues[0].wake()
        await elapse(0.01)
        assert kinds(tasks) == ["none"] and (at.hold.num_held, at.hold.held_bytes) == (0, 0)

    virtual_time(main)


@pytest.mark.parametrize("seed", range(6))
def test_bounds_hold_and_no_request_is_lost_in_random_histories(virtual_time: Run, seed: int) -> None:
    async def main() -> None:
        rng, at = random.Random(seed), _Endpoint(max_held=20, max_bytes=5000)
        tasks: list[asyncio.Task[Pick | Refusal]] = []
        names: list[str] = []
        for number in range(600):
            action = rng.random()
            if action < 0.6:
                size = rng.choice((0, 10, 400, 2000))
                name = f"{rng.choice('abc')}{number}"
                names.append(name)
                tasks += await at.begin(name, size=size, priority=rng.randrange(2), queue=rng.randrange(2))
            elif action < 0.7 and tasks:
                rng.choice(tasks).cancel()
            elif action < 0.8:
                at.say(phase=rng.choice(list(Phase)), drain=rng.choice(("w1", "w2")))
            elif action < 0.85:
                at.say(start_failure=rng.choice(("", "", "no image")))
            else:
                at.report(
                    rng.choice(SERVERS), ready=rng.random() < 0.6, running=rng.randrange(9), waiting=rng.choice((0, 4))
                )
            await elapse(rng.choice((0.001, 0.5, 5.0)))
            waiting = [each for each in tasks if not each.done()]
            assert sum(map(len, at.queues)) == len(waiting)
            assert 0 <= at.hold.num_held <= 20 and 0 <= at.hold.held_bytes <= 5000
        await elapse(200)
        assert all(each.done() for each in tasks)
        assert (at.hold.num_held, at.hold.held_bytes) == (0, 0)
        assert at.queues[0]._queue.next_expiry == math.inf
        refused = {"held": "timed_out", "not held": "no_room", "not started": "start_failed"}
        for name, task in zip(names, tasks, strict=True):
            outcome, _ = at.ended.get(name, ("", 0.0))
            if task.cancelled():
                assert outcome in ("", "cancelled")
            elif isinstance(choice := task.result(), Pick):
                assert outcome == ("" if choice.held_s is None else "routed")
            else:
                assert outcome == refused.get(choice.kind, "" if choice.held_s is None else "refused")
        assert {outcome for outcome, _ in at.ended.values()} >= {"routed", "cancelled", "no_room", "start_failed"}

    virtual_time(main)
