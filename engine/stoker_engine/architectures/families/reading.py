"""Readers of config fields that most families share."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from stoker_common.errors import ModelError
from stoker_engine.architectures.config_fields import Fields
from stoker_engine.architectures.decoder_config import (
    AttentionConfig,
    LayerConfig,
    MLPConfig,
    NormConfig,
    ResidualConfig,
)
from stoker_engine.architectures.rope_config import read_rope

#: Upper limits, several times the largest models' values.
MOST_LAYERS: Final = 10_000
MOST_HEADS: Final = 100_000

#: Attention and MLP in parallel, with a common norm.
PARALLEL: Final = ResidualConfig("parallel", norms=("input_norm",))


def rms_norm(c: Fields, *, wide: bool = False) -> NormConfig:
    """Return the config of RMS norms, without bias."""
    return NormConfig("rms", c.number("rms_norm_eps", lower=0), wide=wide)


def layer_norm(c: Fields, *, bias: bool = True, weight: bool = True) -> NormConfig:
    """Return the config of layer norms. Without weights they have no biases."""
    return NormConfig("layer", c.number("layer_norm_eps", lower=0), weight=weight, bias=bias and weight)


def num_layers(c: Fields) -> int:
    """Return the number of layers."""
    return c.integer("num_hidden_layers", upper=MOST_LAYERS)


def num_heads(c: Fields) -> int:
    """Return the number of query heads."""
    return c.integer("num_attention_heads", upper=MOST_HEADS)


def head_dim(c: Fields) -> int:
    """Return the size of one head: as stated, or the hidden size divided by the number of heads.

    Raises:
        ModelError: no head size is stated, and the hidden size is less than the number of heads.
    """
    size = c.optional_integer("head_dim") or c.integer("hidden_size") // num_heads(c)
    if size < 1:
        raise ModelError(
            f"config.json: hidden_size {c.integer('hidden_size')} is less than num_attention_heads {num_heads(c)}"
        )
    return size


def attention(c: Fields, *, qkv_bias: bool = False, out_bias: bool = False) -> AttentionConfig:
    """Return the attention config without RoPE, ALiBi or a window; add these with `dataclasses.replace`.

    Raises:
        ModelError: the number of query heads is not a multiple of the number of key and value heads.
    """
    heads = num_heads(c)
    kv_heads = c.optional_integer("num_key_value_heads") or heads
    size = head_dim(c)
    if heads % kv_heads:
        raise ModelError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    return AttentionConfig(heads, kv_heads, size, scale=size**-0.5, qkv_bias=qkv_bias, out_bias=out_bias)


def rotated(c: Fields, heads: AttentionConfig) -> AttentionConfig:
    """Return `heads` with the config's rotary embedding."""
    return replace(heads, rope=read_rope(c, heads.head_dim))


def mlp(c: Fields, *, gated: bool = True, bias: bool = False) -> MLPConfig:
    """Return the MLP's config; a missing size is four times the hidden size."""
    size = c.optional_integer("intermediate_size") or 4 * c.integer("hidden_size")
    return MLPConfig(size, c.text("hidden_act"), gated, bias)


def alike(c: Fields, attention: AttentionConfig, mlp: MLPConfig) -> tuple[LayerConfig, ...]:
    """Return as many layers as the config states, all equal."""
    return (LayerConfig(attention, mlp),) * num_layers(c)


def of_kinds(c: Fields, kinds: Sequence[str], layer: Callable[[str], LayerConfig]) -> tuple[LayerConfig, ...]:
    """Return one layer for each of `kinds`, which are names of ``layer_types``."""
    made = {kind: layer(kind) for kind in set(kinds)}
    return tuple(made[kind] for kind in kinds)


def layer_kinds(c: Fields, otherwise: Callable[[int], bool]) -> list[str]:
    """Return each layer's kind: ``sliding_attention`` or ``full_attention``.

    Args:
        otherwise: whether the layer with this index has a sliding window, if the config has no ``layer_types``.

    Raises:
        ModelError: a layer type is not supported, or the number of layer types differs from the number of layers.
    """
    count = num_layers(c)
    kinds = c.items("layer_types", str)
    if c.get("layer_types") is None:
        kinds = ["sliding_attention" if otherwise(index) else "full_attention" for index in range(count)]
    if len(kinds) != count:
        raise ModelError(f"layer_types names {len(kinds)} layers, but num_hidden_layers is {count}")
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    if unknown:
        raise ModelError(f"layer_types: {', '.join(sorted(unknown))} is not supported in this family")
    return kinds


def windowed(c: Fields, attention: AttentionConfig, kind: str) -> AttentionConfig:
    """Return `attention`, with the config's sliding window, if it has one and `kind` is ``sliding_attention``."""
    if kind != "sliding_attention":
        return attention
    window = c.optional_integer("sliding_window", lower=1)
    return attention if window is None else replace(attention, sliding_window=window)


def alibi_slopes(num_heads: int, largest: float = 8.0) -> tuple[float, ...]:
    """Return the ALiBi slope of each head (Press et al., 2022).

    For n = 2^k heads the slopes are 2^(-largest · h / n), h = 1 … n. Other numbers of heads use the slopes of the next
    lower power of two, then every other slope of the next higher one.
    """
    power = 1 << (num_heads.bit_length() - 1)

    def slopes(count: int) -> list[float]:
        return [math.pow(2.0, -largest * h / count) for h in range(1, count + 1)]

    return tuple((slopes(power) + slopes(2 * power)[::2])[:num_heads])


def refuse(c: Fields, **supported: object) -> None:
    """Check that the config's options, if not null, have the `supported` values.

    Raises:
        ModelError: an option has another value.
    """
    for name, value in supported.items():
        stated = c.get(name)
        if stated is not None and stated != value:
            raise ModelError(
                f"config.json: {name} = {reprlib.repr(stated)} is not supported in this family, only {value!r}"
            )
