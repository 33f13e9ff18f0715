"""A pool that sends requests only as far as servers report room, compared with exact counts."""

from __future__ import annotations

import random

import pytest

from stoker_gateway.scheduling.load import ServerLoad
from stoker_gateway.scheduling.picker import EndpointPicker, Pick
from stoker_gateway.scheduling.routing_request import RoutingRequest
from stoker_gateway.scheduling.server_pool import FIRST_REQUESTS

SERVERS = ("10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80")


@pytest.mark.parametrize("seed", range(8))
def test_servers_get_nothing_before_a_report_and_then_a_number_that_grows(seed: int) -> None:
    rng, picker, now = random.Random(seed), EndpointPicker(), 0.0
    picker.careful = picker.backlog = True
    picker.set_servers(SERVERS, now)
    allowance = dict.fromkeys(SERVERS, 0)
    sent = dict.fromkeys(SERVERS, 0)
    waiting = dict.fromkeys(SERVERS, 0)
    ready = dict.fromkeys(SERVERS, False)
    num_sent = 0
    for _ in range(3000):
        now += 0.001  # in total less than the time for which sent requests count
        if rng.random() < 0.9:
            choice = picker.pick(RoutingRequest(), now)
            may = {each for each in SERVERS if ready[each] and not waiting[each] and sent[each] < allowance[each]}
            assert isinstance(choice, Pick) == bool(may)
            if isinstance(choice, Pick):
                assert set(choice.servers) <= may
                sent[choice.servers[0]] += 1
                num_sent += 1
            continue
        server = rng.choice(SERVERS)
        is_ready, num_waiting = rng.random() < 0.9, rng.choice((0, 0, 0, 5))
        picker.observe(server, ServerLoad(waiting=num_waiting, ready=is_ready), now, now)
        if is_ready and not ready[server]:
            allowance[server] = FIRST_REQUESTS
        elif num_waiting:
            allowance[server] = max(FIRST_REQUESTS, allowance[server] // 2)
        else:
            allowance[server] = min(64, max(FIRST_REQUESTS, 2 * allowance[server]))
        ready[server], waiting[server], sent[server] = is_ready, num_waiting, 0
    assert num_sent > 1000


def test_a_request_that_ends_makes_room_before_the_next_report() -> None:
    picker = EndpointPicker()
    picker.careful = True
    picker.set_servers(SERVERS[:1], 0.0)
    picker.observe(SERVERS[0], ServerLoad(), 1.0, 1.0)
    picks = [picker.pick(RoutingRequest(), 1.1) for _ in range(FIRST_REQUESTS + 1)]
    assert [isinstance(each, Pick) for each in picks] == [True] * FIRST_REQUESTS + [False]
    assert isinstance(picks[0], Pick)
    picker.ended(picks[0].number, SERVERS[:1], 1.2)
    assert isinstance(picker.pick(RoutingRequest(), 1.2), Pick)


def test_other_pools_send_to_servers_that_have_not_reported_and_to_failed_ones() -> None:
    picker = EndpointPicker()
    picker.set_servers(SERVERS[:1], 0.0)
    picker.failed(SERVERS[0], 1.0)
    assert all(isinstance(picker.pick(RoutingRequest(), 1.1), Pick) for _ in range(100))
