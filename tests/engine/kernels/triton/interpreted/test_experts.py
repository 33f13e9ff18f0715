"""Experts by Triton: tiles compared with lists, results with torch in float64.

Unwritten memory is NaN, or the largest integer.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from stoker_engine.architectures.activation import Activation, ClampedSwiGLU
from stoker_engine.kernels.triton.bundle import TRITON
from stoker_engine.kernels.triton.gemm.grouped_gemm import grouped_gemm, tiles_of
from stoker_engine.kernels.triton.moe.align import align, max_tiles
from stoker_engine.kernels.triton.moe.combine import combine

from .conftest import DEVICE

#: Tolerances. In 16 bits the gates, the activations and the results are rounded separately.
NEAR = {torch.float32: 4e-6, torch.bfloat16: 2.5e-2, torch.float16: 4e-3}
GPT_OSS = ClampedSwiGLU(alpha=1.702, limit=7.0)


@pytest.fixture(autouse=True)
def unwritten_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def draw_chosen(tokens: int, top: int, numbers: int, seed: int) -> torch.Tensor:
    """Return [tokens, top] expert numbers, without repetition in a row."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, numbers, generator=generator).argsort(-1)[:, :top].contiguous()


def check_tiles(chosen: torch.Tensor, experts: int, tile_rows: int) -> None:
    rows, tile_experts = align(chosen, experts, tile_rows)
    choices, numbers = chosen.numel(), chosen.flatten().tolist()
    expected, owners = [], []
    for expert in range(experts):
        ours = [choice for choice, number in enumerate(numbers) if number == expert]
        while ours:
            expected.append(ours[:tile_rows] + [choices] * (tile_rows - len(ours[:tile_rows])))
            owners.append(expert)
            ours = ours[tile_rows:]
    assert len(owners) <= len(tile_experts) == max_tiles(choices, experts, tile_rows)
    assert tile_experts.tolist() == owners + [-1] * (len(tile_experts) - len(owners))
    assert rows.view(-1, tile_rows)[: len(owners)].tolist() == expected


@pytest.mark.parametrize(
    ("experts", "tile_rows"),
    [
        (1, 64),
        (2, 1),
        (5, 16),
        pytest.param(17, 64, marks=pytest.mark.slow),
        pytest.param(513, 4, marks=pytest.mark.slow),
    ],
)
def test_tiles_hold_the_choices_of_one_expert_each(experts: int, tile_rows: int) -> None:
    """Lengths around tiles and around a program's reads; experts of other ranks; all tokens to one expert."""
    for tokens in (0, 1, 15, 16, 17, 63, 64, 65, 341, 342) if experts < 100 else (0, 17):
        numbers = experts + tokens % 2 * 3
        check_tiles(draw_chosen(tokens, min(3, numbers), numbers, tokens), experts, tile_rows)
    check_tiles(torch.full((1025, 1), experts - 1), experts, tile_rows)
    check_tiles(torch.full((65, 1), experts), experts, tile_rows)
    check_tiles(torch.tensor([[2**31 + experts - 1, 0], [2**40, 2**31 - 1]]), experts, tile_rows)


def in_float64(
    x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, stacks: list[torch.Tensor | None], act: Activation
) -> torch.Tensor:
    gate_up, down, gate_up_bias, down_bias = (None if each is None else each.double() for each in stacks)
    assert gate_up is not None and down is not None
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, row in enumerate(chosen.tolist()):
        for index, expert in enumerate(row):
            if expert >= len(gate_up):
                continue
            both = gate_up[expert] @ x[token].double() + (0 if gate_up_bias is None else gate_up_bias[expert])
            gate, up = both.chunk(2)
            if isinstance(act, ClampedSwiGLU):
                gate, up = gate.clamp(max=act.limit), up.clamp(-act.limit, act.limit)
                inner = gate * torch.sigmoid(gate * act.alpha) * (up + 1)
            else:
                inner = (functional.gelu if act == "gelu" else functional.silu)(gate) * up
            result = down[expert] @ inner + (0 if down_bias is None else down_bias[expert])
            out[token] += weights[token, index].double() * result
    return out


def random_stacks(
    experts: int, hidden: int, size: int, dtype: torch.dtype, biased: bool, seed: int
) -> list[torch.Tensor | None]:
    """Return parts of larger tensors, as a checkpoint's matrices may be."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        larger = torch.full((*shape[:-1], shape[-1] + 5), torch.nan, dtype=dtype)
        larger[..., 2:-3] = torch.randn(*shape, generator=generator).mul(shape[-1] ** -0.5).to(dtype)
        return larger[..., 2:-3]

    return [
        random(experts, 2 * size, hidden),
        random(experts, hidden, size),
        random(experts, 2 * size) if biased else None,
        random(experts, hidden) if biased else None,
    ]


def check(
    tokens: int,
    experts: int,
    top: int,
    hidden: int,
    size: int,
    *,
    others: int = 0,
    dtype: torch.dtype = torch.float32,
    biased: bool = False,
    act: Activation = "silu",
    seed: int = 0,
    chosen: torch.Tensor | None = None,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    stacks = random_stacks(experts, hidden, size, dtype, biased, seed)
    x = torch.randn(tokens, hidden, generator=generator).to(dtype)
    weights = torch.rand(tokens, top, generator=generator)
    if chosen is None:
        chosen = draw_chosen(tokens, top, experts + others, seed)
    gate_up, down, *biases = stacks
    assert gate_up is not None and down is not None
    ours = TRITON.experts(gate_up, down, act, *biases)(x, weights, chosen)
    assert ours.dtype == dtype and ours.is_contiguous()
    torch.testing.assert_close(
        ours.double(), in_float64(x, weights, chosen, stacks, act), rtol=NEAR[dtype], atol=NEAR[dtype]
    )


@pytest.mark.parametrize("dtype", NEAR, ids=["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("tokens", [0, 1, 17, pytest.param(70, marks=pytest.mark.slow)])
def test_experts_equal_float64(tokens: int, dtype: torch.dtype) -> None:
    check(tokens, 5, 2, 32, 24, dtype=dtype)
    check(tokens, 4, 3, 67, 65, dtype=dtype, biased=True, act=GPT_OSS, others=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("number", [0, 3])
def test_experts_equal_float64_if_all_tokens_choose_one(number: int, dtype: torch.dtype) -> None:
    check(66, 4, 1, 20, 12, dtype=dtype, chosen=torch.full((66, 1), number))


def test_experts_of_other_ranks_add_zero() -> None:
    check(9, 3, 2, 20, 12, chosen=torch.tensor([[3, 5]] * 9))


def test_nan_affects_only_its_row() -> None:
    """NaN of tokens whose experts are on other ranks does not appear anywhere."""
    gate_up, down, *biases = random_stacks(4, 20, 12, torch.bfloat16, True, 1)
    assert gate_up is not None and down is not None
    chosen = draw_chosen(40, 2, 7, 4)
    experts = TRITON.experts(gate_up, down, "silu", *biases)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(40, 20, generator=generator).bfloat16()
    weights = torch.rand(40, 2, generator=generator)
    expected = experts(x, weights, chosen)
    are_elsewhere = (chosen >= 4).all(-1)
    bad = are_elsewhere.clone()
    bad[[0, 7, 39]] = True
    x[bad], weights[chosen >= 4] = torch.nan, torch.nan
    got = experts(x, weights, chosen)
    is_nan = bad & ~are_elsewhere
    assert is_nan.any() and are_elsewhere.any()
    assert torch.equal(got[~is_nan], expected[~is_nan]) and got[is_nan].isnan().all()


def test_results_are_added_in_the_order_of_expert_numbers() -> None:
    """Sums are float32 and start from 0, with one addition per expert, wherever `chosen` names it."""
    generator = torch.Generator().manual_seed(0)
    for tokens, top, size in ((3, 8, 5), (2, 1, 1025), (1, 3, 1024)):
        chosen = draw_chosen(tokens, top, 10, top)
        results = torch.randn(tokens, top, size, generator=generator) * torch.logspace(-6, 6, size)
        results[chosen >= 8] = torch.nan
        weights = torch.full((tokens, top), 0.5)
        expected = torch.zeros(tokens, size)
        for token in range(tokens):
            for column in chosen[token].argsort().tolist():
                if chosen[token, column] < 8:
                    expected[token] += results[token, column] * 0.5
        assert torch.equal(combine(results.flatten(0, 1), weights, chosen, 8), expected)


def test_bits_do_not_depend_on_the_batch() -> None:
    """With integers, whose sums are exact within an expert: in the interpreter's GEMMs, a row's last bit depends on its
    place in a tile, on GPUs it does not.
    """
    generator = torch.Generator().manual_seed(5)

    def whole(largest: int, *shape: int) -> torch.Tensor:
        return torch.randint(-largest, largest + 1, shape, generator=generator).bfloat16()

    stacks = whole(1, 5, 66, 70), whole(1, 5, 70, 33), "relu", whole(3, 5, 66), whole(3, 5, 70)
    experts = TRITON.experts(*stacks)
    x, weights, chosen = whole(2, 30, 70), torch.rand(30, 3, generator=generator), draw_chosen(30, 3, 6, 4)
    together = experts(x, weights, chosen)
    for rows in (slice(0, 1), slice(5, 25)):
        assert torch.equal(experts(x[rows], weights[rows], chosen[rows]), together[rows])


def test_operators_pass_opcheck() -> None:
    """torch checks their schemas, and the shapes and dtypes of fake results."""
    chosen = draw_chosen(6, 2, 5, 0)
    x, stack = torch.randn(6, 8), torch.randn(4, 10, 8)
    rows, tile_experts = align(chosen, 4, tiles_of(torch.float32, False).rows)
    for operator, arguments in (
        (align, (chosen, 4, 16)),
        (grouped_gemm, (x, stack, None, rows, tile_experts, 2)),
        (combine, (torch.randn(12, 10), torch.rand(6, 2), chosen, 4)),
    ):
        with _disable_current_modes():  # torch's check uses its own modes
            there = tree_map_only(torch.Tensor, lambda tensor: tensor.to(DEVICE), arguments)
            torch.library.opcheck(operator.operator, there, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_random_cases_equal_float64(seed: int) -> None:
    dice = random.Random(seed)
    acts: list[Activation] = ["silu", "gelu", GPT_OSS]
    experts, others = dice.randint(1, 17), dice.choice([0, 0, 1, 20])
    check(
        dice.choice([0, 1, 2, 15, 16, 17, 33, 64, 65, 130]), experts, dice.randint(1, min(8, experts + others)),
        dice.choice([1, 16, 31, 32, 64, 65, 129]), dice.choice([1, 8, 31, 33, 64, 65]), others=others,
        dtype=dice.choice(list(NEAR)), biased=dice.random() < 0.5, act=dice.choice(acts),
        seed=seed,
    )  # fmt: skip
