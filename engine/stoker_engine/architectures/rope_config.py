"""Rotary positions as a config states them, in every spelling.

transformers 5 has ``rope_parameters`` (one set, or one a kind of layer); the hub's older files have ``rope_theta`` and
``rope_scaling`` beside each other, and the share of a head that is rotated under several names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from stoker_common.errors import ModelError
from stoker_engine.architectures.config_fields import MIN_POSITIVE, Fields

ROPE_TYPES: Final = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")

#: What rope parameters may leave unsaid.
_DEFAULTS: Final = {"type": "default", "truncate": True}


@dataclass(frozen=True)
class RopeParameters:
    """Rotary embedding of one layer: what is rotated, how fast, and how that is stretched to longer contexts.

    Attributes:
        rotary_dim: numbers of each head that are rotated, its first ones; an odd number stands for one more.
        interleaved: pairs are neighbours (GPT-J) instead of half a rotated part away (GPT-NeoX).
        rope_type: one of `ROPE_TYPES`.
        rope_theta: the base.
        factor: how far the context is stretched.
        max_position_embeddings: the context before ``dynamic`` stretches it.
        original_max_position_embeddings: the context before any other type stretches it.
        low_freq_factor, high_freq_factor: of ``llama3``.
        beta_fast, beta_slow, truncate: of ``yarn``.
        short_factor, long_factor: of ``longrope``, one number a pair.
        attention_factor: cos and sin are multiplied by it (``yarn`` and ``longrope``).
    """

    rotary_dim: int
    interleaved: bool = False
    rope_type: str = "default"
    rope_theta: float = 10000.0
    factor: float = 1.0
    max_position_embeddings: int = 0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    attention_factor: float = 1.0


def read_rope(
    c: Fields,
    head_dim: int,
    kind: str = "full_attention",
    *,
    interleaved: bool = False,
    renamed: Mapping[str, str] | None = None,
) -> RopeParameters:
    """The rotary embedding of layers of `kind` whose heads have `head_dim` numbers.

    Args:
        kind: a name in ``layer_types``; matters where each kind has its own parameters.
        renamed: rope types that the family's files call by another name.

    Raises:
        ModelError: the rope type is not supported, or a parameter is out of range.
    """
    parameters = _given(c, kind)
    stated = parameters.text("rope_type" if parameters.get("rope_type") else "type")
    rope_type = (renamed or {}).get(stated, stated)
    if rope_type not in ROPE_TYPES:
        raise ModelError(f"rope type {rope_type!r} is not supported; supported are {', '.join(ROPE_TYPES)}")
    rotary_dim = int(head_dim * _either(parameters, c, "partial_rotary_factor", 1.0, 0, 1))
    local = kind == "sliding_attention" and c.get("rope_local_base_freq") is not None  # Gemma 3
    if not 1 <= rotary_dim <= head_dim - head_dim % 2:
        raise ModelError(
            f"config.json: a rotary dimension of {rotary_dim} does not fit a head of {head_dim} dimensions"
        )
    theta = _either(parameters, c, "rope_local_base_freq" if local else "rope_theta", 10000.0, 2)
    if rope_type == "default":
        return RopeParameters(rotary_dim, interleaved, rope_theta=theta)
    if rope_type == "dynamic" and rotary_dim < 4:
        raise ModelError(f"config.json: rope type 'dynamic' needs at least 4 rotated dimensions, not {rotary_dim}")
    longest = c.integer("max_position_embeddings")
    original = longest
    if rope_type in ("llama3", "yarn", "longrope"):
        key = "original_max_position_embeddings"
        original = c.optional_integer(key) or parameters.optional_integer(key) or longest
        if original < 2:
            raise ModelError(f"rope parameters: {key} must be at least 2, not {original}")
    factor = parameters.optional("factor", 0) or (longest / original if rope_type in ("yarn", "longrope") else 1.0)
    if rope_type in ("linear", "dynamic") and factor < 1:
        raise ModelError(f"rope parameters: factor must be at least 1, not {factor:g}")
    low, high = parameters.optional("low_freq_factor", 0) or 1.0, parameters.optional("high_freq_factor", 0) or 4.0
    if rope_type == "llama3" and low == high:
        raise ModelError(f"rope parameters: low_freq_factor and high_freq_factor must differ, but are both {low:g}")
    return RopeParameters(
        rotary_dim,
        interleaved,
        rope_type=rope_type,
        rope_theta=theta,
        factor=factor,
        max_position_embeddings=longest,
        original_max_position_embeddings=original,
        low_freq_factor=low,
        high_freq_factor=high,
        beta_fast=parameters.optional("beta_fast", 0) or 32.0,
        beta_slow=parameters.optional("beta_slow", 0) or 1.0,
        truncate=parameters.flag("truncate"),
        short_factor=_factors(parameters, "short_factor", rotary_dim) if rope_type == "longrope" else (),
        long_factor=_factors(parameters, "long_factor", rotary_dim) if rope_type == "longrope" else (),
        attention_factor=_attention_factor(parameters, rope_type, factor, original),
    )


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """How much sharper attention gets where yarn stretches by `factor` (Peng et al., 2023, eq. 22)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _given(c: Fields, kind: str) -> Fields:
    """The parameters of layers of `kind`, from whichever spelling is there."""
    parameters = c.object("rope_parameters")
    if parameters:
        nested = any(isinstance(value, Mapping) for value in parameters.values())
        return Fields(Fields(parameters, {}).object(kind) if nested else parameters, _DEFAULTS)
    if kind == "sliding_attention" and c.get("rope_local_base_freq") is not None:
        return Fields({}, _DEFAULTS)  # Gemma 3's local layers are never stretched
    return Fields(c.object("rope_scaling"), _DEFAULTS)


def _either(parameters: Fields, c: Fields, name: str, otherwise: float, lower: float, upper: float = math.inf) -> float:
    """A number that may stand in either, from `lower` to `upper`."""
    inner = "rope_theta" if name == "rope_local_base_freq" else name
    if parameters.get(inner) is not None:
        return parameters.number(inner, lower, upper)
    return otherwise if c.get(name) is None else c.number(name, lower, upper)


def _attention_factor(parameters: Fields, rope_type: str, factor: float, original: int) -> float:
    if rope_type not in ("yarn", "longrope"):
        return 1.0
    if (stated := parameters.optional("attention_factor")) is not None:
        return stated
    if rope_type == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    mscale, all_dim = parameters.optional("mscale", 0), parameters.optional("mscale_all_dim", 0)
    if mscale and all_dim:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
    return yarn_mscale(factor)


def _factors(parameters: Fields, name: str, rotary_dim: int) -> tuple[float, ...]:
    factors = parameters.get(name)
    if not isinstance(factors, list | tuple) or len(factors) != -(-rotary_dim // 2):
        raise ModelError(f"rope parameters: {name} must be a list of {-(-rotary_dim // 2)} numbers, one for each pair")
    return tuple(Fields({name: factor}, {}).number(name, MIN_POSITIVE) for factor in factors)
