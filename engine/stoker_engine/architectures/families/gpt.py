"""GPT-2, GPT-J and GPT-NeoX: layer norms with biases, an MLP without gate.

GPT-2 has learned positions. GPT-J and GPT-NeoX rotate all or part of each head, and compute attention and MLP in
parallel (GPT-NeoX: by default).
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
    ResidualConfig,
)
from stoker_engine.architectures.families.family import Family, GGUFFamily
from stoker_engine.architectures.families.reading import PARALLEL, alike, attention, layer_norm, mlp, refuse
from stoker_engine.architectures.families.shared_weight_names import QKV, ROTARY_BUFFER
from stoker_engine.architectures.rope_config import read_rope
from stoker_engine.architectures.weight_layout import CONV1D, Fused, Split
from stoker_engine.architectures.weight_names import WeightNames


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
        raise ModelError(
            f"config.json: a rotary dimension of {size} does not fit a head of {heads.head_dim} dimensions"
        )
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

_BUFFERS: Final = (r"\.attn\.(bias|masked_bias)$", r"\.attention\.(bias|masked_bias)$", ROTARY_BUFFER)

_GPT2_WEIGHTS: Final = WeightNames(
    names={
        "embed": "transformer.wte",
        "positions": "transformer.wpe",
        "layers.{i}.input_norm": "transformer.h.{i}.ln_1",
        "layers.{i}.o": "transformer.h.{i}.attn.c_proj",
        "layers.{i}.pre_mlp_norm": "transformer.h.{i}.ln_2",
        "layers.{i}.up": "transformer.h.{i}.mlp.c_fc",
        "layers.{i}.down": "transformer.h.{i}.mlp.c_proj",
        "final_norm": "transformer.ln_f",
        "lm_head": "lm_head",
    },
    fused={"transformer.h.{i}.attn.c_attn": Fused(QKV, Split.ROWS)},
    renames=((r"^(wte|wpe|h|ln_f)\.", r"transformer.\1."),),
    operations={r"\.(c_attn|c_proj|c_fc)\.weight$": CONV1D},
    ignored=_BUFFERS,
)

_GPTJ_WEIGHTS: Final = WeightNames(
    names={
        "embed": "transformer.wte",
        "layers.{i}.input_norm": "transformer.h.{i}.ln_1",
        "layers.{i}.q": "transformer.h.{i}.attn.q_proj",
        "layers.{i}.k": "transformer.h.{i}.attn.k_proj",
        "layers.{i}.v": "transformer.h.{i}.attn.v_proj",
        "layers.{i}.o": "transformer.h.{i}.attn.out_proj",
        "layers.{i}.up": "transformer.h.{i}.mlp.fc_in",
        "layers.{i}.down": "transformer.h.{i}.mlp.fc_out",
        "final_norm": "transformer.ln_f",
        "lm_head": "lm_head",
    },
    ignored=(*_BUFFERS, r"\.attn\.embed_positions$"),
)

_GPT_NEOX_WEIGHTS: Final = WeightNames(
    names={
        "embed": "gpt_neox.embed_in",
        "layers.{i}.input_norm": "gpt_neox.layers.{i}.input_layernorm",
        "layers.{i}.o": "gpt_neox.layers.{i}.attention.dense",
        "layers.{i}.pre_mlp_norm": "gpt_neox.layers.{i}.post_attention_layernorm",
        "layers.{i}.up": "gpt_neox.layers.{i}.mlp.dense_h_to_4h",
        "layers.{i}.down": "gpt_neox.layers.{i}.mlp.dense_4h_to_h",
        "final_norm": "gpt_neox.final_layer_norm",
        "lm_head": "embed_out",
    },
    fused={"gpt_neox.layers.{i}.attention.query_key_value": Fused(QKV, Split.KV_HEADS)},
    ignored=_BUFFERS,
)

GPT2: Final = Family("gpt2", _gpt2, _GPT2, weight_names=_GPT2_WEIGHTS, gguf=GGUFFamily("gpt2", "GPT2LMHeadModel"))

GPTJ: Final = Family("gptj", _gptj, _GPTJ, weight_names=_GPTJ_WEIGHTS)

GPT_NEOX: Final = Family(
    "gpt_neox", _gpt_neox, _GPT_NEOX, weight_names=_GPT_NEOX_WEIGHTS, gguf=GGUFFamily("gptneox", "GPTNeoXForCausalLM")
)
