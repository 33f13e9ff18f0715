"""Limits shared by replicas: real ones over loopback, each with its own clock; seeded."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker_gateway.ext_proc.errors import RateLimitError
from stoker_gateway.keys.key import Key, Limits
from stoker_gateway.limits import peer_client, peer_limiter
from stoker_gateway.limits.key_usage import KeyUsage
from stoker_gateway.limits.messages import LimitRequest, Message, MessageError, Reply
from stoker_gateway.limits.peer_limiter import PeerLimiter
from stoker_gateway.limits.peer_reports import PeerReports, statement
from stoker_gateway.limits.peer_server import METHOD, SERVICE, PeerServer, credentials
from stoker_gateway.limits.ratelimit_headers import Allowance, Denial, Grant, RateLimitStatus
from stoker_gateway.limits.replicas import View

from ...support.waiting import until_async

SKEWS = (0.0, 86_400.25, 7.75)


async def run_event_loop(number: int) -> None:
    """Run the event loop `number` times."""
    for _ in range(number):
        await asyncio.sleep(0)


class Relay:
    """A network between two replicas, which can be cut without notice."""

    def __init__(self) -> None:
        self.whole = asyncio.Event()
        self.whole.set()
        self.port = 0
        self.to = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, to: int) -> None:
        self.to = to
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            there, back = await asyncio.open_connection("127.0.0.1", self.to)
            for each in (self._pump(reader, back), self._pump(there, writer)):
                task = asyncio.create_task(each)
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            return
        writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                await self.whole.wait()
                writer.write(data)
                await writer.drain()
        writer.close()


class Replica:
    """A running replica."""

    def __init__(self, skew: float, token: str) -> None:
        self.seconds = 0.0  # limits per minute recover only if a test lets time pass
        self.clock: Callable[[], float] = lambda: self.seconds + skew
        self.limiter = PeerLimiter(token, self.clock)
        self.heard = 0
        self.server = PeerServer(token, self._hear)
        self.port = self.server.listen("127.0.0.1:0")
        self.granted: list[str] = []

    def _hear(self, message: Message) -> Reply:
        self.heard += 1
        return self.limiter.receive(message)

    async def reserve(self, key: Key, tokens: int = 1) -> Grant | Denial:
        verdict = await self.limiter.reserve(key, tokens, self.clock())
        if isinstance(verdict, Grant):
            self.granted.append(verdict.id)
        return verdict

    async def granted_at_last(self, key: Key, tokens: int) -> Grant:
        """Retry until a request is granted."""

        async def granted() -> Grant | None:
            verdict = await self.reserve(key, tokens)
            return verdict if isinstance(verdict, Grant) else None

        grant = await until_async(granted, "a grant", every=0.02)
        assert grant is not None
        return grant

    async def flood(self, key: Key, number: int, together: int = 10) -> int:
        """Send `number` requests, `together` at a time; return how many were granted."""
        before = len(self.granted)
        for _ in range(number // together):
            await asyncio.gather(*(self.reserve(key) for _ in range(together)))
        return len(self.granted) - before

    def settle(self, grant_id: str, tokens: int) -> None:
        self.limiter.settle(grant_id, tokens, self.clock())

    async def end(self) -> None:
        await self.limiter.close()
        await self.server.stop()


class Replicas(list[Replica]):
    """Replicas with the networks between them."""

    def __init__(self, replicas: list[Replica]) -> None:
        super().__init__(replicas)
        self.relays: list[Relay] = []

    def owner(self, key: Key) -> Replica:
        owner = self[0].limiter.view.owner(key.id)
        return next(each for each in self if each.limiter.identity == owner)

    def not_owner(self, key: Key) -> Replica:
        return next(each for each in self if each is not self.owner(key))

    async def until_reached(self, number: int) -> None:
        """Wait until each replica reaches `number` others."""
        await until_async(lambda: all(len(each.limiter.view.reached) == number for each in self))

    async def news(self) -> None:
        """Wait until two replicas have exchanged everything: a message may be in flight, the next contains all."""
        before = [each.heard for each in self]
        await until_async(lambda: all(each.heard >= heard + 2 for each, heard in zip(self, before, strict=True)))

    @property
    def granted(self) -> int:
        return sum(len(each.granted) for each in self)


@asynccontextmanager
async def replicas(number: int = 2, tokens: tuple[str, ...] = ("t", "t", "t")) -> AsyncIterator[Replicas]:
    made = Replicas([Replica(SKEWS[each], tokens[each]) for each in range(number)])
    try:
        for replica in made:
            await replica.server.start()
        for replica in made:
            ports = []
            for peer in made:
                if peer is not replica:
                    relay = Relay()
                    await relay.start(peer.port)
                    made.relays.append(relay)
                    ports.append(relay.port)
            # Its own address may be among them, as in the list of a Service's addresses.
            await replica.limiter.set_peers([f"127.0.0.1:{port}" for port in [*ports, replica.port]])
        async with asyncio.timeout(60):
            # Until a replica recognizes its own address, it counts one replica too many, and uses a smaller part.
            await until_async(lambda: all(each.limiter.view.number == number for each in made))
            if len(set(tokens[:number])) == 1:
                await made.until_reached(number - 1)
        yield made
    finally:
        for relay in made.relays:
            relay.whole.set()
        for replica in made:
            await replica.end()
        for relay in made.relays:
            await relay.stop()


def key(name: str, **limits: int) -> Key:
    return Key(name, "", limits=Limits(**limits))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas wait for each other on any slow machine: only disconnected or dead ones count as lost."""
    monkeypatch.setattr(peer_limiter, "MAX_VERDICT_WAIT_S", 60.0)
    monkeypatch.setattr(peer_client, "_LOST_S", 60.0)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("number", [2, 3])
def test_a_limit_is_for_all_replicas_together(number: int) -> None:
    async def main() -> None:
        async with replicas(number) as all_:
            spread = key("spread", requests_per_minute=300)
            granted = sum(await asyncio.gather(*(each.flood(spread, 450 // number) for each in all_)))
            assert 270 <= granted <= 330
            for one in (all_.owner, all_.not_owner):
                at_one = key(f"all at one {one}", requests_per_minute=300)
                assert 270 <= await one(at_one).flood(at_one, 400) <= 330

    asyncio.run(main())


@pytest.mark.usefixtures("patient")
def test_usage_and_returned_tokens_are_known_to_all_replicas() -> None:
    async def main() -> None:
        async with replicas() as all_:
            for number in range(6):  # owned by one of both
                of = key(f"k{number}", tokens_per_minute=1000, concurrency=1)
                for first, second in (all_, all_[::-1]):
                    async with asyncio.timeout(60):
                        held = await first.granted_at_last(of, 450)  # the end of the last one may be in flight
                        denied = await second.reserve(of, 1)
                        assert isinstance(denied, Denial) and denied.what == "concurrency"
                        first.settle(held.id, 100)
                        verdict = await second.granted_at_last(of, 0)
                    allowance = verdict.standing.tokens
                    assert allowance is not None and allowance.remaining == (900 if first is all_[0] else 800)
                    second.settle(verdict.id, 0)

    asyncio.run(main())


def test_usage_counted_by_a_dead_owner_still_counts() -> None:
    async def main() -> None:
        async with replicas() as all_:
            of = key("k", requests_per_minute=300)
            owner, survivor = all_.owner(of), all_.not_owner(of)
            assert await owner.flood(of, 60) == 60
            assert await survivor.flood(of, 40) == 40
            await all_.news()
            await owner.end()
            # The dead replica might still serve: the remaining one has half of the limit.
            granted = await survivor.flood(of, 300, 50)
            assert 80 <= granted <= 110
            await survivor.limiter.set_peers([])  # it does not: now it has the full limit
            granted += await survivor.flood(of, 300, 50)
            assert 180 <= granted <= 200

    asyncio.run(main())


def test_disconnected_replicas_use_their_parts_and_reconnected_ones_one_limit() -> None:
    async def main() -> None:
        async with replicas() as all_:
            of, late = key("k", requests_per_minute=300), key("late", requests_per_minute=300)
            tiny = key("tiny", requests_per_minute=20)
            cut_off = all_.not_owner(tiny)
            await asyncio.gather(*(each.flood(of, 50) for each in all_))
            assert all_.granted == 100
            for relay in all_.relays:
                relay.whole.clear()
            # No replica knows that yet; one that asks in vain uses its own part.
            assert await asyncio.gather(*(each.flood(of, 20) for each in all_)) == [20, 20]
            assert await cut_off.flood(tiny, 30) == 10
            async with asyncio.timeout(60):
                await all_.until_reached(0)
            await asyncio.gather(*(each.flood(of, 300, 50) for each in all_))
            assert [len(each.granted) for each in all_] == [150 + 10 * (each is cut_off) for each in all_]
            alone = [await each.flood(late, 120) for each in all_]
            assert alone == [120, 120]
            for relay in all_.relays:
                relay.whole.set()
            async with asyncio.timeout(60):
                await all_.until_reached(1)
            await all_.news()
            assert sum(await asyncio.gather(*(each.flood(late, 200) for each in all_))) in range(45, 76)
            assert sum(await asyncio.gather(*(each.flood(of, 100) for each in all_))) <= 15

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_replicas_agree_on_usage_after_random_faults(seed: int) -> None:
    async def main() -> None:
        random_ = random.Random(seed)
        keys = [key(f"k{number}", tokens_per_minute=10**9, concurrency=10**6) for number in range(6)]
        used, under_way = dict.fromkeys(keys, 0), list[tuple[Replica, Key, str, int]]()

        async def live(replica: Replica, all_: Replicas) -> None:
            for _ in range(80):
                of, tokens = random_.choice(keys), random_.randint(0, 1000)
                asking = asyncio.create_task(replica.reserve(of, tokens))
                if random_.random() < 0.2:
                    await run_event_loop(random_.choice([0, 10, 100]))
                    asking.cancel()
                with suppress(asyncio.CancelledError):
                    grant = await asking
                    assert isinstance(grant, Grant)
                    used[of] += tokens
                    under_way.append((replica, of, grant.id, tokens))
                while random_.random() < 0.4 and under_way:
                    where, of, grant_id, reserved = under_way.pop(random_.randrange(len(under_way)))
                    tokens = random_.randint(0, 1200)
                    where.settle(grant_id, tokens)
                    used[of] += tokens - reserved
                if random_.random() < 0.05:
                    relay = random_.choice(all_.relays)
                    (relay.whole.clear if relay.whole.is_set() else relay.whole.set)()
                await asyncio.sleep(random_.choice([0, 0.01, 0.05]))  # sleeps: lets the replicas run

        async def let_time_pass(all_: Replicas) -> None:
            """Let lost messages be sent again. Less than a minute passes, so no limit recovers."""
            loop = asyncio.get_running_loop()
            began = loop.time()
            while True:
                for each in all_:
                    each.seconds = min(loop.time() - began, 50.0)
                await asyncio.sleep(0.01)  # sleeps: the replicas' clock

        async with replicas(3) as all_:
            clock = asyncio.create_task(let_time_pass(all_))
            await asyncio.gather(*(live(each, all_) for each in all_))
            for relay in all_.relays:
                relay.whole.set()
            async with asyncio.timeout(60):
                await all_.until_reached(2)
            for of in keys:
                for replica in all_:

                    async def knows(replica: Replica = replica, of: Key = of) -> bool:
                        grant = await replica.granted_at_last(of, 0)
                        assert grant.standing.tokens is not None
                        replica.settle(grant.id, 0)
                        return grant.standing.tokens.remaining == 10**9 - used[of]

                    await until_async(knows, "statements that are on their way", every=0.05)
            clock.cancel()

    asyncio.run(main())


def test_cancelled_reservations_release_their_slots() -> None:
    async def main() -> None:
        async with replicas() as all_:
            of = key("k", concurrency=2)
            random_ = random.Random(5)
            for each in all_:
                for _ in range(100):
                    asking = asyncio.create_task(each.limiter.reserve(of, 1, each.clock()))
                    await run_event_loop(random_.choice([0, 0, 10, 20, 30]))
                    if asking.cancel():
                        with suppress(asyncio.CancelledError):
                            await asking
                    elif isinstance(grant := asking.result(), Grant):
                        each.settle(grant.id, 0)
            async with asyncio.timeout(60):
                for each in all_:
                    await each.granted_at_last(of, 1)
            assert isinstance(await all_[0].reserve(of), Denial)

    asyncio.run(main())


def test_requests_of_any_size_can_be_sent_to_the_keys_owner(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with replicas() as all_:
            of = key("k", tokens_per_minute=10**12)
            for each in all_:
                denial = await each.reserve(of, 2**70)
                assert isinstance(denial, Denial) and denial.retry_after_s is None
        assert "Integer exceeds 64-bit range" not in caplog.text

    asyncio.run(main())


def test_replica_with_another_token_is_not_a_peer(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with replicas(tokens=("right", "wrong")) as all_:
            of = key("k", requests_per_minute=10)
            async with asyncio.timeout(60):
                await until_async(lambda: "the same peer token" in caplog.text)
            for each in all_:
                assert await each.flood(of, 20) == 5
            assert not any(each.limiter.view.reached for each in all_)

    with caplog.at_level("WARNING"):
        asyncio.run(main())


def test_hostile_messages_are_refused_and_later_ones_are_accepted() -> None:
    async def main() -> None:
        random_ = random.Random(18)
        replica = Replica(0, "t")
        await replica.server.start()
        good = Message("other", 5, {"k": statement(KeyUsage(), 0.0)}, (LimitRequest("k", Limits(1), 1),)).encode()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{replica.port}") as channel:
            call = channel.unary_unary(f"/{SERVICE}/{METHOD}")
            metadata = (("authorization", credentials("t")),)
            for _ in range(300):
                data = bytearray(good)
                for _ in range(random_.randint(1, 4)):
                    at = random_.randrange(len(data))
                    data[at : at + random_.randint(0, 6)] = random_.choice([b"", b"null", b"{}", b"[", b"1e9", b"\xff"])
                try:
                    await call(bytes(data), metadata=metadata)
                except grpc.aio.AioRpcError as error:
                    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, data
            reply = Reply.decode(await call(Message("new", 1, {}, ()).encode(), metadata=metadata))
            assert reply == Reply(replica.limiter.identity)
        await replica.end()

    asyncio.run(main())


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.tuples(st.floats(0, 130), st.integers(0, 9)), max_size=30),
    st.floats(0, 1),
    st.floats(0, 1e6),
    st.floats(0, 62),
)
def test_reported_usage_counts_for_a_minute_by_any_clock(
    past: list[tuple[float, int]], delay: float, skew: float, later: float
) -> None:
    use, reports = KeyUsage(), PeerReports()
    for at, tokens in sorted(past):
        use.begin(tokens, 1000 + at)
    now = 1131.0
    use.expire(now)
    reports.record("r", "k", statement(use, now), now + delay + skew)
    heard = reports.uses("k", now + delay + skew + later)
    ages = [(now + delay + later - 1000 - at, tokens) for at, tokens in past]
    assert sum(each.tokens.total for each in heard) >= sum(tokens for age, tokens in ages if age < 60)
    assert sum(each.requests.total for each in heard) <= sum(age <= 64 for age, _ in ages)
    assert sum(each.open for each in heard) == (0 if later > 30 else use.open)


@given(st.lists(st.text("abcdef", min_size=1), min_size=1, max_size=5, unique=True), st.integers(0, 9))
def test_connected_replicas_agree_on_owners(names: list[str], more: int) -> None:
    views = [View(name, names, len(names) + more) for name in names]
    for number in range(20):
        assert len({view.order(f"key{number}") for view in views}) == 1
    share = views[0].share
    assert (share.parts, share.of) == (len(names), len(names) + more)
    assert all(share.part(limit) <= limit for limit in (0, 1, 5, 300))


def test_messages_survive_encoding_and_decoding() -> None:
    ask = LimitRequest("k", Limits(1, None, 3), 7)
    message = Message("me", 3, {"k": statement(KeyUsage(), 0.0)}, (ask,))
    assert Message.decode(message.encode()) == message
    standing = RateLimitStatus(Allowance(3, 1, 0.5), None)
    reply = Reply("me", (standing, Denial("tokens", 5, 4, 9, None, standing)))
    assert Reply.decode(reply.encode()) == reply
    for data in (b"", b"[]", b"{}", b"7", b'{"sender": 1}'):
        with pytest.raises(MessageError):
            Message.decode(data)
        with pytest.raises(MessageError):
            Reply.decode(data)


def _with_each_value_replaced(document: Any, value: Any) -> Iterator[Any]:
    """Yield copies of a JSON document, in each of which another value is replaced."""
    yield value
    if not isinstance(document, dict | list):
        return
    for at, inner in document.items() if isinstance(document, dict) else enumerate(document):
        for changed in _with_each_value_replaced(inner, value):
            copy = document.copy()
            copy[at] = changed
            yield copy


@pytest.mark.parametrize("value", [None, True, -1, 1e300, "1", [], [1], {}, {"x": 1}], ids=repr)
def test_messages_with_a_wrong_type_are_refused_or_harmless(value: Any) -> None:
    use = KeyUsage()
    use.begin(3, 1.0)
    requests = LimitRequest("k", Limits(1, 2, 3), 1), LimitRequest("l", Limits(0, 5), 9)
    message = Message("other", 5, {"k": statement(use, 2.0)}, requests)
    standing = RateLimitStatus(Allowance(3, 1, 0.5), Allowance(3, 1, 0.5))
    reply = Reply("me", (standing, Denial("tokens", 5, 4, 9, 1.0, standing)))

    async def main() -> None:
        limiter = PeerLimiter("t", lambda: 3.0)
        for document in _with_each_value_replaced(orjson.loads(message.encode()), value):
            with suppress(MessageError):
                limiter.receive(Message.decode(orjson.dumps(document))).encode()
        await limiter.close()

    asyncio.run(main())
    for document in _with_each_value_replaced(orjson.loads(reply.encode()), value):
        with suppress(MessageError):
            decoded = Reply.decode(orjson.dumps(document))
            hash(decoded)
            for verdict in decoded.verdicts:
                (verdict.standing if isinstance(verdict, Denial) else verdict).headers()
                if isinstance(verdict, Denial):
                    RateLimitError("k", verdict)
