"""Module names in a ``quantization_config`` match those that the loader finds in files."""

from __future__ import annotations

import pytest

from stoker_engine.architectures.families.registry import FAMILIES
from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.architectures.module_names import module_name
from stoker_engine.architectures.weight_names import EVERY_NAME
from stoker_engine.sizing.named_experts import first_expert
from stoker_engine.sizing.weight_sizes import matrices

#: transformers' module names, of supported and of other architectures.
NAMES = [
    ("LlamaForCausalLM", "embed", "model.embed_tokens"),
    ("LlamaForCausalLM", "layers.3.q", "model.layers.3.self_attn.q_proj"),
    ("Phi3ForCausalLM", "layers.3.v", "model.layers.3.self_attn.qkv_proj"),
    ("Glm4ForCausalLM", "layers.3.up", "model.layers.3.mlp.gate_up_proj"),
    ("GPT2LMHeadModel", "layers.3.k", "transformer.h.3.attn.c_attn"),
    ("GPTNeoXForCausalLM", "lm_head", "embed_out"),
    ("FalconForCausalLM", "layers.3.q", "transformer.h.3.self_attention.query_key_value"),
    ("InternLM2ForCausalLM", "layers.3.gate", "model.layers.3.feed_forward.w1"),
    ("Qwen3MoeForCausalLM", "layers.3.experts.7.gate", "model.layers.3.mlp.experts.7.gate_proj"),
    ("Qwen2MoeForCausalLM", "layers.3.shared.down", "model.layers.3.mlp.shared_expert.down_proj"),
    ("MixtralForCausalLM", "layers.3.experts.7.up", "model.layers.3.block_sparse_moe.experts.7.w3"),
    ("GraniteMoeForCausalLM", "layers.3.experts.7.up", "model.layers.3.block_sparse_moe.experts.gate_up_proj"),
    ("GptOssForCausalLM", "layers.3.experts.7.gate", "model.layers.3.mlp.experts.gate_up_proj"),
    ("DbrxForCausalLM", "layers.3.experts.7.down", "transformer.blocks.3.ffn.experts.mlp.w2"),
    ("DeepseekV3ForCausalLM", "layers.3.v_b", "model.layers.3.self_attn.kv_b_proj"),
    ("Llama4ForCausalLM", "layers.3.experts.7.gate", "model.layers.3.feed_forward.experts.gate_up_proj"),
    ("Llama4ForConditionalGeneration", "layers.3.shared.up", "model.layers.3.feed_forward.shared_expert.up_proj"),
    ("MiniMaxM2ForCausalLM", "layers.3.experts.7.down", "model.layers.3.block_sparse_moe.experts.7.w2"),
    ("UnknownForCausalLM", "layers.3.experts.7.down", "model.layers.3.mlp.experts.7.down_proj"),
    ("UnknownForCausalLM", "layers.3.kv_a", "model.layers.3.self_attn.kv_a_proj_with_mqa"),
]


@pytest.mark.parametrize(("architecture", "module", "name"), NAMES)
def test_module_names_equal_those_of_transformers(architecture: str, module: str, name: str) -> None:
    assert module_name(architecture, module) == name


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_module_names_are_those_of_loaded_tensors(architecture: str) -> None:
    config = ModelConfig.from_dict({"architectures": [architecture]})
    weight_names = FAMILIES[architecture].weight_names
    for module, _ in matrices(config, first_expert):
        name = module_name(architecture, module)
        assert weight_names.canonical(name) == name
        spelled = [weight_names.destination(each, EVERY_NAME, config) for each in (name, f"{name}.weight")]
        assert any(each and f"{module}.weight" in each.param_names for each in spelled), module
