"""The CPU's kernels at random sizes, compared with torch in float64; seeded.

`test_sanitizers.py` runs these under sanitizers: there every tensor lies between red zones, and a stray read ends the
process. So tensors are exactly as large as necessary.
"""

from __future__ import annotations

import ctypes
import os
import random
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.nn import functional

from stoker_engine.architectures.activation import ClampedSwiGLU
from stoker_engine.architectures.stored_formats import GGUF_FORMATS, GroupFormat, StoredFormat
from stoker_engine.attention.backend import AttentionShape
from stoker_engine.attention.cpu import CpuBackend
from stoker_engine.contract.names import KV_CACHE_DTYPES
from stoker_engine.kernels import activation as kernels_activation
from stoker_engine.kernels import rotary
from stoker_engine.kernels.cpu import activation as native_activation
from stoker_engine.kernels.cpu import gguf_blocks, group_blocks
from stoker_engine.kernels.cpu import rotary as native_rotary
from stoker_engine.kernels.cpu.argmax import argmax
from stoker_engine.kernels.cpu.block_panels import block_panels
from stoker_engine.kernels.cpu.blocks import rows as plain_rows
from stoker_engine.kernels.cpu.bundle import cpu_kernels
from stoker_engine.kernels.cpu.library import load
from stoker_engine.kernels.cpu.linear import linear
from stoker_engine.kernels.cpu.lora import AdapterMemory, CpuLoraFactors, CpuLoraSite, CpuLoraTable
from stoker_engine.kernels.cpu.matrix import CpuLinear, concat_linear
from stoker_engine.kernels.cpu.panels import panels
from stoker_engine.kernels.cpu.rms_norm import rms_norm
from stoker_engine.kernels.int8_activations import block_of, int8_activations
from stoker_engine.kernels.lora import LoraPart, add_lora
from stoker_engine.kernels.panels import PANEL

from ...support.engine.gguf_random import random_blocks
from ..attention.conftest import Sequences, run
from .each_isa import each_isa
from .group_random import random_groups, some_formats
from .stored_random import IN_PANELS, random_stored, whole_numbers

ACTIVATIONS = {
    "silu": (native_activation.SILU, functional.silu),
    "gelu": (native_activation.GELU, functional.gelu),
    "gelu_pytorch_tanh": (native_activation.GELU_TANH, partial(functional.gelu, approximate="tanh")),
}
EXACT = {torch.float32: 5e-6, torch.bfloat16: 1.6e-2}
EXAMPLES = int(os.environ.get("STOKER_FUZZ_EXAMPLES", "40"))

drawn = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)
dtypes = st.sampled_from(list(EXACT))
seeds = st.integers(0, 2**16)
rows = st.integers(1, 40)
#: Around the widths of vectors and tiles, and anywhere.
widths = st.one_of(st.integers(1, 70), st.sampled_from([127, 128, 129, 255, 256, 257, 511, 576]))


@pytest.fixture(scope="module", params=each_isa())
def kernels(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """Kernels of one ISA."""
    return load(request.param)


class RandomTensors:
    """Draws tensors, each in memory of exactly its size."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self._generator, self._dtype = torch.Generator().manual_seed(seed), dtype

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator).to(self._dtype)

    def rows_of_wider(self, count: int, width: int, more: int) -> torch.Tensor:
        """Return [count, width] with a row stride of `width + more`, and nothing after the last row."""
        memory = self((count - 1) * (width + more) + width)
        return memory.as_strided((count, width), (width + more, 1))


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.shape == expected.shape
    scale = max(float(expected.abs().max()), 1e-3)
    assert float((got.double() - expected.double()).abs().max()) <= EXACT[got.dtype] * scale


@drawn
@given(rows, widths, st.integers(1, 130), st.integers(0, 9), st.booleans(), dtypes, seeds)
def test_linear_equals_float64(
    kernels: ctypes.CDLL, count: int, inner: int, outputs: int, more: int, biased: bool, dtype: torch.dtype, seed: int
) -> None:
    tensors = RandomTensors(seed, dtype)
    x, weight = tensors.rows_of_wider(count, inner, more), tensors.rows_of_wider(outputs, inner, more)
    bias = tensors(outputs) if biased else None
    close(
        linear(kernels, weight, bias)(x),
        functional.linear(x.double(), weight.double(), None if bias is None else bias.double()),
    )


@drawn
@given(
    st.one_of(rows, st.sampled_from([95, 96, 97])), st.one_of(st.integers(1, 70), st.sampled_from([1023, 1024, 1025])),
    st.integers(16, 130), st.integers(0, 9), st.booleans(), seeds,
)  # fmt: skip
def test_panels_equal_float64(
    kernels: ctypes.CDLL, count: int, pairs: int, outputs: int, more: int, biased: bool, seed: int
) -> None:
    """A packed matrix can be looked up and multiplied like the original."""
    operations = panels(kernels)
    if operations is None:
        return
    tensors, inner = RandomTensors(seed, torch.bfloat16), 2 * pairs
    x, weight = tensors.rows_of_wider(count, inner, more), tensors(outputs, inner)
    bias = tensors(outputs) if biased else None
    exact = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    in_panels = weight.clone()
    operations.pack(in_panels)
    assert torch.equal(operations.rows(in_panels, torch.arange(outputs)), weight)
    close(operations.linear(in_panels, bias)(x), exact)


def base_linear(kernels: ctypes.CDLL, base: str, weight: torch.Tensor, outputs: list[int]) -> CpuLinear:
    """Return the GEMM with a weight in rows, in panels if it fits, or cut into several parts in panels ("concat")."""
    operations, found = panels(kernels), list[CpuLinear]()
    for part in weight.split(outputs) if base == "concat" else [weight]:
        in_panels = part.clone()
        if base != "rows" and operations is not None and operations.fit(in_panels):
            operations.pack(in_panels)
            found.append(operations.linear(in_panels, None))
        else:
            found.append(linear(kernels, in_panels))
    return found[0] if len(found) == 1 else concat_linear(kernels, found)


@drawn
@given(
    st.one_of(rows, st.sampled_from([63, 64, 65, 95, 96, 97, 193])), widths,
    st.lists(st.integers(1, 300), min_size=1, max_size=3), st.integers(1, 5), st.integers(0, 9), st.booleans(), dtypes,
    st.sampled_from(["rows", "panels", "concat"]), seeds,
)  # fmt: skip
def test_lora_equals_float64(
    kernels: ctypes.CDLL,
    count: int,
    inner: int,
    outputs: list[int],
    num_slots: int,
    more: int,
    shares: bool,
    dtype: torch.dtype,
    base: str,
    seed: int,
) -> None:
    """Adapters have any ranks and slots; the matrix is in rows, in panels, or cut into several parts. Rows without
    adapter have the same bits as without LoRA, and each row has the same bits as alone.
    """
    tensors, dice = RandomTensors(seed, dtype), random.Random(seed)
    table, slots = CpuLoraTable(num_slots), torch.tensor([dice.randrange(-1, num_slots) for _ in range(count)] + [-1])
    table.read_from(slots)
    site, adapters = CpuLoraSite(kernels, table), {}
    for slot in range(num_slots):
        parts, first, shared = [], 0, tensors(dice.randrange(1, 70), inner)
        for width in outputs:
            if dice.random() < 0.8:
                a = shared if shares else tensors(dice.choice([1, 2, 5, 16, 31, 64]), inner)
                parts.append(LoraPart(a, tensors(width, len(a)) / len(a) ** 0.5, first))
            first += width
        if parts:
            adapters[slot] = parts
            memory = AdapterMemory(kernels, dtype)
            site.set(slot, CpuLoraFactors(parts, memory))
            memory.fill()
    x, weight = tensors.rows_of_wider(count, inner, more), tensors(sum(outputs), inner)
    batch_rows = torch.tensor([dice.randrange(-1, count) for _ in range(count)])
    plain = base_linear(kernels, base, weight, outputs)
    got = site.extended(plain, lambda: batch_rows)(x)
    exact = plain(x).double()
    add_lora(exact, x.double(), slots[batch_rows], {
        slot: [LoraPart(a.double(), b.double(), first) for a, b, first in parts] for slot, parts in adapters.items()
    })  # fmt: skip
    close(got, exact)
    without = torch.tensor([slot not in adapters for slot in slots[batch_rows].tolist()])
    assert torch.equal(got[without], plain(x)[without])
    for row in {0, count // 2, count - 1}:
        alone = batch_rows[row : row + 1].clone()
        assert torch.equal(site.extended(plain, lambda alone=alone: alone)(x[row : row + 1]), got[row : row + 1])


@drawn
@given(
    st.one_of(rows, st.sampled_from([255, 256, 257])),
    st.integers(1, 20),
    st.integers(1, 130),
    st.integers(0, 9),
    st.booleans(),
    dtypes,
    seeds,
)
def test_gguf_blocks_have_the_bits_of_dequantized_weights(
    kernels: ctypes.CDLL, count: int, blocks: int, outputs: int, more: int, biased: bool, dtype: torch.dtype, seed: int
) -> None:
    """GEMMs with weights of every type have the same bits as with dequantized weights."""
    for format in GGUF_FORMATS.values():
        width = {1: 7 * blocks, 32: blocks, 256: -(-blocks // 8)}[format.numbers]
        tensors, inner, size = RandomTensors(seed, dtype), width * format.numbers, width * format.bytes
        memory = torch.zeros((outputs - 1) * (size + more) + size, dtype=torch.uint8)
        weight = memory.as_strided((outputs, size), (size + more, 1))
        weight.copy_(random_blocks(format, outputs, width, seed))
        x, bias = tensors.rows_of_wider(count, inner, more), tensors(outputs) if biased else None
        plain = gguf_blocks.dequantize(kernels, weight, format, dtype)
        got = gguf_blocks.linear(kernels, weight, format, dtype, bias)(x)
        assert torch.equal(got, linear(kernels, plain, bias)(x)), format


@drawn
@given(
    st.one_of(rows, st.sampled_from([191, 192, 193])), st.integers(1, 20), st.integers(16, 130), st.integers(0, 9),
    st.booleans(), st.sampled_from(IN_PANELS), seeds,
)  # fmt: skip
def test_block_panels_equal_float64_with_int8_activations(
    kernels: ctypes.CDLL, count: int, units: int, outputs: int, more: int, biased: bool, stored: StoredFormat, seed: int
) -> None:
    """Lookup returns the dequantized rows; the GEMM rounds activations to 8 bits."""
    of_blocks = block_panels(kernels)
    if of_blocks is None:
        return
    tensors, whole = RandomTensors(seed, torch.bfloat16), outputs // PANEL * PANEL
    inner = whole_numbers(stored, 32 * units)
    blocks = random_stored(stored, outputs, inner, seed)
    x, bias = tensors.rows_of_wider(count, inner, more), tensors(outputs) if biased else None
    plain = plain_rows(kernels, blocks, stored, inner, torch.arange(outputs), torch.float32)
    of_blocks.pack(blocks, stored, inner)
    found = of_blocks.rows(blocks, stored, inner, torch.arange(outputs), torch.bfloat16)
    assert torch.equal(found, plain.bfloat16())
    got = of_blocks.linear(blocks, stored, inner, torch.bfloat16, bias)(x)
    rounded = int8_activations(x, block_of(stored, inner))
    exact = rounded @ plain[:whole].double().T + (0 if bias is None else bias[:whole].double())
    summed = rounded.abs() @ plain[:whole].double().abs().T
    assert ((got[:, :whole] - exact).abs() <= exact.abs() * 2**-8 + summed * 2**-19).all()


@drawn
@given(
    rows, widths, st.integers(1, 130), st.integers(0, 9), st.booleans(), dtypes,
    st.sampled_from(some_formats(6, seed=1)), seeds,
)  # fmt: skip
def test_group_blocks_have_the_bits_of_dequantized_weights(
    kernels: ctypes.CDLL, count: int, width: int, outputs: int, more: int, biased: bool, dtype: torch.dtype,
    format: GroupFormat, seed: int,
) -> None:  # fmt: skip
    """The result is also close to float64's."""
    draw = RandomTensors(seed, dtype)
    x, bias = draw.rows_of_wider(count, width, more), draw(outputs) if biased else None
    row_bytes = format.row_bytes(width)
    weight = torch.empty((outputs - 1) * (row_bytes + more) + row_bytes, dtype=torch.uint8)
    weight = weight.as_strided((outputs, row_bytes), (row_bytes + more, 1))
    weight.copy_(random_groups(format, outputs, width, seed).blocks)
    plain = group_blocks.dequantize(kernels, weight, format, width, dtype)
    got = group_blocks.linear(kernels, weight, format, width, dtype, bias)(x)
    assert torch.equal(got, linear(kernels, plain, bias)(x))
    close(got, (x.double() @ plain.double().T + (0 if bias is None else bias.double())).to(dtype))


@drawn
@given(rows, st.integers(1, 5), widths, st.integers(0, 9), st.booleans(), dtypes, seeds)
def test_rms_norm_equals_float64(
    kernels: ctypes.CDLL, count: int, heads: int, size: int, more: int, wide: bool, dtype: torch.dtype, seed: int
) -> None:
    tensors = RandomTensors(seed, dtype)
    weight = tensors(size).float() if wide else tensors(size)
    x = tensors.rows_of_wider(count, heads * size, more).unflatten(1, (heads, size))
    if heads == 1:
        x = x[:, 0]
    expected = x.double() * (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    close(rms_norm(kernels, weight, 1e-5)(x), expected)


@drawn
@given(rows, st.integers(1, 5), st.integers(1, 70), st.integers(0, 70), st.booleans(), dtypes, seeds)
def test_rotary_equals_float64(
    kernels: ctypes.CDLL,
    count: int,
    heads: int,
    pairs: int,
    num_unrotated: int,
    pairwise: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    tensors = RandomTensors(seed, dtype)
    x = tensors(count, heads, 2 * pairs + num_unrotated)
    positions = torch.randint(0, 5000, (count,), generator=torch.Generator().manual_seed(seed))
    frequencies = 10000.0 ** -(torch.arange(pairs) / pairs)
    cos, sin = native_rotary.cos_sin(kernels, positions, frequencies, 1.0, dtype)
    cos_sin = (positions[:, None] * frequencies).double()[:, None]
    assert float((cos.double() - cos_sin.cos()).abs().max()) < max(EXACT[dtype], 1e-3)
    assert float((sin.double() - cos_sin.sin()).abs().max()) < max(EXACT[dtype], 1e-3)
    expected = rotary.apply_rotary(x.double(), cos.double(), sin.double(), pairwise)
    close(native_rotary.apply_rotary(kernels, x, cos.clone(), sin.clone(), pairwise), expected)


@drawn
@given(
    rows,
    widths,
    st.integers(0, 9),
    st.booleans(),
    st.sampled_from(["silu", "gelu", "gelu_pytorch_tanh"]),
    dtypes,
    seeds,
)
def test_activations_equal_float64(
    kernels: ctypes.CDLL, count: int, size: int, more: int, gated: bool, name: str, dtype: torch.dtype, seed: int
) -> None:
    x = RandomTensors(seed, dtype).rows_of_wider(count, size * (1 + gated), more)
    kind, function = ACTIVATIONS[name]
    expected = function(x[:, :size].double()) * (x[:, size:].double() if gated else 1)
    close(native_activation.activation(kernels, kind, x, gated), expected)


@drawn
@given(rows, widths, st.integers(0, 9), st.sampled_from([(1.702, 7.0), (1.0, 0.5), (-0.3, 1e30)]), dtypes, seeds)
def test_clamped_swiglu_equals_float64(
    kernels: ctypes.CDLL, count: int, size: int, more: int, gate: tuple[float, float], dtype: torch.dtype, seed: int
) -> None:
    x, act = 4 * RandomTensors(seed, dtype)(count, 2 * size + more), ClampedSwiGLU(*gate)
    x = x.flatten()[: (count - 1) * (2 * size + more) + 2 * size].clone()
    x = x.as_strided((count, 2 * size), (2 * size + more, 1))
    first, up = x[:, :size].double().clamp(max=act.limit), x[:, size:].double().clamp(-act.limit, act.limit)
    expected = first * torch.sigmoid(act.alpha * first) * (up + 1)
    close(native_activation.clamped_swiglu(kernels, act, x), expected)
    reference = kernels_activation.act_and_mul(act)(x.double())
    assert torch.allclose(reference, expected, rtol=1e-12, atol=1e-12)


@drawn
@given(rows, st.one_of(widths, st.integers(1, 3000)), st.integers(0, 9), st.integers(1, 50), seeds)
def test_argmax_returns_the_first_maximum(
    kernels: ctypes.CDLL, count: int, size: int, more: int, values: int, seed: int
) -> None:
    """There are few different values, so that several are the maximum."""
    x = (RandomTensors(seed, torch.float32).rows_of_wider(count, size, more) * values).round()
    expected = x.eq(x.max(dim=-1, keepdim=True).values).int().argmax(dim=-1)
    indices, largest = argmax(kernels, x)
    assert indices.tolist() == expected.tolist()
    assert torch.equal(largest, x.amax(dim=-1))


@drawn
@given(rows, st.integers(1, 9), st.integers(1, 3), st.integers(1, 70), st.integers(1, 70), dtypes, seeds)
def test_experts_equal_float64(
    kernels: ctypes.CDLL, count: int, experts: int, k: int, hidden: int, inner: int, dtype: torch.dtype, seed: int
) -> None:
    tensors, k = RandomTensors(seed, dtype), min(k, experts)
    x, gate_up, down = tensors(count, hidden), tensors(experts, 2 * inner, hidden), tensors(experts, hidden, inner)
    weights, chosen = tensors(count, experts).float().softmax(-1).topk(k, dim=-1)
    got = cpu_kernels(kernels).experts(gate_up, down, "silu")(x, weights, chosen)
    gate, up = torch.einsum("th,eih->tei", x.double(), gate_up.double()).chunk(2, dim=-1)
    each = torch.einsum("tei,ehi->teh", functional.silu(gate) * up, down.double())
    expected = (each.gather(1, chosen[..., None].expand(-1, -1, hidden)) * weights.double()[..., None]).sum(1)
    scale = max(float(expected.abs().max()), 1.0)
    assert float((got.double() - expected).abs().max()) <= 4 * EXACT[dtype] * scale


@st.composite
def attentions(draw: st.DrawFn) -> tuple[AttentionShape, list[int], int, bool]:
    """Draw a layer's shape, sequence lengths, block size, and whether values are part of the keys."""
    kv_heads, group = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 4, 5, 7, 8, 13]))
    latent = draw(st.integers(0, 5)) == 0
    head_dim = draw(st.one_of(st.sampled_from([1, 8, 16, 64, 80, 96, 128]), st.integers(1, 130)))
    value_dim = draw(st.integers(1, head_dim)) if latent else draw(st.one_of(st.just(head_dim), st.integers(1, 130)))
    # Around the kernel's tile (64 or 128 keys) and splits (512).
    edges = st.sampled_from([1, 2, 15, 16, 17, 33, 63, 64, 65, 127, 128, 129])
    window = draw(st.one_of(st.none(), edges, st.integers(1, 200)))
    lengths = draw(st.lists(st.one_of(edges, st.integers(1, 200)), min_size=1, max_size=4))
    if draw(st.integers(0, 7)) == 0:
        lengths[0] = draw(st.sampled_from([511, 512, 513, 1024, 1025, 1100]))
    heads = kv_heads * group
    slopes = torch.rand(heads, generator=torch.Generator().manual_seed(heads)) / 10
    sinks = torch.randn(heads, generator=torch.Generator().manual_seed(heads)) * draw(st.sampled_from([1.0, 50.0]))
    shape = AttentionShape(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        value_head_dim=value_dim,
        scale=head_dim**-0.5,
        sliding_window=window,
        logits_soft_cap=draw(st.sampled_from([None, None, 30.0])),
        alibi_slopes=slopes if draw(st.integers(0, 3)) == 0 else None,
        sinks=sinks if draw(st.integers(0, 2)) == 0 else None,
    )
    return shape, lengths, draw(st.one_of(st.sampled_from([1, 16, 64]), st.integers(1, 90))), latent


@drawn
@given(attentions(), st.data(), dtypes, st.sampled_from(KV_CACHE_DTYPES), st.booleans(), seeds)
def test_attention_equals_float64(
    kernels: ctypes.CDLL,
    case: tuple[AttentionShape, list[int], int, bool],
    data: st.DataObject,
    dtype: torch.dtype,
    kv_cache_dtype: str,
    scaled: bool,
    seed: int,
) -> None:
    """Sequences are computed in chunks of any size. Memory outside of a sequence is NaN or inaccessible."""
    shape, lengths, block_size, latent = case
    scales = None
    if scaled and kv_cache_dtype in ("fp8", "fp8_e4m3"):
        each = torch.rand(shape.num_kv_heads + 1, generator=torch.Generator().manual_seed(seed)) / 20 + 0.001
        scales = each[1:].clone(), each[:1].clone()
    sequences = Sequences.random(shape, lengths, dtype, latent, seed, block_size, kv_cache_dtype, scales)
    steps, done = [], [0] * len(lengths)
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        spans = []
        for sequence, (at, length) in enumerate(zip(done, lengths, strict=True)):
            if at < length:
                chunk = 1 if len(steps) > 4 and length - at < 3 else data.draw(st.integers(1, length - at))
                if len(steps) > 5 and length - at > 3:
                    chunk = length - at
                spans.append((sequence, at, at + chunk))
                done[sequence] = at + chunk
        steps.append(sorted(spans, key=lambda span: span[2] - span[1] > 1))
    for index, got in enumerate(run(CpuBackend(kernels), sequences, *steps)):
        close(got, sequences.expected(index))
