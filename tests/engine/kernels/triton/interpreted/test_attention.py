"""Attention by Triton compared with attention in float64, with a cache whose null block is inaccessible and whose
unwritten values are NaN.
"""

from __future__ import annotations

import bisect
import dataclasses
import random
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from stoker_engine.attention.backend import AttentionShape
from stoker_engine.attention.metadata import AttentionMetadata
from stoker_engine.attention.sdpa import SdpaBackend
from stoker_engine.attention.triton import TritonBackend
from stoker_engine.contract import names
from stoker_engine.kernels.triton.attention import decode, decode_splits, merge
from stoker_engine.models.loading.kv_scales import LayerScales

from ....attention.conftest import Sequences, run
from .conftest import ON_CHIP

KV_CACHE_DTYPES = [name for name in names.KV_CACHE_DTYPES if name not in ("auto", "fp8_e4m3")]
EXACT = {torch.float32: 4e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}

PLAIN = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16, value_head_dim=16, scale=0.25)
SHAPES = {
    "plain": PLAIN,
    "one head each": dataclasses.replace(PLAIN, num_kv_heads=4),
    "seven to one": dataclasses.replace(PLAIN, num_heads=7, num_kv_heads=1),
    "forty to one": dataclasses.replace(PLAIN, num_heads=40, num_kv_heads=1),
    "window": dataclasses.replace(PLAIN, sliding_window=37),
    "window of one": dataclasses.replace(PLAIN, sliding_window=1),
    "soft cap": dataclasses.replace(PLAIN, logits_soft_cap=5.0),
    "alibi": dataclasses.replace(PLAIN, alibi_slopes=torch.tensor([0.5, 0.25, 0.1, 0.05])),
    "sinks": dataclasses.replace(PLAIN, sinks=torch.tensor([0.5, -3.0, 9.0, -200.0])),
    "all options": dataclasses.replace(
        PLAIN, sliding_window=37, sinks=torch.linspace(-2, 40, 4), alibi_slopes=torch.linspace(0.01, 0.5, 4),
        logits_soft_cap=30.0,
    ),
    "odd sizes": dataclasses.replace(PLAIN, head_dim=80, value_head_dim=20),
    "tiny": dataclasses.replace(PLAIN, head_dim=8, value_head_dim=8),
    "wide": dataclasses.replace(PLAIN, num_heads=2, num_kv_heads=1, head_dim=256, value_head_dim=256, scale=1 / 16),
}  # fmt: skip
LATENT = {
    "deepseek": AttentionShape(num_heads=16, num_kv_heads=1, head_dim=576, value_head_dim=512, scale=0.04),
    "odd": AttentionShape(num_heads=5, num_kv_heads=1, head_dim=96, value_head_dim=64, scale=0.1),
}
LENGTHS = [1, 1, 17, 16, 5]


def whole(sequences: Sequences) -> list[tuple[int, int, int]]:
    """Return one step that computes everything."""
    return sorted(((s, 0, len(q)) for s, q in enumerate(sequences.queries)), key=lambda span: span[2] > 1)


def check(sequences: Sequences, *steps: list[tuple[int, int, int]], exact: float) -> None:
    for index, rows in enumerate(run(TritonBackend(), sequences, *steps)):
        torch.testing.assert_close(rows.double(), sequences.expected(index)[: len(rows)], rtol=exact, atol=exact)


#: In 16 bits only rounding differs.
CASES = [pytest.param(name, torch.float32, id=f"{name} float32") for name in SHAPES] + [
    pytest.param(name, dtype, id=f"{name} {dtype}", marks=[pytest.mark.slow] * (name not in ("plain", "all options")))
    for name in SHAPES
    for dtype in (torch.bfloat16, torch.float16)
]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_attention_equals_the_float64_reference(name: str, dtype: torch.dtype) -> None:
    sequences = Sequences.random(SHAPES[name], LENGTHS, dtype)
    check(sequences, whole(sequences), exact=EXACT[dtype])


@pytest.mark.parametrize(
    ("name", "kv_cache_dtype"),
    [
        pytest.param(name, dtype, marks=[pytest.mark.slow] * (name != "odd" and dtype != "auto"))
        for name in LATENT
        for dtype in ("auto", *KV_CACHE_DTYPES)
    ],
)
def test_latent_attention_equals_the_float64_reference(name: str, kv_cache_dtype: str) -> None:
    layer_scales = (torch.tensor([0.013]),) * 2 if kv_cache_dtype == "fp8" else None
    lengths = [1, 20] if name == "deepseek" else LENGTHS
    sequences = Sequences.random(
        LATENT[name], lengths, torch.float32, True, kv_cache_dtype=kv_cache_dtype, layer_scales=layer_scales
    )
    check(sequences, whole(sequences), exact=EXACT[torch.float32])


def own_scales(name: str, shape: AttentionShape) -> LayerScales | None:
    """Return one scale for all keys, and one per head for values, for formats with layer scales."""
    return (torch.tensor([0.013]), torch.linspace(0.007, 0.02, shape.num_kv_heads)) if name == "fp8" else None


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize("kv_cache_dtype", KV_CACHE_DTYPES)
def test_quantized_caches_have_the_bytes_of_the_reference(kv_cache_dtype: str, dtype: torch.dtype) -> None:
    """The results are those of the float64 reference."""
    shape, stored = SHAPES["odd sizes"], []
    layer_scales = own_scales(kv_cache_dtype, shape)
    for backend in (TritonBackend(), SdpaBackend()):
        sequences = Sequences.random(shape, LENGTHS, dtype, kv_cache_dtype=kv_cache_dtype, layer_scales=layer_scales)
        if isinstance(backend, TritonBackend):
            check(sequences, whole(sequences), exact=EXACT[dtype])
        else:
            run(backend, sequences, whole(sequences))
        stored.append([part[1:].view(torch.uint8).clone() for part in (sequences.cache.key, sequences.cache.value)])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*stored, strict=True))


@pytest.mark.parametrize("kv_cache_dtype", KV_CACHE_DTYPES)
def test_float16_neither_underflows_nor_overflows(kv_cache_dtype: str) -> None:
    """Many keys have equal scores, so that weights are small; one key is as large as possible."""
    shape = AttentionShape(num_heads=2, num_kv_heads=1, head_dim=16, value_head_dim=16, scale=1e-6)
    sequences = Sequences.random(shape, [1500], torch.float16, kv_cache_dtype=kv_cache_dtype)
    sequences.keys[0][7] = 65504.0
    sequences.values[0].mul_(0.01)
    run(SdpaBackend(), sequences, [(0, 0, 1499)])
    (row,) = run(TritonBackend(), sequences, [(0, 1499, 1500)])
    expected = sequences.expected(0)[-1:]
    assert (row.double() - expected).abs().max() <= 0.01 * expected.abs().max()


#: Parts of three kinds within few keys: 32 keys each to 64, 64 to 192, then 128.
SMALL = decode_splits.PartSizes(32, 64, 128, medium_from=64, long_from=192)
#: Lengths around tiles of 16 keys and around these parts.
AROUND = [1, 15, 17, 31, 32, 33, 64, 65, 127, 129, 192, 193, 319, 320, 321, 450]


def split_into(sizes: decode_splits.PartSizes, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (decode_splits, decode, merge):
        monkeypatch.setattr(module, "PART_SIZES", sizes)


@pytest.mark.parametrize(
    ("name", "kv_cache_dtype"),
    [
        ("all options", "auto"), ("sinks", "fp8"), ("window", "int8_per_token_head"), ("alibi", "fp8_e5m2"),
        ("soft cap", "fp8_per_token_head"), ("seven to one", "auto"), ("latent", "auto"), ("latent", "fp8"),
        *(pytest.param(name, "auto", marks=pytest.mark.slow) for name in ("plain", "window", "window of one", "sinks")),
    ],
)  # fmt: skip
def test_decodes_of_lengths_around_tiles_and_parts_equal_the_reference(
    name: str, kv_cache_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    split_into(SMALL, monkeypatch)
    shape = LATENT["odd"] if name == "latent" else SHAPES[name]
    scales = own_scales(kv_cache_dtype, shape)
    sequences = Sequences.random(
        shape, AROUND, torch.float32, name == "latent", kv_cache_dtype=kv_cache_dtype,
        layer_scales=scales and (scales[0],) * 2 if name == "latent" else scales,
    )  # fmt: skip
    rows = run(TritonBackend(), sequences, decodes(sequences))
    for index, row in enumerate(rows):
        torch.testing.assert_close(row.double(), sequences.expected(index)[-1:], rtol=4e-6, atol=4e-6)


@pytest.mark.parametrize("name", ["plain", "window"])
def test_parts_are_joined_with_the_same_bits_in_a_launch_of_its_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the decode kernel, parts are joined by the program that finishes the last one of them."""
    split_into(SMALL, monkeypatch)
    launches = []
    merge_parts = merge.merge_parts
    monkeypatch.setattr(decode, "merge_parts", lambda *args: [launches.append(args), merge_parts(*args)])
    sequences = Sequences.random(SHAPES[name], AROUND, torch.float32)
    step = decodes(sequences)
    joined = run(TritonBackend(), sequences, step)
    assert not launches
    monkeypatch.setattr(decode, "_MOST_MERGED", 0)
    for one, other in zip(joined, run(TritonBackend(), sequences, step), strict=True):
        assert torch.equal(one, other)
    assert len(launches) == 1


def test_counters_of_parts_are_zero_after_each_layer() -> None:
    """Layers of a step take turns with them, also if they differ in windows and numbers of KV heads."""
    backend = TritonBackend()
    for name in ("plain", "window", "one head each"):
        sequences = Sequences.random(SHAPES[name], [600, 1, 257], torch.float32)
        query, key, value, metadata = sequences.step(decodes(sequences))
        plan = backend.prepare(metadata)
        results = [backend.forward(sequences.shape, query, key, value, sequences.cache, plan) for _ in range(2)]
        assert torch.equal(*results)
        assert not plan.counters[4].any()


@pytest.mark.parametrize(("name", "kv_cache_dtype"), [("seven to one", "auto"), ("plain", "fp8_per_token_head")])
def test_layers_whose_parts_another_launch_joins_have_no_counters(name: str, kv_cache_dtype: str) -> None:
    backend = TritonBackend()
    sequences = Sequences.random(SHAPES[name], [600, 1], torch.float32, kv_cache_dtype=kv_cache_dtype)
    query, key, value, metadata = sequences.step(decodes(sequences))
    plan = backend.prepare(metadata)
    backend.forward(sequences.shape, query, key, value, sequences.cache, plan)
    assert not plan.counters


#: Where the parts of a sequence begin.
PART_BEGINS = [*range(0, 16384, 256), *range(16384, 65536, 512), *range(65536, 1 << 18, 1024)]


def test_parts_begin_at_fixed_positions() -> None:
    dice = random.Random(0)
    around = [length + more for length in PART_BEGINS for more in (-1, 0, 1) if length + more > 0]
    lengths = [0, 16384, 65536, *dice.sample(around, 40), 0, 70_000]
    counts = [bisect.bisect_left(PART_BEGINS, max(length, 1)) for length in lengths]
    total = decode_splits.count_parts(np.array(lengths))
    assert total == sum(counts)
    starts, sequences = decode_splits.decode_splits(torch.tensor(lengths, dtype=torch.int32), total + 7)
    assert starts.tolist() == [0, *accumulate(counts)]
    assert sequences.tolist() == [s for s, count in enumerate(counts) for _ in range(count)] + [-1] * 7


def test_long_decodes_equal_the_reference() -> None:
    """Their lengths are around the first longer part. The first and the last one share a prefix with the second one."""
    lengths = [16_384, 16_897, 16_500]
    shape = dataclasses.replace(PLAIN, num_heads=2, num_kv_heads=1)
    sequences = Sequences.random(shape, lengths, torch.bfloat16, block_size=32)
    share(sequences, 16_384, 1, 2)
    share(sequences, 16_352, 1, 0)
    for s, blocks in enumerate(sequences.blocks):
        for cached, own in ((sequences.cache.key, sequences.keys[s]), (sequences.cache.value, sequences.values[s])):
            for block, tokens in zip(blocks, own.split(32), strict=True):
                cached[block, : len(tokens)] = tokens
    rows = run(TritonBackend(), sequences, [(s, length - 1, length) for s, length in enumerate(lengths)])
    for s, row in enumerate(rows):
        key, value = sequences.keys[s].double()[:, 0], sequences.values[s].double()[:, 0]
        weights = (sequences.queries[s][-1].double() @ key.T * shape.scale).softmax(-1)
        torch.testing.assert_close(row.double(), (weights @ value).flatten()[None], rtol=2e-3, atol=2e-3)


def test_splits_of_many_decodes_equal_the_reference() -> None:
    """There are more decodes than are counted at once; memory is allocated only for their splits."""
    lengths = [1 if s % 9 else 512 + s % 2 for s in range(135)]
    sequences = Sequences.random(dataclasses.replace(PLAIN, num_heads=1, num_kv_heads=1), lengths, torch.float32)
    run(SdpaBackend(), sequences, [(s, 0, length - 1) for s, length in enumerate(lengths) if length > 1])
    rows = run(TritonBackend(), sequences, [(s, length - 1, length) for s, length in enumerate(lengths)])
    for index in (0, 8, 9, 18, 126, 127, 128, 134):
        torch.testing.assert_close(rows[index].double(), sequences.expected(index)[-1:], rtol=4e-6, atol=4e-6)


@pytest.mark.parametrize("name", ["plain", "sinks", "window"])
def test_padding_decodes_have_results_of_zero(name: str) -> None:
    """CUDA graphs pad a step with sequences of length 0, which have no parts."""
    sequences = Sequences.random(SHAPES[name], [600, 1], torch.float32)
    step = decodes(sequences)
    query, key, value, metadata = sequences.step(step)
    backend = TritonBackend()
    expected = backend.forward(sequences.shape, query, key, value, sequences.cache, backend.prepare(metadata))
    padded = AttentionMetadata(
        query_starts=torch.arange(5, dtype=torch.int32),
        seq_lens=torch.tensor([0, 600, 0, 1], dtype=torch.int32),
        num_decodes=4,
        block_size=metadata.block_size,
        groups=[
            dataclasses.replace(group, tables=group.tables[[0, 0, 1, 1]] * torch.tensor([[0], [1], [0], [1]]).int())
            for group in metadata.groups
        ],
        query_starts_host=np.arange(5, dtype=np.int32),
        seq_lens_host=np.array([0, 600, 0, 1], dtype=np.int32),
    )
    out = backend.attend(sequences.shape, query[[0, 0, 1, 1]], sequences.cache, backend.prepare(padded))
    torch.testing.assert_close(out[[1, 3]], expected, rtol=0, atol=0)
    assert not out[[0, 2]].any()


@pytest.mark.usefixtures("batch_invariant_matmul")
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 12))])
def test_padded_steps_with_chunks_have_the_same_bits(
    seed: int, batch_invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA graphs pad a step with sequences without tokens, and with tokens of a sequence of length 0. Padding is NaN,
    and its results are 0. Each sequence may be a decode or a chunk, as the device's number of decodes says."""
    for module in (decode_splits, decode, merge):  # contexts of a few tokens have several parts
        monkeypatch.setattr(module, "PART_SIZES", decode_splits.PartSizes(32, 64, 128, 64, 128))
    rng = random.Random(seed)
    shape = SHAPES[rng.choice(("plain", "window", "seven to one", "all options"))]
    num_decodes, num_chunks = rng.choice((0, 1, 3)), rng.choice((1, 2, 4))
    lengths = [rng.choice((1, 5, 31, 32, 33, 70)) for _ in range(num_decodes)]
    lengths += [rng.choice((2, 7, 8, 9, 17, 40)) for _ in range(num_chunks)]
    sequences = Sequences.random(
        shape, lengths, torch.float32, seed=seed, block_size=rng.choice((3, 16)),
        kv_cache_dtype=rng.choice(("auto", "fp8_per_token_head")),
    )  # fmt: skip
    starts = [length - 1 for length in lengths[:num_decodes]]
    starts += [rng.choice((0, rng.randrange(length - 1))) for length in lengths[num_decodes:]]
    for s, start in enumerate(starts):
        run(SdpaBackend(), sequences, *([[(s, 0, start)]] if start else []))
    spans = [(s, start, length) for s, (start, length) in enumerate(zip(starts, lengths, strict=True))]
    query, key, value, metadata = sequences.step(spans)
    assert value is not None
    backend = TritonBackend(batch_invariant)
    expected = backend.forward(shape, query, key, value, sequences.cache, backend.prepare(metadata))

    tokens = len(query) + rng.choice((0, 1, 15, 30))
    slots = min(len(lengths) + rng.choice((0, 1, 5)), tokens)

    def padded(values: torch.Tensor, size: int, fill: float) -> torch.Tensor:
        return torch.cat([values, values.new_full((size - len(values), *values.shape[1:]), fill)])

    of_graph = dataclasses.replace(
        metadata,
        query_starts=padded(padded(metadata.query_starts, slots + 1, len(query)), slots + 2, tokens),
        seq_lens=padded(metadata.seq_lens, slots + 1, 0),
        num_decodes=slots,
        groups=[
            dataclasses.replace(
                group, tables=padded(group.tables, slots + 1, 0), slot_mapping=padded(group.slot_mapping, tokens, -1)
            )
            for group in metadata.groups
        ],
        query_starts_host=np.zeros(0),
        seq_lens_host=np.array([*[rng.choice((70, 100))] * slots, 0], dtype=np.int32),
        graph_decodes=torch.tensor([num_decodes], dtype=torch.int32),
    )
    inputs = (padded(each, tokens, torch.nan) for each in (query, key, value))
    out = backend.forward(shape, *inputs, sequences.cache, backend.prepare(of_graph))
    assert torch.equal(out[: len(query)], expected)
    assert not out[len(query) :].any()


@pytest.mark.usefixtures("batch_invariant_matmul")
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=["bfloat16", "float32"]
)
@pytest.mark.parametrize("name", ["plain", "window", "seven to one"])
def test_bits_do_not_depend_on_the_batch(name: str, dtype: torch.dtype) -> None:
    sequences = Sequences.random(SHAPES[name], [700, 33, 40, 5, 1], dtype)
    run(SdpaBackend(), sequences, [(0, 0, 699), (1, 0, 32), (2, 0, 10), (3, 0, 1)])
    steps = [(0, 699, 700), (4, 0, 1), (1, 32, 33), (2, 10, 40), (3, 1, 5)]
    together = run(TritonBackend(), sequences, steps)
    alone = run(TritonBackend(), sequences, *([each] for each in steps))
    for one, other in zip(together, alone, strict=True):
        assert torch.equal(one, other)


def share(sequences: Sequences, count: int, first: int, *others: int) -> None:
    """Let other sequences share the first `count` tokens of the first one, in its blocks."""
    blocks = count // sequences.block_size
    for s in others:
        for part in (sequences.keys, sequences.values):
            part[s][: blocks * sequences.block_size] = part[first][: blocks * sequences.block_size]
        sequences.blocks[s][:blocks] = sequences.blocks[first][:blocks]


def decodes(sequences: Sequences) -> list[tuple[int, int, int]]:
    """Return a step of the last tokens, after storing the earlier ones."""
    lengths = [len(each) for each in sequences.queries]
    for s, length in enumerate(lengths):
        run(SdpaBackend(), sequences, *([[(s, 0, length - 1)]] if length > 1 else []))
    return [(s, length - 1, length) for s, length in enumerate(lengths)]


@pytest.mark.usefixtures("batch_invariant_matmul")
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 24))])
def test_decodes_with_shared_prefixes_have_the_same_bits_as_alone(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random cases of two prefixes with interleaved sequences, and one without prefix, with lengths around parts.

    Sharing must not change any bit.
    """
    dice = random.Random(seed)
    shape = SHAPES[dice.choice(list(SHAPES))]
    dtype = dice.choice([torch.float32, torch.bfloat16])
    if dice.random() < 0.5:  # 512 and 1,024 are where longer parts begin
        split_into(decode_splits.PartSizes(128, 256, 512, medium_from=512, long_from=1024), monkeypatch)
    lengths = [dice.choice([1, 512, 513, 600, 1025]) for _ in range(dice.choice([3, 5, 9]))]
    sequences = Sequences.random(shape, lengths, dtype, seed=seed, block_size=dice.choice([3, 16, 32]))
    leader: dict[str, int] = {}
    for s, length in enumerate(lengths):
        prefix = dice.choice(["a", "a", "b", ""])
        if prefix and (first := leader.setdefault(prefix, s)) != s:
            share(sequences, min(dice.choice([512, 530, 1024]), length - 1, lengths[first] - 1), first, s)
    step = decodes(sequences)
    together = run(TritonBackend(), sequences, step)
    for s in dice.sample(range(len(lengths)), min(5, len(lengths))):
        (alone,) = (rows for rows in run(TritonBackend(), sequences, [step[s]]) if len(rows))
        assert torch.equal(together[s], alone)
        torch.testing.assert_close(
            together[s].double(), sequences.expected(s)[-1:], rtol=EXACT[dtype], atol=EXACT[dtype]
        )


def test_shared_prefix_is_read_once_per_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight sequences share a tile if two query heads share a KV head."""
    if ON_CHIP:
        pytest.skip("reads are counted in the interpreter")
    shape = dataclasses.replace(PLAIN, num_heads=2, num_kv_heads=1)
    sequences = Sequences.random(shape, [515] * 10, torch.float32)
    step = decodes(sequences)
    storage = sequences.cache.key.untyped_storage()
    read = 0
    load = InterpreterBuilder.create_masked_load

    def counted(self: Any, pointers: Any, mask: Any, *more: Any) -> Any:
        nonlocal read
        of_cache = (pointers.data >= storage.data_ptr()) & (pointers.data < storage.data_ptr() + storage.nbytes())
        read += int((of_cache & mask.data).sum())
        return load(self, pointers, mask, *more)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counted)

    def tokens_read() -> float:
        nonlocal read
        read = 0
        run(TritonBackend(), sequences, step)
        return read / (2 * shape.head_dim)  # keys and values

    assert tokens_read() == 10 * 515
    share(sequences, 512, 0, *range(1, 10))
    assert tokens_read() == 2 * 512 + 10 * 3


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_random_cases_equal_the_reference(seed: int) -> None:
    """Random shapes, lengths, chunks, blocks and dtypes."""
    dice = random.Random(seed)
    kv_heads = dice.choice([1, 2, 3])
    heads = kv_heads * dice.choice([1, 2, 3, 8, 13])
    head, value = dice.choice([(64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (192, 128), (24, 40)])
    shape = AttentionShape(
        heads, kv_heads, head, value, head**-0.5,
        dice.choice([None, None, 1, 16, 50]),
        dice.choice([None, 20.0]),
        torch.rand(heads) if dice.random() < 0.3 else None,
        torch.randn(heads) if dice.random() < 0.3 else None,
    )  # fmt: skip
    dtype, kv_cache_dtype = dice.choice([torch.float32, torch.bfloat16]), dice.choice(["auto", *KV_CACHE_DTYPES])
    lengths = [dice.choice([1, 2, 15, 16, 17, 63, 64, 65, 100]) for _ in range(dice.choice([1, 3, 6]))]
    sequences = Sequences.random(
        shape, lengths, dtype, seed=seed, block_size=dice.choice([1, 3, 16, 32]), kv_cache_dtype=kv_cache_dtype,
        layer_scales=own_scales(kv_cache_dtype, shape),
    )  # fmt: skip
    first = [dice.randrange(length + 1) for length in lengths]
    steps = [
        [(s, begin, end) for s, (begin, end) in enumerate(spans) if begin < end]
        for spans in (
            [(0, cut) for cut in first],
            [(cut, length) for cut, length in zip(first, lengths, strict=True)],
        )
    ]
    steps = [sorted(each, key=lambda span: span[2] - span[1] > 1) for each in steps if each]
    check(sequences, *steps, exact=EXACT[dtype])
