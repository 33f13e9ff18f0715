"""The benchmark of the host's work runs with the engine as it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# In a process of its own: tests of the engine guard the caches of theirs.
PROGRAM = """
import json, runpy
from stoker_engine.core.sampling_params import SamplingParams
benchmark = runpy.run_path("benchmarks/host_overhead.py")
greedy = SamplingParams(temperature=0, ignore_eos=True, max_tokens=None)
print(json.dumps(benchmark["measure"](greedy, 2, 8, 3)))
"""


def test_host_overhead_is_measured_without_a_model() -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.strip("\n").split("\n")[-1])
    assert measured["step, bytes"] > 0 and measured["all, CPU time"] > 0
