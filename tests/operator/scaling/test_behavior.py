"""HPA's behavior against an independent model of its controller."""

from __future__ import annotations

import random
import runpy
from pathlib import Path
from typing import Any

import pytest

from stoker_common.scaling.signals import Signals
from stoker_operator.scaling.autoscaler import Autoscaler, Observation, ScalingSettings
from stoker_operator.scaling.behavior import Behavior, History, Policy, Rules

_MODEL = runpy.run_path(str(Path(__file__).parents[3] / "benchmarks/autoscaling/hpa.py"))
DEFAULT, HorizontalPodAutoscaler = _MODEL["DEFAULT"], _MODEL["HorizontalPodAutoscaler"]


def _rules(document: dict[str, Any]) -> Rules:
    policies = tuple(Policy(each["type"], each["value"], each["periodSeconds"]) for each in document["policies"])
    return Rules(document["stabilizationWindowSeconds"], policies, document["selectPolicy"], document["tolerance"])


def _behavior(document: dict[str, Any]) -> Behavior:
    return Behavior(_rules(document["scaleUp"]), _rules(document["scaleDown"]))


def _random_behavior(generator: random.Random) -> dict[str, Any]:
    def policy() -> dict[str, Any]:
        kind = generator.choice(["Pods", "Percent"])
        value = generator.choice([1, 2, 4, 10] if kind == "Pods" else [5, 10, 50, 100, 300])
        return {"type": kind, "value": value, "periodSeconds": generator.choice([1, 15, 30, 60, 600])}

    def rules(windows: list[int]) -> dict[str, Any]:
        return {
            "stabilizationWindowSeconds": generator.choice(windows),
            "selectPolicy": generator.choice(["Max", "Max", "Min", "Disabled"]),
            "tolerance": generator.choice([0.0, 0.1, 0.5]),
            "policies": [policy() for _ in range(generator.randint(1, 3))],
        }

    return {"scaleUp": rules([0, 0, 30, 120]), "scaleDown": rules([0, 60, 300, 900])}


def test_defaults_are_those_of_hpa() -> None:
    assert _behavior(DEFAULT) == Behavior()


def test_history_matches_model_of_hpa() -> None:
    assert sum(_changes_alike(seed) for seed in range(200)) > 2000


def _changes_alike(seed: int) -> int:
    """Compares both along a random walk, and returns how often the count changed."""
    generator = random.Random(seed)
    document = _random_behavior(generator)
    behavior, history = _behavior(document), History()
    model = HorizontalPodAutoscaler(1, 500, 1.0, document)
    current, now, proposed = generator.randint(1, 60), 0.0, 10
    changes = 0
    for _ in range(150):
        now += generator.choice([0.5, 1, 15, 15, 40])
        proposed = max(0, proposed + generator.choice([0, 0, 1, -1, 7, -9, 60, -60]))
        expected = model.normalize(current, proposed, now)
        stabilized = history.stabilized(proposed, current, behavior, now)
        history.recommend(proposed, now)
        if stabilized > current:
            count = min(stabilized, 500, history.limit_up(current, behavior.scale_up, now))
        elif stabilized < current:
            count = max(stabilized, 1, history.limit_down(current, behavior.scale_down, now))
        else:
            count = current
        assert count == expected
        if count != current:
            changes += 1
            model.events["scaleUp" if count > current else "scaleDown"].append((now, abs(count - current)))
        history.change(current, count, now)
        current = count
    return changes


@pytest.mark.parametrize("seed", range(40))
def test_autoscaler_follows_model_of_hpa_where_the_metric_is_steady(seed: int) -> None:
    """Each level of requests in service lasts longer than the mean that the demand takes; then both see the same."""
    generator = random.Random(seed)
    document = _random_behavior(generator)
    for direction in ("scaleUp", "scaleDown"):
        document[direction]["stabilizationWindowSeconds"] = 0
        document[direction]["selectPolicy"] = "Max"
        document[direction]["policies"] = [{"type": "Percent", "value": 1000, "periodSeconds": 1}]
    target = generator.choice([0.5, 3.0, 8.0])
    scaler = Autoscaler(ScalingSettings(1, 50, "pendingRequests", target, _behavior(document)), 0.0)
    model = HorizontalPodAutoscaler(1, 50, target, document)
    count, expected, now = 5, 5, 0.0
    for _ in range(20):
        total = generator.randint(0, 300)
        for _ in range(90):
            now += 1.0
            signals = Signals(in_flight=total, idle_seconds=0.0, drained=("",))
            count = scaler.update(Observation(signals, count, count), now).replicas
        # Means on the way have moved the count, so the model starts from within the tolerance of the same target.
        expected = model.reconcile(count, total, now)
        assert count == expected
