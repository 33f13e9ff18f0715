"""Sampling by Triton, compared with the definition: kept tokens, and the token that a random number selects."""

from __future__ import annotations

import math
import random

import pytest
import torch

from stoker_engine.kernels.select_token import COLUMNS, LEAST, SCALE, TOP_K, TOP_P, UNIFORM, keep_likely
from stoker_engine.kernels.triton.sampling.select_token import select_token, thresholds

from .conftest import DEVICE

#: Share of all weights by which float32's exponentials differ.
NEAR = 1e-6
#: Smallest weight, relative to the likeliest token's, that can be sampled.
LEAST_WEIGHT = 2.0**-40


def drawn_parameters(rng: random.Random, vocabulary: int) -> list[float]:
    row = [0.0] * len(COLUMNS)
    row[SCALE] = rng.choice([1.0, 1 / 0.7, 1 / 1.5, 1e-30, 1e30, 50.0])
    row[TOP_K] = rng.choice([0, 0, 1, 2, 5, 50, vocabulary - 1, vocabulary, vocabulary + 7, 2**31 - 1])
    row[TOP_P] = rng.choice([1.0, 1.0, 0.95, 0.5, 1e-9, 0.999999])
    row[LEAST] = rng.choice([-math.inf, -math.inf, math.log(0.05), math.log(1e-9), 0.0])
    row[UNIFORM] = rng.choice([0.0, 1 - 2**-53, 0.5, rng.random(), rng.random(), rng.random()])
    return row


def drawn_logits(rng: random.Random, vocabulary: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    logits = torch.randn(vocabulary, generator=generator) * rng.choice([0.1, 2.0, 8.0]) + rng.choice(
        [0.0, -300.0, 80.0]
    )
    if rng.random() < 0.4:  # ties
        logits = logits.round()
    if rng.random() < 0.4:
        logits[torch.rand(vocabulary, generator=generator) < rng.choice([0.1, 0.99])] = -torch.inf
    if rng.random() < 0.1:
        logits[:] = 3.0
    logits[rng.randrange(vocabulary)] = rng.choice([0.0, 5.0, 90.0, 3e38])
    return logits


def check(logits: torch.Tensor, parameters: torch.Tensor) -> torch.Tensor:
    """Return the sampled tokens; check that kept and sampled tokens are as defined, except for rounding."""
    tokens = select_token(logits, parameters)
    _, last = (each.cpu() for each in thresholds(logits.to(DEVICE), parameters.to(DEVICE)))
    scaled = (logits - logits.amax(-1, keepdim=True)) * parameters[:, SCALE, None].float()
    expected = keep_likely(scaled, parameters).isfinite()
    kept = (scaled.view(torch.int32) & 0x7FFFFFFF) <= last[:, None]
    weights = scaled.double().exp()
    of_kept = torch.where(kept, weights, 0)
    upto = of_kept.cumsum(-1)
    for row in range(len(logits)):
        differs = (kept[row] ^ expected[row]) & (weights[row] >= LEAST_WEIGHT)
        if differs.any():
            # Only equally likely tokens, at which top-p is reached, may differ.
            assert parameters[row, TOP_P] < 1 and scaled[row, differs].unique().numel() == 1
            nearer = weights[row, scaled[row] > scaled[row, differs].max()].sum()
            whole = weights[row].sum()
            shares = [(nearer + n * weights[row, differs].max()) / whole for n in range(int(differs.sum()) + 1)]
            assert min(abs(float(share) - float(parameters[row, TOP_P])) for share in shares) < NEAR
        token, target = int(tokens[row]), float(parameters[row, UNIFORM] * upto[row, -1])
        assert kept[row, token] and weights[row, token] > LEAST_WEIGHT * (1 - NEAR)
        near = NEAR * float(upto[row, -1])
        assert float(upto[row, token] - of_kept[row, token]) - near <= target <= float(upto[row, token]) + near
    return tokens


@pytest.mark.parametrize("vocabulary", [1, 3, 63, 4095, 4096, 4097])
def test_tokens_are_those_of_the_definition(vocabulary: int) -> None:
    rng = random.Random(vocabulary)
    count = 8
    wide = torch.full((count, vocabulary + 5), torch.nan)
    logits = wide[:, 2 : 2 + vocabulary]
    for row in range(count):
        logits[row] = drawn_logits(rng, vocabulary)
    parameters = torch.tensor([drawn_parameters(rng, vocabulary) for _ in range(count)], dtype=torch.float64)
    together = check(logits, parameters)
    alone = torch.cat([select_token(logits[row, None], parameters[row, None]) for row in range(0, count, 3)])
    assert torch.equal(alone, together[::3])


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", [32_000, 128_256, 262_145])
def test_tokens_of_large_vocabularies_are_those_of_the_definition(vocabulary: int) -> None:
    rng = random.Random(vocabulary)
    logits = torch.stack([drawn_logits(rng, vocabulary) for _ in range(6)])
    check(logits, torch.tensor([drawn_parameters(rng, vocabulary) for _ in range(6)], dtype=torch.float64))


def test_empty_batch_is_accepted() -> None:
    assert select_token(torch.empty(0, 9), torch.empty(0, len(COLUMNS), dtype=torch.float64)).shape == (0,)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_rows_with_nan_or_infinity_do_not_change_others(number: float) -> None:
    rng = random.Random(3)
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(3))
    parameters = torch.tensor([drawn_parameters(rng, 300) for _ in range(4)], dtype=torch.float64)
    parameters[:, TOP_P], parameters[1, TOP_K] = 0.9, 20
    expected = select_token(logits, parameters)
    logits[1, 17 if number != -math.inf else slice(None)] = number
    found = select_token(logits, parameters)
    assert torch.equal(found[[0, 2, 3]], expected[[0, 2, 3]])
    assert 0 <= int(found[1]) < 300


def test_token_frequencies_follow_the_probabilities() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -torch.inf, 0.5, -3.0])
    count = 200
    parameters = torch.zeros(count, len(COLUMNS), dtype=torch.float64)
    parameters[:, SCALE], parameters[:, TOP_P], parameters[:, LEAST] = 1.0, 1.0, -math.inf
    parameters[:, UNIFORM] = torch.arange(count) / count
    found = select_token(logits.expand(count, -1).contiguous(), parameters).bincount(minlength=6) / count
    torch.testing.assert_close(found, logits.softmax(-1), rtol=0, atol=1 / count)
