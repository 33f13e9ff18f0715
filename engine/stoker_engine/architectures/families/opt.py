"""OPT: learned positions, an MLP without gate; OPT-350m has norms after each block instead of before."""

from __future__ import annotations

from typing import Final

from stoker_engine.architectures.config_fields import Fields
from stoker_engine.architectures.decoder_config import DecoderConfig, EmbeddingConfig, ResidualConfig
from stoker_engine.architectures.families.family import Family
from stoker_engine.architectures.families.reading import alike, attention, layer_norm, mlp
from stoker_engine.architectures.weight_names import WeightNames


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

_WEIGHTS: Final = WeightNames(
    names={
        "embed": "model.decoder.embed_tokens",
        "positions": "model.decoder.embed_positions",
        "project_in": "model.decoder.project_in",
        "project_out": "model.decoder.project_out",
        "layers.{i}.input_norm": "model.decoder.layers.{i}.self_attn_layer_norm",
        "layers.{i}.post_attention_norm": "model.decoder.layers.{i}.self_attn_layer_norm",  # OPT-350m
        "layers.{i}.q": "model.decoder.layers.{i}.self_attn.q_proj",
        "layers.{i}.k": "model.decoder.layers.{i}.self_attn.k_proj",
        "layers.{i}.v": "model.decoder.layers.{i}.self_attn.v_proj",
        "layers.{i}.o": "model.decoder.layers.{i}.self_attn.out_proj",
        "layers.{i}.pre_mlp_norm": "model.decoder.layers.{i}.final_layer_norm",
        "layers.{i}.post_mlp_norm": "model.decoder.layers.{i}.final_layer_norm",
        "layers.{i}.up": "model.decoder.layers.{i}.fc1",
        "layers.{i}.down": "model.decoder.layers.{i}.fc2",
        "final_norm": "model.decoder.final_layer_norm",
        "lm_head": "lm_head",
    },
    renames=((r"^decoder\.", "model.decoder."),),
    ignored=(r"\.decoder\.version$",),
)

OPT: Final = Family("opt", _opt, _OPT, weight_names=_WEIGHTS)
