"""The CPU's attention kernel, compared with attention in float64, and bitwise with itself in other batches."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from stoker_engine.attention.backend import AttentionShape
from stoker_engine.attention.cpu import CpuBackend
from stoker_engine.attention.sdpa import SdpaBackend
from stoker_engine.contract import names
from stoker_engine.kernels.cpu.library import load
from stoker_engine.models.loading.kv_scales import LayerScales

from ..kernels.each_isa import each_isa
from .conftest import Sequences, run

KV_CACHE_DTYPES = [name for name in names.KV_CACHE_DTYPES if name not in ("auto", "fp8_e4m3")]

PLAIN = AttentionShape(num_heads=6, num_kv_heads=2, head_dim=64, value_head_dim=64, scale=0.125)
SHAPES = {
    "grouped": PLAIN,
    "one head each": dataclasses.replace(PLAIN, num_kv_heads=6),
    "seven to one": dataclasses.replace(PLAIN, num_heads=14),
    "window": dataclasses.replace(PLAIN, sliding_window=37),
    "soft cap": dataclasses.replace(PLAIN, logits_soft_cap=5.0),
    "alibi": dataclasses.replace(PLAIN, alibi_slopes=torch.tensor([0.5, 0.25, 0.1, 0.05, 0.02, 0.01])),
    "sinks": dataclasses.replace(PLAIN, sinks=torch.tensor([0.5, -3.0, 0.0, 2.0, 9.0, -200.0])),
    "sinks and a window": dataclasses.replace(PLAIN, sliding_window=37, sinks=torch.linspace(-2, 40, 6)),
    "odd sizes": dataclasses.replace(PLAIN, head_dim=80, value_head_dim=20),
    "tiny": dataclasses.replace(PLAIN, head_dim=8, value_head_dim=8),
    # Slopes of all sizes, down to weights too small for a float.
    "steep alibi": dataclasses.replace(PLAIN, alibi_slopes=torch.tensor([0.6, 1.0, 1.5, 2.0, 3.0, 8.0])),
}
LENGTHS = [1, 16, 65, 200, 130, 47]
EXACT = {torch.float32: 2e-6, torch.bfloat16: 8e-3}


@pytest.fixture(params=each_isa())
def backend(request: pytest.FixtureRequest) -> CpuBackend:
    """Kernels of one ISA; those other than this processor's widest need another compilation."""
    return CpuBackend(load(request.param))


def whole(sequences: Sequences) -> list[tuple[int, int, int]]:
    """Return one step that computes everything."""
    return sorted(((s, 0, len(q)) for s, q in enumerate(sequences.queries)), key=lambda span: span[2] > 1)


@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_attention_equals_the_float64_reference(backend: CpuBackend, name: str, dtype: torch.dtype) -> None:
    sequences = Sequences.random(SHAPES[name], LENGTHS, dtype)
    for index, rows in enumerate(run(backend, sequences, whole(sequences))):
        torch.testing.assert_close(rows.double(), sequences.expected(index), rtol=EXACT[dtype], atol=EXACT[dtype])


@pytest.mark.parametrize("dtype", EXACT, ids=str)
def test_latent_attention_equals_the_float64_reference(backend: CpuBackend, dtype: torch.dtype) -> None:
    shape = AttentionShape(num_heads=40, num_kv_heads=1, head_dim=96, value_head_dim=64, scale=0.1)
    sequences = Sequences.random(shape, LENGTHS, dtype, latent=True)
    for index, rows in enumerate(run(backend, sequences, whole(sequences))):
        torch.testing.assert_close(rows.double(), sequences.expected(index), rtol=EXACT[dtype], atol=EXACT[dtype])


@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_bits_do_not_depend_on_batch_or_chunks(backend: CpuBackend, name: str, dtype: torch.dtype) -> None:
    """The sequences are long enough for several splits, whose results are merged."""
    sequences = Sequences.random(SHAPES[name], [2100, 33, 1], dtype)
    together = run(backend, sequences, [(2, 0, 1), (0, 0, 2100), (1, 0, 33)])
    alone = run(backend, sequences, [(0, 0, 2100)], [(1, 0, 33)], [(2, 0, 1)])
    chunked = run(
        backend, sequences, [(0, 0, 700)], [(1, 0, 32), (0, 700, 1039)], [(1, 32, 33), (2, 0, 1), (0, 1039, 2099)],
        [(0, 2099, 2100)],
    )  # fmt: skip
    for one, other, third in zip(together, alone, chunked, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, third)


@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize("name", ["grouped", "one head each", "window", "odd sizes"])
@pytest.mark.parametrize("heads_first", [False, True])
def test_many_decodes_have_the_same_bits_as_alone(
    backend: CpuBackend, heads_first: bool, name: str, dtype: torch.dtype
) -> None:
    """There are so many that threads take all heads of one sequence; lengths are around tiles and splits."""
    lengths = [2, 17, 64, 65, 127, 128, 129, 130, 255, 256, 257, 300, 384, 385, 511, 512, 513, 514, 640, 700]
    sequences = Sequences.random(SHAPES[name], lengths, dtype, heads_first=heads_first)
    prompts = [(s, 0, length - 1) for s, length in enumerate(lengths)]
    decodes = [(s, length - 1, length) for s, length in enumerate(lengths)]
    together = run(backend, sequences, prompts, decodes)
    alone = run(backend, sequences, *([span] for span in prompts), *([span] for span in decodes))
    assert all(torch.equal(one, other) for one, other in zip(together, alone, strict=True))


def test_bits_do_not_depend_on_threads(backend: CpuBackend) -> None:
    sequences = Sequences.random(PLAIN, [2100, 300], torch.float32)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2):
        backend.library.stoker_use_threads(threads)
        results.append(run(backend, sequences, [(0, 0, 2099), (1, 0, 300)], [(0, 2099, 2100)]))
    backend.library.stoker_use_threads(before)
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", EXACT, ids=str)
def test_nan_in_a_query_affects_only_its_own_result(backend: CpuBackend, dtype: torch.dtype, value: float) -> None:
    """Rows that are computed together, of several heads and queries, share vector registers."""
    sequences = Sequences.random(PLAIN, [700], dtype)
    (clean,) = run(backend, sequences, [(0, 0, 700)])
    for row in (0, 130, 699):
        spoilt = Sequences.random(PLAIN, [700], dtype)
        spoilt.queries[0][row, 1] = value
        rows = run(backend, spoilt, [(0, 0, 700)])[0].view(700, PLAIN.num_heads, -1)
        is_clean = torch.ones(700, PLAIN.num_heads, dtype=torch.bool)
        is_clean[row, 1] = False
        assert torch.equal(rows[is_clean], clean.view_as(rows)[is_clean])
        assert rows[row, 1].isnan().all()


@pytest.mark.parametrize("name", SHAPES)
def test_sdpa_equals_the_float64_reference(name: str) -> None:
    sequences = Sequences.random(SHAPES[name], LENGTHS, torch.float32)
    for index, rows in enumerate(run(SdpaBackend(), sequences, whole(sequences))):
        torch.testing.assert_close(rows.double(), sequences.expected(index), rtol=2e-6, atol=2e-6)


def own_scales(name: str, shape: AttentionShape) -> LayerScales | None:
    """Return one scale for all keys, and one per head for values, for formats with layer scales."""
    return (torch.tensor([0.013]), torch.linspace(0.007, 0.02, shape.num_kv_heads)) if name == "fp8" else None


@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize("kv_cache_dtype", KV_CACHE_DTYPES)
@pytest.mark.parametrize("name", ["grouped", "window", "odd sizes", "tiny"])
def test_quantized_caches_equal_the_reference_and_store_the_same_bytes(
    backend: CpuBackend, name: str, kv_cache_dtype: str, dtype: torch.dtype
) -> None:
    """Both backends attend to the stored values, and store the same bytes."""
    stored = []
    for each in (backend, SdpaBackend()):
        scales = own_scales(kv_cache_dtype, SHAPES[name])
        sequences = Sequences.random(SHAPES[name], LENGTHS, dtype, kv_cache_dtype=kv_cache_dtype, layer_scales=scales)
        for index, rows in enumerate(run(each, sequences, whole(sequences))):
            torch.testing.assert_close(rows.double(), sequences.expected(index), rtol=EXACT[dtype], atol=EXACT[dtype])
        cache = sequences.cache
        stored.append([part[1:].view(torch.uint8).clone() for part in (cache.key, cache.value)])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*stored, strict=True))


@pytest.mark.parametrize("kv_cache_dtype", KV_CACHE_DTYPES)
def test_latent_vector_has_one_scale(backend: CpuBackend, kv_cache_dtype: str) -> None:
    shape = AttentionShape(num_heads=40, num_kv_heads=1, head_dim=96, value_head_dim=64, scale=0.1)
    scales = (torch.tensor([0.013]),) * 2 if kv_cache_dtype == "fp8" else None
    for each in (backend, SdpaBackend()):
        sequences = Sequences.random(
            shape, LENGTHS, torch.float32, True, kv_cache_dtype=kv_cache_dtype, layer_scales=scales
        )
        for index, rows in enumerate(run(each, sequences, whole(sequences))):
            torch.testing.assert_close(rows.double(), sequences.expected(index), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("kv_cache_dtype", KV_CACHE_DTYPES)
def test_bits_over_quantized_caches_do_not_depend_on_batch_or_chunks(backend: CpuBackend, kv_cache_dtype: str) -> None:
    """Stored tokens never change: full blocks have the same bytes after every later step."""
    shape = SHAPES["window" if kv_cache_dtype == "bfloat16" else "grouped"]

    def made() -> Sequences:
        scales = own_scales(kv_cache_dtype, shape)
        return Sequences.random(
            shape, [2100, 33, 1], torch.bfloat16, kv_cache_dtype=kv_cache_dtype, layer_scales=scales
        )

    sequences = made()
    together = run(backend, sequences, [(2, 0, 1), (0, 0, 2100), (1, 0, 33)])
    later, seen = made(), dict[int, bytes]()
    results: list[list[torch.Tensor]] = [[], [], []]
    for spans in (
        [(0, 0, 700)],
        [(1, 0, 32), (0, 700, 1039)],
        [(1, 32, 33), (2, 0, 1), (0, 1039, 2099)],
        [(0, 2099, 2100)],
    ):
        for rows, part in zip(results, run(backend, later, spans), strict=True):
            rows.append(part)
        for sequence, _, end in spans:
            for block in later.blocks[sequence][: end // 16]:
                assert seen.setdefault(block, bytes_of(later, block)) == bytes_of(later, block)
        assert all(bytes_of(later, block) == content for block, content in seen.items())
    for one, parts in zip(together, results, strict=True):
        assert torch.equal(one, torch.cat([part for part in parts if len(part)]))


def bytes_of(sequences: Sequences, block: int) -> bytes:
    """Return all that a layer stores in a block, including tokens' scales."""
    cache = sequences.cache
    parts = [cache.key[block], cache.value[block]]
    if cache.scales_of_tokens and cache.key_scales is not None and cache.value_scales is not None:
        parts += [cache.key_scales[block], cache.value_scales[block]]
    return b"".join(part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts)
