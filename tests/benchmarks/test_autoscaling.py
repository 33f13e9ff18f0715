"""The simulation of autoscaling: the real autoscaler and picker, beside a model of HPA."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import dataclasses, json
from autoscaling.__main__ import hpa, p99, stoker
from autoscaling.cluster import Simulation
from autoscaling.loads import LOADS
load = dataclasses.replace(next(load for load in LOADS if load.name == "flapping"), seconds=1200.0)
made = {make.__name__: Simulation(load, make(40), 3, 0).run() for make in (stoker, hpa)}
print(json.dumps({name: [len(it.waits), sum(it.waits), p99(it), it.pod_seconds] for name, it in made.items()}))
"""


def test_flapping_load_waits_less_than_with_hpa_and_costs_less() -> None:
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join([*sys.path, str(ROOT / "benchmarks")])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.strip("\n").split("\n")[-1])
    ours, other = measured["stoker"], measured["hpa"]
    assert ours[0] == other[0] > 5000, "both complete the same requests"
    assert ours[1] < other[1] and ours[2] < other[2] and ours[3] <= 1.02 * other[3]
