"""StarCoder 2: rotary embeddings, optional sliding windows, layer norms, an MLP without gate."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from stoker_engine.architectures.config_fields import Fields
from stoker_engine.architectures.decoder_config import DecoderConfig
from stoker_engine.architectures.families.family import Family, GGUFFamily
from stoker_engine.architectures.families.reading import alike, attention, layer_norm, mlp, windowed
from stoker_engine.architectures.families.shared_weight_names import IGNORED, LLAMA_NAMES
from stoker_engine.architectures.rope_config import read_rope
from stoker_engine.architectures.weight_names import WeightNames


def _starcoder2(c: Fields) -> DecoderConfig:
    bias = c.flag("use_bias")
    heads = attention(c, qkv_bias=bias, out_bias=bias)
    heads = windowed(c, replace(heads, rope=read_rope(c, heads.head_dim)), "sliding_attention")
    return DecoderConfig(layer_norm(c), alike(c, heads, mlp(c, gated=False, bias=bias)))


_STARCODER2: Final = {
    "vocab_size": 49_152,
    "hidden_size": 3072,
    "intermediate_size": 12_288,
    "num_hidden_layers": 30,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-5,
    "use_bias": True,
    "rope_theta": 10_000.0,
    "eos_token_id": 50_256,
    "tie_word_embeddings": True,
}

_WEIGHTS: Final = WeightNames(
    names={
        **LLAMA_NAMES,
        "layers.{i}.up": "model.layers.{i}.mlp.c_fc",
        "layers.{i}.down": "model.layers.{i}.mlp.c_proj",
    },
    ignored=IGNORED,
)

STARCODER2: Final = Family(
    "starcoder2",
    _starcoder2,
    _STARCODER2,
    weight_names=_WEIGHTS,
    gguf=GGUFFamily("starcoder2", "Starcoder2ForCausalLM"),
)
