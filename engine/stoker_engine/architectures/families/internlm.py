"""InternLM 2 and 3: Llama with optional biases; InternLM 2 fuses queries, keys and values."""

from __future__ import annotations

from typing import Final

from stoker_engine.architectures.config_fields import Fields
from stoker_engine.architectures.decoder_config import DecoderConfig
from stoker_engine.architectures.families.family import Family, GGUFFamily
from stoker_engine.architectures.families.llama import LLAMA_DEFAULTS, pre_norm
from stoker_engine.architectures.families.reading import attention, mlp
from stoker_engine.architectures.families.shared_weight_names import LLAMA_WEIGHTS, QKV, ROTARY_BUFFER
from stoker_engine.architectures.weight_layout import Fused, Split
from stoker_engine.architectures.weight_names import WeightNames


def _internlm2(c: Fields) -> DecoderConfig:
    bias = c.flag("bias")
    return pre_norm(c, attention(c, qkv_bias=bias, out_bias=bias), mlp(c))


def _internlm3(c: Fields) -> DecoderConfig:
    bias = c.flag("bias")
    return pre_norm(c, attention(c, qkv_bias=c.flag("qkv_bias"), out_bias=bias), mlp(c, bias=bias))


_INTERNLM2_WEIGHTS: Final = WeightNames(
    names={
        "embed": "model.tok_embeddings",
        "layers.{i}.input_norm": "model.layers.{i}.attention_norm",
        "layers.{i}.o": "model.layers.{i}.attention.wo",
        "layers.{i}.pre_mlp_norm": "model.layers.{i}.ffn_norm",
        "layers.{i}.gate": "model.layers.{i}.feed_forward.w1",
        "layers.{i}.up": "model.layers.{i}.feed_forward.w3",
        "layers.{i}.down": "model.layers.{i}.feed_forward.w2",
        "final_norm": "model.norm",
        "lm_head": "output",
    },
    fused={"model.layers.{i}.attention.wqkv": Fused(QKV, Split.KV_HEADS)},
    ignored=(ROTARY_BUFFER,),
)

INTERNLM2: Final = Family(
    "internlm2",
    _internlm2,
    {**LLAMA_DEFAULTS, "vocab_size": 103_168, "bias": True},
    weight_names=_INTERNLM2_WEIGHTS,
    gguf=GGUFFamily("internlm2", "InternLM2ForCausalLM", rotated=True),
)

INTERNLM3: Final = Family(
    "internlm3",
    _internlm3,
    {**LLAMA_DEFAULTS, "vocab_size": 128_512, "max_position_embeddings": 32_768},
    weight_names=LLAMA_WEIGHTS,
)
