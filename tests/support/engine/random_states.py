"""Random state specs of recurrent layers."""

from __future__ import annotations

import random

from stoker_engine.architectures.cache_spec import StateSpec, StateTensor


def random_state(rng: random.Random) -> StateSpec:
    """Return one to three tensors of odd shapes and any dtype."""
    tensors = []
    for index in range(rng.randint(1, 3)):
        shape = tuple(rng.randint(1, 9) for _ in range(rng.randint(1, 3)))
        tensors.append(StateTensor(f"t{index}", shape, rng.choice([None, "float32", "bfloat16", "float16"])))
    return StateSpec(tuple(tensors))
