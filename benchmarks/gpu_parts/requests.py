"""Requests of the throughput benchmarks: prompts as token ids, and numbers of tokens to generate."""

from __future__ import annotations

import random

#: A request: prompt, number of output tokens.
Request = tuple[list[int], int]

#: Tokens that requests may contain: both models' vocabularies are larger.
_FIRST, _LAST = 1000, 40_000


def nano_vllm(count: int, longest: int) -> list[Request]:
    """Return the requests of nano-vllm's benchmark (its ``bench.py``): uniform lengths from 100 to `longest`, by
    Python's generator with seed 0, in the same order of draws."""
    rng = random.Random(0)
    prompts = [[rng.randint(0, 10_000) for _ in range(rng.randint(100, longest))] for _ in range(count)]
    return [(prompt, rng.randint(100, longest)) for prompt in prompts]


def sharegpt_like(count: int, longest: int, seed: int = 0) -> list[Request]:
    """Return requests with log-normal lengths: prompts with a median of 110 and outputs with a median of 150 tokens, σ
    of 1.1 and 0.9, from 4 to `longest` tokens. Their means are about 180 and 205, as ShareGPT's."""
    rng = random.Random(seed)

    def length(median: int, sigma: float) -> int:
        return min(max(round(median * rng.lognormvariate(0, sigma)), 4), longest)

    return [(tokens(rng, length(110, 1.1)), length(150, 0.9)) for _ in range(count)]


def equal(count: int, length: int, output: int) -> list[Request]:
    """Return requests of equal lengths, the same in every call."""
    rng = random.Random(count * length)
    return [(tokens(rng, length), output) for _ in range(count)]


def tokens(rng: random.Random, count: int) -> list[int]:
    """Return random token ids."""
    return [rng.randrange(_FIRST, _LAST) for _ in range(count)]


def below(requests: list[Request], vocabulary: int) -> list[Request]:
    """Return the requests with token ids that a smaller vocabulary has."""
    return [([token % vocabulary for token in prompt], output) for prompt, output in requests]


def lengths(requests: list[Request]) -> list[tuple[int, int]]:
    """Return the prompt's and the output's length of each request."""
    return [(len(prompt), output) for prompt, output in requests]
