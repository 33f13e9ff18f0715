"""The operator's announcements, which lapse by this process's clock."""

from __future__ import annotations

import random

import pytest

from stoker_gateway.registry.model_registry import Phase, Scaling
from stoker_gateway.scheduling.drain import DRAIN_VALID_S, Drain


def scaling(phase: Phase, drain: str = "") -> Scaling:
    return Scaling("one", "a", 10, phase, drain)


def test_announcement_lapses_unless_a_new_one_replaces_it() -> None:
    drain = Drain()
    drain.update(scaling(Phase.DRAINING, "w1"), 100.0)
    drain.update(scaling(Phase.DRAINING, "w1"), 100.0 + DRAIN_VALID_S - 1)  # a repetition is not a new announcement
    assert drain.stops(100.0 + DRAIN_VALID_S - 0.01) and drain.drain_id(100.0 + DRAIN_VALID_S - 0.01) == "w1"
    assert not drain.stops(100.0 + DRAIN_VALID_S) and drain.drain_id(100.0 + DRAIN_VALID_S) == ""
    drain.update(scaling(Phase.DRAINING, "w1"), 200.0)
    assert not drain.stops(200.0)
    drain.update(scaling(Phase.DRAINING, "w2"), 200.0)
    assert drain.stops(200.0) and drain.drain_id(200.0) == "w2"
    drain.update(scaling(Phase.ACTIVE, "w2"), 201.0)
    assert not drain.stops(201.0)


def test_phase_zero_never_lapses() -> None:
    drain = Drain()
    drain.update(scaling(Phase.DRAINING, "w"), 0.0)
    drain.update(scaling(Phase.ZERO, "w"), 20.0)
    assert drain.stops(1e9) and drain.drain_id(1e9) == "w"


@pytest.mark.parametrize("seed", range(5))
def test_requests_stop_by_the_last_announcement_and_its_age(seed: int) -> None:
    rng, drain, now = random.Random(seed), Drain(), 0.0
    history: list[tuple[Phase, str]] = []
    first_seen = 0.0
    for _ in range(500):
        now += rng.choice((0.1, 5.0, 29.0))
        state = rng.choice(list(Phase)), rng.choice(("w1", "w2"))
        if not history or state != history[-1]:
            first_seen = now
        history.append(state)
        drain.update(scaling(*state), now)
        later = now + rng.uniform(0, 40)
        expected = state[0] is Phase.ZERO or (state[0] is Phase.DRAINING and later - first_seen < DRAIN_VALID_S)
        assert drain.stops(later) is expected
        assert drain.drain_id(later) == (state[1] if expected else "")
