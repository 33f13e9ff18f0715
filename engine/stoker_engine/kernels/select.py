"""Which kernels run where. A further set (Triton's, say) is a file beside `reference` and a line here."""

from __future__ import annotations

import torch

from stoker_engine.kernels.bundle import Kernels
from stoker_engine.kernels.native.bundle import native_kernels
from stoker_engine.kernels.native.library import native_library
from stoker_engine.kernels.reference import REFERENCE


def select_kernels(device: torch.device, dtype: torch.dtype) -> Kernels:
    """The fastest kernels for a model of `dtype` on `device`."""
    library = native_library(device, dtype)
    return REFERENCE if library is None else native_kernels(library)
