"""Workloads of token ids: greedy, without end of sequence, so that every engine computes the same amount.

W1  1 request, 128 tokens in, 128 out
W2  32 concurrent requests, 32 … 512 in (sum 8,290), 32 … 128 out (sum 2,419)
W3  32 concurrent requests, 1,024 shared + 32 own tokens in, 32 out
"""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Workload:
    """Requests that start together: (prompt, tokens to generate)."""

    name: str
    requests: list[tuple[list[int], int]]

    @property
    def num_output_tokens(self) -> int:
        """Return the number of output tokens of all requests."""
        return sum(out for _, out in self.requests)


def workloads(seed: int) -> dict[str, Workload]:
    """Return W1 to W3. Tokens differ for each seed, so that no cache entry is reused; lengths are always the same."""
    tokens, lengths = random.Random(seed), random.Random(0)

    def prompt(length: int) -> list[int]:
        return [tokens.randrange(1000, 40_000) for _ in range(length)]

    ins, outs = _lengths(lengths, 32, 512, 8290), _lengths(lengths, 32, 128, 2419)
    shared = prompt(1024)
    return {
        "W1": Workload("W1", [(prompt(128), 128)]),
        "W2": Workload("W2", [(prompt(length), out) for length, out in zip(ins, outs, strict=True)]),
        "W3": Workload("W3", [(shared + prompt(32), 32) for _ in range(32)]),
    }


def _lengths(rng: random.Random, low: int, high: int, total: int) -> list[int]:
    """Return 32 lengths from `low` to `high` with the given sum."""
    lengths = [rng.randint(low, high) for _ in range(32)]
    while sum(lengths) != total:
        step = 1 if sum(lengths) < total else -1
        index = rng.randrange(32)
        if low <= lengths[index] + step <= high:
            lengths[index] += step
    return lengths
