"""Memory of CUDA graphs, compared with sums written out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.sizing.activations import activation_bytes
from stoker_engine.sizing.graph_memory import graph_bytes, sampling_graph_bytes
from stoker_engine.sizing.kv_format import kv_format
from stoker_engine.sizing.memory import (
    GIB,
    AdapterNumbers,
    Device,
    Numbers,
    longest_sequence,
    memory_use,
    model_cache_groups,
)
from stoker_engine.sizing.step_shapes import sampled_rows
from stoker_engine.sizing.weight_sizes import ONE_DEVICE, Sharding

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
CONFIG = ModelConfig.from_dict(LLAMA)
BF16 = kv_format("auto", "bfloat16")


#: Bytes of the cache for a token.
TOKEN_BYTES = 2 * 32 * 8 * 128 * 2


def planned(
    max_num_seqs: int,
    max_num_batched_tokens: int,
    split: Sharding = ONE_DEVICE,
    max_model_len: int = 8192,
    cache_tokens: int = 1 << 19,
    **more: bool,
) -> int:
    return graph_bytes(
        CONFIG, max_num_seqs, max_num_batched_tokens, max_model_len, cache_tokens, 2, 16, 1, split, **more
    )


def test_the_sum_of_one_sequence_is_that_of_its_parts() -> None:
    """Decodes of 1,024, 4,096 and 8,192 tokens; steps of 2 tokens with decodes of 1,024 and 8,192. One row of logits,
    without and with draws."""
    launches = (3 + 2) * (24 + 32 * 12) * 16384
    activations = 2 * 2 * (5 * 4096 + 3 * 128 + 3 * 14336) * 105 // 100
    parts = 32 * 32 * 130 * 4
    inputs_and_outputs = 2 * 512 * 4 + 2 * 4096 * 2
    sampling = 2 * 24 * 16384 + 128256 * (2 + 4) + 4096 * 2
    assert planned(1, 2) == launches + activations + parts + (64 << 20) + inputs_and_outputs + sampling


@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("vocab_size", [131, 32000, 128256, 262144, 1 << 27])
def test_sampling_is_captured_for_at_most_256_rows_and_256_mebibytes(vocab_size: int, element_bytes: int) -> None:
    row = vocab_size * (element_bytes + 4)
    for max_rows in (1, 2, 3, 8, 100, 256, 1024):
        sizes = sampled_rows(vocab_size, max_rows, element_bytes)
        assert sizes == sorted(set(sizes)) and sizes[0] == 1
        assert sizes[-1] == max(1, min(max_rows, 256, (256 << 20) // row))
        assert all(size.bit_count() == 1 for size in sizes[:-1])


def test_ranks_share_the_logits_of_sampling() -> None:
    sizes = [sampling_graph_bytes(CONFIG, 256, 2048, 2, Sharding(tensor=tensor)) for tensor in (1, 2)]
    assert sizes[0] - sizes[1] == 256 * 128256 // 2 * (2 + 4) + 9 * 24 * 16384, "and have no graphs with draws"


def test_shorter_sequences_and_a_smaller_cache_take_less() -> None:
    """Decodes of 1,024, 4,096 and 8,192 tokens; of 1,024 and 4,096; of 2,000, twice what is cached. Steps with chunks
    have the shortest and the longest of these."""
    graph = (24 + 32 * 12) * 16384
    parts, columns = 32 * 130 * 4, 2 * 4
    whole, shorter, cached = planned(1, 1), planned(1, 1, max_model_len=4096), planned(1, 1, cache_tokens=1000)
    assert whole - shorter == graph + (32 - 16) * parts + 256 * columns
    assert shorter - planned(1, 1, max_model_len=2000) == 2 * graph + (16 - 8) * parts + (256 - 125) * columns
    assert whole - cached == 3 * graph + (32 - 8) * parts


def test_more_graphs_take_more_memory() -> None:
    few, sequences, tokens = planned(64, 256), planned(1024, 256), planned(64, 2048)
    assert few < sequences and few < tokens
    assert planned(64, 2048) == planned(64, 16384)  # more tokens are not captured
    assert 1.5 * few < planned(64, 256, has_adapters=True) < 4 * few


@pytest.mark.parametrize("split", [Sharding(tensor=2), Sharding(pipeline=2)])
def test_ranks_take_less_memory_than_one(split: Sharding) -> None:
    assert planned(256, 2048, split) < planned(256, 2048)


def test_a_model_of_8_billion_weights_takes_about_a_gibibyte() -> None:
    assert 0.5 * GIB < planned(256, 2048) < planned(1024, 8192) < 1.5 * GIB


def test_the_cache_gets_what_graphs_leave() -> None:
    numbers = Numbers(2, BF16, 16, 2048, 256, fused=True, adapters=AdapterNumbers(1, 8, 2))
    use = memory_use(CONFIG, numbers, Device(80 * GIB, 0.9, on_cpu=False))
    assert use.graphs == planned(256, 2048, has_adapters=True, cache_tokens=use.num_blocks * 16)
    assert use.activations == activation_bytes(CONFIG, 2048, 256, 2, fused=True)
    held = use.weights + use.activations + use.adapters + use.allowances
    assert use.allowances == GIB + use.graphs
    assert use.kv_cache == int(80 * GIB * 0.9) - held


def test_other_runtimes_reserve_a_gibibyte_and_cpus_nothing() -> None:
    numbers = Numbers(2, BF16, 16, 2048, 256)
    assert memory_use(CONFIG, numbers, Device(80 * GIB, 0.9, on_cpu=False)).graphs == GIB
    assert memory_use(CONFIG, numbers, Device(80 * GIB, 0.9, on_cpu=True)).graphs == 0


@pytest.mark.parametrize("enough", [0, 1, 15, 40])
def test_a_cache_of_a_stated_size_has_graphs_for_this_size(enough: int) -> None:
    """Whatever the memory, and whether the size is stated in bytes or in blocks."""
    numbers = Numbers(2, BF16, 16, 2048, 256, fused=True)
    expected = planned(256, 2048, max_model_len=0 if enough < 2 else (enough - 1) * 16, cache_tokens=enough * 16)
    for memory in (1, 20 * GIB, 500 * GIB):
        device = Device(memory, 0.9, on_cpu=False)
        assert memory_use(CONFIG, replace(numbers, num_blocks=enough), device).graphs == expected
        size = enough * 16 * TOKEN_BYTES + 1
        assert memory_use(CONFIG, replace(numbers, kv_cache_memory_bytes=size), device).graphs == expected


def test_the_models_own_length_matters_only_if_it_is_used() -> None:
    """A model of a million tokens, with a short length and with its own; and the memory limits the length."""
    numbers = Numbers(2, BF16, 16, 8192, 1024, fused=True)
    long = ModelConfig.from_dict({**LLAMA, "max_position_embeddings": 1 << 20})
    large, small = Device(400 * GIB, 0.9, on_cpu=False), Device(24 * GIB, 0.9, on_cpu=False)

    def graphs(config: ModelConfig, device: Device, max_model_len: int | None = None) -> int:
        return memory_use(config, replace(numbers, max_model_len=max_model_len), device).graphs

    assert graphs(long, large, 8192) == graphs(CONFIG, large) < graphs(long, large) - (256 << 20)
    use = memory_use(long, numbers, small)
    fits = longest_sequence(model_cache_groups(long, 16, BF16), use.usable_blocks, 8192, 16, 1 << 20)
    assert 10_000 < fits < 100_000
    assert graphs(long, small, fits) <= use.graphs < graphs(long, small, fits) + (64 << 20)


def test_eager_steps_and_experts_of_ranks_with_adapters_have_no_graphs() -> None:
    device = Device(80 * GIB, 0.9, on_cpu=False, sharding=Sharding(tensor=2, expert=2))
    numbers = Numbers(2, BF16, 16, 2048, 256, fused=True, adapters=AdapterNumbers(1, 8, 2))
    assert memory_use(CONFIG, numbers, device).graphs == 0
    assert memory_use(CONFIG, replace(numbers, adapters=None), device).graphs > 0
    eager, captured = (replace(numbers, adapters=None, has_graphs=each) for each in (False, True))
    uses = [memory_use(CONFIG, each, device) for each in (eager, captured)]
    assert uses[0].graphs == 0 and uses[0].kv_cache == uses[1].kv_cache + uses[1].graphs
