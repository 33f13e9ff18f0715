"""Matrices in GGUF blocks or in groups, packed into panels."""

from __future__ import annotations

import ctypes
from functools import partial

import torch

from stoker_engine.architectures.stored_formats import GGUFFormat, StoredFormat
from stoker_engine.kernels.bundle import BlockPanels
from stoker_engine.kernels.cpu import gguf_panels, group_panels
from stoker_engine.kernels.cpu.matrix import CpuLinear
from stoker_engine.kernels.panels import PANEL, checked


def block_panels(library: ctypes.CDLL) -> BlockPanels | None:
    """Return the operations; None if the library's ISA has no panels."""
    if not library.stoker_has_panels():
        return None
    return BlockPanels(
        fit=partial(fit, library), pack=partial(pack, library), linear=partial(linear, library),
        rows=partial(rows, library), rounds_activations=True,
    )  # fmt: skip


def fit(library: ctypes.CDLL, blocks: torch.Tensor, stored: StoredFormat, inner: int, dtype: torch.dtype) -> bool:
    """See `BlockPanels`."""
    if dtype != torch.bfloat16 or not blocks.is_contiguous() or len(blocks) < PANEL:
        return False
    if isinstance(stored, GGUFFormat):
        return gguf_panels.has_panels(library, stored)
    return group_panels.has_panels(library, stored, inner)


def pack(library: ctypes.CDLL, blocks: torch.Tensor, stored: StoredFormat, inner: int) -> None:
    """See `BlockPanels`."""
    if isinstance(stored, GGUFFormat):
        gguf_panels.pack(library, blocks)
    else:
        group_panels.pack(library, blocks, stored, inner)


def linear(
    library: ctypes.CDLL,
    blocks: torch.Tensor,
    stored: StoredFormat,
    inner: int,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> CpuLinear:
    """See `BlockPanels`."""
    assert fit(library, blocks, stored, inner, dtype)
    if isinstance(stored, GGUFFormat):
        return gguf_panels.linear(library, blocks, stored, inner, dtype, bias)
    return group_panels.linear(library, blocks, stored, inner, dtype, bias)


def rows(
    library: ctypes.CDLL, blocks: torch.Tensor, stored: StoredFormat, inner: int, ids: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """See `BlockPanels`.

    Raises:
        IndexError: an id is out of range.
    """
    ids = checked(ids, len(blocks))
    if isinstance(stored, GGUFFormat):
        return gguf_panels.rows(library, blocks, stored, ids, dtype)
    return group_panels.rows(library, blocks, stored, inner, ids, dtype)
