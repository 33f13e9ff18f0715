"""Other families' fields in a config.json change no size: only the fields that a family's classes read count."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from stoker_engine.sizing.weight_sizes import weight_sizes
from stoker_operator.plan.foreign_models import foreign_config

#: Model types of all kinds that transformers has: mixtures and dense models.
KINDS: Final = {
    "apertus": "ApertusForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "phimoe": "PhimoeForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
}
SMALL: Final[dict[str, Any]] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "pad_token_id": None,
}
#: Fields that state a size in some family.
FIELDS: Final[dict[str, Any]] = {
    "moe_intermediate_size": 96,
    "num_experts": 12,
    "num_local_experts": 12,
    "n_routed_experts": 12,
    "moe_num_experts": 12,
    "n_shared_experts": 2,
    "moe_num_shared_experts": 2,
    "shared_expert_intermediate_size": 160,
    "intermediate_size_mlp": 224,
    "first_k_dense_replace": 1,
    "interleave_moe_layer_step": 2,
    "moe_layer_interval": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": 0,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [0],
    "attention_bias": True,
    "qkv_bias": True,
    "use_bias": True,
    "use_qk_norm": True,
    "word_embed_proj_dim": 40,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
}


def counted(config: Any, architecture: str) -> int:
    return sum(
        size.numbers for size in weight_sizes(foreign_config({**config.to_dict(), "architectures": [architecture]}))
    )


@pytest.mark.parametrize("kind", KINDS)
def test_fields_that_a_family_does_not_read_are_not_counted(kind: str) -> None:
    make = CONFIG_MAPPING[kind]
    plain: Any = make(**SMALL)
    unread = {name: value for name, value in FIELDS.items() if not hasattr(plain, name)}
    assert unread
    with torch.device("meta"):
        num_parameters = [
            sum(each.numel() for each in AutoModelForCausalLM.from_config(config).parameters())
            for config in (plain, make(**SMALL, **unread))
        ]
    assert num_parameters[0] == num_parameters[1]
    expected = counted(plain, KINDS[kind])
    assert expected == pytest.approx(num_parameters[0], rel=0.01)
    for name, value in unread.items():
        assert counted(make(**SMALL, **{name: value}), KINDS[kind]) == expected, name
