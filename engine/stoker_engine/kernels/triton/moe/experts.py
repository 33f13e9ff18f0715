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
from stoker_engine.kernels.triton.gemm.grouped_quant_gemm import grouped_quant_gemm, tile_rows_of
from stoker_engine.kernels.triton.gemm.grouped_w8a8_gemm import TILE_ROWS, grouped_w8a8_gemm
from stoker_engine.kernels.triton.moe.align import align
from stoker_engine.kernels.triton.moe.combine import combine
from stoker_engine.kernels.triton.ops.activation import act_and_mul
from stoker_engine.kernels.triton.ops.quantize_rows import act_and_mul_rows, quantize_rows
from stoker_engine.kernels.triton.quant.block_tile import has_tiles
from stoker_engine.kernels.w8a8_panels import Packed, row_format

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
    expert by `linear`, which synchronizes with the device.
    """

    def block_experts(gate_up: BlockStack, down: BlockStack, act: Activation, dtype: torch.dtype) -> Experts:
        if not has_tiles(gate_up.stored) or not has_tiles(down.stored):
            return make_block_experts(linear, act_and_mul)(gate_up, down, act, dtype)
        tile_rows = tile_rows_of(dtype)
        return _experts(len(gate_up.blocks), tile_rows, act_and_mul(act), _of_blocks(gate_up), _of_blocks(down))

    return block_experts


def _of_blocks(stack: BlockStack) -> _Grouped:
    return lambda x, *where: grouped_quant_gemm(x, stack.blocks, stack.stored, stack.inner, stack.biases, *where)


def w8a8_experts(gate_up: BlockStack, down: BlockStack, act: Activation, dtype: torch.dtype) -> Experts:
    """See `BlockPanels.experts`, for matrices that are multiplied with quantized activations."""
    of_x, of_inner = row_format(gate_up.stored, gate_up.inner), row_format(down.stored, down.inner)
    assert of_x is not None and of_inner is not None
    to_gate_up, to_down = _of_w8a8(gate_up, dtype), _of_w8a8(down, dtype)

    def quantized(x: torch.Tensor, *where: Any) -> torch.Tensor:
        return to_gate_up(quantize_rows(x, of_x), *where)

    return _experts(len(gate_up.blocks), TILE_ROWS, act_and_mul_rows(act, of_inner), quantized, to_down)


def _of_w8a8(stack: BlockStack, dtype: torch.dtype) -> _Grouped:
    codes, scales = Packed.of(stack.blocks, stack.stored, stack.inner)
    return lambda x, *where: grouped_w8a8_gemm(x, codes, scales, dtype, stack.biases, *where)


def _experts(
    count: int, tile_rows: int, activate: Callable[[torch.Tensor], Any], gate_up: _Grouped, down: _Grouped
) -> Experts:
    def chosen_experts(x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        rows, tile_experts = align(chosen, count, tile_rows)
        inner = activate(gate_up(x, rows, tile_experts, chosen.shape[1]))
        results = down(inner, rows, tile_experts, 1)
        return combine(results, weights, chosen, count)

    return chosen_experts
