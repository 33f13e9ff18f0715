"""Packages that compute attention where they are installed, and what they can."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch

from stoker_common.errors import ArgumentError
from stoker_engine.architectures.decoder_config import AttentionConfig
from stoker_engine.attention.backend import AttentionBackend

FLAG: Final = "--attention-backend"

#: flash-attn: what a block's tokens are a multiple of, and a head's size, and the most of that.
_BLOCK_SIZE: Final = 256
_HEAD_STEP: Final = 8
_LARGEST_HEAD: Final = 256
#: flashinfer: sizes of heads that its kernels are compiled for.
_HEADS: Final = (64, 128, 256)


@dataclass(frozen=True)
class AttentionRequirements:
    """What a model asks of a backend.

    Attributes:
        layers: those that attend.
        dtype: of queries, and of keys and values as they are computed.
        stored: of keys and values as they are stored.
        block_size: tokens in a block.
    """

    layers: Sequence[AttentionConfig]
    dtype: torch.dtype
    stored: str
    block_size: int


def by_package(
    name: Literal["flash-attn", "flashinfer"], requirements: AttentionRequirements, lacks: str | None
) -> AttentionBackend:
    """The backend that a package computes.

    Args:
        lacks: why Triton's kernels, which store, cannot run here.

    Raises:
        ArgumentError: it cannot serve this model here.
    """
    package = name.replace("-", "_")
    if importlib.util.find_spec(package) is None:
        lacks = f"the package {package} is not installed"
    if lacks is None:
        lacks = _lack_of_flash_attn(requirements) if name == "flash-attn" else _lack_of_flashinfer(requirements)
    if lacks is not None:
        raise ArgumentError(FLAG, f"{name} cannot run here: {lacks}; choose auto, or sdpa")
    module = importlib.import_module(package)
    if name == "flash-attn":
        from stoker_engine.attention.flash_attn import FlashAttnBackend

        return FlashAttnBackend(module.flash_attn_varlen_func)
    from stoker_engine.attention.flashinfer import FlashInferBackend

    return FlashInferBackend(module.BatchPrefillWithPagedKVCacheWrapper)


def _lack_of_packages(requirements: AttentionRequirements) -> str | None:
    if requirements.dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 or float16, not in {dtype_name(requirements.dtype)}"
    if requirements.stored != dtype_name(requirements.dtype):
        return f"it reads keys and values in the model's dtype, not in {requirements.stored} (--kv-cache-dtype)"
    for layer in requirements.layers:
        if layer.latent is not None:
            return "it has no latent attention"
        if layer.sinks:
            return "it has no sinks"
        if layer.value_head_dim not in (None, layer.head_dim):
            return f"its keys and values have one size, not {layer.head_dim} and {layer.value_head_dim}"
    return None


def _lack_of_flash_attn(requirements: AttentionRequirements) -> str | None:
    if (lacks := _lack_of_packages(requirements)) is not None:
        return lacks
    sizes = sorted({layer.head_dim for layer in requirements.layers})
    if odd := [size for size in sizes if size % _HEAD_STEP or size > _LARGEST_HEAD]:
        return f"its heads have multiples of {_HEAD_STEP} up to {_LARGEST_HEAD}, not {odd[0]}"
    if requirements.block_size % _BLOCK_SIZE:
        return f"its blocks have {_BLOCK_SIZE} tokens, not {requirements.block_size} (--block-size)"
    return None


def _lack_of_flashinfer(requirements: AttentionRequirements) -> str | None:
    if (lacks := _lack_of_packages(requirements)) is not None:
        return lacks
    sizes = sorted({layer.head_dim for layer in requirements.layers})
    if odd := [size for size in sizes if size not in _HEADS]:
        return f"its heads have {', '.join(map(str, _HEADS))} numbers, not {odd[0]}"
    if any(layer.alibi_slopes is not None for layer in requirements.layers):
        return "it has no slopes for distances but its own (ALiBi)"
    return None


def dtype_name(dtype: torch.dtype) -> str:
    """Its name without the module's."""
    return str(dtype).removeprefix("torch.")
