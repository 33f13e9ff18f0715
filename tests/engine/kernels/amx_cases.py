"""Tests run by `test_sanitizers` with kernels compiled with `amx_model.h`: GEMMs computed by tiles."""

from __future__ import annotations

import ctypes
import random

import pytest
import torch
from torch.nn import functional

from stoker_engine.architectures.stored_formats import StoredFormat
from stoker_engine.attention.cpu import CpuBackend
from stoker_engine.kernels.cpu.block_panels import block_panels
from stoker_engine.kernels.cpu.isa import usable_isas
from stoker_engine.kernels.cpu.library import load
from stoker_engine.kernels.cpu.linear import linear
from stoker_engine.kernels.cpu.lora import AdapterMemory, CpuLoraFactors, CpuLoraSite, CpuLoraTable
from stoker_engine.kernels.cpu.panels import panels
from stoker_engine.kernels.lora import LoraPart, add_lora

from ..attention.conftest import Sequences, run
from ..attention.test_windows import SHAPE
from .stored_random import IN_PANELS, id_of, random_stored, whole_numbers
from .test_fuzz import RandomTensors, close


@pytest.fixture(scope="module")
def kernels() -> ctypes.CDLL:
    """Kernels compiled with the emulated tiles."""
    return load(next(isa for isa in usable_isas() if isa.name == "avx512-bf16"))


@pytest.mark.parametrize("seed", range(12))
def test_gemm_by_tiles_equals_torch(kernels: ctypes.CDLL, seed: int) -> None:
    """Results are right, and a row has the same bits alone."""
    dice = random.Random(seed)
    count = dice.choice([1, 2, 15, 16, 17, 31, 32, 33, 64, 65, dice.randrange(1, 70)])
    inner, outputs = 32 * dice.randrange(1, 12), dice.choice([16, 17, 31, 32, 33, 48, 129, dice.randrange(16, 140)])
    tensors = RandomTensors(seed, torch.bfloat16)
    x, weight = (tensors.rows_of_wider(each, inner, dice.randrange(9)) for each in (count, outputs))
    bias = dice.choice([None, tensors(outputs)])
    before = kernels.amx_model_products()
    got = linear(kernels, weight, bias)(x)
    assert kernels.amx_model_products() > before, "the tile instructions were not used"
    close(got, functional.linear(x.double(), weight.double(), None if bias is None else bias.double()))
    for row in {0, count // 2, count - 1}:
        assert torch.equal(linear(kernels, weight, bias)(x[row : row + 1]), got[row : row + 1])


@pytest.mark.parametrize("seed", range(8))
def test_gemm_of_panels_by_tiles_equals_torch(kernels: ctypes.CDLL, seed: int) -> None:
    """Weights are in panels; there may be more rows than a block has."""
    dice = random.Random(seed)
    operations = panels(kernels)
    assert operations is not None
    count = dice.choice([1, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 65, dice.randrange(1, 70)])
    inner, outputs = 32 * dice.randrange(1, 12), dice.choice([16, 17, 31, 32, 33, 48, 129, dice.randrange(16, 140)])
    if seed == 0:
        count, inner, outputs = 90, 4096, 33
    tensors = RandomTensors(seed, torch.bfloat16)
    x, weight, bias = tensors.rows_of_wider(count, inner, dice.randrange(9)), tensors(outputs, inner), tensors(outputs)
    in_panels, before = weight.clone(), kernels.amx_model_products()
    operations.pack(in_panels)
    multiply = operations.linear(in_panels, bias)
    got = multiply(x)
    assert kernels.amx_model_products() > before, "the tile instructions were not used"
    close(got, functional.linear(x.double(), weight.double(), bias.double()))
    for row in {0, count // 2, count - 1}:
        assert torch.equal(multiply(x[row : row + 1]), got[row : row + 1])


@pytest.mark.parametrize("stored", [each for each in IN_PANELS if each.name != "Q6_K"], ids=id_of)
def test_gemm_of_blocks_by_tiles_has_the_bits_of_vectors(kernels: ctypes.CDLL, stored: StoredFormat) -> None:
    """Many rows, computed by tiles, have the bits of few rows, computed by vectors."""
    of_blocks, inner = block_panels(kernels), whole_numbers(stored, 9 * 32)
    assert of_blocks is not None
    tensors, blocks = RandomTensors(inner, torch.bfloat16), random_stored(stored, 37, inner, seed=1)
    of_blocks.pack(blocks, stored, inner)
    multiply = of_blocks.linear(blocks, stored, inner, torch.bfloat16, tensors(37))
    x = tensors.rows_of_wider(50, inner, 3)
    few = torch.cat([multiply(x[at : at + 5]) for at in range(0, 50, 5)])
    before = kernels.amx_model_products()
    for count in (16, 17, 31, 33, 50):
        assert torch.equal(multiply(x[:count]), few[:count])
    assert kernels.amx_model_products() > before, "the tile instructions were not used"


@pytest.mark.parametrize("seed", range(8))
def test_adapters_by_tiles_equal_the_reference(kernels: ctypes.CDLL, seed: int) -> None:
    """Some adapters are computed by tiles, others by vectors; a row has the same bits alone."""
    dice, tensors, table = random.Random(seed), RandomTensors(seed, torch.bfloat16), CpuLoraTable(2)
    count, inner, outputs = dice.choice([1, 17, 33, 100]), 32 * dice.randrange(1, 12), dice.randrange(1, 140)
    slots = torch.tensor([dice.randrange(-1, 2) for _ in range(count)] + [-1])
    table.read_from(slots)
    site, adapters = CpuLoraSite(kernels, table), {}
    for slot, rank in enumerate((32, dice.choice([5, 64]))):
        adapters[slot] = [LoraPart(tensors(rank, inner), tensors(outputs, rank), 0)]
        memory = AdapterMemory(kernels, torch.bfloat16)
        site.set(slot, CpuLoraFactors(adapters[slot], memory))
        memory.fill()
    x, plain = tensors.rows_of_wider(count, inner, dice.randrange(9)), linear(kernels, tensors(outputs, inner))
    rows, before = torch.arange(count), kernels.amx_model_products()
    got, exact = site.extended(plain, lambda: rows)(x), plain(x).double()
    assert kernels.amx_model_products() > before, "the tile instructions were not used"
    add_lora(exact, x.double(), slots[:-1], {
        slot: [LoraPart(a.double(), b.double(), first) for a, b, first in parts] for slot, parts in adapters.items()
    })  # fmt: skip
    close(got, exact)
    for row in {0, count // 2, count - 1}:
        alone = rows[row : row + 1].clone()
        assert torch.equal(site.extended(plain, lambda alone=alone: alone)(x[row : row + 1]), got[row : row + 1])


def test_attention_by_tiles_does_not_depend_on_chunks(kernels: ctypes.CDLL) -> None:
    """Prompts in chunks have the same bits as in one step."""
    sequences = Sequences.random(SHAPE, [150, 33], torch.bfloat16)
    before = kernels.amx_model_products()
    whole = run(CpuBackend(kernels), sequences, [(0, 0, 150), (1, 0, 33)])
    assert kernels.amx_model_products() > before, "the tile instructions were not used"
    parts = run(CpuBackend(kernels), sequences, [(0, 0, 1), (1, 0, 20)], [(0, 1, 149), (1, 20, 33)], [(0, 149, 150)])
    for index, (rows, rows_in_parts) in enumerate(zip(whole, parts, strict=True)):
        close(rows, sequences.expected(index))
        assert torch.equal(rows, rows_in_parts)
