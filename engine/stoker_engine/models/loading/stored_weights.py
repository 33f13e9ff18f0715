"""The weights that keep their file's block format, and the linear methods for them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

import torch

from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.architectures.stored_formats import GGUFFormat, StoredFormat
from stoker_engine.architectures.weight_names import EVERY_NAME, WeightNames
from stoker_engine.kernels.cpu.library import cpu_library
from stoker_engine.kernels.select import lack_of_triton
from stoker_engine.models.loading.weight_source import WeightSource
from stoker_engine.quant.blocks import Blocks
from stoker_engine.quant.method import LinearMethod
from stoker_engine.sizing.packed_weights import formats_on_gpus
from stoker_engine.sizing.weight_formats import ALL_NUMBERS, WeightFormats

logger = logging.getLogger(__name__)

#: Suffix of a parameter that latent attention uses transposed, which blocks along rows do not allow.
_TRANSPOSED: Final = ".k_b.weight"


def stored_weights(
    source: WeightSource, weight_names: WeightNames, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> WeightFormats:
    """Return the formats of the weights in memory, for a model of `dtype` on `device`. Weights keep their blocks if
    possible; others are dequantized while loading."""
    formats = {name: _usable(source.stored(name), dtype, device) for name in source.names()}
    if not any(formats.values()):
        return ALL_NUMBERS
    by_param: dict[str, StoredFormat | None] = {}
    for name, stored in formats.items():
        canonical = weight_names.canonical(name)
        destination = weight_names.destination(canonical, EVERY_NAME, config)
        if destination is None or weight_names.is_ignored(canonical, config):
            continue
        whole_rows = len(source.shape(name)) > 1 and destination.moves_rows
        stays = whole_rows and not any(param_name.endswith(_TRANSPOSED) for param_name in destination.param_names)
        by_param.update(dict.fromkeys(destination.param_names, stored if stays else None))
    found = WeightFormats.of(by_param)
    dequantized = {name for name, stored in by_param.items() if stored is not None and found.stored(name) is None}
    if layers := {name.split(".")[1] for name in dequantized}:
        logger.info("dequantizing the experts of %d layers, since their formats differ", len(layers))
    if device.type == "cpu" or not any(isinstance(stored, GGUFFormat) for stored in formats.values()):
        return found
    kept = formats_on_gpus(found)
    if others := found.counts - kept.counts:
        counts = ", ".join(f"{count} of type {name}" for name, count in sorted(others.items()))
        logger.info("dequantizing weights that GPUs do not keep in blocks: %s", counts)
    return kept


def _usable(stored: StoredFormat | None, dtype: torch.dtype, device: torch.device) -> StoredFormat | None:
    """Return `stored` if weights are to keep this format in memory, or None if they are to be dequantized."""
    if isinstance(stored, GGUFFormat):
        # Without a kernel the weights would be dequantized in every step; blocks that are not smaller save nothing.
        smaller = stored.bytes < stored.numbers * dtype.itemsize
        return stored if smaller and _has_kernels(dtype, device) else None
    return stored


def _has_kernels(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `device` has kernels for weights in blocks. Without GPUs here, kernels are compiled for elsewhere."""
    if device.type == "cpu":
        return cpu_library(device, dtype) is not None
    return not torch.cuda.is_available() or lack_of_triton(device) is None


def with_formats(
    formats: WeightFormats, otherwise: Callable[[Sequence[str]], LinearMethod]
) -> Callable[[Sequence[str]], LinearMethod]:
    """Return a factory as for `Build.linear` that uses `Blocks` for weights stored in blocks."""

    def method(param_names: Sequence[str]) -> LinearMethod:
        stored = formats.stored(param_names[0])
        return otherwise(param_names) if stored is None else Blocks(stored)

    return method
