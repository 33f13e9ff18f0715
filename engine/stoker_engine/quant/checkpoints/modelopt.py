"""Matrices as Model Optimizer stores them: FP8 (see `fp8`) and NVFP4, which has these tensors:

weight            uint8 [outputs, inner / 2], pairs of fp4
weight_scale      float8_e4m3fn [outputs, inner / 16]
weight_scale_2    float32, float16 or bfloat16: one factor of all scales of a matrix
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Final

import torch

from stoker_common.errors import WeightsError
from stoker_engine.architectures.quantization.fp8 import FP8
from stoker_engine.architectures.quantization.modelopt import NVFP4
from stoker_engine.quant.checkpoints import fp8
from stoker_engine.quant.checkpoints.components import OF_ACTIVATIONS, components, needed
from stoker_engine.quant.checkpoints.grouped_matrix import (
    Grid,
    GroupedMatrix,
    Pairs,
    check_sizes,
    scale_of,
    scale_of_all,
)
from stoker_engine.quant.checkpoints.module import Tensors

logger = logging.getLogger(__name__)

_PARTS: Final = ("weight", "weight_scale", "weight_scale_2", *OF_ACTIVATIONS)


def find_modules(config: FP8 | NVFP4, tensors: Tensors) -> dict[str, GroupedMatrix]:
    """Return the quantized matrices among `tensors`, by module name.

    Raises:
        WeightsError: tensors of a matrix are missing or inconsistent.
    """
    if isinstance(config, FP8):
        return fp8.find_modules(config, tensors)
    found = {}
    for name, parts in components(tensors.names(), _PARTS).items():
        if "weight" not in parts or tensors.dtype(parts["weight"]) != torch.uint8:
            if "weight_scale" in parts:
                raise WeightsError(f"{name} has scales but no uint8 weight; download the model again")
            continue  # unquantized
        found[name] = _matrix(name, config, parts, tensors)
    if found:
        logger.info("activations are not quantized, although config.json states %s", config.activations)
    return found


def _matrix(name: str, config: NVFP4, parts: dict[str, str], tensors: Tensors) -> GroupedMatrix:
    stored = tensors.shape(parts["weight"])
    check_sizes(parts["weight"], stored)
    shape = torch.Size((*stored[:-1], stored[-1] * 2))
    scale, second = needed(name, parts, "weight_scale"), needed(name, parts, "weight_scale_2")
    format = replace(config.format, scale=scale_of(tensors, scale))
    return GroupedMatrix(
        name,
        shape,
        format,
        frozenset(parts.values()),
        Pairs(tensors, parts["weight"]),
        Grid.of(tensors, scale, shape, 1, format.groups(shape[-1])),
        row_scale=scale_of_all(tensors, second, shape),
    )
