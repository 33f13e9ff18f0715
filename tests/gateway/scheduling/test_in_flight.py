"""Requests in flight, counted by the gateway and by Envoy, compared with a model of both."""

from __future__ import annotations

import random

import pytest

from stoker_gateway.scheduling.in_flight import ON_THE_WAY_S, InFlight


def test_idleness_is_certain_only_after_envoy_counts_zero_for_long_enough() -> None:
    in_flight = InFlight(0.0)
    assert not in_flight.is_certainly_idle() and in_flight.needs_count
    for at in (0.0, 1.0, ON_THE_WAY_S):
        in_flight.counted(0, at)
        assert not in_flight.is_certainly_idle()  # requests routed by an earlier picker may be in flight
    in_flight.counted(0, ON_THE_WAY_S + 0.25)
    assert in_flight.is_certainly_idle() and len(in_flight) == 0
    in_flight.sent(1, 10.0)
    assert not in_flight.is_certainly_idle() and len(in_flight) == 1
    in_flight.ended(1)
    in_flight.counted(0, 10.5)
    assert not in_flight.is_certainly_idle() and len(in_flight) == 0
    in_flight.counted(0, 12.1)
    in_flight.counted(0, 12.4)
    assert in_flight.is_certainly_idle()


def test_requests_of_an_earlier_picker_count_until_envoy_has_none() -> None:
    in_flight = InFlight(0.0)
    in_flight.sent(1, 0.1)
    in_flight.counted(4, 1.0)
    assert len(in_flight) == 4  # three of them are an earlier picker's
    in_flight.sent(2, 1.1)
    assert len(in_flight) == 5
    in_flight.ended(1)
    in_flight.counted(2, 2.0)  # one of the earlier ones, and the second one
    assert len(in_flight) == 2
    in_flight.counted(50, 3.0)  # an earlier picker routes no new requests
    assert len(in_flight) == 2
    in_flight.ended(2)
    in_flight.counted(0, 4.0)
    assert len(in_flight) == 0 and not in_flight.needs_count


def test_a_request_whose_end_is_never_reported_is_forgotten_by_two_counts() -> None:
    in_flight = InFlight(0.0)
    in_flight.counted(0, 0.0)
    in_flight.sent(1, 1.0)
    for at in (1.5, 2.9):  # too early: it may be on its way
        in_flight.counted(0, at)
        assert len(in_flight) == 1
    in_flight.counted(1, 3.0)
    in_flight.counted(0, 3.1)  # one zero: it may wait for a retry
    assert len(in_flight) == 1 and not in_flight.is_certainly_idle()
    in_flight.counted(0, 3.5)
    assert len(in_flight) == 0 and in_flight.is_certainly_idle()


@pytest.mark.parametrize("seed", range(8))
def test_idleness_is_reported_only_while_no_request_is_in_flight(seed: int) -> None:
    """Envoy is modelled: requests of two pickers arrive within `ON_THE_WAY_S`, and are not counted during a retry.

    This picker's requests are counted exactly, and all of them once Envoy has been polled.
    """
    rng = random.Random(seed)
    now, number = 0.0, 0
    arrives: dict[int, float] = {}
    gap_until: dict[int, float] = {}
    earlier = {-each - 1 for each in range(rng.randrange(4))}
    arrives.update({each: rng.uniform(0, ON_THE_WAY_S) for each in earlier})
    in_flight = InFlight(0.0)
    own: set[int] = set()
    num_none = 0
    for _ in range(4000):
        now += rng.choice((0.005, 0.05, 0.3))
        action = rng.random()
        if action < 0.02 and now < 300:
            number += 1
            in_flight.sent(number, now)
            own.add(number)
            arrives[number] = now + rng.uniform(0, ON_THE_WAY_S)
        elif action < 0.08:
            there = [each for each in arrives if arrives[each] <= now]
            if there:
                ended = rng.choice(there)
                del arrives[ended]
                own.discard(ended)
                in_flight.ended(ended)
        elif action < 0.1 and arrives:
            gap_until[rng.choice(list(arrives))] = now + 0.01
        else:
            active = [each for each, at in arrives.items() if at <= now and gap_until.get(each, 0) <= now]
            in_flight.counted(len(active), now)
        if in_flight.is_certainly_idle():
            num_none += 1
            assert not arrives
        assert len(in_flight) >= len(own)
    assert num_none
