"""Draws a token from each row of logits, by a number that the request's seed and the token's position alone determine.

So a seeded request gives the same tokens alone, in any batch, and after a preemption.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from hashlib import blake2b

import torch

from stoker_engine.kernels.bundle import Kernels
from stoker_engine.kernels.select_token import COLUMNS, LEAST, SCALE, TOP_K, TOP_P, UNIFORM
from stoker_engine.parallel.transfer import to_device


@dataclass(frozen=True)
class Draw:
    """How one token is drawn."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    position: int


def draw(logits: torch.Tensor, draws: list[Draw], kernels: Kernels) -> torch.Tensor:
    """Draws from rows whose temperature is above 0.

    Args:
        logits: [rows, vocabulary] float32; -inf is never drawn.
        kernels: for the device that the logits are on.

    Returns:
        [rows] int64 token ids; of a row whose largest logit is no finite number, any.
    """
    return kernels.select_token(logits, to_device([_parameters(d) for d in draws], logits.device, torch.float64))


def _parameters(draw: Draw) -> list[float]:
    """A row of what `kernels.select_token` draws by."""
    parameters = [0.0] * len(COLUMNS)
    parameters[SCALE] = 1 / min(max(draw.temperature, 1e-30), 1e30)
    parameters[TOP_K] = max(0, min(draw.top_k, 2**31 - 1))
    parameters[TOP_P] = draw.top_p
    parameters[LEAST] = math.log(draw.min_p) if draw.min_p > 0 else -math.inf
    parameters[UNIFORM] = _uniform(draw.seed, draw.position)
    return parameters


def _uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that (seed, position) determine."""
    digest = blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
