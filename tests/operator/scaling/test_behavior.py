"""HPA's behavior compared with an independent model of its controller, and both with a trace of the real one."""

from __future__ import annotations

import json
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

TRACE = json.loads(Path(__file__).with_name("hpa_trace.json").read_text())


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
    """Compare both along a random walk; return the number of changes of the replicas."""
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
        count = _step(history, behavior, current, proposed, (1, 500), now)
        assert count == expected
        if count != current:
            changes += 1
            model.events["scaleUp" if count > current else "scaleDown"].append((now, abs(count - current)))
        current = count
    return changes


def _step(
    history: History, behavior: Behavior, current: int, proposed: int, bounds: tuple[int, int], now: float
) -> int:
    """Return the replicas that the operator's rules make of a proposal, and record them."""
    lowest, highest = bounds
    stabilized = history.stabilized(proposed, current, behavior, now)
    history.recommend(proposed, now)
    if stabilized > current:
        count = min(stabilized, highest, history.limit_up(current, behavior.scale_up, now))
    elif stabilized < current:
        count = max(stabilized, lowest, history.limit_down(current, behavior.scale_down, now))
    else:
        count = current
    history.change(current, count, now)
    return count


def _compare(decided: list[int], real: list[int]) -> None:
    """Assert that replicas differ by at most one at each sync, and are equal at nearly all."""
    assert len(set(real)) >= 3, "the trace has changes"
    apart = [abs(ours - theirs) for ours, theirs in zip(decided, real, strict=True)]
    assert max(apart) <= 1 and apart.count(0) >= 0.95 * len(apart), list(zip(decided, real, strict=True))


@pytest.mark.parametrize("name", TRACE["cases"])
def test_model_of_hpa_decides_as_the_real_controller_did(name: str) -> None:
    """The model sees only the metric: its replicas continue from one sync to the next."""
    case = TRACE["cases"][name]
    window = TRACE["downscale_stabilization_seconds"]
    model = HorizontalPodAutoscaler(case["lowest"], case["highest"], TRACE["target"], case["behavior"], window)
    counts = [case["syncs"][0][2]]
    for now, metric, _, _ in case["syncs"][:-1]:
        counts.append(model.reconcile(counts[-1], metric, now))
    _compare(counts, [spec for _, _, spec, _ in case["syncs"]])


@pytest.mark.parametrize("name", [name for name, case in TRACE["cases"].items() if case["behavior"]])
def test_history_decides_as_the_real_controller_did(name: str) -> None:
    case = TRACE["cases"][name]
    behavior, history = _behavior(case["behavior"]), History()
    model = HorizontalPodAutoscaler(case["lowest"], case["highest"], TRACE["target"], case["behavior"])
    counts = [case["syncs"][0][2]]
    history.recommend(counts[0], 0.0)  # as a starting controller does
    for now, metric, _, _ in case["syncs"][:-1]:
        proposed = model.proposal(counts[-1], metric)
        counts.append(_step(history, behavior, counts[-1], proposed, (case["lowest"], case["highest"]), now))
    _compare(counts, [spec for _, _, spec, _ in case["syncs"]])


@pytest.mark.parametrize("seed", range(40))
def test_autoscaler_follows_model_of_hpa_where_the_metric_is_steady(seed: int) -> None:
    """Each load level lasts longer than the demand's averaging window; then both see the same values."""
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
        # During averaging the replicas have changed, so the model starts within the tolerance of the same target.
        expected = model.reconcile(count, total, now)
        assert count == expected
