"""Rendezvous hashing: all pickers with the same servers agree, and few keys move when a server is added or removed."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from stoker_gateway.scheduling.rendezvous import PROBES, Rendezvous, point, probes

NAMES = st.sets(st.integers(0, 400).map(lambda number: f"10.0.{number // 256}.{number % 256}:8000"), max_size=40)


def weight(key: bytes, server: str) -> int:
    """Return the weight by its definition; `Rendezvous` finds it by bisection."""
    return min((point(server) - probe) % 2**64 for probe in probes(key))


@given(NAMES, st.binary(max_size=40))
def test_the_order_is_that_of_the_weights(servers: set[str], key: bytes) -> None:
    assert list(Rendezvous(servers).order(key)) == sorted(servers, key=lambda server: weight(key, server))


@given(NAMES.filter(bool), st.binary(max_size=40), st.data())
def test_removed_server_leaves_the_order_of_the_others(servers: set[str], key: bytes, data: st.DataObject) -> None:
    departed = data.draw(st.sampled_from(sorted(servers)))
    before = [server for server in Rendezvous(servers).order(key) if server != departed]
    assert before == list(Rendezvous(servers - {departed}).order(key))


def test_shares_are_even() -> None:
    servers = [f"10.1.0.{number}:8000" for number in range(50)]
    order, chance = Rendezvous(servers), random.Random(0)
    shares = Counter(next(order.order(chance.randbytes(16))) for _ in range(20_000))
    assert len(shares) == 50
    assert max(shares.values()) < 1.35 * 20_000 / 50


def test_key_has_distinct_probe_points() -> None:
    assert len(set(probes(b"key"))) == PROBES
