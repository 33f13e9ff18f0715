"""Binding of panels.cpp."""

from __future__ import annotations

import ctypes
from functools import partial

import torch

from stoker_engine.kernels.bundle import Panels
from stoker_engine.kernels.cpu.matrix import PANELS, CpuLinear
from stoker_engine.kernels.panels import can_be_packed, checked


def panels(library: ctypes.CDLL) -> Panels | None:
    """Return the operations; None if the library's ISA has no panels."""
    if not library.stoker_has_panels():
        return None
    return Panels(fit=fit, pack=partial(pack, library), linear=partial(linear, library), rows=partial(rows, library))


def fit(weight: torch.Tensor) -> bool:
    """See `Panels`."""
    return weight.dtype == torch.bfloat16 and can_be_packed(weight)


def pack(library: ctypes.CDLL, weight: torch.Tensor) -> None:
    """See `Panels`."""
    assert fit(weight)
    library.stoker_pack_panels(weight.data_ptr(), *weight.shape)


def rows(library: ctypes.CDLL, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """See `Panels`.

    Raises:
        IndexError: an id is out of range.
    """
    outputs, inner = weight.shape
    assert fit(weight)
    ids = checked(ids, outputs)
    out = torch.empty(len(ids), inner, dtype=weight.dtype)
    library.stoker_panel_rows(weight.data_ptr(), ids.data_ptr(), out.data_ptr(), len(ids), outputs, inner)
    return out


def linear(library: ctypes.CDLL, weight: torch.Tensor, bias: torch.Tensor | None = None) -> CpuLinear:
    """See `Panels`."""
    assert fit(weight)
    return CpuLinear.of(library, PANELS, weight, weight.shape[1], weight.dtype, bias)
