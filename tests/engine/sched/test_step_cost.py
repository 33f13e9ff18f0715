"""The cost model, for any measured step times."""

from __future__ import annotations

import math
import random

import pytest

from stoker_engine.sched.step_cost import StepCost, StepWork


@pytest.mark.parametrize("seed", range(60))
def test_estimates_are_finite_for_any_step_times(seed: int) -> None:
    """Some steps take almost no time, so that a coefficient of the model is 0."""
    rng = random.Random(seed)
    cost = StepCost()
    for _ in range(rng.randrange(1, 40)):
        prompt = rng.choice((0, 0, 1, rng.randrange(2000)))
        decodes = rng.choice((0, 1, rng.randrange(64))) if prompt else rng.randrange(1, 64)
        cost.observe(StepWork(prompt, prompt * rng.randrange(1, 4000), decodes), 10 ** rng.uniform(-12, 3))
        estimate = cost.estimate
        seconds = (estimate.seconds(StepWork(5, 25, 3)), estimate.seconds(StepWork(num_decodes=1)))
        assert all(math.isfinite(each) and each >= 0 for each in seconds)
