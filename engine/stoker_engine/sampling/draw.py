"""Draws a token from each row of logits, using a random number that depends only on the sequence's seed and the
position: it is the same alone, in any batch, and after a preemption.
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
    """Parameters of one draw."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    position: int


def draw(logits: torch.Tensor, draws: list[Draw], kernels: Kernels) -> torch.Tensor:
    """Draw a token from each row; all temperatures are above 0.

    Args:
        logits: [rows, vocabulary] float32; -inf is never drawn.
        kernels: kernels for the device of the logits.

    Returns:
        [rows] int64 token ids; arbitrary for a row whose largest logit is NaN or infinite.
    """
    return kernels.select_token(logits, to_device([_parameters(d) for d in draws], logits.device, torch.float64))


def _parameters(draw: Draw) -> list[float]:
    """Return the row of parameters for `kernels.select_token`."""
    parameters = [0.0] * len(COLUMNS)
    parameters[SCALE] = 1 / min(max(draw.temperature, 1e-30), 1e30)
    parameters[TOP_K] = max(0, min(draw.top_k, 2**31 - 1))
    parameters[TOP_P] = draw.top_p
    parameters[LEAST] = math.log(draw.min_p) if draw.min_p > 0 else -math.inf
    parameters[UNIFORM] = _uniform(draw.seed, draw.position)
    return parameters


def _uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) determined by (seed, position)."""
    digest = blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
