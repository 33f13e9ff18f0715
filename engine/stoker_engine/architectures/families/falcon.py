"""Falcon: attention and MLP, usually in parallel, with one norm or two; rotary embeddings or ALiBi."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from stoker_engine.architectures.config_fields import Fields
from stoker_engine.architectures.decoder_config import DecoderConfig, ResidualConfig
from stoker_engine.architectures.families.family import Family, GGUFFamily
from stoker_engine.architectures.families.reading import alibi_slopes, alike, attention, layer_norm, mlp
from stoker_engine.architectures.families.shared_weight_names import QKV, ROTARY_BUFFER
from stoker_engine.architectures.gguf.gguf_metadata import Metadata
from stoker_engine.architectures.rope_config import read_rope
from stoker_engine.architectures.weight_layout import Fused, Split
from stoker_engine.architectures.weight_names import WeightNames


def _falcon(c: Fields) -> DecoderConfig:
    bias = c.flag("bias")
    heads = attention(c, qkv_bias=bias, out_bias=bias)
    if c.flag("new_decoder_architecture"):
        side_by_side, two_norms = True, c.get("num_ln_in_parallel_attn") in (None, 2)
    else:
        heads = replace(heads, num_kv_heads=1 if c.flag("multi_query") else heads.num_heads)
        side_by_side, two_norms = c.flag("parallel_attn"), False
    if c.flag("alibi"):
        # Falcon scales the scores after adding the ALiBi biases. transformers also rounds slope × position to bfloat16,
        # so its results differ if that product has more than eight significant bits.
        heads = replace(heads, alibi_slopes=tuple(slope * heads.scale for slope in alibi_slopes(heads.num_heads)))
    else:
        heads = replace(heads, rope=read_rope(c, heads.head_dim))
    if not side_by_side:
        residual = ResidualConfig()
    else:
        residual = ResidualConfig("parallel", ("input_norm", "pre_mlp_norm") if two_norms else ("input_norm",))
    return DecoderConfig(layer_norm(c), alike(c, heads, mlp(c, gated=False, bias=bias)), residual=residual)


_FALCON: Final = {
    "vocab_size": 65_024,
    "hidden_size": 4544,
    "num_hidden_layers": 32,
    "num_attention_heads": 71,
    "max_position_embeddings": 2048,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "multi_query": True,
    "parallel_attn": True,
    "rope_theta": 10_000.0,
    "eos_token_id": 11,
    "tie_word_embeddings": True,
}

#: Also used by BLOOM.
FALCON_NAMES: Final = {
    "embed": "transformer.word_embeddings",
    "layers.{i}.input_norm": "transformer.h.{i}.input_layernorm",
    "layers.{i}.o": "transformer.h.{i}.self_attention.dense",
    "layers.{i}.pre_mlp_norm": "transformer.h.{i}.post_attention_layernorm",
    "layers.{i}.up": "transformer.h.{i}.mlp.dense_h_to_4h",
    "layers.{i}.down": "transformer.h.{i}.mlp.dense_4h_to_h",
    "final_norm": "transformer.ln_f",
    "lm_head": "lm_head",
}
#: With ``multi_query``, all query heads share one key and value head: the same arrangement, with one group.
FALCON_FUSED: Final = {"transformer.h.{i}.self_attention.query_key_value": Fused(QKV, Split.KV_HEADS)}

_WEIGHTS: Final = WeightNames(
    names=FALCON_NAMES,
    fused=FALCON_FUSED,
    renames=((r"\.ln_attn\.", ".input_layernorm."), (r"\.ln_mlp\.", ".post_attention_layernorm.")),
    ignored=(ROTARY_BUFFER, r"\.maybe_rotary\.inv_freq$"),
)


def _gguf_config(metadata: Metadata) -> dict[str, Any]:
    kv_heads = metadata.get("attention.head_count_kv", 1)
    return {
        "num_kv_heads": kv_heads,
        "multi_query": kv_heads == 1,
        "new_decoder_architecture": kv_heads != 1,
        "num_ln_in_parallel_attn": 2 if metadata.has("blk.0.attn_norm_2.weight") else 1,
    }


def _gguf_names(metadata: Metadata) -> dict[str, str]:
    if not metadata.has("blk.0.attn_norm_2.weight"):
        return {}
    return {"layers.{i}.input_norm": "blk.{i}.attn_norm_2", "layers.{i}.pre_mlp_norm": "blk.{i}.attn_norm"}


FALCON: Final = Family(
    "falcon",
    _falcon,
    _FALCON,
    weight_names=_WEIGHTS,
    gguf=GGUFFamily("falcon", "FalconForCausalLM", _gguf_config, names=_gguf_names),
)
