"""Rotary embedding parameters of a config, in every spelling.

transformers 5 writes ``rope_parameters`` (one set, or one for each kind of layer). Older files on the hub have
``rope_theta`` and ``rope_scaling``, and several names for the rotated fraction of a head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from stoker_common.errors import ModelError
from stoker_engine.architectures.config_fields import MIN_POSITIVE, Fields

ROPE_TYPES: Final = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")

#: Defaults of rope parameters.
_DEFAULTS: Final = {"type": "default", "truncate": True}


@dataclass(frozen=True)
class RopeParameters:
    """Rotary embedding of one layer, and its scaling to longer contexts.

    Attributes:
        rotary_dim: number of rotated elements at the start of each head; an odd number is rounded up.
        interleaved: pairs are adjacent elements (GPT-J) instead of rotary_dim / 2 apart (GPT-NeoX).
        rope_type: one of `ROPE_TYPES`.
        rope_theta: base of the frequencies.
        factor: scaling factor of the context length.
        max_position_embeddings: context length in tokens before scaling by ``dynamic``.
        original_max_position_embeddings: context length in tokens before scaling by any other type.
        low_freq_factor, high_freq_factor: parameters of ``llama3``.
        beta_fast, beta_slow, truncate: parameters of ``yarn``.
        short_factor, long_factor: parameters of ``longrope``, one per pair.
        attention_factor: factor of cos and sin (``yarn`` and ``longrope``).
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
    """Return the rotary embedding of layers of `kind` with heads of `head_dim` elements.

    Args:
        kind: a name in ``layer_types``; relevant if the kinds have different parameters.
        renamed: the family's names of rope types → names in `ROPE_TYPES`.

    Raises:
        ModelError: the rope type is not supported, or a parameter is missing or out of range.
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
    """Return yarn's attention scaling for a context extended by `factor` (Peng et al., 2023, eq. 22)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _given(c: Fields, kind: str) -> Fields:
    """Return the rope parameters of layers of `kind`, in either spelling."""
    parameters = c.object("rope_parameters")
    if parameters:
        nested = any(isinstance(value, Mapping) for value in parameters.values())
        return Fields(Fields(parameters, {}).object(kind) if nested else parameters, _DEFAULTS)
    if kind == "sliding_attention" and c.get("rope_local_base_freq") is not None:
        return Fields({}, _DEFAULTS)  # Gemma 3's local layers are never scaled
    return Fields(c.object("rope_scaling"), _DEFAULTS)


def _either(parameters: Fields, c: Fields, name: str, otherwise: float, lower: float, upper: float = math.inf) -> float:
    """Return the number `name`, from `lower` to `upper`, of the rope parameters, or else of the config, or else
    `otherwise`."""
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
