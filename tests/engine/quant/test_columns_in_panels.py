"""Matrices with columns in the order of their groups (GPTQ's ``desc_act``), packed into panels."""

from __future__ import annotations

import pytest
import torch

from stoker_engine.architectures.stored_formats import GroupFormat
from stoker_engine.kernels.select import select_kernels
from stoker_engine.quant.blocks import BlockMatrix

from ..kernels.group_random import random_groups


def test_packed_matrix_with_act_order_is_close_to_the_unpacked_one() -> None:
    """Lookups are equal, and GEMMs differ by the rounding of activations to 8 bits."""
    kernels = select_kernels(torch.device("cpu"), torch.bfloat16)
    if kernels.block_panels is None:
        pytest.skip("this ISA has no panels")
    stored = GroupFormat("uint4", 64, "float16", zero=True, in_order_of="groups")
    blocks, generator = random_groups(stored, 50, 256, seed=1).blocks, torch.Generator().manual_seed(2)
    packed, plain = (BlockMatrix(blocks.clone(), stored, 256, torch.bfloat16, kernels) for _ in range(2))
    order = torch.randperm(256, generator=generator).int()
    for matrix in (packed, plain):
        assert matrix.columns is not None
        matrix.columns.data.copy_(order)
    linears = packed.linear(), plain.linear()
    packed.pack()
    assert packed.is_packed and not plain.is_packed
    rows = torch.tensor([0, 7, 47, 49])
    assert torch.equal(packed.lookup(rows), plain.lookup(rows))
    x = torch.randn(9, 256, generator=generator).bfloat16()
    got, expected = (linear(x).float() for linear in linears)
    assert (got - expected).norm() <= 0.02 * expected.norm()
