"""Routing decisions: invariants, and the intended effects."""

from __future__ import annotations

import math
import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from stoker_common.text_prefix_hash import FIRST_BLOCK, text_chain
from stoker_gateway.scheduling.load import ServerLoad
from stoker_gateway.scheduling.picker import BALANCE, FEW, EndpointPicker, Pick, PickerSettings, Refusal
from stoker_gateway.scheduling.routing_request import RoutingRequest

SERVERS = [f"10.0.0.{number}:8000" for number in range(1, 9)]
MAX_BLOCKS = 40


def ask_of(text: bytes, **fields: object) -> RoutingRequest:
    return RoutingRequest(chain=text_chain(text, "m"), size=len(text), **fields)  # type: ignore[arg-type]


def picked(result: Pick | Refusal) -> str:
    assert isinstance(result, Pick)
    return result.servers[0]


def text_of(seed: int, blocks: float = 4) -> bytes:
    return random.Random(seed).randbytes(FIRST_BLOCK * 30)[: int(FIRST_BLOCK * blocks)]


class AnyLife(RuleBasedStateMachine):
    """Servers appear, disappear, fail, fill up and report in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.picker = EndpointPicker(PickerSettings(max_blocks=MAX_BLOCKS, max_waiting=8))
        self.now = 0.0
        self.there: set[str] = set()
        self.unready: set[str] = set()
        self.failing: dict[str, float] = {}
        self.full: set[str] = set()

    @rule(servers=st.sets(st.sampled_from(SERVERS)))
    def set_servers(self, servers: set[str]) -> None:
        self.picker.set_servers(sorted(servers), self.now)
        for memory in (self.unready, self.full):
            memory &= servers & self.there
        self.failing = {each: until for each, until in self.failing.items() if each in servers & self.there}
        self.there = set(servers)

    @rule(server=st.sampled_from(SERVERS), ready=st.booleans(), full=st.booleans(), counted=st.booleans())
    def observe(self, server: str, ready: bool, full: bool, counted: bool) -> None:
        self.now += 0.001
        load = ServerLoad(5, 8 if full else 0, 0.5, ready, counted)
        self.picker.observe(server, load, self.now, self.now)
        if server in self.there:
            (self.unready.discard if ready else self.unready.add)(server)
            (self.full.add if full else self.full.discard)(server)
            if ready:
                self.failing.pop(server, None)

    @rule(server=st.sampled_from(SERVERS))
    def failed(self, server: str) -> None:
        self.picker.failed(server, self.now)
        if server in self.there:
            self.failing[server] = self.now + 1.0  # at least

    @rule(seconds=st.sampled_from([0.01, 0.9, 31.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(
        seed=st.integers(0, 5),
        blocks=st.integers(0, 12),
        session=st.sampled_from([None, None, "one", "two"]),
        held_by=st.sampled_from([None, None, *SERVERS]),
        subset=st.none() | st.frozensets(st.sampled_from([*SERVERS, "203.0.113.9:1"])),
    )
    def pick(
        self, seed: int, blocks: int, session: str | None, held_by: str | None, subset: frozenset[str] | None
    ) -> None:
        ask = ask_of(text_of(seed, blocks), session=session, held_by=held_by, subset=subset)
        result = self.picker.pick(ask, self.now)
        may = self.there - self.unready
        if subset is not None:
            may &= subset
        well = {each for each in may if self.failing.get(each, -1.0) <= self.now}
        surely_failing = may - well
        if isinstance(result, Refusal):
            assert (result.kind == "none") == (not may)
            if result.kind == "saturated":
                assert held_by in self.full if held_by in may else well <= self.full
            return
        assert 1 <= len(result.servers) <= 3
        assert len(set(result.servers)) == len(result.servers)
        assert set(result.servers) <= may
        assert 0 <= result.cached_share <= 1
        if held_by in may:
            assert result.servers == (held_by,)
        elif set(result.servers) & surely_failing:
            assert set(result.servers) <= may - (well - set(self.failing)), "servers without a failure were available"
        else:
            assert not set(result.servers) & self.full

    @invariant()
    def memory_is_bounded(self) -> None:
        assert self.picker.num_blocks <= MAX_BLOCKS


TestAnyLife = AnyLife.TestCase


def a_picker(servers: list[str], max_blocks: int = 100_000) -> EndpointPicker:
    picker = EndpointPicker(PickerSettings(max_blocks=max_blocks))
    picker.set_servers(servers, 0.0)
    return picker


@given(st.integers(1, 8), st.integers(1, 120), st.integers(0, 2**32))
def test_new_conversations_keep_the_bound(count: int, asks: int, seed: int) -> None:
    picker, chance, sequences = a_picker(SERVERS[:count]), random.Random(seed), Counter[str]()
    for number in range(asks):
        server = picked(picker.pick(ask_of(chance.randbytes(600)), 0.0))
        sequences[server] += 1
        assert sequences[server] <= max(FEW, math.ceil(BALANCE * (number + 1) / count))


@given(st.integers(0, 2**32), st.integers(2, 8))
def test_two_pickers_agree_though_each_sees_every_other_turn(seed: int, count: int) -> None:
    chance = random.Random(seed)
    system = chance.randbytes(1500)
    pickers = [a_picker(SERVERS[:count]) for _ in range(2)]
    now = 0.0
    for picker in pickers:  # both know the common prefix of all conversations
        for _ in range(2):
            picker.pick(ask_of(system + chance.randbytes(600)), now)
    for _ in range(10):
        prompt, homes = system, set()
        for number in range(6):
            prompt += chance.randbytes(700)
            now += 60.0  # all servers are idle by then
            homes.add(picked(pickers[number % 2].pick(ask_of(prompt), now)))
        assert len(homes) == 1


@given(st.integers(0, 2**32), st.booleans())
def test_conversations_move_only_to_or_from_a_changed_server(seed: int, by_session: bool) -> None:
    chance = random.Random(seed)
    texts = [chance.randbytes(600) for _ in range(40)]

    def homes(servers: list[str]) -> list[str]:
        picker = a_picker(servers)
        return [
            picked(
                picker.pick(ask_of(b"" if by_session else text, session=text.hex() if by_session else None), 60.0 * at)
            )
            for at, text in enumerate(texts)
        ]

    all_servers, fewer = homes(SERVERS), homes(SERVERS[:-1])
    assert all(before == after for before, after in zip(all_servers, fewer, strict=True) if before != SERVERS[-1])


def test_conversation_moves_when_queueing_costs_more_than_its_cache_saves() -> None:
    picker = a_picker(SERVERS)
    first = picker.pick(ask_of(text_of(1, 20)), 0.0)
    again = picker.pick(ask_of(text_of(1, 24)), 3.0)
    assert isinstance(again, Pick)
    assert again.servers[0] == picked(first)
    assert again.why == "prefix"
    assert 0.7 < again.cached_share < 0.9
    for server in SERVERS:
        busy = server == again.servers[0]
        picker.observe(server, ServerLoad(running=60 if busy else 1, waiting=30 if busy else 0), 4.0, 4.0)
    assert picked(picker.pick(ask_of(text_of(1, 28)), 4.0)) != again.servers[0]


def test_prefix_shared_by_all_prompts_spreads_to_all_servers() -> None:
    picker, system = a_picker(SERVERS), text_of(0, 10)
    went = Counter(picked(picker.pick(ask_of(system + text_of(seed, 3)), 60.0 * seed)) for seed in range(1, 400))
    assert set(went) == set(SERVERS)
    assert max(went.values()) < 100


def test_prompts_without_a_full_block_are_spread() -> None:
    picker = a_picker(SERVERS)
    went = Counter(picked(picker.pick(ask_of(b"hi"), 0.0)) for _ in range(160))
    assert max(went.values()) - min(went.values()) <= 12


def test_pickers_agree_on_a_new_server_after_one_is_removed() -> None:
    for seed in range(20):
        pickers = [a_picker(SERVERS) for _ in range(2)]
        prompt = text_of(seed, 20)
        homes = {picked(picker.pick(ask_of(prompt[: 6 * FIRST_BLOCK]), 0.0)) for picker in pickers}
        homes.add(picked(pickers[1].pick(ask_of(prompt[: 12 * FIRST_BLOCK]), 60.0)))  # only one of them knows it
        assert len(homes) == 1
        after = set()
        for picker in pickers:
            picker.set_servers([server for server in SERVERS if server not in homes], 100.0)
            result = picker.pick(ask_of(prompt), 120.0)
            assert isinstance(result, Pick)
            assert result.cached_share == 0
            after.add(result.servers[0])
        assert len(after) == 1


def test_server_that_was_not_ready_has_no_cached_prefix() -> None:
    picker = a_picker(SERVERS[:1])
    picker.pick(ask_of(text_of(1)), 0.0)
    picker.observe(SERVERS[0], ServerLoad(ready=False), 1.0, 1.0)
    assert picker.pick(ask_of(text_of(1)), 1.0) == Refusal("none", 1.0)
    picker.observe(SERVERS[0], ServerLoad(), 2.0, 2.0)
    result = picker.pick(ask_of(text_of(1)), 2.0)
    assert isinstance(result, Pick)
    assert result.cached_share == 0


def test_failed_server_is_retried_with_growing_delays() -> None:
    picker = a_picker(SERVERS[:2])
    bad = SERVERS[0]

    def gets_something(now: float) -> bool:
        return any(picked(picker.pick(RoutingRequest(), now)) == bad for _ in range(20))

    assert gets_something(0.0)
    picker.failed(bad, 0.0)
    assert not gets_something(0.9)
    assert gets_something(40.0)
    picker.failed(bad, 40.0)
    assert not gets_something(41.5)
    assert gets_something(80.0)
    picker.failed(bad, 80.0)
    picker.observe(bad, ServerLoad(), 79.9, 80.1)  # polled before it failed
    assert not gets_something(80.5)
    picker.observe(bad, ServerLoad(), 80.6, 80.7)
    assert gets_something(80.8)


def test_failed_servers_are_tried_if_all_have_failed() -> None:
    picker = a_picker(SERVERS[:3])
    for server in SERVERS[:3]:
        picker.failed(server, 0.0)
    assert isinstance(picker.pick(ask_of(text_of(1)), 0.5), Pick)


def test_saturation_lasts_until_a_server_reports_room() -> None:
    picker = a_picker(SERVERS[:2])
    for server in SERVERS[:2]:
        picker.observe(server, ServerLoad(running=9, waiting=64), 1.0, 1.0)
    for _ in range(3):
        assert picker.pick(ask_of(text_of(1)), 1.1) == Refusal("saturated", 1.0)
    picker.observe(SERVERS[1], ServerLoad(running=9, waiting=0), 2.0, 2.0)
    assert picked(picker.pick(ask_of(text_of(1)), 2.1)) == SERVERS[1]


def test_saturation_lasts_until_a_request_ends() -> None:
    picker = a_picker(SERVERS[:2])
    for server in SERVERS[:2]:
        picker.observe(server, ServerLoad(running=9, waiting=60), 1.0, 1.0)
    sent = [picker.pick(RoutingRequest(), 1.1) for _ in range(8)]
    assert picker.pick(RoutingRequest(), 1.2) == Refusal("saturated", 1.0)
    assert isinstance(sent[0], Pick)
    picker.ended(sent[0].number, sent[0].servers[:1], 1.3)
    assert picked(picker.pick(RoutingRequest(), 1.4)) == sent[0].servers[0]
    assert picker.pick(RoutingRequest(), 1.5) == Refusal("saturated", 1.0)


def test_pickers_without_prompt_text_do_not_pick_in_step() -> None:
    same = 0
    one, another = (EndpointPicker(identity=name) for name in ("pod-a 1", "pod-b 1"))
    for picker in (one, another):
        picker.set_servers(SERVERS, 0)
    for now in range(200):
        same += picked(one.pick(RoutingRequest(size=1), now * 100)) == picked(
            another.pick(RoutingRequest(size=1), now * 100)
        )
    assert same < 60  # 25 of 200 by chance
