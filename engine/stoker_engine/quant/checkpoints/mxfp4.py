"""Stacks of experts in MXFP4, as gpt-oss stores them.

gate_up_proj_blocks    uint8 [count, outputs, inner / 32, 16], pairs of fp4, the low half first
gate_up_proj_scales    uint8 [count, outputs, inner / 32], exponents of powers of two with a bias of 127
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stoker_common.errors import WeightsError
from stoker_engine.architectures.quantization.mxfp4 import MXFP4
from stoker_engine.architectures.stored_formats import GroupFormat
from stoker_engine.quant.checkpoints.components import components, needed
from stoker_engine.quant.checkpoints.grouped_matrix import Grid, check_cut, check_sizes, scale_of
from stoker_engine.quant.checkpoints.module import Part, Tensors


@dataclass(frozen=True)
class MXFP4Stack:
    """See `StoredModule`. A block in the file holds the same codes as a unit of the format (`kernels.group_blocks`), in
    another order. So `rows` reorders halves of bytes without unpacking the codes, which would be slow for large stacks.

    Attributes:
        blocks: name of the tensor of codes.
        scales: scales, by rows and groups.
    """

    name: str
    shape: torch.Size
    format: GroupFormat
    tensors: frozenset[str]
    source: Tensors
    blocks: str
    scales: Grid

    def rows(self, part: Part) -> torch.Tensor:
        """See `StoredModule`."""
        *leading, columns = part
        check_cut(self.name, self.format, columns, self.shape[-1])
        groups = slice(columns.start // 32, columns.stop // 32)
        pairs = self.source.read(self.blocks, (*leading, groups, slice(0, 16)))
        first, second = pairs.unflatten(-1, (2, 8)).unbind(-2)  # elements 0 … 15, and 16 … 31
        units = torch.stack([first & 15 | second << 4, first >> 4 | second & 0xF0], dim=-1)
        return torch.cat([self.scales.read((*leading, groups)), units.flatten(-3)], dim=-1)

    def columns(self) -> torch.Tensor | None:
        """See `StoredModule`."""
        return None


def find_modules(config: MXFP4, tensors: Tensors) -> dict[str, MXFP4Stack]:
    """Return the quantized stacks among `tensors`, by module name.

    Raises:
        WeightsError: tensors of a stack are missing or inconsistent.
    """
    found = {}
    for name, parts in components(tensors.names(), ("blocks", "scales"), joint="_").items():
        blocks, scales = needed(name, parts, "blocks"), needed(name, parts, "scales")
        *stack, groups, bytes_ = tensors.shape(blocks)
        if tensors.dtype(blocks) != torch.uint8 or tensors.dtype(scales) != torch.uint8 or bytes_ != 16:
            raise WeightsError(f"{blocks} and {scales} are not uint8 in blocks of 16; download the model again")
        shape = torch.Size((*stack, groups * 32))
        check_sizes(blocks, shape)
        scale_of(tensors, scales)
        found[name] = MXFP4Stack(
            name,
            shape,
            config.format,
            frozenset(parts.values()),
            tensors,
            blocks,
            Grid.of(tensors, scales, shape, 1, groups),
        )
    return found
