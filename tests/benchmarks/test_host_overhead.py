"""The benchmark of the host's work runs with the engine as it is."""

from __future__ import annotations

import gc
import runpy
from pathlib import Path
from typing import Any

from stoker_engine.core.sampling_params import SamplingParams

BENCHMARK: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "host_overhead.py"))


def test_host_overhead_is_measured_without_a_model() -> None:
    greedy = SamplingParams(temperature=0, ignore_eos=True, max_tokens=None)
    try:
        measured = BENCHMARK["measure"](greedy, 2, 8, 3)
    finally:
        gc.unfreeze()  # the benchmark freezes, as the engine's process does
    assert measured["step, bytes"] > 0 and measured["all, CPU time"] > 0
