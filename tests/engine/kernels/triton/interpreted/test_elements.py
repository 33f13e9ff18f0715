"""Norms, activations, rotary embedding, argmax and masks by Triton, compared with their definitions: odd sizes,
strides, no rows, and NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from stoker_engine.architectures.activation import ClampedSwiGLU
from stoker_engine.kernels.bundle import Kernels
from stoker_engine.kernels.reference import REFERENCE
from stoker_engine.kernels.triton.bundle import TRITON

NEAR = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
DTYPES = pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, *(pytest.param(each, marks=pytest.mark.slow) for each in (torch.float32, torch.float16))],
    ids=["bfloat16", "float32", "float16"],
)
NAMES = ["gelu", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2", "silu"]
SIZES = [1, 2, 63, 65, 1024, 1030]
Operation = Callable[[Kernels], Any]


def same(operation: Operation, dtype: torch.dtype, roundings: int = 1) -> None:
    """Assert equality within `roundings` roundings; NaN must be at the same places."""
    ours, theirs = operation(TRITON), operation(REFERENCE)
    near = NEAR[dtype] * roundings
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape and ours.is_contiguous()
    torch.testing.assert_close(ours, theirs, rtol=near, atol=near, equal_nan=True)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).mul(2).to(dtype)


@DTYPES
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("wide_weight", [False, True])
def test_rms_norm_equals_the_reference(size: int, wide_weight: bool, dtype: torch.dtype) -> None:
    weight = random(size, dtype=torch.float32 if wide_weight else dtype, seed=1)
    x = random(5, size, dtype=dtype)
    x[1], x[2, 0], x[3] = 0.0, float("nan"), 300.0
    for each in (x, x[:0], x[:, None], random(3, 4, 3 * size, dtype=dtype)[..., size : 2 * size]):
        same(lambda kernels, each=each: kernels.rms_norm(weight, 1e-6)(each), dtype)


@DTYPES
@pytest.mark.parametrize("size", SIZES)
def test_add_rms_norm_equals_the_reference(size: int, dtype: torch.dtype) -> None:
    weight = random(size, dtype=dtype, seed=1)
    x, added = random(5, size, dtype=dtype), random(5, size, dtype=dtype, seed=2)
    x[1], added[1], x[2, 0] = 0.0, 0.0, float("inf")
    for each, more in ((x, added), (x[:0], added[:0]), (random(5, 3 * size, dtype=dtype)[:, size : 2 * size], added)):
        (total, normed), (right, _) = (
            kernels.add_rms_norm(weight, 1e-6)(each, more) for kernels in (TRITON, REFERENCE)
        )
        torch.testing.assert_close(total, right, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(torch.nan_to_num(normed), torch.nan_to_num(TRITON.rms_norm(weight, 1e-6)(total)))


@DTYPES
@pytest.mark.parametrize("size", SIZES)
def test_layer_norm_equals_float32(size: int, dtype: torch.dtype) -> None:
    weight, bias = random(size, dtype=dtype, seed=1), random(size, dtype=dtype, seed=2)
    of_heads = random(4, size, dtype=dtype, seed=3)
    x = random(5, size, dtype=dtype)
    x[1], x[2, 0], x[3] = 0.0, float("nan"), 300.0
    heads = random(3, 6, 2 * size, dtype=dtype)[:, 1:5, size:]
    for each, *parameters in (
        (x, weight, bias), (x, weight, None), (x, None, None), (x[:0], weight, bias), (heads, weight, None),
        (heads, of_heads, None), (heads, of_heads, of_heads + 1),
    ):  # fmt: skip
        # In 16 bits the definition rounds intermediate results; the reference is float32's result.
        wide = [None if one is None else one.float() for one in (each, *parameters)]
        ours, exact = TRITON.layer_norm(*parameters, 1e-5)(each), REFERENCE.layer_norm(*wide[1:], 1e-5)(wide[0])
        assert ours.dtype == dtype and ours.is_contiguous()
        torch.testing.assert_close(ours.float(), exact, rtol=NEAR[dtype], atol=NEAR[dtype], equal_nan=True)


@DTYPES
@pytest.mark.parametrize("name", NAMES)
def test_activations_equal_the_reference(name: str, dtype: torch.dtype) -> None:
    for size in (1, 1030):
        x = random(3, 2 * size, dtype=dtype)
        x[0, :2] = torch.tensor([float("nan"), 100.0])
        x[1, :2] = torch.tensor([-100.0, -0.0])
        for each in (x, x[:0]):
            roundings = 3 if name == "quick_gelu" else 1  # torch's operators round several times
            same(lambda kernels, each=each: kernels.activation(name)(each), dtype, roundings)
            same(lambda kernels, each=each: kernels.act_and_mul(name)(each), dtype, roundings)


@DTYPES
def test_clamped_swiglu_equals_float32(dtype: torch.dtype) -> None:
    x = random(4, 66, dtype=dtype) * 5
    # The definition rounds after each operation, so in 16 bits both are compared with float32's result.
    act = ClampedSwiGLU(alpha=1.702, limit=7.0)
    ours, exact = TRITON.act_and_mul(act)(x), REFERENCE.act_and_mul(act)(x.float())
    torch.testing.assert_close(ours.float(), exact, rtol=NEAR[dtype], atol=NEAR[dtype])


@DTYPES
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("size", "pairs"), [(8, 4), (80, 16), (96, 48), (64, 7), (576, 32)])
def test_rotary_equals_float32(size: int, pairs: int, interleaved: bool, dtype: torch.dtype) -> None:
    cos, sin = REFERENCE.cos_sin(torch.tensor([0, 1, 5000]), torch.linspace(1, 1e-4, pairs), 1.0, torch.float32)
    x = random(3, 5, size + 6, dtype=dtype)[:, 1:4, 3:-3]
    for each, tokens in ((x, 3), (x[:0], 0)):
        rotated = TRITON.apply_rotary(each, cos[:tokens].to(dtype), sin[:tokens].to(dtype), interleaved)
        exact = REFERENCE.apply_rotary(
            each.float(), cos[:tokens].to(dtype).float(), sin[:tokens].to(dtype).float(), interleaved
        )
        assert rotated.dtype == dtype and rotated.is_contiguous()
        torch.testing.assert_close(rotated.float(), exact, rtol=NEAR[dtype], atol=NEAR[dtype])


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 12_289])
def test_argmax_equals_the_reference(size: int) -> None:
    logits = random(6, size + 1)[:, :size]
    logits[1] = float("-inf")
    logits[2] = 1.0
    logits[3, size // 2] = logits[3, -1] = 50.0
    logits[4, -1] = float("inf")
    logits[5, size // 3] = float("nan")
    for each in (logits, logits[:0]):
        (best, largest), (column, number) = TRITON.argmax(each), REFERENCE.argmax(each)
        assert torch.equal(best[:5], column[:5])
        torch.testing.assert_close(largest, number, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("size", [1, 31, 32, 33, 4097])
def test_keep_allowed_equals_the_reference(size: int) -> None:
    words = -(-size // 32)
    allowed = torch.randint(-(2**31), 2**31, (3, words), generator=torch.Generator().manual_seed(size)).int()
    allowed[1], allowed[2] = 0, -1
    rows = torch.tensor([4, 0, 2])
    results = []
    for kernels in (TRITON, REFERENCE):
        logits = random(5, size + 3)[:, :size]
        kernels.keep_allowed(logits, rows, allowed)
        kernels.keep_allowed(logits, rows[:0], allowed[:0])
        results.append(logits)
    assert torch.equal(*results)


@pytest.mark.parametrize("size", [1, 7, 4095, 4096, 4097, 9000])
def test_logprobs_equal_the_reference(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    logits = 20 * torch.randn(9, size + 3, generator=generator)[:, :size]  # rows are not contiguous
    logits[1] = logits[1].round()  # ties
    logits[2] += 1e4
    logits[3, 1:] = -torch.inf
    logits[4] = -1e30
    tokens = torch.randint(size, (9,), generator=generator)
    tokens[0] = logits[0].argmax()
    tokens[3] = size - 1
    logits[7, size // 2], logits[8] = torch.nan, -torch.inf
    numbers, ranks = TRITON.logprobs(logits, tokens)
    expected, expected_ranks = REFERENCE.logprobs(logits, tokens)
    torch.testing.assert_close(numbers[:7], expected[:7], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(numbers[:3, 0], logits.log_softmax(-1)[range(3), tokens[:3]], rtol=1e-6, atol=1e-6)
    assert torch.equal(ranks[:7], expected_ranks[:7]) and ranks[0] == 1 and numbers[7:, 0].isnan().all()


def test_logprobs_of_no_rows_are_empty() -> None:
    numbers, ranks = TRITON.logprobs(torch.empty(0, 5), torch.empty(0, dtype=torch.int64))
    assert (numbers.shape, ranks.shape) == ((0, 3), (0,))
