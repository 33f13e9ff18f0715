"""Names close to Llama's, with norms of heads and blocks under names of their own: Cohere, StableLM, GLM-4."""

from typing import Final

from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.models.families.fused import each_row, rows
from stoker_engine.models.families.llama import GATE_UP, IGNORED, LLAMA_NAMES
from stoker_engine.models.families.weight_names import Fused, WeightNames


def _q_norms(config: ModelConfig) -> list[str]:
    return [f"layers.{{i}}.q_norm.{head}" for head in range(config.num_attention_heads)]


def _k_norms(config: ModelConfig) -> list[str]:
    return [f"layers.{{i}}.k_norm.{head}" for head in range(config.num_key_value_heads)]


COHERE: Final = WeightNames(
    names=LLAMA_NAMES,
    fused={
        "model.layers.{i}.self_attn.q_norm": Fused(_q_norms, each_row),
        "model.layers.{i}.self_attn.k_norm": Fused(_k_norms, each_row),
    },
    ignored=IGNORED,
)

STABLELM: Final = WeightNames(
    names={
        **LLAMA_NAMES,
        "layers.{i}.q_norm.{j}": "model.layers.{i}.self_attn.q_layernorm.norms.{j}",
        "layers.{i}.k_norm.{j}": "model.layers.{i}.self_attn.k_layernorm.norms.{j}",
    },
    ignored=IGNORED,
)

GLM: Final = WeightNames(
    names={
        **LLAMA_NAMES,
        "layers.{i}.post_attention_norm": "model.layers.{i}.post_self_attn_layernorm",
        "layers.{i}.post_mlp_norm": "model.layers.{i}.post_mlp_layernorm",
    },
    fused={"model.layers.{i}.mlp.gate_up_proj": Fused(GATE_UP, rows)},
    ignored=IGNORED,
)
