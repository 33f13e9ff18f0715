"""The likeliest token over shards of a vocabulary, compared with torch's over the whole: with ties and NaN anywhere."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from stoker_engine.kernels.argmax import argmax
from stoker_engine.kernels.select import select_kernels
from stoker_engine.sampling.vocab_parallel_argmax import vocab_parallel_argmax
from stoker_engine.sizing.sharding import every_part_has_some, largest_part

from ...support.engine.thread_ranks import ThreadRanks

_KERNELS = {"reference": argmax, "chosen": select_kernels(torch.device("cpu"), torch.float32).argmax}


def _logits(chance: random.Random, rows: int, vocabulary: int) -> torch.Tensor:
    """Return few different values, so that many are equal, some of them NaN or infinite."""
    numbers = [-1.5, 0.0, 0.25, 1.0, 1.0, -torch.inf]
    hostile = [torch.nan, torch.inf]
    drawn = torch.tensor([[chance.choice(numbers) for _ in range(vocabulary)] for _ in range(rows)])
    for row in range(rows):
        if chance.random() < 0.3:
            drawn[row, chance.randrange(vocabulary)] = chance.choice(hostile)
        elif chance.random() < 0.2:
            drawn[row] = -torch.inf
    return drawn


@pytest.mark.parametrize("kernel", _KERNELS)
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_argmax_over_shards_equals_that_over_the_whole_vocabulary(size: int, kernel: str) -> None:
    chance = random.Random(size)
    with ThreadPoolExecutor(size) as pool:
        for vocabulary in (size, 9, 15, 16, 17, 33, 131, 259):
            if not every_part_has_some(vocabulary, size):
                continue
            logits = _logits(chance, chance.choice([1, 2, 7, 19]), vocabulary)
            parts = logits.split(largest_part(vocabulary, size), dim=1)
            starts = [sum(part.shape[1] for part in parts[:rank]) for rank in range(size)]
            ranks = ThreadRanks.group(size)
            found = list(pool.map(lambda *each: vocab_parallel_argmax(*each, _KERNELS[kernel]), parts, starts, ranks))
            largest = logits.amax(dim=1)
            right = largest.isfinite()
            for tokens, numbers in found:
                assert torch.equal(numbers.nan_to_num(7, 8, 9), largest.nan_to_num(7, 8, 9))
                assert torch.equal(tokens[right], logits.argmax(dim=1)[right])
            assert all(each.calls == ["all_gather"] for each in ranks)
