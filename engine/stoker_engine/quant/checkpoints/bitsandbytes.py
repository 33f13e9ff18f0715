"""bitsandbytes matrices: 8 bits with a scale for each row, or 4 bits with a scale for each block of elements.

8 bits:

M.weight           int8 [outputs, inner]
M.SCB              float32 [outputs]     127 × the scale of each row
M.weight_format    uint8, optional       0: row-major

4 bits:

M.weight           [n, 1]: 4-bit codes in row-major order, the first of two in the high half of a byte; the dtype may
                   be wider than uint8: the tensor is read as bytes
M.weight.absmax    float32 [blocks]      scales; or quantized scales in uint8:
                                         nested_quant_map[absmax] × nested_absmax + nested_offset, with one
                                         nested_absmax for nested_blocksize scales
M.weight.quant_map, .nested_absmax, .nested_quant_map
M.weight.quant_state.bitsandbytes__nf4   JSON: shape, blocksize, nested_blocksize, nested_offset …
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from stoker_common.errors import ModelError, WeightsError
from stoker_engine.architectures.config_fields import Fields
from stoker_engine.architectures.quantization.bitsandbytes import BitsAndBytes, nf4_format, unfit
from stoker_engine.architectures.stored_formats import GroupFormat
from stoker_engine.kernels.group_blocks import values
from stoker_engine.quant.checkpoints.components import components, needed
from stoker_engine.quant.checkpoints.grouped_matrix import Bytes, GroupedMatrix, check_sizes
from stoker_engine.quant.checkpoints.module import Part, Tensors
from stoker_engine.quant.checkpoints.tensor_checks import check_dimensions, check_tensor

_STATE: Final = ".weight.quant_state.bitsandbytes__"
_STORAGES: Final = (torch.uint8, torch.int8, torch.bfloat16, torch.float16, torch.float32, torch.float64)

#: Largest valid size of the JSON in a quant_state tensor, in bytes.
_LONGEST_STATE: Final = 4096


def find_modules(config: BitsAndBytes, tensors: Tensors) -> dict[str, GroupedMatrix]:
    """Return all quantized matrices of a checkpoint, by module name.

    Raises:
        WeightsError: tensors of a matrix are missing or inconsistent.
    """
    names = frozenset(tensors.names())
    of_rows = components(names, ("weight", "SCB", "weight_format"))
    found = {module: _rows(module, parts, tensors) for module, parts in of_rows.items() if "SCB" in parts}
    for name in names:
        module, is_state, kind = name.partition(_STATE)
        if is_state:
            known = ("", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
            parts = {f"weight{end}": full for end in known if (full := f"{module}.weight{end}") in names}
            found[module] = _blocks(module, parts, name, kind, tensors)
    return found


@dataclass(frozen=True)
class _RowScales:
    """Row scales of an 8-bit matrix; see `Values`."""

    tensors: Tensors
    name: str

    def read(self, part: Part) -> torch.Tensor:
        """See `Values`."""
        return (self.tensors.read(self.name, (part[0],)) / 127).unsqueeze(-1)


@dataclass(frozen=True)
class _Halves:
    """4-bit codes of a matrix with rows of `inner` elements; reads whole rows and slices them. See `Values`.

    Attributes:
        in_element: number of codes in one element of the stored tensor.
    """

    tensors: Tensors
    name: str
    inner: int
    in_element: int

    def read(self, part: Part) -> torch.Tensor:
        """See `Values`."""
        outputs, columns = part
        size = self.in_element  # divides 16, of which `inner` is a multiple: so each row starts at an element
        first, last = outputs.start * self.inner, outputs.stop * self.inner
        elements = self.tensors.read(self.name, (slice(first // size, -(-last // size)), slice(0, 1)))
        octets = elements.contiguous().view(torch.uint8).flatten()
        codes = torch.stack((octets >> 4, octets & 15), dim=-1).flatten()[: last - first]
        return codes.view(-1, self.inner)[:, columns]


@dataclass(frozen=True)
class _BlockScales:
    """Scales of groups, each of which is a block or a part of one; see `Values`.

    Attributes:
        name: name of the tensor of codes.
        inner: number of elements of a row.
        group: number of elements of a group.
        block: number of elements of a block.
        nested: number of blocks whose quantized scales share a second-level scale; 0 if scales are not quantized.
        offset: added to dequantized scales; unused if scales are not quantized.
    """

    tensors: Tensors
    name: str
    inner: int
    group: int
    block: int
    nested: int
    offset: float

    def read(self, part: Part) -> torch.Tensor:
        """See `Values`."""
        outputs, groups = part
        first, last = outputs.start * self.inner, outputs.stop * self.inner
        blocks = torch.arange(first, last, self.group).view(-1, self.inner // self.group)[:, groups] // self.block
        start = first // self.block
        return self._of_blocks(start, -(-last // self.block))[blocks - start]

    def _of_blocks(self, first: int, last: int) -> torch.Tensor:
        """Return the scales of blocks `first` … `last - 1`, float32."""
        scales = self.tensors.read(f"{self.name}.absmax", (slice(first, last),))
        if not self.nested:
            return scales
        shared = slice(first // self.nested, -(-last // self.nested))
        of_blocks = self.tensors.read(f"{self.name}.nested_absmax", (shared,))
        which = torch.arange(first, last) // self.nested - shared.start
        return self.tensors.read(f"{self.name}.nested_quant_map")[scales.long()] * of_blocks[which] + self.offset


def _rows(name: str, parts: dict[str, str], tensors: Tensors) -> GroupedMatrix:
    weight, scales = needed(name, parts, "weight"), parts["SCB"]
    check_dimensions(tensors, weight, 2)
    shape = tensors.shape(weight)
    check_sizes(name, shape)
    check_tensor(tensors, weight, shape, torch.int8)
    check_tensor(tensors, scales, shape[:1], torch.float32)
    layout = parts.get("weight_format")
    if layout is not None and bool(tensors.read(layout).any()):
        raise WeightsError(f"{layout} is not 0: weights that are not stored by rows are not supported; save them again")
    format = GroupFormat("int8", 0, "float32")
    codes, of_rows = Bytes(tensors, weight), _RowScales(tensors, scales)
    return GroupedMatrix(name, shape, format, frozenset(parts.values()), codes, of_rows)


def _blocks(name: str, parts: dict[str, str], state_name: str, kind: str, tensors: Tensors) -> GroupedMatrix:
    if kind != "nf4":
        raise WeightsError(f"{name} is stored as {kind[:20]!r}, not as nf4; quantize the model again to nf4 or 8 bits")
    weight, nested = needed(name, parts, "weight"), "weight.nested_absmax" in parts
    state = Fields(_state(state_name, tensors), {}, file=state_name)
    try:
        shape = torch.Size(state.items("shape", int))
        block = state.integer("blocksize", 32, 1 << 16)
        shared = state.integer("nested_blocksize", 1, 1 << 16) if nested else 0
        offset = state.number("nested_offset") if nested else 0.0
    except ModelError as error:
        raise WeightsError(str(error)) from None
    if len(shape) != 2 or min(shape) < 1 or max(shape) > 1 << 31:
        raise WeightsError(
            f"{state_name} has a shape of {tuple(shape)!r:.50}, which is not a matrix; download the file again"
        )
    inner, numbers = shape[1], shape.numel()
    if (format := nf4_format(inner, block)) is None:
        raise WeightsError(f"{name} has rows of {inner} values, {unfit(block)}")
    check_tensor(tensors, weight, tensors.shape(weight), *_STORAGES)
    in_element = 2 * (tensors.dtype(weight) or torch.uint8).itemsize
    check_tensor(tensors, weight, (-(-numbers // in_element), 1), *_STORAGES)
    blocks = -(-numbers // block)
    scales = needed(name, parts, "weight.absmax")
    check_tensor(tensors, scales, (blocks,), torch.uint8 if nested else torch.float32)
    check_tensor(tensors, needed(name, parts, "weight.quant_map"), (16,), torch.float32)
    if not torch.allclose(tensors.read(parts["weight.quant_map"]), values("nf4"), rtol=0, atol=1e-6):
        raise WeightsError(f"{parts['weight.quant_map']} is not the table of nf4; download the file again")
    if nested:
        check_tensor(tensors, parts["weight.nested_absmax"], (-(-blocks // shared),), torch.float32)
        check_tensor(tensors, needed(name, parts, "weight.nested_quant_map"), (256,), torch.float32)
    codes = _Halves(tensors, weight, inner, in_element)
    of_groups = _BlockScales(tensors, weight, inner, format.group or inner, block, shared, offset)
    return GroupedMatrix(name, shape, format, frozenset({*parts.values(), state_name}), codes, of_groups)


def _state(name: str, tensors: Tensors) -> Mapping[str, Any]:
    stored = tensors.shape(name)
    try:
        if len(stored) != 1 or stored[0] > _LONGEST_STATE or tensors.dtype(name) != torch.uint8:
            raise ValueError
        state = json.loads(bytes(tensors.read(name).tolist()))
    except (ValueError, RecursionError):
        raise WeightsError(f"{name} does not hold JSON; download the file again") from None
    if not isinstance(state, Mapping):
        raise WeightsError(f"{name} does not hold a JSON object; download the file again")
    return state
