"""Gated MLPs of the chosen experts (`kernels/moe.py` defines them): five kernels without synchronization."""

from __future__ import annotations

from collections.abc import Callable

import torch

from stoker_engine.architectures.activation import Activation
from stoker_engine.kernels.bundle import BlockStack, Experts, MakeBlockExperts, MakeQuantLinear
from stoker_engine.kernels.moe import make_block_experts
from stoker_engine.kernels.triton.gemm.grouped_gemm import grouped_gemm, tiles_of
from stoker_engine.kernels.triton.gemm.grouped_packed_gemm import grouped_packed_gemm
from stoker_engine.kernels.triton.gemm.grouped_quant_gemm import grouped_quant_gemm, tile_rows_of
from stoker_engine.kernels.triton.moe.align import align
from stoker_engine.kernels.triton.moe.combine import combine
from stoker_engine.kernels.triton.ops.activation import act_and_mul
from stoker_engine.kernels.triton.quant.block_tile import has_tiles
from stoker_engine.kernels.triton.quant.packed_layout import packed_matrix

#: (x, rows, tile_experts, shared) → results; see `grouped_gemm`.
_Grouped = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]


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
        act,
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
        return _experts(len(gate_up.blocks), tile_rows_of(dtype), act, _of_blocks(gate_up), _of_blocks(down))

    return block_experts


def _of_blocks(stack: BlockStack) -> _Grouped:
    if stack.is_packed:
        matrices = packed_matrix(stack.blocks, stack.stored, stack.inner)
        return lambda x, *where: grouped_packed_gemm(x, matrices, stack.biases, *where)
    return lambda x, *where: grouped_quant_gemm(x, stack.blocks, stack.stored, stack.inner, stack.biases, *where)


def _experts(count: int, tile_rows: int, act: Activation, gate_up: _Grouped, down: _Grouped) -> Experts:
    activate = act_and_mul(act)

    def chosen_experts(x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        rows, tile_experts = align(chosen, count, tile_rows)
        inner = activate(gate_up(x, rows, tile_experts, chosen.shape[1]))
        results = down(inner, rows, tile_experts, 1)
        return combine(results, weights, chosen, count)

    return chosen_experts
