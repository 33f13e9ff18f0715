"""What `test_sanitizers` runs where kernels were compiled with `amx_model.h`: products that tiles compute."""

from __future__ import annotations

import ctypes
import random

import pytest
import torch
from torch.nn import functional

from stoker_engine.kernels.native.levels import usable_levels
from stoker_engine.kernels.native.library import load
from stoker_engine.kernels.native.linear import product

from .test_fuzz import Numbers, close


@pytest.fixture(scope="module")
def kernels() -> ctypes.CDLL:
    """The kernels with the model of tiles."""
    return load(next(level for level in usable_levels() if level.name == "avx512-bf16"))


@pytest.mark.parametrize("seed", range(12))
def test_products_of_tiles(kernels: ctypes.CDLL, seed: int) -> None:
    """They are right, and a row has the same bits alone."""
    dice = random.Random(seed)
    count = dice.choice([1, 2, 15, 16, 17, 31, 32, 33, 64, 65, dice.randrange(1, 70)])
    inner, outputs = 32 * dice.randrange(1, 12), dice.choice([16, 17, 31, 32, 33, 48, 129, dice.randrange(16, 140)])
    numbers = Numbers(seed, torch.bfloat16)
    x, weight = (numbers.rows_of_wider(each, inner, dice.randrange(9)) for each in (count, outputs))
    bias = dice.choice([None, numbers(outputs)])
    before = kernels.amx_model_products()
    got = product(kernels, weight, bias)(x)
    assert kernels.amx_model_products() > before, "it was not tiles that multiplied"
    close(got, functional.linear(x.double(), weight.double(), None if bias is None else bias.double()))
    for row in {0, count // 2, count - 1}:
        assert torch.equal(product(kernels, weight, bias)(x[row : row + 1]), got[row : row + 1])
