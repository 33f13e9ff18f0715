"""Choice of kernels for a device and dtype."""

from __future__ import annotations

import importlib.util
import os
from typing import Final

import torch

from stoker_engine.kernels.bundle import Kernels
from stoker_engine.kernels.cpu.bundle import cpu_kernels
from stoker_engine.kernels.cpu.library import cpu_library
from stoker_engine.kernels.reference import REFERENCE

#: Lowest compute capability of NVIDIA GPUs that the Triton kernels support.
_OLDEST: Final = (8, 0)


def select_kernels(device: torch.device, dtype: torch.dtype, batch_invariant: bool = False) -> Kernels:
    """Return the fastest kernels for a model of `dtype` on `device`.

    Args:
        batch_invariant: whether a row's result must not depend on its batch. `attention.select.attention_backend`
            rejects combinations that do not support it.
    """
    library = cpu_library(device, dtype)
    if library is not None:
        return cpu_kernels(library)
    if device.type == "cuda" and lack_of_triton(device) is None:
        from stoker_engine.kernels.triton.batch_invariant import BATCH_INVARIANT
        from stoker_engine.kernels.triton.bundle import TRITON

        return BATCH_INVARIANT if batch_invariant else TRITON
    return REFERENCE


def has_little_shared_memory(device: torch.device) -> bool:
    """Whether a program can use at most 64 KiB of shared memory, as on AMD GPUs before gfx950."""
    if device.type != "cuda" or torch.version.hip is None:
        return False
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block) <= 64 << 10


def lack_of_triton(device: torch.device) -> str | None:
    """Return why the Triton kernels cannot run on a device; None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if device.type == "cpu":
        return None if os.environ.get("TRITON_INTERPRET") == "1" else "its kernels need a GPU, and this is a CPU"
    if device.type != "cuda":
        return f"its kernels need an NVIDIA or AMD GPU, and this is {device.type}"
    if torch.version.hip is None and (found := torch.cuda.get_device_capability(device)) < _OLDEST:
        oldest, this = (".".join(map(str, each)) for each in (_OLDEST, found))
        return f"its kernels need compute capability {oldest}, and this GPU has {this}"
    return None
