"""Memory of adapters: the sums cover all sites of a rank's model, and everything that an adapter holds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.architectures.quantization.on_load import ON_LOAD
from stoker_engine.attention.sdpa import SdpaBackend
from stoker_engine.kernels.bundle import Operation
from stoker_engine.kernels.reference import REFERENCE
from stoker_engine.layers.batch_rows import BatchRows
from stoker_engine.layers.build import Build
from stoker_engine.layers.linear_site import LinearSite, SiteForm
from stoker_engine.models.decoder import Decoder
from stoker_engine.parallel.communicator import SingleRank
from stoker_engine.quant.unquantized import UNQUANTIZED
from stoker_engine.sizing.kv_format import kv_format
from stoker_engine.sizing.lora import AdapterMatrices, adapter_bytes, changeable, operation_bytes
from stoker_engine.sizing.memory import AdapterNumbers, Device, Numbers, memory_use
from stoker_engine.sizing.pipeline_stages import Stage
from stoker_engine.sizing.planned_formats import on_load_formats
from stoker_engine.sizing.weight_sizes import Sharding

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 101,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 64,
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": BASE,
    "not gated": BASE | {"architectures": ["OPTForCausalLM"], "ffn_dim": 72, "word_embed_proj_dim": 64},
    "narrow embedding": BASE | {"architectures": ["OPTForCausalLM"], "ffn_dim": 72, "word_embed_proj_dim": 32},
    "tied": BASE | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "tie_word_embeddings": True},
    "experts": BASE | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 5, "num_experts_per_tok": 2},
    "shared experts": BASE
    | {"architectures": ["Qwen2MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
    | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
    "latent": BASE
    | {"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
    | {"q_lora_rank": 24, "v_head_dim": 8, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4}
    | {"topk_group": 2, "moe_intermediate_size": 24, "n_shared_experts": 1, "first_k_dense_replace": 1}
    | {"num_key_value_heads": 8},
}
SPLITS = [Sharding(), Sharding(tensor=2), Sharding(tensor=4), Sharding(pipeline=2), Sharding(tensor=2, pipeline=3)]


@dataclass
class FirstRank(SingleRank):
    """A rank that never communicates."""

    rank: int
    size: int


def of_sites(config: ModelConfig, split: Sharding, stage: int, rank: int) -> int:
    """Return an adapter's bytes at all operations of the stage's first rank, with 2 bytes per element."""
    total = 0

    def extend(linear: Operation, site: LinearSite, rows: BatchRows) -> Operation:
        nonlocal total
        parts = [
            AdapterMatrices("", site.inputs.size, shard.size, in_panels=site.form is SiteForm.LINEAR)
            for name, shard in site.outputs.items()
            if not name.endswith((".k_b", ".v_b"))  # see `absorbed`
        ]
        total += operation_bytes(parts, rank, 2) if parts else 0
        return linear

    build = Build(
        torch.float32, SdpaBackend(), REFERENCE, FirstRank(0, split.tensor), lambda _: UNQUANTIZED,
        whole_experts=split.expert > 1, stage=Stage(stage, split.pipeline), extend=extend,
    )  # fmt: skip
    with torch.device("meta"):
        Decoder(config, build, max_model_len=64)
    return total


def absorbed(config: ModelConfig, split: Sharding, stage: int, rank: int) -> int:
    """Return the bytes at the two matrices that latent attention absorbs; A's columns are the latent vector at both."""
    layers, total = Stage(stage, split.pipeline).layers(len(config.layers)), 0
    for index in layers:
        attention = config.layers[index].attention
        if attention.latent is not None:
            heads, latent = attention.num_heads // split.tensor, attention.latent
            for size in (latent.qk_nope_head_dim, latent.v_head_dim):
                total += rank * (latent.kv_lora_rank + heads * size) * 2
    return total


@pytest.mark.parametrize("name", MODELS)
def test_adapter_bytes_are_sums_over_the_sites_of_the_model(name: str) -> None:
    config = ModelConfig.from_dict(MODELS[name])
    splits = [*SPLITS, Sharding(tensor=2, expert=2)] if any(layer.moe for layer in config.layers) else SPLITS
    for split in splits:
        for rank in (16, 5, 8):
            expected = [
                of_sites(config, split, stage, rank) + absorbed(config, split, stage, rank)
                for stage in range(split.pipeline)
            ]
            assert adapter_bytes(config, rank, 2, split) == expected, split


def test_adapter_bytes_follow_rank_dtype_and_shards() -> None:
    config = ModelConfig.from_dict(BASE)
    assert adapter_bytes(config, 8, 4)[0] == 2 * adapter_bytes(config, 8, 2)[0]
    assert adapter_bytes(config, 32, 2)[0] == 2 * adapter_bytes(config, 16, 2)[0]
    assert adapter_bytes(config, 16, 2, Sharding(tensor=2))[0] < adapter_bytes(config, 16, 2)[0]


def test_uncut_blocks_give_the_first_rank_more_bytes() -> None:
    config = ModelConfig.from_dict(BASE | {"intermediate_size": 96})
    formats = on_load_formats(config, next(iter(ON_LOAD)), on_cpu=True)
    split = Sharding(tensor=2)
    assert adapter_bytes(config, 16, 2, split, formats)[0] >= adapter_bytes(config, 16, 2, split)[0]


def test_adapters_reduce_the_kv_cache() -> None:
    config, memory = ModelConfig.from_dict(BASE), 2 << 30
    numbers = Numbers(2, kv_format("auto", "bfloat16"), 16, 64, 4)
    for split in SPLITS:
        device = Device(memory, 0.9, on_cpu=False, sharding=split)
        device = replace(device, memory_bytes=device.allowances + memory)
        without = memory_use(config, numbers, device)
        adapters = AdapterNumbers(8, 16, 2)
        use = memory_use(config, replace(numbers, adapters=adapters), device)
        taken = [8 * each for each in adapter_bytes(config, 16, 2, split)]
        assert without.adapters == 0
        assert use.adapters == max(taken)
        assert without.kv_cache - use.kv_cache in taken or split.pipeline > 1
        assert use.num_blocks < without.num_blocks


#: Modules as files name them, and the modules that contain them in the engine.
TARGETS: list[tuple[str, tuple[str, ...], set[str]]] = [
    ("LlamaForCausalLM", ("q_proj", "v_proj"), {"q", "v"}),
    ("LlamaForCausalLM", ("embed_tokens", "lm_head"), {"embed", "lm_head"}),
    ("Phi3ForCausalLM", ("qkv_proj", "gate_up_proj"), {"q", "k", "v", "gate", "up"}),
    ("GPT2LMHeadModel", ("c_proj",), {"o", "down"}),
    ("MixtralForCausalLM", ("w1", "gate"), {"experts.gate", "router"}),
    ("Qwen3MoeForCausalLM", ("experts",), {"experts.gate", "experts.up", "experts.down"}),
    ("DeepseekV3ForCausalLM", ("kv_b_proj",), {"k_b", "v_b"}),
    ("DeepseekV3ForCausalLM", ("down_proj",), {"down", "experts.down", "shared.down"}),
]
EVERY = (
    "q",
    "k",
    "v",
    "o",
    "gate",
    "up",
    "down",
    "embed",
    "lm_head",
    "router",
    "shared_gate",
    "project_in",
    "k_b",
    "v_b",
)
EXPERTS = ("experts.gate", "experts.up", "experts.down", "shared.gate", "shared.up", "shared.down")


@pytest.mark.parametrize(("architecture", "modules", "expected"), TARGETS)
def test_target_modules_select_their_matrices(architecture: str, modules: tuple[str, ...], expected: set[str]) -> None:
    config = replace(ModelConfig.from_dict(BASE), architecture=architecture)
    assert {name for name in (*EVERY, *EXPERTS) if name in changeable(config, modules)} == expected
    for others in ((), (*modules, "module_of_another_model")):
        assert all(name in changeable(config, others) for name in EVERY)


def test_matrices_outside_of_the_target_modules_take_no_bytes() -> None:
    config = ModelConfig.from_dict(BASE)
    for split in SPLITS:
        whole = adapter_bytes(config, 16, 2, split)
        modules = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
        ends = ("embed_tokens", "lm_head")
        parts = [adapter_bytes(config, 16, 2, split, target_modules=each) for each in (*modules, ends)]
        assert [sum(each) for each in zip(*parts, strict=True)] == whole
