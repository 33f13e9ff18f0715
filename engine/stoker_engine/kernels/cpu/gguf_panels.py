"""Binding of gguf_panels.cpp."""

from __future__ import annotations

import ctypes

import torch

from stoker_engine.architectures.stored_formats import GGUFFormat
from stoker_engine.kernels.cpu.gguf_blocks import TYPES, dequantize
from stoker_engine.kernels.cpu.matrix import GGUF_PANELS, CpuLinear


def has_panels(library: ctypes.CDLL, stored: GGUFFormat) -> bool:
    """Whether matrices of this format can be packed."""
    return bool(library.stoker_has_gguf_panels(TYPES[stored.name]))


def pack(library: ctypes.CDLL, blocks: torch.Tensor) -> None:
    """See `BlockPanels`."""
    library.stoker_pack_gguf_panels(blocks.data_ptr(), len(blocks), blocks.shape[1] // 2)


def linear(
    library: ctypes.CDLL,
    blocks: torch.Tensor,
    stored: GGUFFormat,
    inner: int,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> CpuLinear:
    """See `BlockPanels`."""
    return CpuLinear.of(library, GGUF_PANELS, blocks, inner, dtype, bias, [TYPES[stored.name]])


def rows(
    library: ctypes.CDLL, blocks: torch.Tensor, stored: GGUFFormat, ids: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """See `BlockPanels`; `ids` must be in range."""
    found = torch.empty(len(ids), blocks.shape[1], dtype=torch.uint8)
    library.stoker_gguf_panel_rows(
        blocks.data_ptr(), ids.data_ptr(), found.data_ptr(), len(ids), len(blocks), blocks.shape[1] // 2
    )
    return dequantize(library, found, stored, dtype)
