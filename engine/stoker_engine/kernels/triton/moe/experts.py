"""Gated MLPs of the chosen experts (`kernels/moe.py` defines them): five kernels without synchronization, or
six if activations are quantized."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stoker_engine.architectures.activation import Activation
from stoker_engine.kernels.bundle import BlockStack, Experts, MakeBlockExperts, MakeQuantLinear
from stoker_engine.kernels.moe import make_block_experts
from stoker_engine.kernels.triton.gemm.grouped_gemm import grouped_gemm, tiles_of
from stoker_engine.kernels.triton.gemm.grouped_packed_gemm import grouped_packed_gemm
from stoker_engine.kernels.triton.gemm.grouped_quant_gemm import grouped_quant_gemm, tile_rows_of
from stoker_engine.kernels.triton.gemm.grouped_w8a8_gemm import TILE_ROWS, grouped_w8a8_gemm
from stoker_engine.kernels.triton.moe.align import align
from stoker_engine.kernels.triton.moe.combine import combine
from stoker_engine.kernels.triton.ops.activation import act_and_mul
from stoker_engine.kernels.triton.ops.quantize_rows import act_and_mul_rows, quantize_rows
from stoker_engine.kernels.triton.quant.block_tile import has_tiles
from stoker_engine.kernels.triton.quant.packed_layout import packed_matrix
from stoker_engine.kernels.w8a8_panels import Packed

#: (x, rows, tile_experts, shared) → results; see `grouped_gemm`. x may be quantized.
_Grouped = Callable[[Any, torch.Tensor, torch.Tensor, int], torch.Tensor]


def experts(
    gate_up: torch.Tensor,
    down: torch.Tensor,
    act: Activation,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> Experts:
    """See `kernels.bundle.Kernels.experts`."""
    return _experts(
        len(gate_up),
        tiles_of(gate_up.dtype, torch.version.hip is not None).rows,
        act_and_mul(act),
        lambda x, *where: grouped_gemm(x, gate_up, gate_up_bias, *where),
        lambda x, *where: grouped_gemm(x, down, down_bias, *where),
    )


def block_experts_with(linear: MakeQuantLinear) -> MakeBlockExperts:
    """Return `kernels.bundle.Kernels.block_experts`. If a format has no tiles, both matrices are multiplied expert by
    expert by `linear`, which synchronizes with the device. Formats that are packed have tiles.
    """

    def block_experts(gate_up: BlockStack, down: BlockStack, act: Activation, dtype: torch.dtype) -> Experts:
        if not has_tiles(gate_up.stored) or not has_tiles(down.stored):
            return make_block_experts(linear, act_and_mul)(gate_up, down, act, dtype)
        of_x, of_inner = gate_up.row_format, down.row_format
        tile_rows = tile_rows_of(dtype) if of_x is None or of_inner is None else TILE_ROWS
        activate = act_and_mul(act) if of_inner is None else act_and_mul_rows(act, of_inner)
        multiply = _of_blocks(gate_up, dtype, tile_rows)
        if of_x is None:
            return _experts(len(gate_up.blocks), tile_rows, activate, multiply, _of_blocks(down, dtype, tile_rows))
        return _experts(
            len(gate_up.blocks),
            tile_rows,
            activate,
            lambda x, *where: multiply(quantize_rows(x, of_x), *where),
            _of_blocks(down, dtype, tile_rows),
        )

    return block_experts


def _of_blocks(stack: BlockStack, dtype: torch.dtype, tile_rows: int) -> _Grouped:
    if stack.row_format is not None:
        codes, scales = Packed.of(stack.blocks, stack.stored, stack.inner)
        return lambda x, rows, tile_experts, shared: grouped_w8a8_gemm(
            x, codes, scales, dtype, stack.biases, rows, tile_experts, shared, tile_rows
        )
    if stack.is_packed:
        matrices = packed_matrix(stack.blocks, stack.stored, stack.inner)
        return lambda x, *where: grouped_packed_gemm(x, matrices, stack.biases, *where)
    return lambda x, *where: grouped_quant_gemm(x, stack.blocks, stack.stored, stack.inner, stack.biases, *where)


def _experts(
    count: int, tile_rows: int, activate: Callable[[torch.Tensor], Any], gate_up: _Grouped, down: _Grouped
) -> Experts:
    def chosen_experts(x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        rows, tile_experts = align(chosen, count, tile_rows)
        inner = activate(gate_up(x, rows, tile_experts, chosen.shape[1]))
        results = down(inner, rows, tile_experts, 1)
        return combine(results, weights, chosen, count)

    return chosen_experts
