"""MPT: ALiBi, no biases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from stoker_engine.architectures.config_fields import Fields
from stoker_engine.architectures.decoder_config import DecoderConfig, MLPConfig
from stoker_engine.architectures.families.family import Family, GGUFFamily
from stoker_engine.architectures.families.reading import alibi_slopes, alike, attention, layer_norm, refuse
from stoker_engine.architectures.families.shared_weight_names import QKV
from stoker_engine.architectures.gguf.gguf_metadata import Metadata
from stoker_engine.architectures.weight_layout import Fused, Split
from stoker_engine.architectures.weight_names import WeightNames


def _mpt(c: Fields) -> DecoderConfig:
    refuse(c, no_bias=True, logit_scale=None, norm_type="low_precision_layernorm", expansion_ratio=4)
    stated: dict[str, Any] = {"alibi": True, "alibi_bias_max": 8, **c.object("attn_config")}
    options = Fields(stated, {})
    refuse(
        options, alibi=True, prefix_lm=False, qk_ln=False, attn_uses_sequence_id=False, attn_type="multihead_attention"
    )
    heads = attention(c)
    heads = replace(
        heads,
        scale=options.optional("softmax_scale") or heads.scale,
        clip_qkv=options.optional("clip_qkv", lower=0),
        alibi_slopes=alibi_slopes(heads.num_heads, options.number("alibi_bias_max")),
    )
    dense = MLPConfig(4 * c.integer("hidden_size"), "gelu", gated=False)
    return DecoderConfig(layer_norm(c, bias=False), alike(c, heads, dense))


_MPT: Final = {
    "vocab_size": 50_368,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "max_position_embeddings": 2048,
    "layer_norm_eps": 1e-5,
    "no_bias": True,
    "tie_word_embeddings": True,
}

_WEIGHTS: Final = WeightNames(
    names={
        "embed": "transformer.wte",
        "layers.{i}.input_norm": "transformer.blocks.{i}.norm_1",
        "layers.{i}.o": "transformer.blocks.{i}.attn.out_proj",
        "layers.{i}.pre_mlp_norm": "transformer.blocks.{i}.norm_2",
        "layers.{i}.up": "transformer.blocks.{i}.ffn.up_proj",
        "layers.{i}.down": "transformer.blocks.{i}.ffn.down_proj",
        "final_norm": "transformer.norm_f",
        "lm_head": "lm_head",
    },
    fused={"transformer.blocks.{i}.attn.Wqkv": Fused(QKV, Split.ROWS)},
)


def _gguf_config(metadata: Metadata) -> dict[str, Any]:
    stated = {
        "clip_qkv": metadata.get("attention.clamp_kqv"),
        "alibi_bias_max": metadata.get("attention.max_alibi_bias"),
    }
    return {"attn_config": {key: value for key, value in stated.items() if value}}


MPT: Final = Family("mpt", _mpt, _MPT, weight_names=_WEIGHTS, gguf=GGUFFamily("mpt", "MptForCausalLM", _gguf_config))
