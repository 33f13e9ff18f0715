"""Binding of group_panels.cpp."""

from __future__ import annotations

import ctypes

import torch

from stoker_engine.architectures.stored_formats import GroupFormat
from stoker_engine.kernels.cpu.group_blocks import dequantize, format_args
from stoker_engine.kernels.cpu.matrix import GROUP_PANELS, CpuLinear


def has_panels(library: ctypes.CDLL, stored: GroupFormat, inner: int) -> bool:
    """Whether matrices [outputs, inner] of this format can be packed."""
    return bool(library.stoker_has_group_panels(*format_args(stored, inner), inner))


def pack(library: ctypes.CDLL, blocks: torch.Tensor, stored: GroupFormat, inner: int) -> None:
    """See `BlockPanels`."""
    library.stoker_pack_group_panels(*format_args(stored, inner), inner, blocks.data_ptr(), len(blocks))


def linear(
    library: ctypes.CDLL,
    blocks: torch.Tensor,
    stored: GroupFormat,
    inner: int,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> CpuLinear:
    """See `BlockPanels`."""
    return CpuLinear.of(library, GROUP_PANELS, blocks, inner, dtype, bias, format_args(stored, inner))


def rows(
    library: ctypes.CDLL, blocks: torch.Tensor, stored: GroupFormat, inner: int, ids: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """See `BlockPanels`; `ids` must be in range."""
    found = torch.empty(len(ids), blocks.shape[1], dtype=torch.uint8)
    library.stoker_group_panel_rows(
        *format_args(stored, inner), inner,
        blocks.data_ptr(), ids.data_ptr(), found.data_ptr(), len(ids), len(blocks),
    )  # fmt: skip
    return dequantize(library, found, stored, inner, dtype)
