"""Autoscaling in virtual time: Stoker's autoscaler compared with models of HPA and Knative.

    PYTHONPATH=benchmarks python -m autoscaling [--seeds 0 1 2] [--write benchmarks/results]

The real `Autoscaler` and the gateway's real `EndpointPicker` run in virtual time with simulated pods. HPA and Knative
get the same metric (requests that have not ended), the same target and the same bounds. HPA reads it every 15 s, Stoker
twice per second, Knative every 2 s. No load goes to zero, because HPA does not scale to zero by default.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from autoscaling.cluster import TICK_SECONDS, Decide, Outcome, Pending, Simulation
from autoscaling.hpa import PERIOD_SECONDS as HPA_PERIOD
from autoscaling.hpa import HorizontalPodAutoscaler
from autoscaling.knative import PERIOD_SECONDS as KNATIVE_PERIOD
from autoscaling.knative import KnativePodAutoscaler
from autoscaling.loads import LARGE, LOADS, Load
from autoscaling.plot import plot
from stoker_common.scaling.signals import EngineReport, Signals
from stoker_operator.scaling.autoscaler import Autoscaler, Observation, ScalingSettings

TARGET: Final = 6.0
LOWEST: Final = 1
HIGHEST: Final = 40
REPLICAS: Final = 3


def stoker(highest: int) -> Decide:
    """Return the real autoscaler."""
    autoscaler = Autoscaler(ScalingSettings(LOWEST, highest, "pendingRequests", TARGET), 0.0)

    def decide(pending: Pending, now: float) -> int:
        engines = {
            name: EngineReport(running, waiting, 0.0, True, 0.0) for name, (running, waiting) in pending.running.items()
        }
        idle = 0.0 if pending.total else 1.0
        signals = Signals(pending.held, pending.queued, pending.in_flight, idle, engines, ("",))
        return autoscaler.update(Observation(signals, pending.replicas, pending.ready), now).replicas

    return decide


def hpa(highest: int) -> Decide:
    """Return the model of HPA, reconciled every 15 s."""
    model = HorizontalPodAutoscaler(LOWEST, highest, TARGET)
    return lambda pending, now: (
        model.reconcile(pending.replicas, pending.total, now) if now % HPA_PERIOD == 0 else pending.replicas
    )


def knative(highest: int) -> Decide:
    """Return the model of Knative, reconciled every 2 s."""
    model = KnativePodAutoscaler(LOWEST, highest, TARGET)

    def decide(pending: Pending, now: float) -> int:
        model.sample(pending.total, now)
        return model.reconcile(pending.ready, now) if now % KNATIVE_PERIOD == 0 else pending.replicas

    return decide


ALGORITHMS: Final[dict[str, Callable[[int], Decide]]] = {"Stoker": stoker, "HPA": hpa, "Knative": knative}


def main() -> None:
    """Run all loads, and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--write", type=Path, help="folder for autoscaling.md and autoscaling.svg")
    parser.add_argument("--no-large", action="store_true", help="leave out the load with 1,000 pods")
    options = parser.parse_args()
    began = time.process_time()
    outcomes = {
        load: {
            name: merge([Simulation(load, make(HIGHEST), REPLICAS, seed).run() for seed in options.seeds])
            for name, make in ALGORITHMS.items()
        }
        for load in LOADS
    }
    if not options.no_large:
        outcomes[LARGE] = {
            name: Simulation(LARGE, ALGORITHMS[name](1200), 500, options.seeds[0]).run() for name in ("Stoker", "HPA")
        }
    text = table(outcomes)
    print(text)
    print(f"{time.process_time() - began:.0f} s CPU")
    if options.write:
        (options.write / "autoscaling.md").write_text(
            HEADER.format(seeds=", ".join(map(str, options.seeds))) + text + FOOTER
        )
        (options.write / "autoscaling.svg").write_text(plot(outcomes, LOADS, TICK_SECONDS))


HEADER: Final = """# Autoscaling, simulated

Virtual time, merged over seeds {seeds}. Stoker's autoscaler and the gateway's picker are the real ones; pods, HPA
and Knative are models (`benchmarks/autoscaling`). All get the same metric (requests that have not ended), target 6,
1 to 40 pods of 8 slots, requests of 5 s on average, and defaults elsewhere. *1,000 pods* starts with 500, may
have 1,200, and has one seed. *Wait* lasts from a request's arrival until a pod computes it. Pods of *slow-start* take
150 s to start, others 25 s. Pod-seconds include pods that are starting.

"""
FOOTER: Final = """
Waits that are equal as shown are draws. Knative's shorter windows need fewer pod-seconds on steady loads, and
more waiting there; its panic window answers a step as fast as Stoker does.

![Number of pods over time](autoscaling.svg)

    PYTHONPATH=benchmarks python -m autoscaling --write benchmarks/results
"""


def table(outcomes: dict[Load, dict[str, Outcome]]) -> str:
    """Return the Markdown table, and a sentence on the loads for which Stoker is better than HPA."""
    lines = [
        "| load | algorithm | mean wait, s | p99 wait, s | max. pods | pod-seconds | ÷ HPA's |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    better = []
    for load, by_name in outcomes.items():
        reference = by_name["HPA"]
        for name, outcome in by_name.items():
            share = outcome.pod_seconds / reference.pod_seconds
            lines.append(
                f"| {load.name} | {name} | {statistics.fmean(outcome.waits):.3f} | {p99(outcome):.2f} "
                f"| {outcome.highest} | {outcome.pod_seconds:,.0f} | {share:.2f} |"
            )
        ours = by_name["Stoker"]
        if (
            load in LOADS
            and statistics.fmean(ours.waits) < statistics.fmean(reference.waits)
            and p99(ours) <= p99(reference)
            and ours.pod_seconds <= 1.02 * reference.pod_seconds
        ):
            better.append(load.name)
    names = ", ".join(better) or "none"
    lines += ["", f"Lower mean wait than HPA, no higher p99 wait, and at most 1.02 × its pod-seconds: {names}."]
    return "\n".join(lines) + "\n"


def merge(outcomes: list[Outcome]) -> Outcome:
    """Merge several seeds: all waits, summed pod-seconds, the highest number of pods, the first seed's counts."""
    waits = sorted(wait for outcome in outcomes for wait in outcome.waits)
    pod_seconds = sum(outcome.pod_seconds for outcome in outcomes)
    return Outcome(waits, pod_seconds, max(outcome.highest for outcome in outcomes), outcomes[0].counts)


def p99(outcome: Outcome) -> float:
    """Return the 99th percentile of waits, in seconds."""
    return outcome.waits[int(0.99 * (len(outcome.waits) - 1))]


if __name__ == "__main__":
    main()
