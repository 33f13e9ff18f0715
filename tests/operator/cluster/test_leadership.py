"""Leader election: the decision, and several replicas with one Lease in virtual time."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from typing import Any

import pytest

from stoker_operator.cluster import leadership
from stoker_operator.cluster.kube import KubeError, Object
from stoker_operator.cluster.leadership import Leadership, Step, Timing, decide
from stoker_operator.settings import LeaseSettings

from ...support.virtual_time import elapse

LEASE = LeaseSettings("stoker-system", "stoker")


class Server:
    """One Lease, stored like in the API server. A request takes `latency` seconds and takes effect after half of it."""

    def __init__(self) -> None:
        self.lease: Object | None = None
        self.version = 0
        self.latency = 0.01
        self.requests = 0

    def put(self, body: Object) -> Object:
        self.version += 1
        metadata = {**body["metadata"], "resourceVersion": str(self.version)}
        self.lease = {**copy.deepcopy(body), "metadata": metadata}
        return copy.deepcopy(self.lease)


class Kube:
    """A replica's connection to the server, which can be cut."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.cut: KubeError | None = None

    def _reach(self) -> Server:
        self.server.requests += 1
        if self.cut:
            raise self.cut
        return self.server

    def get(self, kind: str, namespace: str, name: str) -> Object | None:
        assert (kind, namespace, name) == ("Lease", LEASE.namespace, LEASE.name)
        return copy.deepcopy(self._reach().lease)

    def create(self, body: Object) -> Object:
        server = self._reach()
        if server.lease:
            raise KubeError(409, "it exists")
        return server.put(body)

    def replace(self, body: Object) -> Object:
        server = self._reach()
        if server.lease is None:
            raise KubeError(404, "there is none")
        if body["metadata"]["resourceVersion"] != server.lease["metadata"]["resourceVersion"]:
            raise KubeError(409, "it has changed")
        return server.put(body)


class Replica:
    """A replica of the election, which records when it starts and stops leading."""

    def __init__(self, name: str, server: Server) -> None:
        self.kube = Kube(server)
        self.story: list[tuple[str, float]] = []
        loop = asyncio.get_running_loop()
        self.leadership = Leadership(
            self.kube,  # type: ignore[arg-type]
            LEASE,
            name,
            on_gain=lambda: self.story.append(("gain", round(loop.time(), 1))),
            on_loss=lambda: self.story.append(("loss", round(loop.time(), 1))),
            clock=loop.time,
            jitter=lambda: 0.5,
        )

    def kill(self) -> None:
        """End as by ``kill -9``."""
        assert self.leadership._task
        self.leadership._task.cancel()


class Thread:
    """Stands in for the thread: takes virtual time."""

    server: Server

    def __init__(self, _name: str) -> None:
        pass

    async def call(self, function: Callable[[], Any]) -> Any:
        await elapse(self.server.latency / 2)
        try:
            return function()
        finally:
            await elapse(self.server.latency / 2)

    def close(self) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    server = Server()
    monkeypatch.setattr(leadership, "OwnThread", type("ItsThread", (Thread,), {"server": server}))
    return server


async def watch_for_two_leaders(*replicas: Replica) -> None:
    while True:
        assert sum(replica.leadership.leading for replica in replicas) <= 1, "two replicas lead at the same time"
        await elapse(0.05)


@pytest.mark.parametrize(
    ("spec", "unchanged", "step"),
    [
        (None, 0, Step.CREATE),
        ({"holderIdentity": "me", "leaseDurationSeconds": 10}, 99, Step.RENEW),
        ({"holderIdentity": "other", "leaseDurationSeconds": 10}, 9.9, Step.WAIT),
        ({"holderIdentity": "other", "leaseDurationSeconds": 10}, 10, Step.TAKE),
        ({"holderIdentity": "other", "leaseDurationSeconds": 60}, 59, Step.WAIT),  # by the holder's own duration
        ({"holderIdentity": "", "leaseDurationSeconds": 1}, 0, Step.TAKE),  # released
        ({"holderIdentity": "other"}, 0, Step.TAKE),  # without a duration
        ({}, 0, Step.TAKE),  # made by hand
    ],
)
def test_next_step_follows_from_the_lease(spec: Object | None, unchanged: float, step: Step) -> None:
    assert decide(None if spec is None else {"spec": spec}, "me", unchanged) is step


def test_first_replica_leads_and_the_others_wait(server: Server, virtual_time: Any) -> None:
    async def main() -> None:
        replicas = [Replica(name, server) for name in "abc"]
        for replica in replicas:
            await replica.leadership.start()
        await elapse(100)
        assert [len(replica.story) for replica in replicas] == [1, 0, 0]
        assert server.lease is not None
        spec = server.lease["spec"]
        assert (spec["holderIdentity"], spec["leaseDurationSeconds"], spec["leaseTransitions"]) == ("a", 10, 0)
        assert spec["acquireTime"] < spec["renewTime"]

    virtual_time(main)


def test_leader_sends_one_request_per_renewal(server: Server, virtual_time: Any) -> None:
    async def main() -> None:
        replica = Replica("a", server)
        await replica.leadership.start()
        await elapse(10)
        before = server.requests
        await elapse(100)
        assert server.requests - before == pytest.approx(50, abs=2)

    virtual_time(main)


def test_killed_leader_is_replaced_within_20_seconds(server: Server, virtual_time: Any) -> None:
    async def main() -> None:
        first, second = Replica("a", server), Replica("b", server)
        await first.leadership.start()
        await elapse(1)
        await second.leadership.start()
        await elapse(30)
        first.kill()
        await elapse(20)
        assert second.story and second.story[0][0] == "gain"
        assert server.lease and server.lease["spec"]["leaseTransitions"] == 1

    virtual_time(main)


def test_stopping_leader_that_still_writes_keeps_the_lease_until_it_expires(server: Server, virtual_time: Any) -> None:
    async def main() -> None:
        first, second = Replica("a", server), Replica("b", server)
        await first.leadership.start()
        await elapse(1)
        await second.leadership.start()
        await elapse(30)
        await first.leadership.stop(release=False)
        assert server.lease and server.lease["spec"]["holderIdentity"] == "a"
        await elapse(5)
        assert not first.leadership.leading
        assert not second.leadership.leading
        await elapse(10)
        assert second.leadership.leading

    virtual_time(main)


def test_stopping_leader_hands_over_at_once(server: Server, virtual_time: Any) -> None:
    async def main() -> None:
        first, second = Replica("a", server), Replica("b", server)
        watch = asyncio.create_task(watch_for_two_leaders(first, second))
        await first.leadership.start()
        await elapse(1)
        await second.leadership.start()
        await elapse(30)
        ended = asyncio.get_running_loop().time()
        await first.leadership.stop()
        await elapse(3)
        assert not first.leadership.leading
        assert second.leadership.leading
        assert second.story[0][1] - ended <= 2.5
        assert first.story == [("gain", 0.0)], "a leader that stops voluntarily gets no event"
        assert not watch.done() or watch.exception() is None
        watch.cancel()

    virtual_time(main)


@pytest.mark.parametrize("error", [KubeError(0, "no answer"), KubeError(500, "etcd is ill"), KubeError(403, "no")])
def test_disconnected_leader_stops_before_another_starts(server: Server, virtual_time: Any, error: KubeError) -> None:
    async def main() -> None:
        first, second = Replica("a", server), Replica("b", server)
        watch = asyncio.create_task(watch_for_two_leaders(first, second))
        await first.leadership.start()
        await elapse(1)
        await second.leadership.start()
        await elapse(30)
        first.kube.cut = error
        await elapse(30)
        (_, lost), (_, gained) = first.story[1], second.story[0]
        assert lost <= 31 + 7 < gained <= 31 + 14
        first.kube.cut = None
        await elapse(30)
        assert len(first.story) == 2, "the former leader does not take the lease back"
        assert second.leadership.leading
        assert not watch.done() or watch.exception() is None
        watch.cancel()

    virtual_time(main)


def test_hanging_api_server_ends_the_leadership_in_time(server: Server, virtual_time: Any) -> None:
    async def main() -> None:
        replica = Replica("a", server)
        await replica.leadership.start()
        await elapse(20)
        server.latency = 60
        await elapse(7.5)
        assert not replica.leadership.leading
        assert replica.story[1][0] == "loss"
        server.latency = 0.01
        await elapse(60)
        assert replica.leadership.leading, "the replica leads again"

    virtual_time(main)


def test_lease_taken_by_hand_ends_the_leadership_at_once(server: Server, virtual_time: Any) -> None:
    async def main() -> None:
        replica = Replica("a", server)
        await replica.leadership.start()
        await elapse(20)
        assert server.lease is not None
        server.put({**server.lease, "spec": {"holderIdentity": "other", "leaseDurationSeconds": 10}})
        await elapse(2.5)
        assert not replica.leadership.leading
        await elapse(14)
        assert replica.leadership.leading

    virtual_time(main)


def test_each_leadership_has_its_own_epoch(server: Server, virtual_time: Any) -> None:
    async def main() -> None:
        replica = Replica("a", server)
        assert replica.leadership.epoch is None
        await replica.leadership.start()
        await elapse(20)
        assert replica.leadership.epoch == 1
        server.latency = 60
        await elapse(7.5)
        assert replica.leadership.epoch is None
        server.latency = 0.01
        await elapse(60)
        assert replica.leadership.epoch == 2

    virtual_time(main)


def test_late_renewal_starts_a_new_leadership(server: Server, virtual_time: Any) -> None:
    async def main() -> None:
        replica = Replica("a", server)
        await replica.leadership.start()
        await elapse(20)

        async def late() -> None:
            # As if the event loop had been blocked: nothing timed out, and yet it is too late.
            replica.leadership._renewed = asyncio.get_running_loop().time() - 8

        await replica.leadership._hold(late)
        assert replica.leadership.epoch == 2
        assert [change for change, _ in replica.story] == ["gain", "loss", "gain"]

    virtual_time(main)


def test_deleted_lease_is_created_again(server: Server, virtual_time: Any) -> None:
    async def main() -> None:
        replica = Replica("a", server)
        await replica.leadership.start()
        await elapse(20)
        server.lease = None
        await elapse(2.5)
        assert replica.leadership.leading
        assert server.lease is not None
        assert len(replica.story) == 1

    virtual_time(main)


def test_default_timing_hands_over_within_20_seconds() -> None:
    timing = Timing()
    assert timing.retry_period < timing.renew_deadline < timing.lease_duration
    assert timing.lease_duration + 2 * timing.retry_period * 1.2 < 20
