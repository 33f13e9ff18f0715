"""What a server has to do, against an account that forgets nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stoker_gateway.picking.load import PROMPT_S, SEQUENCE_S, Load, ServerLoad

EVENTS = st.lists(
    st.tuples(st.sampled_from(["send", "say", "say nothing", "pass"]), st.floats(0, 20), st.integers(0, 9000)),
    max_size=40,
)


@given(EVENTS)
def test_counts_what_was_sent_since(events: list[tuple[str, float, int]]) -> None:
    load, now = Load(), 0.0
    sent: list[tuple[float, int]] = []
    for what, seconds, size in events:
        now += seconds
        load.pass_time(now)
        if what == "send":
            load.send(size, now)
            sent.append((now, size))
        elif what == "say":
            heard_at = now - seconds / 2
            load.say(ServerLoad(running=3, waiting=2), heard_at)
            sent = [each for each in sent if each[0] > heard_at]
        elif what == "say nothing":
            load.say(ServerLoad(running=load.said.running, waiting=load.said.waiting, counted=False), now)
        counted = [each for each in sent if each[0] > now - SEQUENCE_S]
        assert load.sequences == load.said.running + load.said.waiting + len(counted)
        assert load.prompt_bytes == sum(size for when, size in counted if when > now - PROMPT_S)


def test_only_its_own_word_makes_a_server_full() -> None:
    load = Load()
    for _ in range(1000):
        load.send(10, 0.0)
    assert not load.is_full(64)
    load.say(ServerLoad(running=200, waiting=1, kv_usage=0.5), 1.0)
    assert not load.is_full(64)
    for _ in range(63):
        load.send(10, 2.0)
    assert load.is_full(64)
    load.say(ServerLoad(running=10, waiting=1, kv_usage=0.97), 3.0)
    assert load.is_full(64)
    load.say(ServerLoad(running=10, waiting=0, kv_usage=1.0), 4.0)
    assert not load.is_full(64)
