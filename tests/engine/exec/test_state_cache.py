"""States in the pool: a recurrent layer with its state there computes the same in chunks as in one call."""

from __future__ import annotations

import random

import pytest
import torch

from stoker_engine.architectures.cache_spec import CacheSpec, LayerCache, StateSpec, StateTensor
from stoker_engine.attention.state_cache import StateCache
from stoker_engine.exec.kv_cache import KVCachePlan, KVCachePool
from stoker_engine.sizing.cache_groups import cache_groups
from stoker_engine.sizing.kv_format import kv_format

from ...support.engine.random_states import random_state

BF16 = kv_format("auto", "bfloat16")
DTYPES = {None: torch.bfloat16, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pool_of(specs: list[LayerCache], num_blocks: int, block_size: int, dtype: torch.dtype) -> KVCachePool:
    """Return a pool filled with NaN in every dtype."""
    kv = kv_format("auto", str(dtype))
    groups = cache_groups(specs, block_size, kv)
    plan = KVCachePlan(kv, groups, num_blocks, block_size, max_model_len=64, step_tokens=64, max_num_seqs=4)
    pool = KVCachePool(plan, specs, dtype, torch.device("cpu"))
    pool._pool.fill_(0xFF)
    return pool


def tables_of(rng: random.Random, num_blocks: int, sequences: int, width: int) -> torch.Tensor:
    """Return tables [sequences, width] of unshared blocks, without the null block."""
    return torch.tensor(rng.sample(range(1, num_blocks), sequences * width), dtype=torch.int32).view(sequences, width)


@pytest.mark.parametrize("seed", range(60))
def test_states_of_layers_and_sequences_never_overlap(seed: int) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    attention = [CacheSpec(rng.randint(1, 3), 8, 4)] * rng.randint(0, 3)
    states = [random_state(rng) for _ in range(rng.randint(1, 4))]
    specs: list[LayerCache] = [*attention, *states]
    rng.shuffle(specs)
    states = [spec for spec in specs if spec.kind == "state"]
    block_size, sequences = rng.choice([1, 5, 16]), rng.randint(1, 4)
    group = cache_groups(specs, block_size, BF16)[-1]
    num_blocks = 4 + sequences * group.blocks_per_sequence
    pool = pool_of(specs, num_blocks, block_size, torch.bfloat16)
    assert len(pool.caches) == len(attention) and len(pool.states) == len(states)
    tables = tables_of(rng, num_blocks, sequences, group.blocks_per_sequence)
    [other, *_] = set(range(1, num_blocks)) - set(tables.flatten().tolist())
    for cache in pool.caches:
        cache.key[other], cache.value[other] = 1.5, 2.5

    written = {}
    for layer, (spec, cache) in enumerate(zip(states, pool.states, strict=True)):
        for tensor in spec.tensors:
            values = torch.randn(sequences, *tensor.shape, generator=generator).to(DTYPES[tensor.dtype])
            written[layer, tensor.name] = values
            cache.store(tensor.name, tables, values)
    started = torch.ones(sequences, dtype=torch.bool)
    for layer, (spec, cache) in enumerate(zip(states, pool.states, strict=True)):
        for tensor in spec.tensors:
            found = cache.load(tensor.name, tables, started)
            assert found.dtype == DTYPES[tensor.dtype]
            assert torch.equal(found, written[layer, tensor.name])
    assert all((cache.key[other] == 1.5).all() and (cache.value[other] == 2.5).all() for cache in pool.caches)
    assert (pool._pool[0] == 0xFF).all(), "the null block belongs to no sequence"

    # A fork copies all of a sequence's blocks.
    parent, child = tables[:1], tables_of(rng, num_blocks, 1, group.blocks_per_sequence)
    pool.copy(list(zip(parent[0].tolist(), child[0].tolist(), strict=True)))
    for layer, cache in enumerate(pool.states):
        for name in cache.tensors:
            assert torch.equal(cache.load(name, child, started[:1])[0], written[layer, name][0])


def test_the_state_of_a_new_sequence_is_zero() -> None:
    spec = StateSpec((StateTensor("h", (3, 5), "float32"),))
    pool = pool_of([CacheSpec(1, 4, 4), spec], 8, 1, torch.bfloat16)
    [cache] = pool.states
    tables = torch.tensor([[1, 2, 3, 4], [7, 6, 5, 0]])[:, : len(cache.tensors["h"].pieces)]
    cache.store("h", tables[:1], torch.ones(1, 3, 5))
    found = cache.load("h", tables, torch.tensor([True, False]))
    assert (found[0] == 1).all() and (found[1] == 0).all()
    assert cache.load("h", tables[:0], torch.ones(0, dtype=torch.bool)).shape == (0, 3, 5)


@pytest.mark.parametrize("seed", range(6))
def test_an_lstm_in_chunks_equals_torchs_in_one_call(seed: int) -> None:
    """Two layers beside one of attention; sequences start at different steps, with different numbers of tokens."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    size, hidden = 6, rng.choice([4, 10, 33])
    state = StateSpec((StateTensor("h", (hidden,), "float32"), StateTensor("c", (hidden,), "float32")))
    specs: list[LayerCache] = [state, CacheSpec(1, 4, 4), state]
    layers = [torch.nn.LSTM(size, hidden, batch_first=True), torch.nn.LSTM(hidden, hidden, batch_first=True)]
    lengths = [rng.randint(1, 40) for _ in range(5)]
    inputs = [torch.randn(1, length, size) for length in lengths]
    width = cache_groups(specs, 4, BF16)[-1].blocks_per_sequence
    num_blocks = 2 + len(lengths) * width
    pool = pool_of(specs, num_blocks, 4, torch.bfloat16)
    tables = tables_of(rng, num_blocks, len(lengths), width)

    computed = [0] * len(lengths)
    outputs: list[list[torch.Tensor]] = [[] for _ in lengths]
    with torch.inference_mode():
        while unfinished := [i for i, length in enumerate(lengths) if computed[i] < length]:
            chosen = rng.sample(unfinished, rng.randint(1, len(unfinished)))
            count = rng.randint(1, min(lengths[i] - computed[i] for i in chosen))
            rows, started = tables[chosen], torch.tensor([computed[i] > 0 for i in chosen])
            out = torch.cat([inputs[i][:, computed[i] : computed[i] + count] for i in chosen])
            for layer, cache in zip(layers, pool.states, strict=True):
                out = advance(layer, cache, out, rows, started)
            for row, i in enumerate(chosen):
                outputs[i].append(out[row])
                computed[i] += count
        for each, parts in zip(inputs, outputs, strict=True):
            expected = layers[1](layers[0](each)[0])[0][0]
            torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-5, atol=1e-6)


def advance(
    layer: torch.nn.LSTM, cache: StateCache, inputs: torch.Tensor, tables: torch.Tensor, started: torch.Tensor
) -> torch.Tensor:
    """Run one layer's step: load its state from the pool, compute the tokens, store its state."""
    state = tuple(cache.load(name, tables, started)[None] for name in ("h", "c"))
    out: torch.Tensor
    out, after = layer(inputs, state)
    for name, tensor in zip(("h", "c"), after, strict=True):
        cache.store(name, tables, tensor[0])
    return out
