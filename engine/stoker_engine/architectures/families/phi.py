"""Phi-1.5 and 2: attention and MLP in parallel, part of each head rotated. Phi-3 and 4: Llama with fused weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from stoker_engine.architectures.config_fields import Fields
from stoker_engine.architectures.decoder_config import DecoderConfig, HeadConfig, QKNormConfig
from stoker_engine.architectures.families.family import Family, GGUFFamily
from stoker_engine.architectures.families.llama import LLAMA_DEFAULTS
from stoker_engine.architectures.families.reading import (
    PARALLEL,
    alike,
    attention,
    head_dim,
    layer_norm,
    mlp,
    rms_norm,
    windowed,
)
from stoker_engine.architectures.families.shared_weight_names import GATE_UP, GGUF_GATE_UP, IGNORED, LLAMA_NAMES, QKV
from stoker_engine.architectures.rope_config import read_rope
from stoker_engine.architectures.weight_layout import Fused, Split
from stoker_engine.architectures.weight_names import WeightNames


def _phi(c: Fields) -> DecoderConfig:
    heads = attention(c, qkv_bias=True, out_bias=True)
    heads = replace(
        heads,
        rope=read_rope(c, heads.head_dim),
        qk_norm=QKNormConfig(layer_norm(c), "head") if c.flag("qk_layernorm") else None,
    )
    layers = alike(c, heads, mlp(c, gated=False, bias=True))
    return DecoderConfig(layer_norm(c), layers, residual=PARALLEL, head=HeadConfig(bias=True))


def _phi3(c: Fields) -> DecoderConfig:
    rope = read_rope(c, head_dim(c), renamed={"su": "longrope", "yarn": "longrope"})
    sees = windowed(c, replace(attention(c), rope=rope), "sliding_attention")
    return DecoderConfig(rms_norm(c), alike(c, sees, mlp(c)))


_PHI: Final = {
    "vocab_size": 51_200,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "hidden_act": "gelu_new",
    "layer_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.5,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}

_PHI_WEIGHTS: Final = WeightNames(
    names={
        **LLAMA_NAMES,
        "layers.{i}.o": "model.layers.{i}.self_attn.dense",
        "layers.{i}.q_norm": "model.layers.{i}.self_attn.q_layernorm",
        "layers.{i}.k_norm": "model.layers.{i}.self_attn.k_layernorm",
        "layers.{i}.up": "model.layers.{i}.mlp.fc1",
        "layers.{i}.down": "model.layers.{i}.mlp.fc2",
        "final_norm": "model.final_layernorm",
    },
    ignored=IGNORED,
)

_PHI3_WEIGHTS: Final = WeightNames(
    names=LLAMA_NAMES,
    fused={
        "model.layers.{i}.self_attn.qkv_proj": Fused(QKV, Split.ROWS),
        "model.layers.{i}.mlp.gate_up_proj": Fused(GATE_UP, Split.ROWS),
    },
    ignored=IGNORED,
)

PHI: Final = Family(
    "phi",
    _phi,
    _PHI,
    weight_names=_PHI_WEIGHTS,
    gguf=GGUFFamily("phi2", "PhiForCausalLM", lambda metadata: {"qk_layernorm": False}),
)

PHI3: Final = Family(
    "phi3",
    _phi3,
    {
        **LLAMA_DEFAULTS,
        "vocab_size": 32_064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 32_000,
    },
    weight_names=_PHI3_WEIGHTS,
    gguf=GGUFFamily("phi3", "Phi3ForCausalLM", fused=GGUF_GATE_UP),
)
