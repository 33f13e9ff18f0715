"""Draws a token from each row of logits, using a random number that depends only on the sequence's seed and the
position: it is the same alone, in any batch, and after a preemption.

The random numbers are those of SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators",
2014), whose n-th output can be computed directly. Each seed has its own stream, and position n has the n-th output.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from stoker_engine.kernels.bundle import Kernels
from stoker_engine.kernels.select_token import COLUMNS, LEAST, SCALE, TOP_K, TOP_P, UNIFORM
from stoker_engine.parallel.transfer import to_device

_GAMMA: Final = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS: Final = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS: Final = np.uint64(30), np.uint64(27), np.uint64(31)
#: Bits of a random number that a float64 in [0, 1) does not hold.
_SURPLUS_BITS: Final = np.uint64(11)


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
    parameters = np.array([selection(d.temperature, d.top_k, d.top_p, d.min_p) for d in draws])
    streams = np.array([stream(d.seed) for d in draws], dtype=np.uint64)
    parameters[:, UNIFORM] = uniforms(streams, np.array([d.position for d in draws]))
    return kernels.select_token(logits, to_device(parameters, logits.device))


def selection(temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    """Return a row of parameters for `kernels.select_token`, without the random number; `temperature` is above 0."""
    parameters = [0.0] * len(COLUMNS)
    parameters[SCALE] = 1 / min(max(temperature, 1e-30), 1e30)
    parameters[TOP_K] = max(0, min(top_k, 2**31 - 1))
    parameters[TOP_P] = top_p
    parameters[LEAST] = math.log(min_p) if min_p > 0 else -math.inf
    return parameters


def stream(seed: int) -> np.uint64:
    """Return the start of a seed's random numbers, for `uniforms`. Any integer is a seed, modulo 2^64."""
    return np.uint64(_mixed(np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64))[0])


def uniforms(streams: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return random numbers in [0, 1), float64 [count].

    Args:
        streams: uint64 [count], see `stream`.
        positions: [count] integers.
    """
    mixed = _mixed(streams + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA)
    numbers: np.ndarray = (mixed >> _SURPLUS_BITS) * 2.0**-53
    return numbers


def _mixed(state: np.ndarray) -> np.ndarray:
    """Return SplitMix64's outputs for states, uint64 [count]."""
    state = (state ^ (state >> _SHIFTS[0])) * _MULTIPLIERS[0]
    state = (state ^ (state >> _SHIFTS[1])) * _MULTIPLIERS[1]
    mixed: np.ndarray = state ^ (state >> _SHIFTS[2])
    return mixed
