"""Stacks of experts in MXFP4, as gpt-oss stores them.

gate_up_proj_blocks    uint8 [count, outputs, inner / 32, 16], pairs of fp4
gate_up_proj_scales    uint8 [count, outputs, inner / 32]: powers of two, 127 is 1
"""

from __future__ import annotations

import torch

from stoker_engine.architectures.quantization.mxfp4 import MXFP4
from stoker_engine.contract.errors import WeightsError
from stoker_engine.quant.checkpoints.components import components, needed
from stoker_engine.quant.checkpoints.grouped_matrix import Grid, GroupedMatrix, Pairs, check_sizes, scale_of
from stoker_engine.quant.checkpoints.module import Tensors


def find_modules(config: MXFP4, tensors: Tensors) -> dict[str, GroupedMatrix]:
    """The quantized stacks among `tensors`, by the names of their modules.

    Raises:
        WeightsError: tensors are missing, or do not fit together.
    """
    found = {}
    for name, parts in components(tensors.names(), ("blocks", "scales"), joint="_").items():
        blocks, scales = needed(name, parts, "blocks"), needed(name, parts, "scales")
        *stack, groups, bytes_ = tensors.shape(blocks)
        if tensors.dtype(blocks) != torch.uint8 or tensors.dtype(scales) != torch.uint8 or bytes_ != 16:
            raise WeightsError(f"{blocks} and {scales} are not uint8 in blocks of 16; fetch the model again")
        shape = torch.Size((*stack, groups * 32))
        check_sizes(blocks, shape)
        scale_of(tensors, scales)
        found[name] = GroupedMatrix(
            name,
            shape,
            config.format,
            frozenset(parts.values()),
            Pairs(tensors, blocks),
            Grid.of(tensors, scales, shape, 1, groups),
        )
    return found
