"""Scaling to zero and back: all interleavings of gateways, requests, leaders and time up to a depth, and random longer
ones.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from stoker_common.scaling.signals import Signals
from stoker_operator.scaling.autoscaler import Autoscaler, Observation, Phase, ScalingSettings
from stoker_operator.scaling.behavior import History
from stoker_operator.scaling.demand import Demand

IDLE_SECONDS = 5.0
#: Time for which a gateway obeys a drain id, by its own clock, in seconds.
LAPSE_SECONDS = 30.0
SETTINGS = ScalingSettings(0, 1, "pendingRequests", 4.0, idle_seconds_to_zero=IDLE_SECONDS)
DRAIN_IDS = [f"drain-{number}" for number in range(10_000)]


@dataclass
class Gateway:
    """A gateway replica that follows the protocol."""

    phase: Phase = Phase.ACTIVE
    drain: str = ""
    seen_at: float = 0.0
    in_flight: int = 0
    held: int = 0
    busy_at: float = 0.0

    def obeys(self, now: float) -> bool:
        return self.phase is Phase.ZERO or (self.phase is Phase.DRAINING and now - self.seen_at < LAPSE_SECONDS)

    def drained(self, now: float) -> str:
        return self.drain if self.obeys(now) and not self.in_flight else ""


@dataclass
class World:
    """Two gateway replicas, the written status and workload, and the leader."""

    gateways: tuple[Gateway, Gateway]
    autoscaler: Autoscaler
    now: float = 100.0
    phase: Phase = Phase.ACTIVE
    drain: str = ""
    replicas: int = 1
    num_drain_ids: int = 0
    zeros: int = 0
    path: tuple[str, ...] = field(default=(), compare=False)

    def clone(self) -> World:
        made = copy.copy(self)
        made.gateways = (copy.copy(self.gateways[0]), copy.copy(self.gateways[1]))
        made.autoscaler = copy.copy(self.autoscaler)
        # With at most one replica, neither affects a decision.
        made.autoscaler._history, made.autoscaler._demand = History(), Demand()
        made.autoscaler._written = copy.copy(self.autoscaler._written)
        made.autoscaler._new_drain_id = made.new_drain_id
        return made

    def new_drain_id(self) -> str:
        self.num_drain_ids += 1
        return DRAIN_IDS[self.num_drain_ids]

    def new_leader(self) -> None:
        self.autoscaler = Autoscaler(SETTINGS, self.now, new_drain_id=self.new_drain_id)

    def send_held(self, gateway: Gateway) -> None:
        if gateway.held and self.replicas and not gateway.obeys(self.now):
            gateway.held, gateway.in_flight, gateway.busy_at = 0, 1, self.now

    def update(self, silent: int | None = None, crashes: bool = False, unwritten: bool = False) -> None:
        answering = [gateway for index, gateway in enumerate(self.gateways) if index != silent]
        signals = Signals(
            held=sum(gateway.held for gateway in answering),
            in_flight=sum(gateway.in_flight for gateway in answering),
            idle_seconds=min(self.now - gateway.busy_at for gateway in answering),
            drained=tuple(gateway.drained(self.now) for gateway in answering),
            missing=() if silent is None else ("silent",),
        )
        observation = Observation(signals, self.replicas, self.replicas, drain=self.drain, phase=self.phase)
        made = self.autoscaler.update(observation, self.now)
        assert (made.replicas == 0) == (made.phase is Phase.ZERO)
        assert (made.drain == "") == (made.phase is Phase.ACTIVE)
        self.phase, self.drain = made.phase, made.drain
        if crashes:
            self.new_leader()
        if crashes or unwritten:
            return
        if made.replicas == 0 and self.replicas > 0:
            assert silent is None, self.path
            for gateway in self.gateways:
                assert gateway.obeys(self.now) and gateway.drain == made.drain, self.path
                assert not gateway.in_flight and not gateway.held, self.path
            self.zeros += 1
        self.replicas = made.replicas

    def act(self, action: str) -> None:
        self.path = (*self.path, action)
        name, _, argument = action.partition(" ")
        if name == "wait":
            self.now += float(argument)
        elif name == "update":
            self.update(
                *({"silent": (1,), "crashes": (None, True), "unwritten": (None, False, True)}.get(argument, ()))
            )
        elif name == "leader":
            self.new_leader()
        else:
            gateway = self.gateways[int(argument)]
            if name == "arrive":
                gateway.held, gateway.busy_at = 1, self.now
            elif name == "finish" and gateway.in_flight:
                gateway.in_flight, gateway.busy_at = 0, self.now
            elif name in ("sync", "restart"):
                if name == "restart":
                    gateway.held = gateway.in_flight = 0
                    gateway.drain, gateway.busy_at = "", self.now
                if gateway.drain != self.drain:
                    gateway.seen_at = self.now
                gateway.phase, gateway.drain = self.phase, self.drain
        for gateway in self.gateways:
            self.send_held(gateway)

    def key(self) -> tuple[Any, ...]:
        def age(time: float | None) -> float | None:
            return None if time is None else min(self.now - time, 100.0)

        scaler = self.autoscaler
        gateways = sorted(
            (each.phase, each.drain == self.drain, age(each.seen_at), each.in_flight, each.held, age(each.busy_at))
            for each in self.gateways
        )
        state = (scaler._phase, scaler._drain == self.drain, age(scaler._drain_started_at), age(scaler._busy_at))
        rest = (age(scaler._ready_since), age(scaler._active_since), scaler._replicas, scaler._observed)
        return (*gateways, *state, *rest, self.phase, self.drain == "", self.replicas)


ACTIONS = (
    *("arrive 0", "finish 0", "sync 0", "sync 1", "restart 0"),
    *("update", "update silent", "update crashes", "update unwritten", "leader", "wait 6", "wait 20"),
)


def _world() -> World:
    world = World((Gateway(), Gateway()), Autoscaler(SETTINGS, 100.0))
    world.new_leader()
    world.act("update")
    return world


def _reach(depth: int) -> Iterator[World]:
    layer = [_world()]
    seen = {layer[0].key()}
    for _ in range(depth):
        following = list[World]()
        for world in layer:
            for action in ACTIONS:
                made = world.clone()
                made.act(action)
                if made.key() not in seen:
                    seen.add(made.key())
                    following.append(made)
                    yield made
        layer = following


def test_zero_is_written_only_when_all_gateways_are_drained_in_all_interleavings() -> None:
    worlds = list(_reach(7))
    assert sum(world.zeros for world in worlds) > 0, "zero is reached"
    assert any(world.zeros and world.replicas for world in worlds), "zero is left again"


@pytest.mark.parametrize("seed", range(60))
def test_zero_is_written_only_when_all_gateways_are_drained_in_long_walks(seed: int) -> None:
    generator, world = random.Random(seed), _world()
    more = ("arrive 1", "finish 1", "restart 1", "wait 0.5", "wait 3", "update", "update", "sync 0", "sync 1")
    for _ in range(400):
        world.act(generator.choice(ACTIONS + more))
    # Without further requests it goes to zero; after one it returns.
    for _ in range(100):
        for action in ("finish 0", "finish 1", "sync 0", "sync 1", "update", "wait 1"):
            world.act(action)
    assert world.phase is Phase.ZERO and world.replicas == 0
    world.act("arrive 1")
    world.act("update")
    assert world.phase is Phase.ACTIVE and world.replicas == 1
    world.act("sync 1")
    assert world.gateways[1].in_flight == 1


def test_a_careless_autoscaler_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Signals, "acknowledged", lambda signals, drain: not signals.is_busy)
    with pytest.raises(AssertionError):
        list(_reach(5))
