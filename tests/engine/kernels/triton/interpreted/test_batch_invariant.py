"""A row has the same bits in every batch, in chunks and as a decode: GEMMs, and whole models."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from stoker_engine.architectures.stored_formats import GGUF_FORMATS, GroupFormat
from stoker_engine.attention.triton import TritonBackend
from stoker_engine.kernels.reference import REFERENCE
from stoker_engine.kernels.triton.batch_invariant import BATCH_INVARIANT
from stoker_engine.kernels.triton.quant.block_tile import has_tiles
from stoker_engine.models.decoder import Decoder

from .....support.engine.tiny_models import reference_of, tiny_family, tiny_mixture
from ....models.conftest import PagedRun, assert_run_is, load_decoder
from .test_block_experts import draw_stack
from .test_experts import draw_chosen

NEAR = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
DTYPES = pytest.mark.parametrize(
    "dtype",
    [torch.float32, *(pytest.param(each, marks=pytest.mark.slow) for each in (torch.bfloat16, torch.float16))],
    ids=["float32", "bfloat16", "float16"],
)
SIZES = [(0, 3, 5), (1, 1, 1), (15, 31, 33), (17, 32, 32), (64, 129, 65), (65, 128, 64), (130, 5, 200)]


pytestmark = pytest.mark.usefixtures("batch_invariant_matmul")


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@DTYPES
@pytest.mark.parametrize(("tokens", "outputs", "inner"), SIZES)
def test_gemm_rows_have_the_same_bits_alone(tokens: int, outputs: int, inner: int, dtype: torch.dtype) -> None:
    wide = drawn(tokens, inner + 3, dtype=dtype)
    x, weight, bias = wide[:, 1 : 1 + inner], drawn(outputs, inner, dtype=dtype, seed=1), drawn(outputs, dtype=dtype)
    exact = x.double() @ weight.double().t()
    size = x.double().abs() @ weight.double().abs().t() + 1
    for make, bias_of, result in (
        (BATCH_INVARIANT.linear, None, dtype),
        (BATCH_INVARIANT.linear, bias, dtype),
        (BATCH_INVARIANT.float32_linear, None, torch.float32),
        (BATCH_INVARIANT.float32_linear, bias, torch.float32),
    ):
        multiply = make(weight, bias_of)
        ours, expected = multiply(x), exact if bias_of is None else exact + bias_of.double()
        assert ours.dtype == result and ours.shape == expected.shape
        assert ((ours.double() - expected).abs() <= NEAR[result] * size).all()
        for row in {0, tokens // 2, tokens - 1} if tokens else ():
            assert torch.equal(multiply(x[row : row + 1])[0], ours[row])
    of_heads = drawn(tokens, 3, inner, dtype=dtype, seed=2)
    matrices = drawn(3, outputs, inner, dtype=dtype, seed=3)
    ours, theirs = (kernels.batched_linear(matrices)(of_heads) for kernels in (BATCH_INVARIANT, REFERENCE))
    torch.testing.assert_close(ours, theirs, rtol=4 * NEAR[dtype], atol=inner**0.5 * NEAR[dtype])


def test_float32_linear_accepts_float32_weights() -> None:
    x, weight = drawn(5, 40, dtype=torch.bfloat16), drawn(7, 40, dtype=torch.float32)
    torch.testing.assert_close(BATCH_INVARIANT.float32_linear(weight)(x), x.float() @ weight.t(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stored", [GroupFormat("uint4", 32, "float16", zero=True), GGUF_FORMATS["F16"]], ids=str)
def test_quant_linear_rows_have_the_same_bits_alone(stored: GroupFormat) -> None:
    rng = random.Random(1)
    rows = [bytes(rng.randrange(60) for _ in range(stored.row_bytes(64))) for _ in range(9)]
    blocks = torch.tensor([list(row) for row in rows], dtype=torch.uint8)
    multiply = BATCH_INVARIANT.quant_linear(blocks, stored, 64, torch.float16)
    x = drawn(70, 64, dtype=torch.float16)
    together = multiply(x)
    torch.testing.assert_close(
        together, REFERENCE.quant_linear(blocks, stored, 64, torch.float16)(x), rtol=2e-3, atol=2e-2
    )
    for row in (0, 16, 69):
        assert torch.equal(multiply(x[row : row + 1])[0], together[row])


def test_experts_whose_format_has_no_tiles_are_multiplied_by_its_linear_operation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If one of the two formats has no tiles, both matrices are; torch's GEMM is used for neither."""
    formats = (GGUF_FORMATS["Q8_0"], GGUF_FORMATS["F16"])
    assert [has_tiles(each) for each in formats] == [True, False]
    gate_up = draw_stack(formats[0], 3, 128, 64, torch.float16, 1)
    down = draw_stack(formats[1], 3, 64, 64, torch.float16, 2)
    compute = BATCH_INVARIANT.block_experts(gate_up, down, "silu", torch.float16)
    x = drawn(40, 64, dtype=torch.float16) / 64
    weights, chosen = torch.rand(40, 2, generator=torch.Generator().manual_seed(1)), draw_chosen(40, 2, 3, 4)
    expected = REFERENCE.block_experts(gate_up, down, "silu", torch.float16)(x, weights, chosen)
    monkeypatch.setattr(torch.nn.functional, "linear", None)
    together = compute(x, weights, chosen)
    torch.testing.assert_close(together, expected, rtol=4e-3, atol=4e-3 * float(expected.abs().max()))
    for row in (0, 17, 39):
        assert torch.equal(compute(x[row : row + 1], weights[row : row + 1], chosen[row : row + 1])[0], together[row])


PROMPTS = [[5, 17, 99, 3, 64, 2, 31, 8, 8, 90, 11, 27, 33, 4, 5, 6, 7, 61, 19], [8]]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param("llama", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("gemma2", torch.float32),
        pytest.param("deepseek_v3", torch.float32, marks=pytest.mark.slow),
    ],
)
def test_logits_do_not_depend_on_batch_or_chunks(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Each run cuts prompts into other chunks."""
    theirs = tiny_mixture(name) if name == "deepseek_v3" else tiny_family(name)
    theirs.save_pretrained(tmp_path)
    backend = TritonBackend(batch_invariant=True)
    ours: Decoder = load_decoder(tmp_path, dtype=dtype, backend=backend, kernels=BATCH_INVARIANT)
    together = PagedRun(ours, PROMPTS, new_tokens=3, dtype=dtype)
    if dtype == torch.float32:
        assert_run_is(together, reference_of(theirs))
    alone = PagedRun(ours, PROMPTS[:1], new_tokens=3, seed=1, dtype=dtype)
    assert alone.sequences[0].tokens == together.sequences[0].tokens
    for a, b in zip(alone.sequences[0].logits, together.sequences[0].logits, strict=True):
        assert torch.equal(a, b)
