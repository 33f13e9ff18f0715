"""Calls gguf_panels.cpp."""

from __future__ import annotations

import ctypes
from functools import partial

import torch

from stoker_engine.architectures.stored_formats import GGUFFormat, StoredFormat
from stoker_engine.kernels.bundle import BlockPanels
from stoker_engine.kernels.native.gguf_blocks import TYPES, dequantize
from stoker_engine.kernels.native.matrix import GGUF_PANELS, NativeProduct
from stoker_engine.kernels.panels import PANEL, checked


def block_panels(library: ctypes.CDLL) -> BlockPanels | None:
    """The operations of a library's level; None: it multiplies rows."""
    if not library.stoker_has_panels():
        return None
    return BlockPanels(
        fit=partial(fit, library), pack=partial(pack, library), product=partial(product, library),
        rows=partial(rows, library),
    )  # fmt: skip


def fit(library: ctypes.CDLL, blocks: torch.Tensor, stored: StoredFormat, dtype: torch.dtype) -> bool:
    """See `BlockPanels`."""
    if not isinstance(stored, GGUFFormat) or dtype != torch.bfloat16:
        return False
    has_panels = bool(library.stoker_has_gguf_panels(TYPES[stored.name]))
    return has_panels and blocks.is_contiguous() and len(blocks) >= PANEL


def pack(library: ctypes.CDLL, blocks: torch.Tensor) -> None:
    """See `BlockPanels`."""
    library.stoker_pack_gguf_panels(blocks.data_ptr(), len(blocks), blocks.shape[1] // 2)


def product(
    library: ctypes.CDLL,
    blocks: torch.Tensor,
    stored: StoredFormat,
    inner: int,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> NativeProduct:
    """See `BlockPanels`."""
    assert isinstance(stored, GGUFFormat) and fit(library, blocks, stored, dtype)
    return NativeProduct.of(library, GGUF_PANELS, blocks, inner, dtype, bias, [TYPES[stored.name]])


def rows(
    library: ctypes.CDLL, blocks: torch.Tensor, stored: StoredFormat, inner: int, ids: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """See `BlockPanels`.

    Raises:
        IndexError: there is no such row.
    """
    assert isinstance(stored, GGUFFormat)
    ids = checked(ids, len(blocks))
    found = torch.empty(len(ids), blocks.shape[1], dtype=torch.uint8)
    library.stoker_gguf_panel_rows(
        blocks.data_ptr(), ids.data_ptr(), found.data_ptr(), len(ids), len(blocks), blocks.shape[1] // 2
    )
    return dequantize(library, found, stored, dtype)
