"""Matrices as compressed-tensors stores them.

weight_packed        integers packed into int32, or pairs of fp4; weight_shape holds the unpacked shape
weight               instead of weight_packed, one byte for each element: int8, float8_e4m3fn
weight_scale         [outputs, groups], [outputs, 1], [1], or one scale for each block of rows and columns
weight_zero_point    for asymmetric integers; int8, or packed along the outputs into int32
weight_global_scale  for NVFP4: divisor of the scales
weight_g_idx         group of each column, if groups are not consecutive columns
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch

from stoker_common.errors import WeightsError
from stoker_engine.architectures.quantization.compressed_tensors import CompressedTensors, Scheme
from stoker_engine.architectures.stored_formats import GroupFormat
from stoker_engine.kernels.group_blocks import implied_zero
from stoker_engine.quant.checkpoints.components import (
    OF_ACTIVATIONS,
    components,
    log_activations,
    needed,
    refuse_others,
)
from stoker_engine.quant.checkpoints.grouped_matrix import (
    Bytes,
    Grid,
    GroupedMatrix,
    Packed,
    Pairs,
    Values,
    check_sizes,
    dtype_name,
    is_integer,
    scale_of,
    scale_of_all,
)
from stoker_engine.quant.checkpoints.module import Tensors
from stoker_engine.quant.checkpoints.packed_integers import words_of

_PARTS: Final = (
    "weight", "weight_packed", "weight_shape", "weight_scale", "weight_zero_point", "weight_global_scale",
    "weight_g_idx", *OF_ACTIVATIONS,
)  # fmt: skip
_BYTES: Final[dict[torch.dtype | None, tuple[str, ...]]] = {
    torch.int8: ("uint2", "uint3", "uint4", "uint8", "int8"),
    torch.float8_e4m3fn: ("fp8_e4m3",),
}


def find_modules(config: CompressedTensors, tensors: Tensors) -> dict[str, GroupedMatrix]:
    """Return the quantized matrices among `tensors`, by module name.

    Raises:
        WeightsError: tensors of a matrix are missing or inconsistent.
    """
    found = {}
    for name, parts in components(tensors.names(), _PARTS).items():
        if "weight_packed" not in parts and "weight_scale" not in parts:
            if "weight" not in parts or tensors.dtype(parts["weight"]) not in _BYTES:
                continue  # unquantized
            needed(name, parts, "weight_scale")
        scheme = config.scheme_of(name)
        if scheme is None:
            raise WeightsError(
                f"{name} is quantized, but not according to quantization_config; download the model again"
            )
        found[name] = _matrix(name, parts, scheme, tensors)
    log_activations(config.activations, (module.format for module in found.values()))
    return found


def _matrix(name: str, parts: dict[str, str], scheme: Scheme, tensors: Tensors) -> GroupedMatrix:
    scale_name = needed(name, parts, "weight_scale")
    scale = scale_of(tensors, scale_name)
    if scale == "e8m0" and scheme.format.scale != "e8m0":
        raise WeightsError(f"{scale_name} holds uint8, which is not valid for scales of {scheme.format.name}")
    shape, codes = _codes(name, parts, scheme, tensors)
    used = ["weight_packed" if "weight_packed" in parts else "weight"]
    if scheme.format.row_scale:
        used.append("weight_global_scale")
    refuse_others(name, parts, (*used, "weight_shape", "weight_scale", "weight_zero_point", "weight_g_idx"))
    order = _order(name, parts, scheme.format, shape[-1], tensors)
    format = replace(scheme.format, scale=scale, in_order_of="columns" if order is None else "groups")
    format = format.for_rows(shape[-1])
    groups = format.groups(shape[-1])
    scales = Grid.of(tensors, scale_name, shape, scheme.rows, groups)
    row_scale = None
    if format.row_scale:
        row_scale = scale_of_all(tensors, needed(name, parts, "weight_global_scale"), shape)
    zeros = _zeros(name, parts, scheme, shape, tensors)
    return GroupedMatrix(name, shape, format, frozenset(parts.values()), codes, scales, zeros, row_scale, True, order)


def _codes(name: str, parts: dict[str, str], scheme: Scheme, tensors: Tensors) -> tuple[torch.Size, Values]:
    """Return the matrix's shape, and a reader of its codes."""
    code, bits = scheme.format.code, scheme.bits
    if "weight_packed" not in parts:
        weight = needed(name, parts, "weight")
        shape, dtype = tensors.shape(weight), tensors.dtype(weight)
        check_sizes(weight, shape)
        if code not in _BYTES.get(dtype, ()):
            raise WeightsError(
                f"{weight} holds {dtype_name(dtype)}, but config.json states {code}; download the model again"
            )
        shift = 1 << (bits - 1) if scheme.format.zero else implied_zero(code)
        return shape, Bytes(tensors, weight, shift, bits if shift else 8)
    packed = parts["weight_packed"]
    stored, dtype = tensors.shape(packed), tensors.dtype(packed)
    check_sizes(packed, stored)
    if code == "fp4" and dtype == torch.uint8:
        return torch.Size((*stored[:-1], stored[-1] * 2)), Pairs(tensors, packed)
    if code in ("fp4", "fp8_e4m3") or dtype != torch.int32:
        raise WeightsError(
            f"{packed} holds {dtype_name(dtype)}, but config.json states {code}; download the model again"
        )
    inner = _inner(name, parts, stored, bits, tensors)
    padded = words_of(inner, bits, False) != stored[-1]
    if padded and words_of(inner, bits, True) != stored[-1]:
        raise WeightsError(
            f"{packed} has {stored[-1]} words in a row, which does not match {inner} integers of {bits} bits"
        )
    shift = 0 if scheme.format.zero else implied_zero(code) - (1 << (bits - 1))
    return torch.Size((*stored[:-1], inner)), Packed(tensors, packed, bits, inner, padded, shift=shift % 256)


def _inner(name: str, parts: dict[str, str], packed: torch.Size, bits: int, tensors: Tensors) -> int:
    """Return the number of elements of a row: from weight_shape, or else from the number of packed words."""
    if "weight_shape" not in parts:
        return packed[-1] * 32 // bits
    stated = parts["weight_shape"]
    if tensors.shape(stated).numel() not in (2, 3) or not is_integer(tensors, stated):
        raise WeightsError(f"{stated} is not a valid shape; download the model again")
    *_, outputs, inner = tensors.read(stated).flatten().tolist()
    if outputs != packed[-2] or inner < 1:
        raise WeightsError(f"{name} has weight_shape ({outputs}, {inner}), but {packed[-2]} packed rows")
    return int(inner)


def _zeros(name: str, parts: dict[str, str], scheme: Scheme, shape: torch.Size, tensors: Tensors) -> Values | None:
    """Return a reader of the zero points; None for symmetric quantization."""
    if not scheme.format.zero:
        if (stated := parts.get("weight_zero_point")) and bool(tensors.read(stated).any()):
            raise WeightsError(
                f"{stated} holds zero points, but config.json states symmetric quantization; download the model again"
            )
        return None
    zero_points = needed(name, parts, "weight_zero_point")
    *stack, outputs, inner = shape
    groups, dtype = scheme.format.groups(inner), tensors.dtype(zero_points)
    if dtype == torch.int8:
        return Grid.of(tensors, zero_points, shape, scheme.rows, groups, scheme.bits)
    needed_shape = (*stack, words_of(outputs, scheme.bits, False), groups)
    padded = tensors.shape(zero_points) != needed_shape
    if padded:
        needed_shape = (*stack, words_of(outputs, scheme.bits, True), groups)
    if dtype != torch.int32 or tensors.shape(zero_points) != needed_shape or scheme.rows != 1:
        raise WeightsError(
            f"{zero_points} is {dtype_name(dtype)} {tuple(tensors.shape(zero_points))}, which does not match a matrix "
            f"of shape {tuple(shape)}; download the model again"
        )
    return Packed(tensors, zero_points, scheme.bits, outputs, padded, dim=-2)


def _order(name: str, parts: dict[str, str], format: GroupFormat, inner: int, tensors: Tensors) -> torch.Tensor | None:
    """Return the columns in the order of their groups, int64 [inner]; None if they are already in that order,
    or if no column has a group index (weight_g_idx is missing or all its values are -1).

    Raises:
        WeightsError: group indices are invalid, or groups have the wrong size.
    """
    if "weight_g_idx" not in parts:
        return None
    stated = parts["weight_g_idx"]
    if tensors.shape(stated) != (inner,) or not is_integer(tensors, stated):
        raise WeightsError(
            f"{stated} has shape {tuple(tensors.shape(stated))}, but {name} needs a group index for {inner} columns"
        )
    groups, order = tensors.read(stated).sort(stable=True)
    in_order = torch.arange(inner) // (format.group or inner)
    if bool((groups == -1).all()) or (torch.equal(order, torch.arange(inner)) and torch.equal(groups.long(), in_order)):
        return None
    if format.in_order_of != "groups" or not torch.equal(groups.long(), in_order):
        raise WeightsError(f"{stated} does not divide {inner} columns into groups of {format.group or inner}")
    return order
