"""Attention backends of external packages, and what each of them supports."""

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

#: Modules of the packages.
_MODULES: Final = {"flash-attn": "flash_attn", "flashinfer": "flashinfer", "fa3": "flash_attn_interface"}
#: Packages whose name differs from the module's.
_PACKAGES: Final = {"fa3": "tokenspeed-fa3"}

#: flash-attn: block size must be a multiple of this, in tokens.
_BLOCK_SIZE: Final = 256
#: flash-attn and fa3: head size must be a multiple of this, in elements; maximum head size.
_HEAD_STEP: Final = 8
_LARGEST_HEAD: Final = 256
#: flashinfer: head sizes that its kernels are compiled for, in elements.
_HEADS: Final = (64, 128, 256)


@dataclass(frozen=True)
class AttentionRequirements:
    """Requirements of a model on an attention backend.

    Attributes:
        layers: configs of the layers that have attention.
        dtype: dtype of queries, and of keys and values before they are stored.
        stored: name of the dtype of keys and values in the cache.
        block_size: tokens per block.
    """

    layers: Sequence[AttentionConfig]
    dtype: torch.dtype
    stored: str
    block_size: int


def by_package(
    name: Literal["flash-attn", "flashinfer", "fa3"], requirements: AttentionRequirements, lacks: str | None
) -> AttentionBackend:
    """Return the backend that uses the package called `name`.

    Args:
        lacks: why the package's kernels or the Triton kernels, which store keys and values, cannot run on the device;
            None: they can.

    Raises:
        ArgumentError: the package is not installed, or does not support this model or device.
    """
    package = _MODULES[name]
    if importlib.util.find_spec(package) is None:
        lacks = f"the package {_PACKAGES.get(name, package)} is not installed"
    if lacks is None:
        lacks = _LACKS[name](requirements)
    if lacks is not None:
        raise ArgumentError(FLAG, f"{name} is not available: {lacks}; choose auto or sdpa")
    module = importlib.import_module(package)
    if name == "fa3":
        from stoker_engine.attention.fa3 import FA3Backend

        return FA3Backend(module.flash_attn_with_kvcache)
    if name == "flash-attn":
        from stoker_engine.attention.flash_attn import FlashAttnBackend

        return FlashAttnBackend(module.flash_attn_varlen_func)
    from stoker_engine.attention.flashinfer import FlashInferBackend

    return FlashInferBackend(module.BatchPrefillWithPagedKVCacheWrapper)


def _lack_of_packages(requirements: AttentionRequirements) -> str | None:
    if requirements.dtype not in (torch.bfloat16, torch.float16):
        return f"it supports bfloat16 and float16, not {dtype_name(requirements.dtype)} (--dtype)"
    if requirements.stored != dtype_name(requirements.dtype):
        return f"it needs keys and values in the model's dtype, not in {requirements.stored} (--kv-cache-dtype)"
    for layer in requirements.layers:
        if layer.latent is not None:
            return "it does not support latent attention"
        if layer.sinks:
            return "it does not support attention sinks"
        if layer.value_head_dim not in (None, layer.head_dim):
            return f"it needs keys and values of equal head size, not {layer.head_dim} and {layer.value_head_dim}"
    return None


def _lack_of_flash_attn(requirements: AttentionRequirements) -> str | None:
    if (lacks := _lack_of_packages(requirements)) is not None:
        return lacks
    if (lacks := _lack_of_head_sizes(requirements)) is not None:
        return lacks
    if requirements.block_size % _BLOCK_SIZE:
        return (
            f"it supports block sizes that are multiples of {_BLOCK_SIZE} tokens, "
            f"not {requirements.block_size} (--block-size)"
        )
    return None


def _lack_of_head_sizes(requirements: AttentionRequirements) -> str | None:
    sizes = sorted({layer.head_dim for layer in requirements.layers})
    if odd := [size for size in sizes if size % _HEAD_STEP or size > _LARGEST_HEAD]:
        return f"it supports head sizes that are multiples of {_HEAD_STEP} up to {_LARGEST_HEAD}, not {odd[0]}"
    return None


def _lack_of_fa3(requirements: AttentionRequirements) -> str | None:
    if (lacks := _lack_of_packages(requirements) or _lack_of_head_sizes(requirements)) is not None:
        return lacks
    for layer in requirements.layers:
        if layer.logits_soft_cap is not None:
            return "it does not support soft caps"
        if layer.alibi_slopes is not None:
            return "it does not support ALiBi"
    return None


def _lack_of_flashinfer(requirements: AttentionRequirements) -> str | None:
    if (lacks := _lack_of_packages(requirements)) is not None:
        return lacks
    sizes = sorted({layer.head_dim for layer in requirements.layers})
    if odd := [size for size in sizes if size not in _HEADS]:
        return f"it supports the head sizes {', '.join(map(str, _HEADS))}, not {odd[0]}"
    if any(layer.alibi_slopes is not None for layer in requirements.layers):
        return "it does not support a model's own ALiBi slopes"
    return None


_LACKS: Final = {"flash-attn": _lack_of_flash_attn, "flashinfer": _lack_of_flashinfer, "fa3": _lack_of_fa3}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the dtype's name without ``torch.``."""
    return str(dtype).removeprefix("torch.")
