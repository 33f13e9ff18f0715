"""Memory arithmetic: stages and shards add up to the model, and quantized sizes equal published ones."""

from __future__ import annotations

from typing import Any

import pytest

from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.sizing.cache_groups import blocks_per_sequence
from stoker_engine.sizing.kv_format import kv_format
from stoker_engine.sizing.memory import (
    CPU_KV_CACHE_LIMIT,
    GIB,
    Device,
    Numbers,
    longest_sequence,
    memory_use,
    model_cache_groups,
    stage_block_bytes,
)
from stoker_engine.sizing.pipeline_stages import pipeline_stages
from stoker_engine.sizing.quantized_weights import usual_weights
from stoker_engine.sizing.weight_sizes import Sharding, stage_weight_bytes, weight_bytes, weight_sizes

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
GEMMA: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "sliding_window": 512,
    "vocab_size": 262144,
    "max_position_embeddings": 32768,
}
MOE: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
}
BF16 = kv_format("auto", "bfloat16")
NUMBERS = Numbers(2, BF16, 16, 2048, 256)


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"),
    [(32, 4, [8, 8, 8, 8]), (30, 4, [7, 8, 8, 7]), (61, 2, [31, 30]), (7, 3, [2, 3, 2]), (5, 5, [1] * 5)],
)
def test_layers_are_split_into_stages_as_by_vllm(layers: int, stages: int, sizes: list[int]) -> None:
    dealt = pipeline_stages(layers, stages)
    assert [len(stage) for stage in dealt] == sizes
    assert [layer for stage in dealt for layer in stage] == list(range(layers))


@pytest.mark.parametrize("document", [LLAMA, GEMMA, MOE])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_stages_add_up_to_the_model_and_a_copy_of_a_tied_head(document: dict[str, Any], stages: int) -> None:
    config = ModelConfig.from_dict(document)
    split = Sharding(pipeline=stages)
    total = sum(stage_weight_bytes(config, stage, 2, split) for stage in range(stages))
    again = config.vocab_size * config.hidden_size * 2 if config.tie_word_embeddings and stages > 1 else 0
    assert total == weight_bytes(config, 2) + again
    assert weight_bytes(config, 2, sharding=split) == max(
        stage_weight_bytes(config, stage, 2, split) for stage in range(stages)
    )


def test_tensor_shards_replicate_scarce_kv_heads() -> None:
    config = ModelConfig.from_dict(LLAMA)
    whole = weight_bytes(config, 2)
    norms = 2 * sum(size.numbers for size in weight_sizes(config) if size.units == 1)
    assert weight_bytes(config, 2, tensor=8) == (whole - norms) // 8 + norms
    # Sixteen devices and eight KV heads: every head exists twice.
    kv = 2 * 32 * 2 * 8 * 128 * 4096
    assert weight_bytes(config, 2, tensor=16) == (whole - norms - kv) // 16 + kv // 8 + norms
    per_token = [
        sum(group.bytes_per_token for group in model_cache_groups(config, 16, BF16, tensor)) for tensor in (1, 8, 16)
    ]
    assert per_token == [2 * 32 * 2 * 8 * 128, 2 * 32 * 2 * 128, 2 * 32 * 2 * 128]


@pytest.mark.parametrize("tensor", [1, 2, 8, 16])
def test_shards_keep_the_scales_of_their_heads(tensor: int) -> None:
    groups = model_cache_groups(ModelConfig.from_dict(LLAMA), 16, kv_format("int8_per_token_head", "bfloat16"), tensor)
    assert sum(group.bytes_per_token for group in groups) == 32 * max(8 // tensor, 1) * 2 * (128 + 4)


def test_expert_parallelism_spreads_whole_experts() -> None:
    config = ModelConfig.from_dict(MOE)
    experts = 4 * 8 * 3 * 64 * 128 * 2
    whole = weight_bytes(config, 2)
    assert weight_bytes(config, 2, sharding=Sharding(expert=4)) == whole - experts + experts // 4
    # Eight experts on three devices: one of them has three.
    assert weight_bytes(config, 2, sharding=Sharding(expert=3)) == whole - experts + experts * 3 // 8


def test_stage_with_the_least_memory_decides_the_blocks() -> None:
    config = ModelConfig.from_dict({**LLAMA, "num_hidden_layers": 4})
    device = Device(16 * GIB, 0.9, on_cpu=False, sharding=Sharding(pipeline=2))
    use = memory_use(config, NUMBERS, device)
    budget = int(16 * GIB * 0.9) - use.activations - use.allowances
    blocks = stage_block_bytes(config, NUMBERS, device.sharding)
    assert blocks == [2 * 2 * 8 * 128 * 2 * 16] * 2
    left = [budget - stage_weight_bytes(config, stage, 2, device.sharding) for stage in (0, 1)]
    assert use.num_blocks == min(left) // blocks[0]
    assert use.weights == max(stage_weight_bytes(config, stage, 2, device.sharding) for stage in (0, 1))


def test_stages_hold_their_layers_of_each_group() -> None:
    """Gemma's groups are formed over the whole model; a stage holds its layers' part of each."""
    config = ModelConfig.from_dict(GEMMA)
    one = stage_block_bytes(config, NUMBERS, Sharding())
    two = stage_block_bytes(config, NUMBERS, Sharding(pipeline=2))
    assert max(two) <= one[0] <= sum(two)


def test_fp8_cache_has_twice_the_blocks() -> None:
    config = ModelConfig.from_dict(LLAMA)
    device = Device(80 * GIB, 0.9, on_cpu=False)
    full = memory_use(config, NUMBERS, device)
    half = memory_use(config, Numbers(2, kv_format("fp8", "bfloat16"), 16, 2048, 256), device)
    assert half.num_blocks in (2 * full.num_blocks, 2 * full.num_blocks + 1)


def test_stated_cache_sizes_override_the_computed_ones() -> None:
    config = ModelConfig.from_dict(LLAMA)
    device = Device(GIB, 0.9, on_cpu=True)
    block = stage_block_bytes(config, NUMBERS, Sharding())[0]
    assert memory_use(config, NUMBERS, device).num_blocks == 0
    given = Numbers(2, BF16, 16, 2048, 256, kv_cache_memory_bytes=10 * block + 1)
    assert memory_use(config, given, device).num_blocks == 10
    assert memory_use(config, Numbers(2, BF16, 16, 2048, 256, num_blocks=7), device).num_blocks == 7


@pytest.mark.parametrize("num_blocks", [0, 1, 2, 7])
def test_usable_blocks_exclude_the_null_block(num_blocks: int) -> None:
    numbers = Numbers(2, BF16, 16, 2048, 256, num_blocks=num_blocks)
    use = memory_use(ModelConfig.from_dict(LLAMA), numbers, Device(80 * GIB, 0.9, on_cpu=False))
    assert (use.num_blocks, use.usable_blocks) == (num_blocks, max(num_blocks - 1, 0))


def test_cpu_cache_stops_at_its_limit() -> None:
    config = ModelConfig.from_dict(GEMMA)
    use = memory_use(config, NUMBERS, Device(1024 * GIB, 0.9, on_cpu=True))
    assert use.kv_cache == CPU_KV_CACHE_LIMIT


@pytest.mark.parametrize("document", [LLAMA, GEMMA])
@pytest.mark.parametrize("num_blocks", [1, 17, 200, 511, 3000])
def test_longest_sequence_fits_and_a_longer_one_does_not(document: dict[str, Any], num_blocks: int) -> None:
    groups = model_cache_groups(ModelConfig.from_dict(document), 16, BF16)
    longest = longest_sequence(groups, num_blocks, 64, 16, 8192)

    def blocks(length: int) -> int:
        return blocks_per_sequence(groups, length, 64, 16)

    assert longest == 0 or blocks(longest) <= num_blocks
    assert longest == 8192 or blocks(longest + 1) > num_blocks


@pytest.mark.parametrize("method", ["torchao", "quark", "made-up"])
def test_unknown_methods_have_no_usual_size(method: str) -> None:
    assert usual_weights(method) is None


def test_communication_takes_memory_on_accelerators_alone() -> None:
    alone, shared = Sharding(), Sharding(tensor=2, pipeline=2)
    assert Device(GIB, 0.9, True, shared).allowances == Device(GIB, 0.9, True, alone).allowances
    assert Device(GIB, 0.9, False, shared).allowances > Device(GIB, 0.9, False, alone).allowances
