"""GPT-2 and those after its design: norms by mean and variance with biases, an MLP without gate.

GPT-2 and OPT have learned positions; GPT-J, GPT-NeoX, Phi-1.5 and 2, and StarCoder 2 rotate part of each head or all of
it; GPT-J, GPT-NeoX and Phi compute attention and MLP side by side.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from stoker_common.errors import ModelError
from stoker_engine.architectures.config_fields import Fields
from stoker_engine.architectures.decoder_config import (
    DecoderConfig,
    EmbeddingConfig,
    HeadConfig,
    LayerConfig,
    QKNormConfig,
    ResidualConfig,
)
from stoker_engine.architectures.families.family_config import FamilyConfig
from stoker_engine.architectures.families.reading import alike, attention, layer_norm, mlp, refuse, windowed
from stoker_engine.architectures.rope_config import read_rope

#: Attention and MLP side by side, on one norm.
PARALLEL: Final = ResidualConfig("parallel", norms=("input_norm",))


def _gpt2(c: Fields) -> DecoderConfig:
    refuse(c, add_cross_attention=False)
    heads = attention(c, qkv_bias=True, out_bias=True)
    if not c.flag("scale_attn_weights"):
        heads = replace(heads, scale=1.0)
    layers = alike(c, heads, mlp(c, gated=False, bias=True))
    if c.flag("scale_attn_by_inverse_layer_idx"):
        layers = tuple(
            LayerConfig(replace(heads, scale=heads.scale / (index + 1)), layer.mlp)
            for index, layer in enumerate(layers)
        )
    return DecoderConfig(
        layer_norm(c), layers, embedding=EmbeddingConfig(positions=c.integer("max_position_embeddings"))
    )


def _gptj(c: Fields) -> DecoderConfig:
    heads = attention(c)
    size = c.optional_integer("rotary_dim") or heads.head_dim
    if size > heads.head_dim - heads.head_dim % 2:
        raise ModelError(f"config.json: {size} of a head's {heads.head_dim} numbers cannot be rotated in pairs")
    heads = replace(heads, rope=replace(read_rope(c, heads.head_dim, interleaved=True), rotary_dim=size))
    layers = alike(c, heads, mlp(c, gated=False, bias=True))
    return DecoderConfig(layer_norm(c), layers, residual=PARALLEL, head=HeadConfig(bias=True))


def _gpt_neox(c: Fields) -> DecoderConfig:
    bias = c.flag("attention_bias")
    heads = attention(c, qkv_bias=bias, out_bias=bias)
    heads = replace(heads, rope=read_rope(c, heads.head_dim))
    kind: Final = "parallel" if c.flag("use_parallel_residual") else "sequential"
    layers = alike(c, heads, mlp(c, gated=False, bias=True))
    return DecoderConfig(layer_norm(c), layers, residual=ResidualConfig(kind))


def _phi(c: Fields) -> DecoderConfig:
    heads = attention(c, qkv_bias=True, out_bias=True)
    heads = replace(
        heads,
        rope=read_rope(c, heads.head_dim),
        qk_norm=QKNormConfig(layer_norm(c), "head") if c.flag("qk_layernorm") else None,
    )
    layers = alike(c, heads, mlp(c, gated=False, bias=True))
    return DecoderConfig(layer_norm(c), layers, residual=PARALLEL, head=HeadConfig(bias=True))


def _opt(c: Fields) -> DecoderConfig:
    bias = c.flag("enable_bias")
    norm = layer_norm(c, weight=c.flag("layer_norm_elementwise_affine"))
    before = c.flag("do_layer_norm_before")
    width = c.optional_integer("word_embed_proj_dim") or c.integer("hidden_size")
    return DecoderConfig(
        norm,
        alike(c, attention(c, qkv_bias=bias, out_bias=bias), mlp(c, gated=False, bias=bias)),
        residual=ResidualConfig()
        if before
        else ResidualConfig("post-norm", norms=("post_attention_norm", "post_mlp_norm")),
        embedding=EmbeddingConfig(
            size=None if width == c.integer("hidden_size") else width,
            positions=c.integer("max_position_embeddings") + 2,
            position_offset=2,
        ),
        final_norm=before and not c.flag("_remove_final_layer_norm"),
    )


def _starcoder2(c: Fields) -> DecoderConfig:
    bias = c.flag("use_bias")
    heads = attention(c, qkv_bias=bias, out_bias=bias)
    heads = windowed(c, replace(heads, rope=read_rope(c, heads.head_dim)), "sliding_attention")
    return DecoderConfig(layer_norm(c), alike(c, heads, mlp(c, gated=False, bias=bias)))


_GPT2: Final = {
    "vocab_size": 50_257,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 1024,
    "hidden_act": "gelu_new",
    "layer_norm_eps": 1e-5,
    "scale_attn_weights": True,
    "eos_token_id": 50_256,
    "tie_word_embeddings": True,
}
_GPTJ: Final = {
    **_GPT2,
    "vocab_size": 50_400,
    "hidden_size": 4096,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "max_position_embeddings": 2048,
    "rotary_dim": 64,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
_GPT_NEOX: Final = {
    "vocab_size": 50_432,
    "hidden_size": 6144,
    "intermediate_size": 24_576,
    "num_hidden_layers": 44,
    "num_attention_heads": 64,
    "max_position_embeddings": 2048,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "attention_bias": True,
    "use_parallel_residual": True,
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.25,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
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
_OPT: Final = {
    "vocab_size": 50_272,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 2048,
    "hidden_act": "relu",
    "layer_norm_eps": 1e-5,
    "do_layer_norm_before": True,
    "enable_bias": True,
    "layer_norm_elementwise_affine": True,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
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

GPT2: Final = FamilyConfig("gpt2", _gpt2, _GPT2)
GPTJ: Final = FamilyConfig("gptj", _gptj, _GPTJ)
GPT_NEOX: Final = FamilyConfig("gpt_neox", _gpt_neox, _GPT_NEOX)
PHI: Final = FamilyConfig("phi", _phi, _PHI)
OPT: Final = FamilyConfig("opt", _opt, _OPT)
STARCODER2: Final = FamilyConfig("starcoder2", _starcoder2, _STARCODER2)
