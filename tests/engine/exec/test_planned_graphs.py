"""The engine's graphs, counted one by one, take the memory that was planned for the size of its cache."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.attention.triton import TritonBackend
from stoker_engine.exec.device_batch import DeviceBatch, empty_values
from stoker_engine.exec.graphs import StepGraphs
from stoker_engine.exec.kv_cache import KVCachePlan
from stoker_engine.kernels.triton.attention import decode_splits
from stoker_engine.kernels.triton.attention.decode_splits import count_parts
from stoker_engine.layers.batch_rows import BatchRows
from stoker_engine.sizing.activations import layer_activation_bytes
from stoker_engine.sizing.graph_memory import sampling_graph_bytes
from stoker_engine.sizing.kv_format import kv_format
from stoker_engine.sizing.memory import (
    GIB,
    AdapterNumbers,
    Device,
    Numbers,
    longest_sequence,
    memory_use,
    model_cache_groups,
    stage_block_bytes,
)
from stoker_engine.sizing.part_sizes import PART_SIZES, PartSizes
from stoker_engine.sizing.weight_sizes import Sharding

from ...support.engine.fake_device import DEEPSEEK_V3, LLAMA_8B, MIXTRAL, QWEN3_06B

_SIZES: Final = {"num_hidden_layers": 8, "max_position_embeddings": 1 << 20}
_GEMMA: Final = {**QWEN3_06B, "architectures": ["Gemma3ForCausalLM"], "sliding_window": 512}
#: Config, launches of a layer, and elements of a head's result.
MODELS: Final = [
    ({**LLAMA_8B, **_SIZES}, 12, 128),
    ({**MIXTRAL, **_SIZES}, 18, 128),
    ({**_GEMMA, **_SIZES}, 12, 128),
    ({**DEEPSEEK_V3, **_SIZES}, 24, 512),
]
BF16: Final = kv_format("auto", "bfloat16")


def captured(numbers: Numbers, num_blocks: int, max_model_len: int) -> StepGraphs:
    """Return the graphs of an engine with such a cache; they compute nothing."""
    limits = numbers.max_num_batched_tokens, numbers.max_num_seqs
    plan = KVCachePlan(numbers.kv, (), num_blocks, numbers.block_size, max_model_len, *limits)
    model: Any = SimpleNamespace(backend=TritonBackend())
    device, max_seqs = torch.device("cpu"), min(limits)
    batch = DeviceBatch(empty_values(max_seqs), device)
    graphs = StepGraphs(model, plan, [], batch, BatchRows(), max_seqs, 1, device, numbers.adapters is not None)
    graphs.capture(lambda compute: (torch.empty(0), lambda: None))
    return graphs


def taken(config: ModelConfig, of_layer: int, result: int, numbers: Numbers, split: Sharding, num_blocks: int) -> int:
    """Return the bytes of the engine's graphs, those of the forward pass counted one by one. `of_layer` and `result`
    are as in `MODELS`."""
    size, step_tokens = numbers.block_size, numbers.max_num_batched_tokens
    groups = model_cache_groups(config, size, numbers.kv, split.tensor)
    requested_len = numbers.max_model_len or config.default_model_len
    length = longest_sequence(groups, num_blocks - 1, step_tokens, size, requested_len)
    graphs = [each for of_shape in captured(numbers, num_blocks, length).captured.values() for each in of_shape]
    layers, sums = len(config.layers), 2 if split.tensor > 1 else 0
    launches = [
        24 + layers * (of_layer + sums) // split.pipeline + each.shape.has_adapters * layers * 10 // split.pipeline
        for each in graphs
    ]
    parts = max(count_parts(each.planned) for each in graphs)
    results = parts * config.num_attention_heads // split.tensor * (result + 2) * 4
    tables = (max(each.shape.sequences for each in graphs) + 1) * -(-length // size) * 4 * len(groups)
    tokens = max(each.shape.tokens for each in graphs)
    hidden = tokens * config.hidden_size * 2 * (1 if split.pipeline == 1 else 2)
    activations = layer_activation_bytes(config, tokens, 2, split) + results + (64 << 20)
    sampling = sampling_graph_bytes(config, numbers.max_num_seqs, step_tokens, 2, split)  # does not depend on the cache
    return sum(launches) * (16 << 10) + activations + tables + hidden + sampling


@pytest.mark.parametrize("seed", range(40))
def test_graphs_take_what_is_planned_for_the_size_of_the_cache(seed: int) -> None:
    dice = random.Random(seed)
    document, of_layer, result = dice.choice(MODELS)
    config = ModelConfig.from_dict(document)
    split = Sharding(tensor=dice.choice((1, 1, 2, 8)), pipeline=dice.choice((1, 1, 2)))
    numbers = Numbers(
        2,
        BF16,
        dice.choice((16, 32, 64)),
        max_num_batched_tokens=dice.choice((2, 300, 2048, 8192)),
        max_num_seqs=dice.choice((1, 7, 256, 1024)),
        fused=True,
        adapters=dice.choice((None, AdapterNumbers(1, 8, 2))),
        max_model_len=dice.choice((None, dice.randrange(2, 5000), dice.randrange(2, config.longest_model_len))),
    )
    device = Device(dice.choice((150, 280)) * GIB, 0.92, on_cpu=False, sharding=split)
    use, eager = (memory_use(config, replace(numbers, has_graphs=has), device) for has in (True, False))
    bound = eager.num_blocks
    assert use.kv_cache == eager.kv_cache - use.graphs and 40 < use.num_blocks < bound

    found = {}
    others = (dice.randint(40, int(bound**0.7)) for _ in range(2))
    for num_blocks in sorted({40, use.num_blocks, use.num_blocks + 1, bound, *others}):
        found[num_blocks] = memory_use(config, replace(numbers, num_blocks=num_blocks), device).graphs
        assert found[num_blocks] == taken(config, of_layer, result, numbers, split, num_blocks)
    assert list(found.values()) == sorted(found.values()) and found[use.num_blocks] == use.graphs
    block = max(stage_block_bytes(config, numbers, split))
    assert split.pipeline > 1 or use.num_blocks * block <= use.kv_cache, "the cache has room beside its graphs"
    assert split.pipeline > 1 or (use.num_blocks + 1) * block > eager.kv_cache - found[use.num_blocks + 1]


@pytest.mark.parametrize("document", [document for document, *_ in MODELS[:1]])
def test_more_memory_never_gives_a_smaller_cache(document: dict[str, Any]) -> None:
    config = ModelConfig.from_dict(document)
    numbers = Numbers(2, BF16, 16, max_num_batched_tokens=8192, max_num_seqs=1024, fused=True)
    least = memory_use(config, replace(numbers, num_blocks=2), Device(0, 1.0, on_cpu=False))
    start = -least.kv_cache + (64 << 20)
    sizes = [
        memory_use(config, numbers, Device(start + extra * (2 << 20), 1.0, on_cpu=False)).num_blocks
        for extra in range(400)
    ]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]


def test_parts_are_counted_as_the_kernels_count_them() -> None:
    limits = (0, 256, PART_SIZES.medium_from, PART_SIZES.long_from, 1 << 20)
    near = [limit + by for limit in limits for by in (-257, -1, 0, 1, 255, 511, 1025) if limit + by >= 0]
    for sizes in (PART_SIZES, PartSizes(32, 64, 128, medium_from=64, long_from=192)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decode_splits, "PART_SIZES", sizes)
            for length in near:
                assert sizes.num_parts(length) == count_parts(np.array([length]))
