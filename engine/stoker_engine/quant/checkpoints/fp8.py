"""FP8 matrices as AutoFP8, DeepSeek, fbgemm and Model Optimizer store them.

    weight              float8_e4m3fn or float8_e5m2 [outputs, inner]
    weight_scale        factors of the elements: one scale for the matrix, for each row, or for each block
    weight_scale_inv    other name of weight_scale, with the same meaning

Stacks of experts, [count, outputs, inner], may have names without ``.weight``: ``gate_up_proj`` and
``gate_up_proj_scale_inv``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import torch

from stoker_common.errors import WeightsError
from stoker_engine.architectures.quantization.fp8 import FP8
from stoker_engine.architectures.stored_formats import Code
from stoker_engine.quant.checkpoints.components import (
    OF_ACTIVATIONS,
    components,
    log_activations,
    needed,
    refuse_others,
)
from stoker_engine.quant.checkpoints.grouped_matrix import Bytes, Grid, GroupedMatrix, check_sizes, dtype_name, scale_of
from stoker_engine.quant.checkpoints.module import Tensors

_SCALES: Final = ("weight_scale", "weight_scale_inv")
_SCALES_OF_STACKS: Final = ("_scale", "_scale_inv")
_CODES: Final[dict[torch.dtype | None, Code]] = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}


def find_modules(config: FP8, tensors: Tensors) -> dict[str, GroupedMatrix]:
    """Return the quantized matrices among `tensors`, by module name.

    Raises:
        WeightsError: tensors of a matrix are missing or inconsistent.
    """
    found = {}
    for name, parts in _found(tensors):
        weight = parts["weight"]
        if (dtype := tensors.dtype(weight)) not in _CODES:
            if not any(scale in parts for scale in _SCALES):
                continue  # unquantized
            raise WeightsError(
                f"{weight} has scales and holds {dtype_name(dtype)}; supported are float8_e4m3fn and float8_e5m2"
            )
        scale = next((scale for scale in _SCALES if scale in parts), _SCALES[0])
        refuse_others(name, parts, ("weight", scale))
        found[name] = _matrix(name, config, parts, needed(name, parts, scale), tensors)
    if found:
        log_activations(config.activations, (module.format for module in found.values()))
    return found


def _found(tensors: Tensors) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the modules that have a weight and the stacks that have scales, with the names of their tensors by part.

    Raises:
        WeightsError: a module has scales but no weight.
    """
    names = tensors.names()
    for name, parts in components(names, ("weight", *_SCALES, *OF_ACTIVATIONS)).items():
        if "weight" not in parts and any(scale in parts for scale in _SCALES):
            raise WeightsError(f"{name} has scales but no weight; download the model again")
        if "weight" in parts:
            yield name, parts
    matrices = frozenset(names)
    for name in names:
        for suffix in _SCALES_OF_STACKS:
            stack = name.removesuffix(suffix)
            if stack != name and stack in matrices and not stack.endswith(".weight"):
                yield stack, {"weight": stack, "weight_scale": name}


def _matrix(name: str, config: FP8, parts: dict[str, str], scale: str, tensors: Tensors) -> GroupedMatrix:
    weight = parts["weight"]
    shape = tensors.shape(weight)
    check_sizes(weight, shape)
    *stack, outputs, inner = shape
    code = _CODES[tensors.dtype(weight)]
    format = replace(
        config.format,
        code=code,
        scale=scale_of(tensors, scale),
        quantized_activations=config.format.quantized_activations and code == "fp8_e4m3",
    ).for_rows(inner)
    stored = [size for size in tensors.shape(scale) if size != 1]
    rows = config.rows
    blocks = [*stack, -(-outputs // (rows or outputs)), format.groups(inner)]
    if stored != [size for size in blocks if size != 1]:
        # Some modules of a checkpoint with block scales may have a single scale, or one for each row.
        format = replace(format, group=0).for_rows(inner)
        rows = 0 if stored == [size for size in stack if size != 1] else 1
    return GroupedMatrix(
        name,
        shape,
        format,
        frozenset(parts.values()),
        Bytes(tensors, weight),
        Grid.of(tensors, scale, shape, rows, format.groups(inner)),
    )
