"""A server's estimated load, compared with an account that forgets nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stoker_gateway.scheduling.load import PROMPT_S, SEQUENCE_S, Load, ServerLoad

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["send", "say", "say nothing", "pass", "end", "take back", "end unknown"]),
        st.floats(0, 20),
        st.integers(0, 9000),
    ),
    max_size=40,
)


@given(EVENTS)
def test_load_counts_requests_sent_and_ended_since_the_report(events: list[tuple[str, float, int]]) -> None:
    load, now = Load(), 0.0
    sent: list[tuple[int, float, int]] = []
    num_reported, ended = 0, list[float]()
    for number, (event, seconds, size) in enumerate(events):
        now += seconds
        load.pass_time(now)
        sent = [each for each in sent if each[1] > now - SEQUENCE_S]
        if event == "send":
            load.send(number, size, now)
            sent.append((number, now, size))
        elif event == "say":
            heard_at = now - seconds / 2
            num_reported = size % 7
            load.update(ServerLoad(running=num_reported // 2, waiting=num_reported - num_reported // 2), heard_at)
            sent = [each for each in sent if each[1] > heard_at]
            ended = [each for each in ended if each > heard_at]
        elif event == "say nothing":
            load.update(ServerLoad(running=load.reported.running, waiting=load.reported.waiting, counted=False), now)
        elif event in ("end", "take back") and sent:
            removed = sent.pop(size % len(sent))[0]
            load.end(removed, now) if event == "end" else load.cancel(removed)
        elif event == "end unknown":
            load.end(-1, now)
            if load.reported.counted and len(ended) < num_reported:
                ended.append(now)
        assert load.sequences == max(0, num_reported - len(ended)) + len(sent)
        assert load.prompt_bytes == sum(size for _, when, size in sent if when > now - PROMPT_S)


def test_server_is_full_only_by_its_own_report() -> None:
    load = Load()
    for number in range(1000):
        load.send(number, 10, 0.0)
    assert not load.is_full(64)
    load.update(ServerLoad(running=200, waiting=1, kv_usage=0.5), 1.0)
    assert not load.is_full(64)
    for number in range(63):
        load.send(1000 + number, 10, 2.0)
    assert load.is_full(64)
    load.update(ServerLoad(running=10, waiting=1, kv_usage=0.97), 3.0)
    assert load.is_full(64)
    load.update(ServerLoad(running=10, waiting=0, kv_usage=1.0), 4.0)
    assert not load.is_full(64)
